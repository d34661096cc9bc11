"""The options of deepspeed, torchrun and accelerate launch, and the variables beside them: devices and hosts."""

from __future__ import annotations

from typing import Any

from dsrun.trainers.counterparts import (
    DIFFERS,
    Draft,
    ForeignTrainer,
    anyway,
    differs,
    is_on,
    left_out,
    refused,
    same,
    settled,
)

COUNTED = "dsrun import --gpus N counts N ranks"


def devices(draft: Draft) -> None:
    """Which devices, or how many of each host; accelerate counts all processes of the job."""
    machines = _whole(draft.given.get("num_machines")) or 1
    total = _whole(draft.given.get("num_processes"))
    each = next(
        (
            number
            for key in ("num_gpus", "nproc_per_node", "num_accelerators")
            if (number := _whole(draft.given.get(key)))
        ),
        None,
    )
    each = each or (max(1, total // machines) if total else None)
    named = draft.given.get("gpu_ids") or draft.given.get("CUDA_VISIBLE_DEVICES")
    counts = ("num_gpus", "nproc_per_node", "num_accelerators", "num_processes")
    if is_on(named) and str(named) != "all":
        draft.put(
            "devices", str(named), *(key for key in ("gpu_ids", "CUDA_VISIBLE_DEVICES") if key in draft.given)
        )
        draft.gpus = len(str(named).split(","))
    elif each:
        draft.put("gpus", each, *(key for key in counts if key in draft.given))
        draft.gpus = each
    for key in counts:
        if _is_open(draft, key) and not is_on(named):
            draft.tell(
                key,
                DIFFERS,
                f"{draft.given[key]}: the script doesn't say how many. A step is counted for {draft.gpus} of each "
                f"host; {COUNTED}",
            )
        elif key in draft.given and key not in draft.outcomes:
            text = (
                "the devices are named"
                if is_on(named)
                else f"{draft.given[key]}: all that are free, without --gpus"
            )
            draft.tell(key, "anyway", text)
    nodes = max(machines, _whole(draft.given.get("nnodes")) or 1, _whole(draft.given.get("num_nodes")) or 1)
    keys = [key for key in ("num_machines", "nnodes", "num_nodes") if key in draft.given]
    of_each = f" of {draft.gpus} GPUs, {nodes * draft.gpus} in all" if each or is_on(named) else ""
    draft.gpus *= nodes
    for key in keys:
        if _is_open(draft, key):
            text = f"{draft.given[key]}: the script doesn't say how many hosts. A step is counted for {nodes}"
            draft.tell(key, DIFFERS, f"{text}; {COUNTED}")
        elif nodes > 1:
            text = f"{nodes} hosts{of_each}: name them (--hosts, --hostfile), or dsrun submit --nodes {nodes}"
            draft.tell(key, DIFFERS, text)
        else:
            draft.tell(key, "anyway", "one host")


def _is_open(draft: Draft, key: str) -> bool:
    """Whether only the shell that runs the script knows an argument."""
    return "$" in str(draft.given.get(key, ""))


def _whole(value: Any) -> int | None:
    try:
        number = int(str(value).split(":")[-1])
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None


def strategy(draft: Draft) -> None:
    """accelerate's DeepSpeed and FSDP options as a preset."""
    stage, offload = draft.given.get("zero_stage"), draft.given.get("offload_param_device")
    optimizer = draft.given.get("offload_optimizer_device")
    file = draft.given.get("deepspeed_config_file")
    if is_on(file):
        found = draft.find(str(file))
        draft.put("preset", str(found.absolute()) if found else str(file), "deepspeed_config_file")
    elif is_on(stage):
        words = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "zero3"}
        name = words.get(str(stage), "zero2")
        away = str(offload).lower() not in ("none", "") if name == "zero3" else False
        away = away or str(optimizer).lower() not in ("none", "")
        draft.put(
            "preset",
            f"{name}-offload" if away and name in ("zero2", "zero3") else name,
            "zero_stage",
            *(key for key in ("offload_param_device", "offload_optimizer_device") if key in draft.given),
        )
    elif is_on(draft.given.get("use_fsdp")):
        draft.put("preset", "fsdp", "use_fsdp")


TRAINER = ForeignTrainer(
    "launchers",
    "the launcher",
    (
        settled(
            devices,
            "num_gpus nproc_per_node num_accelerators num_processes gpu_ids CUDA_VISIBLE_DEVICES num_machines "
            "nnodes num_nodes",
            options="gpus devices",
            text="accelerate counts all processes, dsrun those of a host",
            named={
                "num_gpus": "gpus",
                "nproc_per_node": "gpus",
                "num_accelerators": "gpus",
                "gpu_ids": "devices",
                "CUDA_VISIBLE_DEVICES": "devices",
            },
        ),
        settled(
            strategy,
            "deepspeed_config_file zero_stage offload_param_device offload_optimizer_device use_fsdp",
            options="preset",
        ),
        same("hostfile", "hostfile H deepspeed_hostfile"),
        same("include", "include i deepspeed_inclusion_filter"),
        same("exclude", "exclude e deepspeed_exclusion_filter"),
        # YAML's `no` without quotation marks is false.
        same(
            "precision",
            "mixed_precision",
            words={"bf16": "bf16", "fp16": "fp16", "no": "fp32", False: "fp32"},
        ),
        same("grad_clip", "gradient_clipping"),
        same("grad_accum", "gradient_accumulation_steps"),
        same("max_restarts", "max_restarts"),
        anyway(
            "master_addr master_port main_process_ip main_process_port rdzv_* node_rank machine_rank "
            "standalone local_addr same_network MASTER_ADDR MASTER_PORT NNODES NODE_RANK FORCE_TORCHRUN "
            "NPROC_PER_NODE",
            text="dsrun starts all hosts from one, at a free port (--master-addr, --master-port)",
        ),
        anyway(
            "module m use_deepspeed multi_gpu no_local_rank no_python zero3_init_flag zero3_save_16bit_model "
            "config_file deepspeed_multinode_launcher launcher num_cpu_threads_per_process "
            "deepspeed_moe_layer_cls_names compute_environment distributed_type downcast_bf16 "
            "main_training_function tpu_* fsdp_* dynamo_* deepspeed_config fsdp_config enable_cpu_affinity "
            "debug",
            text="of how ranks are started",
        ),
        refused("use_megatron_lm megatron_lm_* tpu autotuning", text="another engine"),
        refused("cpu use_cpu", text="CPU ranks are taken where there is no GPU"),
        differs("parallelism_config_* use_parallelism_config", text="--tp, --sp, --pp"),
        left_out("*", text="of how that launcher starts and logs its ranks"),
    ),
)

"""The YAML of `accelerate launch --config_file`: the keys that it may have, and the ds_config that is built of it.

Read in accelerate 1.15: commands/config/config_args.py (the file's keys), commands/launch.py and utils/launch.py
(which hand each on to the training processes in a variable, as a text), and DeepSpeedPlugin in utils/dataclasses.py
(which reads the variables). So a number in quotes is as good as one without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

SECTION = "deepspeed_config"
FILE = "deepspeed_config_file"
DEEPSPEED, FSDP = "DEEPSPEED", "FSDP"
FSDP_SECTION, PARALLELISM, DYNAMO = "fsdp_config", "parallelism_config", "dynamo_config"
REFERENCED = "_referenced"
"""A key of dsrun's own beside those of the YAML: the reason that accelerate wouldn't find deepspeed_config_file."""
MISSING, BESIDE, INLINE = "missing", "beside", "inline"

TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU"),
    *(DEEPSPEED, FSDP, "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON", "TPU"),
)
PRECISIONS = ("no", "fp8", "fp16", "bf16")
TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")

KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug"),
    *("num_processes", "machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port"),
    *("rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity"),
    *("fp8_config", SECTION, FSDP_SECTION, PARALLELISM, "megatron_lm_config", "mpirun_config"),
    *("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands"),
    *("tpu_vm", "tpu_env", DYNAMO),
)
"""The fields of ClusterConfig."""
OLD = ("fp16", "dynamo_backend")
"""Old names, which process_config replaces."""
RETIRED = ("ipex_config", "tp_config")
"""Keys of earlier versions (ClusterConfig had them up to 1.11 and 1.6)."""

PLUGIN = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model",
    "offload_optimizer_device", "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
)  # fmt: skip
"""Options that a DeepSpeed config file can set, too (_deepspeed_config_checks)."""
OPTIONS = (
    *(*PLUGIN, FILE, "zero3_init_flag", "deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher"),
    *("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
)
"""The DeepSpeed arguments of accelerate launch."""
ARGUMENTS = (*KEYS, "num_cpu_threads_per_process")
"""The other arguments of accelerate launch, which count in deepspeed_config as well."""

FSDP_DEFAULTS: Mapping[str, Any] = {
    "fsdp_version": "1", "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false", "fsdp_min_num_params": 100_000_000, "fsdp_auto_wrap_policy": None,
    "fsdp_transformer_layer_cls_to_wrap": None, "fsdp_backward_prefetch": None, "fsdp_state_dict_type": None,
    "fsdp_forward_prefetch": "false", "fsdp_use_orig_params": "true", "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true", "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false", "fsdp_ignored_modules": None,
}  # fmt: skip
"""The keys of fsdp_config, and the values that accelerate launch takes where they are left out."""
PARALLELISM_DEFAULTS: Mapping[str, Any] = {
    "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 1, "parallelism_config_tp_size": 1,
    "parallelism_config_cp_size": 1, "parallelism_config_cp_backend": "torch",
    "parallelism_config_cp_comm_strategy": "allgather", "parallelism_config_sp_size": 1,
    "parallelism_config_sp_backend": "deepspeed", "parallelism_config_sp_seq_length": None,
    "parallelism_config_sp_seq_length_is_variable": True, "parallelism_config_sp_attn_implementation": None,
}  # fmt: skip
DYNAMO_DEFAULTS: Mapping[str, Any] = {
    "dynamo_backend": "no", "dynamo_mode": "default", "dynamo_use_fullgraph": False, "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
}  # fmt: skip

STANDARD = "standard"
LAUNCHERS = ("pdsh", "openmpi", "mvapich", "mpich", "nossh", "slurm", "impi")
"""Launchers that need a hostfile: DeepSpeed's own (launcher/runner.py)."""

PATHS = {
    "gradient_accumulation_steps": f"{SECTION}.gradient_accumulation_steps",
    "gradient_clipping": f"{SECTION}.gradient_clipping",
    "zero_optimization": f"{SECTION}.zero_stage",
    "zero_optimization.stage": f"{SECTION}.zero_stage",
    "zero_optimization.offload_optimizer": f"{SECTION}.offload_optimizer_device",
    "zero_optimization.offload_optimizer.device": f"{SECTION}.offload_optimizer_device",
    "zero_optimization.offload_optimizer.nvme_path": f"{SECTION}.offload_optimizer_nvme_path",
    "zero_optimization.offload_param": f"{SECTION}.offload_param_device",
    "zero_optimization.offload_param.device": f"{SECTION}.offload_param_device",
    "zero_optimization.offload_param.nvme_path": f"{SECTION}.offload_param_nvme_path",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": f"{SECTION}.zero3_save_16bit_model",
    "bf16": "mixed_precision",
    "bf16.enabled": "mixed_precision",
    "fp16": "mixed_precision",
    "fp16.enabled": "mixed_precision",
}
"""A path of the ds_config -> the YAML's path that says the same; of several for one of the YAML the last is exact."""


@dataclass(frozen=True)
class LaunchConfig:
    """The YAML's top level."""

    given: Mapping[str, Any]

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """deepspeed_config; {} where it isn't a section."""
        section = self.given.get(SECTION)
        return section if isinstance(section, Mapping) else {}

    @property
    def kind(self) -> str:
        """distributed_type, NO where there is none."""
        kind = self.given.get("distributed_type")
        return "NO" if kind in (None, False) else str(kind)

    @property
    def by_deepspeed(self) -> bool:
        return self.given.get("distributed_type") == DEEPSPEED

    @property
    def by_fsdp(self) -> bool:
        return self.given.get("distributed_type") == FSDP

    def section(self, name: str, prefix: str) -> dict[str, Any]:
        """A section whose keys may lack their prefix, with it (_validate_launch_command in commands/launch.py)."""
        section = self.given.get(name)
        keys = section if isinstance(section, Mapping) else {}
        return {key if key.startswith(prefix) else f"{prefix}_{key}": value for key, value in keys.items()}

    @cached_property
    def fsdp(self) -> dict[str, Any]:
        """fsdp_config, its keys as fsdp_...; {} where it isn't a section."""
        return self.section(FSDP_SECTION, "fsdp")

    @property
    def fsdp_version(self) -> str:
        return str(self.fsdp.get("fsdp_version", FSDP_DEFAULTS["fsdp_version"]))

    @property
    def file(self) -> str | None:
        """deepspeed_config_file, if one is named: "none" is accelerate's word for no file."""
        return None if (name := self.text(FILE)) == "none" else name

    @property
    def beside_the_file(self) -> list[str]:
        """Keys, by their paths, that belong in the file which is named: accelerate stops at them, whatever they say
        (_deepspeed_config_checks in accelerate/utils/dataclasses.py).
        """
        if self.file is None:
            return []
        keys = [f"{SECTION}.{key}" for key in self.options if key.lower() in (*PLUGIN, "mixed_precision")]
        if self.given.get("mixed_precision") is not None:
            keys.append("mixed_precision")
        elif self.given.get("fp16") and "mixed_precision" not in self.given:
            keys.append("fp16")
        return keys

    def text(self, key: str) -> str | None:
        """An option as the variable has it; None where it isn't set."""
        value = self.options.get(key)
        return None if value is None else str(value)

    def word(self, key: str) -> str | None:
        """An option as the variable has it, in small letters."""
        text = self.text(key)
        return None if text is None else text.lower()

    @property
    def machines(self) -> int:
        return whole(self.given.get("num_machines", 1)) or 1

    @property
    def processes(self) -> int | None:
        """All processes of the job, if the file says it."""
        count = whole(self.given.get("num_processes"))
        return count if count and count > 0 else None

    @property
    def launcher(self) -> str:
        return self.text("deepspeed_multinode_launcher") or LAUNCHERS[0]

    @property
    def filtered(self) -> bool:
        """Whether a filter of the hostfile says which GPUs take part, not num_processes."""
        filters = ("deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
        return self.machines > 1 and self.launcher != STANDARD and any(self.text(key) for key in filters)

    @property
    def world_size(self) -> int | None:
        """The processes that the engine counts: each machine starts as many as the others."""
        if self.processes is None or self.filtered:
            return None
        return self.processes // self.machines * self.machines or None

    @property
    def stage(self) -> int:
        """zero_stage; 2 where it is left out, or can't be read."""
        try:
            return int(self.text("zero_stage") or "")
        except ValueError:
            return 2

    @property
    def precision(self) -> str:
        old = "fp16" if self.given.get("fp16") else None
        return str(self.given.get("mixed_precision", old) or "no").lower()

    def config(self) -> dict[str, Any]:
        """The ds_config that DeepSpeedPlugin builds where no file is named (__post_init__, set_mixed_precision).

        It drops a clipping of 0 and paths for NVMe. Here they stay: DS690 and DS686 report that, and other rules
        judge the values that were written.
        """
        steps = whole(self.text("gradient_accumulation_steps"))
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto" if steps is None else steps,
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": self.offload("optimizer"),
                "offload_param": self.offload("param"),
                "stage3_gather_16bit_weights_on_model_save": self.word("zero3_save_16bit_model") == "true",
            },
            "gradient_clipping": self.clipping,
            "fp16": {"enabled": False},
            "bf16": {"enabled": False},
        }
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True, "auto_cast": True}
        elif self.precision in ("bf16", "fp8"):
            config["bf16"] = {"enabled": True}
        return config

    @property
    def clipping(self) -> float | str:
        value = number(self.word("gradient_clipping") or "auto")
        return "auto" if value is None else value

    def offload(self, part: str) -> dict[str, Any]:
        device = self.word(f"offload_{part}_device") or "none"
        path = self.text(f"offload_{part}_nvme_path") or "/nvme"
        return {"device": device, "nvme_path": path if device == "nvme" else None}


def whole(value: Any) -> int | None:
    """A whole number, as it is or in quotes."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

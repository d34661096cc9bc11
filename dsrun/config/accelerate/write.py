"""The YAML of `accelerate launch` for a preset, and for one of FSDP the section of TrainingArguments, too.

For DeepSpeed it names the config's own file, and counts processes: whatever that file can say has to stay out of the
YAML (DS684).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from dsrun.config import tree
from dsrun.config.accelerate import launch as known
from dsrun.config.presets.fsdp import FsdpPreset
from dsrun.config.presets.options import Options
from dsrun.config.schemas.schema import AUTO
from dsrun.errors import DsrunError
from dsrun.packages import installed_version
from dsrun.versions import meets

PORT = 29500
"""accelerate's own port (prepare_deepspeed_cmd_env in accelerate/utils/launch.py)."""
HEADER = "# accelerate launch --config_file {0} SCRIPT, or: dsrun launch --accelerate {0} SCRIPT\n"
EACH = "# accelerate launch is started on each machine, with --machine_rank N --main_process_ip FIRST.\n"
PRECISION = "# Accelerator(mixed_precision=...) says the precision, else fp32; --precision writes it down.\n"


def for_deepspeed(config: Mapping[str, Any], file: Path, name: Path, options: Options) -> str:
    """The YAML, to be called `name`, that starts the ds_config in `file`: a path from where training starts."""
    section: dict[str, Any] = {
        known.FILE: str(file),
        # from_pretrained then loads each rank's share only (zero.Init).
        "zero3_init_flag": config["zero_optimization"]["stage"] == 3,
    }
    if options.nodes > 1:
        section["deepspeed_multinode_launcher"] = known.STANDARD
    scripts = tree.get(config, "bf16.enabled") == AUTO
    launch = {"distributed_type": known.DEEPSPEED, known.SECTION: section, **_machines(options)}
    return (PRECISION if scripts else "") + _text(launch, name, options)


def for_fsdp(chosen: FsdpPreset, name: Path | None, options: Options, version: int) -> str:
    """The YAML that trains with FSDP as a preset does. name: the name of its file, where that is known."""
    precise = "" if options.precision is not None else PRECISION
    launch = fsdp_launch(chosen, options, version)
    return precise + _text({**launch, **_machines(options)}, name or Path("accelerate.yaml"), options)


def fsdp_launch(chosen: FsdpPreset, options: Options, version: int) -> dict[str, Any]:
    """The part of the YAML that is about FSDP. Raises DsrunError where the version can't do it."""
    whole = options.world_size
    shard = chosen.shard_ranks(options.world_size, options.gpus, "shard_over")
    if version == 1 and shard not in (whole, options.gpus):
        message = f"HYBRID_SHARD of version 1 makes a copy for each host of {options.gpus} GPUs, not for {shard} ranks"
        raise DsrunError(message, where="--fsdp-version 1", hint="Take version 2.")
    launch: dict[str, Any] = {"distributed_type": known.FSDP}
    if options.precision is not None:
        launch["mixed_precision"] = "no" if options.precision == "fp32" else options.precision
    section = _second(chosen) if version == 2 else _first(chosen, hybrid=shard != whole)
    launch[known.FSDP_SECTION] = {"fsdp_version": version, **section}
    if version == 2 and shard != whole:
        sizes = {"dp_replicate_size": whole // shard, "dp_shard_size": shard}
        launch[known.PARALLELISM] = {f"parallelism_config_{key}": value for key, value in sizes.items()}
    return launch


def for_trainer(chosen: FsdpPreset, options: Options) -> dict[str, Any]:
    """The same as TrainingArguments. Raises DsrunError where a file of these can't hold it."""
    if chosen.shard_ranks(options.world_size, options.gpus, "shard_over") != options.world_size:
        message = "copies of the model across hosts are a ParallelismConfig in TrainingArguments, which no file holds"
        raise DsrunError(message, where="--for hf", hint="Start it by accelerate's YAML: --for accelerate.")
    keys = {key.removeprefix("fsdp_"): value for key, value in _second(chosen).items()}
    keys["cpu_offload"] = keys.pop("offload_params")
    # transformers before 5.10 doesn't read cpu_offload, and offloads by this word alone; newer ones call it old.
    there = installed_version("transformers")
    old = there is not None and not meets(there, ">=5.10")
    shard = "full_shard offload" if chosen.offload and old else True
    precise = {options.precision: True} if options.precision in ("bf16", "fp16") else {}
    return {"fsdp": shard, "fsdp_config": {"version": 2, **keys}, **precise}


def _second(chosen: FsdpPreset) -> dict[str, Any]:
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": chosen.offload,
    }


def _first(chosen: FsdpPreset, *, hybrid: bool) -> dict[str, Any]:
    """The section of version 1, whose HYBRID_SHARD makes copies of the model for each host."""
    return {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_sharding_strategy": "HYBRID_SHARD" if hybrid else "FULL_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": chosen.offload,
    }


def _machines(options: Options) -> dict[str, Any]:
    several = {"main_process_port": PORT, "rdzv_backend": "static", "same_network": True}
    return {
        "num_machines": options.nodes,
        "num_processes": options.world_size,
        "machine_rank": 0,
        **(several if options.nodes > 1 else {}),
    }


def _text(launch: Mapping[str, Any], name: Path, options: Options) -> str:
    return HEADER.format(quote(str(name))) + (EACH if options.nodes > 1 else "") + launch_text(launch)


def launch_text(launch: Mapping[str, Any]) -> str:
    """A launch config as YAML."""
    import yaml

    return yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **launch}, sort_keys=False)

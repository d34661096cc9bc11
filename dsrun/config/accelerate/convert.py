"""One way of writing down how a model is divided, from another: DeepSpeed's config, accelerate's YAML, FSDP's.

The names that ZeRO and FSDP have for the same thing are from accelerate's own table (docs, "Moving between FSDP and
DeepSpeed"), and those of FSDP1's keys in FSDP2 from its to-fsdp2 (accelerate/commands/to_fsdp2.py). A key without a
name on the other side is left out, and reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.config import tree
from dsrun.config.accelerate import findings
from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import LaunchConfig
from dsrun.config.accelerate.write import for_deepspeed, launch_text
from dsrun.config.presets.json_text import render_json
from dsrun.config.presets.options import Options
from dsrun.config.rules.frame import AUTOS
from dsrun.config.validation.sources import ConfigText
from dsrun.errors import DsrunError
from dsrun.files import read_json_object
from dsrun.options.table import FORMS
from dsrun.words import listed

DEEPSPEED, ACCELERATE, FSDP = FORMS
STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}
"""FSDP's strategies as stages of ZeRO. The hybrid ones are ZeRO++'s hpZ at most, which keeps the optimizer divided."""
SAME_KEYS = (
    "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_state_dict_type",
    "fsdp_cpu_ram_efficient_loading", "fsdp_offload_params", "fsdp_activation_checkpointing", "fsdp_ignored_modules",
)  # fmt: skip
"""Keys that FSDP2 takes as FSDP1 does."""
CONVERTED = (
    "zero_optimization.stage", "zero_optimization.offload_param", "zero_optimization.offload_optimizer",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save", "bf16", "fp16",
)  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """The text of the other form. dropped: keys of the file that have no place in it."""

    text: str
    dropped: tuple[str, ...] = ()


def convert(source: ConfigText, form: str | None, output: Path | None, options: Options) -> Conversion:
    """The file in another form; of a YAML DeepSpeed's config, of a config accelerate's YAML, unless form says which.

    options: GPUs and nodes, for the processes of a YAML. Raises DsrunError where there is no such thing.
    """
    if not source.is_yaml:
        config = _config(source)
        if form == FSDP:
            return _fsdp_of(config, options)
        if form == DEEPSPEED:
            raise DsrunError(
                "is a DeepSpeed config already", where=source.name, hint="Say --to accelerate, or fsdp."
            )
        if source.path is None:
            raise DsrunError(
                "the YAML names the config's file, and it came through a pipe", where=source.name
            )
        return Conversion(for_deepspeed(config, source.path, output or Path("accelerate.yaml"), options))
    launch = _launch(source)
    if form == ACCELERATE:
        raise DsrunError(
            "is accelerate's YAML already", where=source.name, hint="Say --to deepspeed, or fsdp."
        )
    if launch.by_fsdp:
        return _second_of(launch, source.name) if form == FSDP else _zero_of(launch, source.name)
    config = _config_of(launch, source)
    counted = Options(gpus=(launch.processes or 1) // launch.machines or 1, nodes=launch.machines)
    lost = _sizes(launch)
    if form == FSDP:
        made = _fsdp_of(config, counted)
        return replace(made, dropped=(*made.dropped, *lost))
    return Conversion(render_json(config), lost)


def _sizes(launch: LaunchConfig) -> tuple[str, ...]:
    """The sizes of other parallelism that a YAML says, which only accelerate reads: a ds_config has no place for
    them.
    """
    section = launch.given.get(known.PARALLELISM)
    named = section if isinstance(section, Mapping) else {}
    return tuple(
        f"{known.PARALLELISM}.{key}"
        for key, value in named.items()
        if value != known.PARALLELISM_DEFAULTS.get(key)
    )


def _config(source: ConfigText) -> dict[str, Any]:
    from dsrun.config.rules.frame import read_config

    value: dict[str, Any] = read_config(source.data, source.name, "json").value
    if not isinstance(value.get("zero_optimization"), dict):
        raise DsrunError("has no section zero_optimization, which accelerate asks for", where=source.name)
    return value


def _launch(source: ConfigText) -> LaunchConfig:
    from dsrun.config.reading import yaml_document

    launch = LaunchConfig(yaml_document.read(source.data, source.name).value)
    if not (launch.by_deepspeed or launch.by_fsdp):
        message = f"distributed_type is {launch.kind}: there is neither DeepSpeed nor FSDP in it"
        raise DsrunError(message, where=source.name)
    return launch


def _config_of(launch: LaunchConfig, source: ConfigText) -> dict[str, Any]:
    """The ds_config that the YAML names, or that accelerate builds of it."""
    if launch.file is not None:
        if both := launch.beside_the_file:
            message = (
                f"says {listed(both)} beside {known.FILE}: accelerate stops at that, and builds no config"
            )
            hint = f"Say them in {launch.file} alone: `dsrun validate {source.name}` has the places."
            raise DsrunError(message, where=source.name, hint=hint)
        path = findings.find(launch.file, source.path)[1]
        if path is None:
            raise DsrunError(f"there is no file {launch.file}", where=source.name)
        return read_json_object(path)
    config = launch.config()
    zero = {key: value for key, value in config["zero_optimization"].items() if not _is_nothing(value)}
    return {**config, "zero_optimization": zero}


def _is_nothing(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("device") == "none"


def _zero_of(launch: LaunchConfig, name: str) -> Conversion:
    """The ds_config that divides as FSDP does."""
    given = {**known.FSDP_DEFAULTS, **launch.fsdp}
    if launch.fsdp_version == "2":
        stage = 3 if str(given["fsdp_reshard_after_forward"]).lower() in known.TRUE else 2
    else:
        strategy = str(given["fsdp_sharding_strategy"]).upper()
        strategy = list(STAGES)[int(strategy) - 1] if strategy in ("1", "2", "3") else strategy
        if strategy not in STAGES:
            raise DsrunError(f"{strategy} is nothing that ZeRO does", where=name, hint="Take FULL_SHARD.")
        stage = STAGES[strategy]
    zero: dict[str, Any] = {"stage": stage}
    if str(given["fsdp_offload_params"]).lower() in known.TRUE:
        sections = ("offload_optimizer", "offload_param")[: 2 if stage == 3 else 1]
        zero |= {section: {"device": "cpu", "pin_memory": True} for section in sections}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config = {
        **dict.fromkeys(AUTOS, "auto"), "zero_optimization": zero,
        "bf16": {"enabled": launch.precision == "bf16"}, "fp16": {"enabled": launch.precision == "fp16"},
    }  # fmt: skip
    converted = (
        "fsdp_version",
        "fsdp_reshard_after_forward",
        "fsdp_sharding_strategy",
        "fsdp_offload_params",
    )
    dropped = [f"{known.FSDP_SECTION}.{key}" for key in launch.fsdp if key not in converted]
    return Conversion(render_json(config), (*dropped, *_sizes(launch)))


def _second_of(launch: LaunchConfig, name: str) -> Conversion:
    """The YAML of FSDP2 from FSDP1's."""
    if launch.fsdp_version == "2":
        raise DsrunError("is FSDP2's already", where=name)
    strategy = str(launch.fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    if strategy.startswith("HYBRID") or strategy in ("4", "5"):
        hint = (
            "Write the sizes into parallelism_config: `dsrun preset fsdp-hybrid --for accelerate` shows how."
        )
        raise DsrunError(
            f"{strategy} is no setting of FSDP2, but a size of parallelism_config", where=name, hint=hint
        )
    reshard = strategy in ("FULL_SHARD", "1")
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard}
    section |= {key: value for key, value in launch.fsdp.items() if key in SAME_KEYS}
    replaced = ("fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    dropped = [key for key in launch.fsdp if key not in (*SAME_KEYS, *replaced)]
    return Conversion(
        launch_text({**launch.given, known.FSDP_SECTION: section}),
        tuple(f"{known.FSDP_SECTION}.{key}" for key in dropped),
    )


def _fsdp_of(config: Mapping[str, Any], options: Options) -> Conversion:
    """The YAML of FSDP2 that divides as a ds_config does."""
    stage = tree.get(config, "zero_optimization.stage", 0)
    devices = {
        part: tree.get(config, f"zero_optimization.offload_{part}.device") for part in ("param", "optimizer")
    }
    if stage not in (2, 3):
        raise DsrunError(
            f"stage {stage} keeps whole gradients, which FSDP divides", hint="Take stage 2 or 3."
        )
    if "nvme" in devices.values():
        raise DsrunError("FSDP has no offload to NVMe", where="zero_optimization", hint="Take device cpu.")
    if devices["optimizer"] == "cpu" and devices["param"] != "cpu" and stage == 3:
        message = "FSDP offloads weights, gradients and optimizer together, and here only the optimizer is"
        raise DsrunError(message, where="zero_optimization.offload_optimizer", hint="Offload both, or none.")
    section = {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": stage == 3,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": "cpu" in devices.values(),
    }  # fmt: skip
    on = next((name for name in ("bf16", "fp16") if tree.get(config, f"{name}.enabled") is True), None)
    launch: dict[str, Any] = {"distributed_type": known.FSDP, "num_machines": options.nodes}
    launch |= {"num_processes": options.world_size, known.FSDP_SECTION: section}
    launch |= {"mixed_precision": on} if on else {}
    dropped = [
        path for path, value in tree.leaves(config)
        if value != "auto" and not any(tree.under(path, section) for section in CONVERTED)
    ]  # fmt: skip
    return Conversion(launch_text(launch), tuple(dropped))

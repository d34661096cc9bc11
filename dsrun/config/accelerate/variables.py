"""The variables that `accelerate launch` gives the ranks of a launch config, so that any launcher can start them.

They are made as in prepare_deepspeed_cmd_env, prepare_multi_gpu_env and prepare_simple_launcher_cmd_env
(accelerate/utils/launch.py, 1.15). Devices, processes and machines aren't among them: they are the launcher's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import LaunchConfig

ON_CPU = "ACCELERATE_USE_CPU"
CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
STARTED = (known.DEEPSPEED, known.FSDP, "MULTI_GPU", "MULTI_CPU", "NO")
"""The kinds of distributed training for which torch's ranks need nothing but variables."""
LOWERED = (
    "zero3_init_flag", "zero3_save_16bit_model", "offload_optimizer_device", "offload_param_device",
    "gradient_clipping",
)  # fmt: skip
NAMES = {
    "zero_stage": "DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "GRADIENT_CLIPPING",
    "offload_optimizer_device": "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    # accelerate launch forgets these two, which its plugin reads (DS686).
    "offload_optimizer_nvme_path": "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    known.FILE: "DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""For each option of deepspeed_config its variable, without ACCELERATE_."""
FSDP_NAMES = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
AS_WRITTEN = frozenset({
    "fsdp_version", "fsdp_sharding_strategy", "fsdp_min_num_params", "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_ignored_modules",
})  # fmt: skip
"""Keys whose values are passed on as written; others are put in small letters."""


def variables(launch: LaunchConfig) -> dict[str, str]:
    """The variables by name, for a kind of training in STARTED."""
    values = {"ACCELERATE_MIXED_PRECISION": launch.precision}
    if launch.given.get("debug"):
        values["ACCELERATE_DEBUG_MODE"] = "true"
    if launch.given.get("enable_cpu_affinity"):  # by accelerate launch from its command line only
        values["ACCELERATE_CPU_AFFINITY"] = "1"
    if launch.by_deepspeed:
        values.update(_deepspeed(launch))
    else:
        values.update(_dynamo(launch))
    if launch.by_fsdp:
        values.update(_fsdp(launch))
    if launch.kind in ("MULTI_CPU", "NO"):
        values[ON_CPU] = str(bool(launch.given.get("use_cpu")) or launch.kind == "MULTI_CPU")
    elif launch.given.get(known.PARALLELISM):
        values.update(_parallelism(launch))
    return values


def _deepspeed(launch: LaunchConfig) -> Iterator[tuple[str, str]]:
    precise = ["mixed_precision"] if launch.given.get("mixed_precision") is not None else []
    yield "ACCELERATE_USE_DEEPSPEED", "true"
    yield "ACCELERATE_CONFIG_DS_FIELDS", ",".join([*launch.options, *precise]).lower()
    for key, name in NAMES.items():
        text = launch.word(key) if key in LOWERED else launch.text(key)
        if text is not None:
            yield f"ACCELERATE_{name}", text


def _fsdp(launch: LaunchConfig) -> Iterator[tuple[str, str]]:
    yield "ACCELERATE_USE_FSDP", "true"
    for key, value in {**known.FSDP_DEFAULTS, **launch.fsdp}.items():
        if value is not None and key in known.FSDP_DEFAULTS:
            yield FSDP_NAMES.get(key, key.upper()), str(value) if key in AS_WRITTEN else str(value).lower()


def _parallelism(launch: LaunchConfig) -> Iterator[tuple[str, str]]:
    values = {**known.PARALLELISM_DEFAULTS, **launch.given[known.PARALLELISM]}
    yield "ACCELERATE_USE_PARALLELISM_CONFIG", "true"
    for key in known.PARALLELISM_DEFAULTS:
        whose = next((kind for kind in ("cp", "sp") if f"_{kind}_" in key), "")
        plain = key.endswith(("_size", "_backend"))
        if plain or known.whole(values[f"parallelism_config_{whose}_size"]) != 1:
            yield key.upper(), str(values[key])


def _dynamo(launch: LaunchConfig) -> Iterator[tuple[str, str]]:
    given: Mapping[str, object] = launch.section(known.DYNAMO, "dynamo")
    for key, default in known.DYNAMO_DEFAULTS.items():
        text = str(given.get(key, default))
        yield f"ACCELERATE_{key.upper()}", text.upper() if key == "dynamo_backend" else text

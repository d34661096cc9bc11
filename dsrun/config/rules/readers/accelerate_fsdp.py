"""DS692 to DS695: fsdp_config in an accelerate YAML, whose settings become the FSDP_* variables of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import FSDP_SECTION, LaunchConfig
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.readers.accelerate_file import TOP, in_yaml, meant

SECTION = f"{TOP}.{FSDP_SECTION}"
TRANSFORMER = "TRANSFORMER_BASED_WRAP"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
CHOICES = {
    "fsdp_version": ("1", "2"),
    "fsdp_auto_wrap_policy": (TRANSFORMER, "SIZE_BASED_WRAP", "NO_WRAP"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
    "fsdp_sharding_strategy": STRATEGIES,
}
"""The names in accelerate/utils/constants.py; a number counts from 1."""
GONE = (
    "fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)  # fmt: skip
"""Keys that version 2 has no use for."""


def case(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """An example: a launch config with these options in fsdp_config."""
    launch = {
        "distributed_type": known.FSDP,
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 4,
    }
    return {"_for": "accelerate", "_launch": {**launch, FSDP_SECTION: options or {}, **top}}


def sharded(context: Context) -> LaunchConfig | None:
    """The YAML, if it starts FSDP."""
    launch = LaunchConfig(context.setting.launch or {})
    return launch if launch.by_fsdp else None


def _path(launch: LaunchConfig, key: str) -> str:
    """A key as the file spells it, with its prefix or without."""
    short = key.removeprefix("fsdp_")
    return f"{SECTION}.{key if key in launch.given[FSDP_SECTION] else short}"


@rule("DS692", DIFFERS)
@bad(case({"fsdp_shardng_strategy": "FULL_SHARD"}), case({"transformer_layer_cls": "LlamaDecoderLayer"}))
@good(case({"fsdp_sharding_strategy": "FULL_SHARD"}), case({"offload_params": True, "_why": "it fits"}))
def unused_fsdp_setting(context: Context) -> Iterator[Finding]:
    """Every key of fsdp_config becomes an argument of accelerate launch; other keys are never read
    (_validate_launch_command in accelerate/commands/launch.py). Where only speed is lost, this is a warning.
    """
    if (launch := sharded(context)) is None:
        return
    for key in launch.fsdp:
        if key not in known.FSDP_DEFAULTS and not key.startswith(("_", "fsdp__")):
            advice = meant(key, known.FSDP_DEFAULTS, "Remove it.")
            text = "unknown setting: nothing reads it"
            if "prefetch" in key:
                text += ", and FSDP fetches no weights ahead: slower, and the same results"
                yield Finding(_path(launch, key), text, advice, severity="warning")
            else:
                yield Finding(_path(launch, key), text, advice)


@rule("DS693", FAILS)
@bad(
    case({"fsdp_auto_wrap_policy": "TRANSFORMER_WRAP"}),
    case({"fsdp_sharding_strategy": "ZERO3"}),
    case({"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}),
    case({"fsdp_sync_module_states": False}),
    case(
        {
            "fsdp_version": 1,
            "fsdp_activation_checkpointing": True,
            "fsdp_activation_checkpointing_offload": True,
        }
    ),
)
@good(
    case({"fsdp_auto_wrap_policy": TRANSFORMER, "fsdp_sharding_strategy": 1}),
    case(
        {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    ),
    case({"fsdp_sync_module_states": False, "fsdp_cpu_ram_efficient_loading": False}),
)
def fsdp_value_refused(context: Context) -> Iterator[Finding]:
    """FullyShardedDataParallelPlugin reads the variables (__post_init__ in accelerate/utils/dataclasses.py);
    prepare_multi_gpu_env compares two of them before (accelerate/utils/launch.py).
    """
    if (launch := sharded(context)) is None:
        return
    given = launch.fsdp
    second = launch.fsdp_version == "2"
    for key, choices in CHOICES.items():
        value = given.get(key)
        numbered = str(value).isdigit() and 1 <= int(str(value)) <= len(choices)
        ignored = second and key in GONE
        if value is None or ignored or str(value).upper() in choices or (numbered and key != "fsdp_version"):
            continue
        advice = meant(str(value).upper(), choices, f"Choose from {', '.join(choices)}.")
        yield Finding(_path(launch, key), f"is {in_yaml(value)}, which accelerate doesn't know", advice)
    reshard = given.get("fsdp_reshard_after_forward")
    if second and reshard is not None and str(reshard).lower() not in known.TRUE + known.FALSE:
        text = f"is {in_yaml(reshard)}, but version 2 takes true or false"
        advice = "Write true for FULL_SHARD, false for SHARD_GRAD_OP."
        yield Finding(_path(launch, "fsdp_reshard_after_forward"), text, advice)
    loading, synced = (
        given.get(f"fsdp_{key}") for key in ("cpu_ram_efficient_loading", "sync_module_states")
    )
    if synced is False and loading is not False:
        text = "is false, and cpu_ram_efficient_loading loads the weights on the first rank only"
        yield Finding(_path(launch, "fsdp_sync_module_states"), text, "Set it to true, or that one to false.")
    if str(given.get("fsdp_activation_checkpointing_offload")).lower() in known.TRUE:
        checkpointed = str(given.get("fsdp_activation_checkpointing")).lower() in known.TRUE
        if not (second and checkpointed):
            text = "needs fsdp_version: 2 and fsdp_activation_checkpointing: true"
            yield Finding(
                _path(launch, "fsdp_activation_checkpointing_offload"), text, "Set both, or remove it."
            )


@rule("DS695", "warning")
@bad(
    case({"fsdp_state_dict_type": "FULL_STATE_DICT"}),
    case({"state_dict_type": 1}),
    case({"fsdp_version": 2, "fsdp_state_dict_type": "full_state_dict"}),
)
@good(
    case({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}),
    case({"fsdp_state_dict_type": "FULL_STATE_DICT"}, num_processes=1),
    case({}),
)
def whole_state_dict_gathered(context: Context) -> Iterator[Finding]:
    """At each checkpoint the first rank gathers all weights and writes them alone, while the others wait in a
    collective: of a large model that outlasts the time-out of NCCL, and every rank is ended in the middle of saving
    (save_fsdp_model in accelerate/utils/fsdp_utils.py; the default of init_process_group in
    torch/distributed/distributed_c10d.py).
    """
    launch = sharded(context)
    kind = str(launch.fsdp.get("fsdp_state_dict_type")).upper() if launch else ""
    if launch is None or launch.processes == 1 or kind not in ("FULL_STATE_DICT", "1"):
        return
    text = "gathers the whole model on the first rank at each save: the others wait, and NCCL's time-out may end them"
    advice = "Take SHARDED_STATE_DICT: each rank writes its part, and `accelerate merge-weights` joins them."
    yield Finding(_path(launch, "fsdp_state_dict_type"), text, advice)


@rule("DS694", "warning")
@bad(
    case({"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHARD"}),
    case({"fsdp_reshard_after_forward": False}),
    case({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}),
)
@good(
    case({"fsdp_version": 2, "fsdp_reshard_after_forward": False}),
    case({"fsdp_reshard_after_forward": "FULL_SHARD"}),
    case({"fsdp_auto_wrap_policy": TRANSFORMER, "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}),
    case({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}),
)
def fsdp_setting_without_effect(context: Context) -> Iterator[Finding]:
    """FSDP2 drops what only FSDP1 knows, and FSDP1 prefers sharding_strategy, which always has a value
    (FullyShardedDataParallelPlugin in accelerate/utils/dataclasses.py).
    """
    if (launch := sharded(context)) is None:
        return
    given = launch.fsdp
    second = launch.fsdp_version == "2"
    for key in GONE if second else ("fsdp_reshard_after_forward",):
        same = not second and str(given.get(key)).upper() in ("FULL_SHARD", "TRUE", "1")
        if given.get(key) is not None and not same:
            text = f"has no effect with fsdp_version {launch.fsdp_version}"
            replacement = "fsdp_reshard_after_forward" if second else "fsdp_sharding_strategy"
            advice = f"Say it as {replacement}." if "shard" in key else "Remove it."
            yield Finding(_path(launch, key), text, advice)
    policy = str(given.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    wants = {"fsdp_transformer_layer_cls_to_wrap": TRANSFORMER, "fsdp_min_num_params": "SIZE_BASED_WRAP"}
    for key, wanted in wants.items():
        if given.get(key) not in (None, 0) and policy != wanted:
            text = f"has no effect with fsdp_auto_wrap_policy {policy}"
            yield Finding(_path(launch, key), text, f"Set fsdp_auto_wrap_policy: {wanted}, or remove it.")

"""DS680, DS681 and DS683 to DS686: the YAML that `accelerate config` writes, and what accelerate launch makes of it.

Paths begin with "launch.", then follow the keys of the YAML; config/reading/yaml_document.py finds their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsrun.catalog import closest
from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import FILE, SECTION, LaunchConfig
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule

TOP = "launch"
OPTION = f"{TOP}.{SECTION}"


def case(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """An example: a launch config with these options in deepspeed_config."""
    base = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 4}
    launch = {**base, SECTION: options or {}, **top}
    # num_machines=... leaves a key out
    return {
        "_for": "accelerate",
        "_launch": {key: value for key, value in launch.items() if value is not ...},
    }


def with_file(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The same with a config file of DeepSpeed's."""
    return case({FILE: "ds_config.json", **(options or {})}, **{"mixed_precision": ..., **top})


def two_machines(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The same on two machines."""
    return case(options, **{"num_machines": 2, **top})


def launched(context: Context) -> LaunchConfig | None:
    """The YAML, if it starts DeepSpeed."""
    launch = LaunchConfig(context.setting.launch or {})
    return launch if launch.by_deepspeed else None


def started(context: Context) -> LaunchConfig | None:
    """The YAML, if it starts DeepSpeed or FSDP."""
    launch = LaunchConfig(context.setting.launch or {})
    return launch if launch.by_deepspeed or launch.by_fsdp else None


def in_yaml(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    return cut(f'"{value}"' if isinstance(value, str) else str(value))


def cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def meant(key: str, names: Iterable[str], otherwise: str) -> str:
    match = closest(key, names)
    return f"Did you mean {match!r}?" if match else otherwise


@rule("DS680", "note")
@bad(case(distributed_type="MULTI_GPU"), case(distributed_type=False))
@good(case(), {"_for": "accelerate"})
def launch_without_deepspeed(context: Context) -> Iterator[Finding]:
    """accelerate starts DeepSpeed if distributed_type is DEEPSPEED, in capitals (_validate_launch_command in
    accelerate/commands/launch.py); a missing or unknown one stops it (commands/config/config_args.py).
    """
    if context.setting.launch is None or launched(context):
        return
    launch = LaunchConfig(context.setting.launch)
    kind = launch.given.get("distributed_type", ...)
    fact = "there is no distributed_type" if kind is ... else f"distributed_type is {in_yaml(kind)}"
    advice = "Set distributed_type: DEEPSPEED to train with it."
    meant = (
        bool(launch.options)
        or str(kind).upper() == known.DEEPSPEED
        or (kind is ... and SECTION in launch.given)
    )
    if not meant and launch.by_fsdp:
        return
    if not meant:
        yield Finding(f"{TOP}.distributed_type", f"{fact}: no DeepSpeed here, so nothing to check", advice)
    elif kind in known.TYPES or kind is False:
        yield Finding(
            f"{TOP}.distributed_type", f"{fact}: {SECTION} has no effect", advice, severity="warning"
        )
    else:
        yield Finding(
            f"{TOP}.distributed_type", f"{fact}: accelerate stops", advice, severity="error", effect=FAILS
        )


@rule("DS681", FAILS)
@bad(case(num_procs=4), case(ipex_config={}))
@good(case(debug=False, fsdp_config={}, dynamo_backend="NO"), case(distributed_type="NO", num_procs=4))
def key_refused_by_accelerate(context: Context) -> Iterator[Finding]:
    """from_yaml_file refuses a key that isn't a field of ClusterConfig (accelerate/commands/config/config_args.py)."""
    if (launch := started(context)) is None:
        return
    for key in launch.given:
        if key in known.RETIRED:
            text = "was removed in a later version of accelerate, which stops at it"
            yield Finding(f"{TOP}.{key}", text, "Remove it.", severity="warning")
        elif key not in (*known.KEYS, *known.OLD, known.REFERENCED):
            below = f"It belongs in {SECTION}." if key in known.OPTIONS else "Remove it."
            advice = below if key in known.OPTIONS else meant(key, known.KEYS, below)
            yield Finding(f"{TOP}.{key}", "unknown key: accelerate stops at it", advice)


@rule("DS683", DIFFERS)
@bad(case({"zero_stge": 3}), case({"train_micro_batch_size_per_gpu": 2}))
@good(
    case({"zero_stage": 3, "_why": "it fits", "num_processes": 2}),
    case({"deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock"}),
)
def unused_option(context: Context) -> Iterator[Finding]:
    """Every key of deepspeed_config becomes an argument of accelerate launch; other keys are
    never read (_validate_launch_command in accelerate/commands/launch.py).
    """
    if (launch := launched(context)) is None:
        return
    for key in launch.options:
        refused = launch.file is not None and key.lower() in known.PLUGIN
        if refused or key in (*known.OPTIONS, *known.ARGUMENTS) or key.startswith("_"):
            continue
        text = "unknown setting: nothing reads it"
        theirs = key in context.schema.root["properties"]
        if theirs:
            text = f"is a DeepSpeed key, which accelerate doesn't read in {SECTION}"
        advice = "Write a DeepSpeed config and name it as deepspeed_config_file."
        yield Finding(f"{OPTION}.{key}", text, advice if theirs else meant(key, known.OPTIONS, "Remove it."))


@rule("DS684", FAILS)
@bad(with_file({"zero_stage": 3}), with_file({"gradient_clipping": None}))
@good(
    with_file(),
    with_file({"zero3_init_flag": False, "deepspeed_multinode_launcher": "standard"}, mixed_precision=None),
)
def setting_not_allowed_with_config_file(context: Context) -> Iterator[Finding]:
    """With a DeepSpeed config file accelerate stops at settings that belong in that file, whatever their value
    (_deepspeed_config_checks in accelerate/utils/dataclasses.py).
    """
    launch = launched(context)
    if launch is None or launch.file is None:
        return
    for path in launch.beside_the_file:
        key = path.rpartition(".")[2]
        text = f"is set together with {FILE}: accelerate stops, even if both are equal"
        yield Finding(f"{TOP}.{path}", text, f"Remove it; set {_in_the_file(key)} in {cut(launch.file)}.")


def _in_the_file(key: str) -> str:
    """The path at which a DeepSpeed config says the same as a key of the YAML."""
    exact = {key_path: path for path, key_path in known.PATHS.items()}
    return exact.get(f"{SECTION}.{key.lower()}", "bf16 or fp16")


@rule("DS685", FAILS)
@bad(with_file(_referenced="missing"), with_file(_referenced="beside"))
@good(with_file(), case({FILE: "none"}))
def config_file_not_found(context: Context) -> Iterator[Finding]:
    """A path is relative to the folder that training starts in, and ~ isn't expanded; anything else is
    read as a config in base64 (HfDeepSpeedConfig in accelerate/utils/deepspeed.py).
    """
    launch = launched(context)
    path = f"{OPTION}.{FILE}"
    if launch is None or launch.file is None:
        return
    reason, name = launch.given.get(known.REFERENCED), cut(launch.file)
    if reason == known.MISSING:
        text = f"there is no file {name}, neither here nor next to this one"
        yield Finding(
            path, text, "Write the path from the folder that accelerate launch is started in, without ~."
        )
    elif reason == known.BESIDE:
        text = f"{name} is next to this file, but accelerate looks in the folder it is started in"
        yield Finding(path, text, "Start it there, or write the absolute path.", severity="note")
    elif reason == known.INLINE:
        text = "is the config itself, in base64 or JSON, which isn't checked here"
        yield Finding(path, text, "Put it into a file.", severity="note")


@rule("DS686", DIFFERS)
@bad(
    case({"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"}),
    case({"zero_stage": 3, "offload_optimizer_device": "NVMe"}),
)
@good(
    case({"zero_stage": 3, "offload_param_device": "cpu", "offload_param_nvme_path": "/nvme"}),
    case({"zero_stage": 2, "offload_optimizer_device": "nvme"}),
)
def nvme_path_not_passed_on(context: Context) -> Iterator[Finding]:
    """The path isn't passed on to the training (prepare_deepspeed_cmd_env in accelerate/utils/launch.py), so that
    DeepSpeedPlugin's default holds, which is a folder called none (accelerate/utils/dataclasses.py).
    """
    launch = launched(context)
    if launch is None or launch.file is not None or launch.stage != 3:
        return
    for part in ("optimizer", "param"):
        if launch.word(f"offload_{part}_device") == "nvme":
            key = f"offload_{part}_nvme_path"
            folder = launch.text(key) or "/nvme"
            text = "isn't passed on by accelerate launch: swaps to a folder called none where training starts"
            advice = f"Set ACCELERATE_DEEPSPEED_{key.upper()}={folder} where it is started, or use {FILE}."
            yield Finding(f"{OPTION}.{key}", text, advice)

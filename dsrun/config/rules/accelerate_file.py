"""DS68x: the YAML that `accelerate config` writes, and what accelerate launch makes of it.

Paths begin with "launch.", then follow the keys of the YAML; accelerate_yaml.py finds their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsrun.catalog import closest, suggestion
from dsrun.config import accelerate_launch as known
from dsrun.config.accelerate_launch import FILE, SECTION, Launch, number, whole
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Hit, rule

TOP = "launch"
OPTION = f"{TOP}.{SECTION}"


def _case(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """An example: a launch config with these options in deepspeed_config."""
    base = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 4}
    launch = {**base, SECTION: options or {}, **top}
    # num_machines=... leaves a key out
    return {
        "_for": "accelerate",
        "_launch": {key: value for key, value in launch.items() if value is not ...},
    }


def _file(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The same with a config file of DeepSpeed's."""
    return _case({FILE: "ds_config.json", **(options or {})}, **{"mixed_precision": ..., **top})


def _machines(options: Mapping[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    """The same on two machines."""
    return _case(options, **{"num_machines": 2, **top})


def _launch(context: Context) -> Launch | None:
    """The YAML, if it starts DeepSpeed."""
    launch = Launch(context.setting.launch or {})
    return launch if launch.by_deepspeed else None


def _shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    return _cut(f'"{value}"' if isinstance(value, str) else str(value))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


def _meant(key: str, names: Iterable[str], otherwise: str) -> str:
    match = closest(key, names)
    return f"Did you mean {match!r}?" if match else otherwise


@rule(
    "DS680",
    "note",
    bad=[
        _case(distributed_type="MULTI_GPU"),
        _case(distributed_type=False),
        _case(distributed_type=...),
        _case(distributed_type="deepspeed"),
        _case(distributed_type="nonsense"),
        _case(distributed_type=..., deepspeed_config=...),
        _case({"zero_stage": 3}, distributed_type="FSDP"),
    ],
    good=[_case(), {"_for": "accelerate"}],
)
def launch_without_deepspeed(context: Context) -> Iterator[Hit]:
    """accelerate starts DeepSpeed where distributed_type is DEEPSPEED, in capitals (_validate_launch_command in
    accelerate/commands/launch.py); a missing or unknown one stops it (commands/config/config_args.py).
    """
    if context.setting.launch is None or _launch(context):
        return
    launch = Launch(context.setting.launch)
    kind = launch.given.get("distributed_type", ...)
    said = "there is no distributed_type" if kind is ... else f"distributed_type is {_shown(kind)}"
    advice = "Set distributed_type: DEEPSPEED to train with it."
    meant = (
        bool(launch.options)
        or str(kind).upper() == known.DEEPSPEED
        or (kind is ... and SECTION in launch.given)
    )
    if not meant:
        yield Hit(f"{TOP}.distributed_type", f"{said}: no DeepSpeed here, so nothing to judge", advice)
    elif kind in known.TYPES or kind is False:
        yield Hit(
            f"{TOP}.distributed_type", f"{said}: {SECTION} counts for nothing", advice, severity="warning"
        )
    else:
        yield Hit(
            f"{TOP}.distributed_type", f"{said}: accelerate stops", advice, severity="error", effect=FAILS
        )


@rule(
    "DS681",
    "error",
    FAILS,
    bad=[
        _case(num_procs=4),
        _case(zero_stage=3),
        _case(gradient_accumulation_steps=2),
        _case(ipex_config={}),
    ],
    good=[_case(debug=False, fsdp_config={}, dynamo_backend="NO"), _case(distributed_type="NO", num_procs=4)],
)
def key_that_accelerate_refuses(context: Context) -> Iterator[Hit]:
    """from_yaml_file raises at a key that is no field of ClusterConfig (accelerate/commands/config/config_args.py)."""
    if (launch := _launch(context)) is None:
        return
    for key in launch.given:
        if key in known.RETIRED:
            text = "went in a later version of accelerate, which stops at it"
            yield Hit(f"{TOP}.{key}", text, "Remove it.", severity="warning")
        elif key not in (*known.KEYS, *known.OLD, known.REFERENCED):
            below = f"It belongs in {SECTION}." if key in known.OPTIONS else "Remove it."
            advice = below if key in known.OPTIONS else _meant(key, known.KEYS, below)
            yield Hit(f"{TOP}.{key}", "is no key of a launch config: accelerate stops at it", advice)


@rule(
    "DS682",
    "error",
    FAILS,
    bad=[
        _case(compute_environment="AMAZON_SAGEMAKER"),
        _case(deepspeed_config="ds_config.json"),
        _case(mixed_precision=False),
        _case(mixed_precision="float16"),
        _case(num_processes=...),
        _case(num_processes=-1),
        _case(num_processes=0),
        _case(num_processes=2.0),
        _machines({"deepspeed_hostfile": "hosts"}, num_processes="4"),
        _case(num_machines=None),
        _case(num_machines="1"),
        _case(gpu_ids=0),
        _case(main_process_port="29500"),
        _case({"zero_stage": 2.0}),
        _case({"gradient_clipping": "none"}),
        _case({"gradient_accumulation_steps": 2.0}),
        _case({"gradient_accumulation_steps": "auto"}),
        _case({"zero3_init_flag": "maybe"}),
    ],
    good=[
        _case(compute_environment="LOCAL_MACHINE", deepspeed_config=None),
        _case(mixed_precision="BF16"),
        _case(mixed_precision=None),
        _case(num_processes="4", gpu_ids="0,1,2,3", main_process_port=29500),
        _case({"zero_stage": "2", "gradient_clipping": "1e-1", "gradient_accumulation_steps": "2"}),
        _case({"zero_stage": None, "gradient_clipping": "auto", "zero3_init_flag": "no"}),
    ],
)
def value_that_accelerate_stops_at(context: Context) -> Iterator[Hit]:
    """Each value goes through a check of its own: _validate_launch_command (accelerate/commands/launch.py),
    prepare_deepspeed_cmd_env (accelerate/utils/launch.py), DeepSpeedPlugin (accelerate/utils/dataclasses.py).
    """
    launch = _launch(context)
    if launch is not None:
        yield from _stops_at_the_top(launch)
        yield from _stops_at_a_count(launch)
        if launch.file is None:
            yield from _stops_at_an_option(launch)


def _stops_at_the_top(launch: Launch) -> Iterator[Hit]:
    given = launch.given
    if (where := given.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        text = f"is {_shown(where)}, for which accelerate has no DeepSpeed"
        yield Hit(f"{TOP}.compute_environment", text, "Set compute_environment: LOCAL_MACHINE.")
    section = given.get(SECTION)
    if section is not None and not isinstance(section, Mapping):
        advice = f"Name a file below it, as {FILE}, or write the settings there one by one."
        yield Hit(OPTION, f"is {_shown(section)}, and accelerate wants keys in it", advice)
    precision = given.get("mixed_precision")
    if precision is not None and launch.file is None and str(precision).lower() not in known.PRECISIONS:
        advice = "Write one of no, fp8, fp16 and bf16, no in quotes: YAML takes it for false otherwise."
        yield Hit(f"{TOP}.mixed_precision", f"is {_shown(precision)}, no precision to accelerate", advice)
    if not isinstance(given.get("gpu_ids"), (str, type(None))):
        shown = _shown(given["gpu_ids"])
        advice = f'Put it in quotes: "{shown.strip("[]")}".'
        yield Hit(f"{TOP}.gpu_ids", f"is {shown}, and accelerate splits a text", advice)
    if not isinstance(given.get("main_process_port"), (int, type(None))):
        shown = _shown(given["main_process_port"])
        yield Hit(
            f"{TOP}.main_process_port", f"is {shown}, no port number", "Write the number without quotes."
        )


def _stops_at_a_count(launch: Launch) -> Iterator[Hit]:
    machines, processes = launch.given.get("num_machines", 1), launch.given.get("num_processes")
    if not isinstance(machines, int):
        advice = "Write the number without quotes, 1 for one machine."
        yield Hit(f"{TOP}.num_machines", f"is {_shown(machines)}, and accelerate compares it with 1", advice)
    if processes in (None, -1):
        text = "is left open: accelerate launch needs --num_processes"
        yield Hit(f"{TOP}.num_processes", text, "Write the number of GPUs of all machines.", severity="note")
    elif launch.processes is None:
        advice = "Write the number of GPUs of all machines."
        yield Hit(f"{TOP}.num_processes", f"is {_shown(processes)}, no number of processes", advice)
    elif launch.machines > 1 and isinstance(processes, str):
        text = f"is {_shown(processes)}, which accelerate can't divide by {launch.machines} machines"
        yield Hit(f"{TOP}.num_processes", text, "Write the number without quotes.")


def _stops_at_an_option(launch: Launch) -> Iterator[Hit]:
    given = launch.options
    stage, clipping = launch.text("zero_stage"), launch.word("gradient_clipping")
    steps, init = launch.text("gradient_accumulation_steps"), launch.word("zero3_init_flag")
    if stage is not None and not stage.strip().lstrip("+-").isdecimal():
        yield Hit(
            f"{OPTION}.zero_stage",
            f"is {_shown(given['zero_stage'])}, no whole number",
            "Write 0, 1, 2 or 3.",
        )
    if clipping not in (None, "auto") and number(str(clipping)) is None:
        advice = "Write a number, such as 1.0, or leave it out for what the script says."
        yield Hit(
            f"{OPTION}.gradient_clipping", f"is {_shown(given['gradient_clipping'])}, no number", advice
        )
    if steps == "auto":
        text = 'is "auto", which HF Trainer fills in; the Accelerator() of any other script stops at it'
        yield Hit(f"{OPTION}.gradient_accumulation_steps", text, "Write the number.", severity="warning")
    elif steps is not None and whole(steps) is None:
        text = f"is {_shown(given['gradient_accumulation_steps'])}, no whole number"
        yield Hit(
            f"{OPTION}.gradient_accumulation_steps", text, "Write the number of micro batches of a step."
        )
    if init is not None and init not in known.TRUE + known.FALSE:
        text = f"is {_shown(given['zero3_init_flag'])}, neither true nor false"
        yield Hit(f"{OPTION}.zero3_init_flag", text, "Write one of the two.")


@rule(
    "DS683",
    "error",
    DIFFERS,
    bad=[
        _case({"zero_stge": 3}),
        _case({"train_micro_batch_size_per_gpu": 2}),
        _case({"fp16": {"enabled": True}, "bf16": {"enabled": False}}),
        _case({"zero_optimization": {"stage": 3}}),
        _file({"offload_device": "cpu"}),
    ],
    good=[
        _case({"zero_stage": 3, "_why": "it fits", "num_processes": 2}),
        _case({"deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock"}),
    ],
)
def option_that_nobody_reads(context: Context) -> Iterator[Hit]:
    """Every key of deepspeed_config becomes an argument of accelerate launch; what is none of its arguments is
    never looked at (_validate_launch_command in accelerate/commands/launch.py).
    """
    if (launch := _launch(context)) is None:
        return
    for key in launch.options:
        refused = launch.file is not None and key.lower() in known.PLUGIN
        if refused or key in (*known.OPTIONS, *known.ARGUMENTS) or key.startswith("_"):
            continue
        text = "is no setting of accelerate's: nobody reads it"
        theirs = key in context.schema.root["properties"]
        if theirs:
            text = f"is a key of DeepSpeed's own, which accelerate does not read in {SECTION}"
        advice = "Write a DeepSpeed config and name it as deepspeed_config_file."
        yield Hit(f"{OPTION}.{key}", text, advice if theirs else _meant(key, known.OPTIONS, "Remove it."))


@rule(
    "DS684",
    "error",
    FAILS,
    bad=[
        _file({"zero_stage": 3}),
        _file({"gradient_clipping": None}),
        _file(mixed_precision="bf16"),
        _file(mixed_precision="no"),
        _file({"mixed_precision": "bf16"}),
        _file(fp16=True),
    ],
    good=[
        _file(),
        _file({"zero3_init_flag": False, "deepspeed_multinode_launcher": "standard"}, mixed_precision=None),
        _case({FILE: "none", "zero_stage": 3}),
    ],
)
def setting_beside_the_file(context: Context) -> Iterator[Hit]:
    """With a DeepSpeed config file accelerate stops at what that file has to say, whatever its value
    (_deepspeed_config_checks in accelerate/utils/dataclasses.py).
    """
    launch = _launch(context)
    if launch is None or launch.file is None:
        return
    paths = [f"{OPTION}.{key}" for key in launch.options if key.lower() in (*known.PLUGIN, "mixed_precision")]
    if launch.given.get("mixed_precision") is not None:
        paths.append(f"{TOP}.mixed_precision")
    elif launch.given.get("fp16") and "mixed_precision" not in launch.given:
        paths.append(f"{TOP}.fp16")
    for path in paths:
        key = path.rpartition(".")[2]
        text = f"stands beside {FILE}: accelerate stops, even where both say the same"
        yield Hit(path, text, f"Remove it; {_in_the_file(key)} of {_cut(launch.file)} says it.")


def _in_the_file(key: str) -> str:
    """Where a DeepSpeed config says what a key of the YAML says."""
    exact = {said: path for path, said in known.PATHS.items()}
    return exact.get(f"{SECTION}.{key.lower()}", "bf16 or fp16")


@rule(
    "DS685",
    "error",
    FAILS,
    bad=[_file(_referenced="missing"), _file(_referenced="beside"), _file(_referenced="inline")],
    good=[_file(), _case({FILE: "none"})],
)
def file_that_accelerate_does_not_find(context: Context) -> Iterator[Hit]:
    """A path counts from the folder that the training starts in, and ~ is a folder's name; what is no path is
    taken for a config in base64 (HfDeepSpeedConfig in accelerate/utils/deepspeed.py).
    """
    launch = _launch(context)
    path = f"{OPTION}.{FILE}"
    if launch is None or launch.file is None:
        return
    found, name = launch.given.get(known.REFERENCED), _cut(launch.file)
    if found == known.MISSING:
        text = f"there is no file {name}, neither here nor beside this one"
        yield Hit(path, text, "Name it from the folder that accelerate launch is started in, without ~.")
    elif found == known.BESIDE:
        text = f"{name} is beside this file, but accelerate looks in the folder it is started in"
        yield Hit(path, text, "Start it there, or write the whole path.", severity="note")
    elif found == known.INLINE:
        text = "is the config itself, in base64 or JSON, which isn't judged here"
        yield Hit(path, text, "Put it in a file of its own.", severity="note")


@rule(
    "DS686",
    "error",
    DIFFERS,
    bad=[
        _case({"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/nvme"}),
        _case({"zero_stage": 3, "offload_optimizer_device": "NVMe"}),
    ],
    good=[
        _case({"zero_stage": 3, "offload_param_device": "cpu", "offload_param_nvme_path": "/nvme"}),
        _case({"zero_stage": 2, "offload_optimizer_device": "nvme"}),
        _case({"zero_stage": 3}),
    ],
)
def nvme_path_that_gets_lost(context: Context) -> Iterator[Hit]:
    """No path is handed on to the training (prepare_deepspeed_cmd_env in accelerate/utils/launch.py), so that
    DeepSpeedPlugin's default holds, which is a folder called none (accelerate/utils/dataclasses.py).
    """
    launch = _launch(context)
    if launch is None or launch.file is not None or launch.stage != 3:
        return
    for what in ("optimizer", "param"):
        if launch.word(f"offload_{what}_device") == "nvme":
            key = f"offload_{what}_nvme_path"
            folder = launch.text(key) or "/nvme"
            text = "isn't handed on by accelerate launch: swaps to a folder called none where training starts"
            advice = f"Set ACCELERATE_DEEPSPEED_{key.upper()}={folder} where it is started, or use {FILE}."
            yield Hit(f"{OPTION}.{key}", text, advice)


@rule(
    "DS687",
    "error",
    DIFFERS,
    bad=[
        _machines({}),
        _machines({"deepspeed_multinode_launcher": "nossh"}),
        _machines({"deepspeed_multinode_launcher": "Standard", "deepspeed_hostfile": "hosts"}),
        _machines({"deepspeed_multinode_launcher": "standard"}),
        _machines({"deepspeed_multinode_launcher": "standard"}, machine_rank=2, main_process_ip="10.0.0.1"),
        _machines(
            {"deepspeed_multinode_launcher": "standard"}, machine_rank=None, main_process_ip="10.0.0.1"
        ),
    ],
    good=[
        _machines({"deepspeed_hostfile": "hosts"}),
        _machines({"deepspeed_multinode_launcher": "OpenMPI", "deepspeed_hostfile": "hosts"}),
        _machines({"deepspeed_multinode_launcher": "standard"}, machine_rank=1, main_process_ip="10.0.0.1"),
        _machines({"deepspeed_multinode_launcher": "standard"}, machine_rank="0", main_process_ip="10.0.0.1"),
        _case(),
    ],
)
def machines_that_do_not_meet(context: Context) -> Iterator[Hit]:
    """All launchers but accelerate's own need a hostfile: DeepSpeed's trains on one machine without it, and says so
    in one line (fetch_hostfile in launcher/runner.py). accelerate's own needs an address (accelerate/utils/launch.py).
    """
    launch = _launch(context)
    if launch is None or launch.machines < 2:
        return
    if launch.launcher == known.STANDARD:
        yield from _standard(launch)
    elif launch.launcher.lower() not in known.LAUNCHERS:
        choices = (known.STANDARD, *known.LAUNCHERS)
        advice = suggestion(launch.launcher, choices, f"Choose from {', '.join(choices)}.")
        text = f"{launch.launcher} is no launcher: DeepSpeed stops"
        yield Hit(f"{OPTION}.deepspeed_multinode_launcher", text, advice, effect=FAILS)
    elif not launch.text("deepspeed_hostfile"):
        text = (
            f"is missing: {launch.launcher} trains on one machine alone, and {launch.machines} are asked for"
        )
        advice = "Name one (a line `host slots=8` for each machine), or set deepspeed_multinode_launcher: standard."
        yield Hit(f"{OPTION}.deepspeed_hostfile", text, advice)


def _standard(launch: Launch) -> Iterator[Hit]:
    rank = launch.given.get("machine_rank", 0)
    number_of = whole(rank)
    if number_of is None or not 0 <= number_of < launch.machines:
        text = f"is {_shown(rank)}, and {launch.machines} machines count from 0 to {launch.machines - 1}"
        yield Hit(f"{TOP}.machine_rank", text, "Give each machine its own, 0 for the first.", effect=FAILS)
    if not launch.given.get("main_process_ip"):
        text = (
            f"is missing: {launch.machines} machines can't find each other, unless --main_process_ip says it"
        )
        yield Hit(f"{TOP}.main_process_ip", text, "Write the address of machine 0.", severity="warning")


@rule(
    "DS688",
    "error",
    DIFFERS,
    bad=[
        _machines({"deepspeed_hostfile": "hosts"}, num_processes=7),
        _machines({"deepspeed_hostfile": "hosts"}, num_processes=1),
        _case(num_processes=3, gpu_ids="0,1"),
        _machines({"deepspeed_hostfile": "hosts"}, num_processes=4, gpu_ids="0"),
    ],
    good=[
        _machines({"deepspeed_hostfile": "hosts"}, num_processes=8),
        _machines({"deepspeed_hostfile": "hosts", "deepspeed_inclusion_filter": "a:0,1,2"}, num_processes=3),
        _case(num_processes=2, gpu_ids="0,1"),
        _case(num_processes=8, gpu_ids="all"),
        _case(num_processes=3, gpu_ids="0,1") | {"_device": "cpu"},
    ],
)
def processes_that_do_not_fit(context: Context) -> Iterator[Hit]:
    """Each machine starts num_processes // num_machines, each process on a GPU of gpu_ids
    (prepare_deepspeed_cmd_env in accelerate/utils/launch.py).
    """
    launch = _launch(context)
    if launch is None or launch.processes is None or launch.filtered:
        return
    processes, machines, path = launch.processes, launch.machines, f"{TOP}.num_processes"
    each = processes // machines
    gpus = launch.given.get("gpu_ids")
    if each == 0:
        text = f"{_many(processes, 'process', 'es')} on {machines} machines leaves none for each"
        yield Hit(path, text, f"Write {machines} or more: it counts the GPUs of all machines.", effect=FAILS)
    elif processes % machines:
        text = (
            f"{processes} processes on {machines} machines: starts {each} on each, {each * machines} in all"
        )
        yield Hit(path, text, f"Write {each * machines} or {(each + 1) * machines}.")
    elif (
        isinstance(gpus, str)
        and gpus != "all"
        and context.setting.device != "cpu"
        and each > gpus.count(",") + 1
    ):
        count = gpus.count(",") + 1
        text = f"{_many(each, 'process', 'es')} on a machine, and gpu_ids names {_many(count, 'GPU')}"
        yield Hit(path, text, f"Write {count * machines}, or name more GPUs.", effect=FAILS)


def _many(count: int, what: str, ending: str = "s") -> str:
    return f"{count} {what}{ending * (count != 1)}"


@rule(
    "DS689",
    "warning",
    bad=[
        _case({"zero_stage": 2, "zero3_init_flag": True}),
        _case({"zero_stage": 2, "zero3_init_flag": "on"}),
        _case({"zero_stage": 3, "zero3_save_16bit_model": "yes"}),
        _case({"zero_stage": 3, "zero3_save_16bit_model": 1}),
        _file({"zero3_init_flag": True}),
    ],
    good=[
        _case({"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": "True"})
        | {"zero_optimization": {"stage": 3}},
        _case({"zero_stage": 2, "zero3_init_flag": False}),
        _case({"zero_stage": 3, "zero3_save_16bit_model": "no"}),
        _file({"zero3_init_flag": True}) | {"zero_optimization": {"stage": 3}},
    ],
)
def flag_that_accelerate_takes_for_off(context: Context) -> Iterator[Hit]:
    """Below stage 3 accelerate turns zero3_init_flag off, with a warning; zero3_save_16bit_model it compares with
    the text true alone (DeepSpeedPlugin.__post_init__ in accelerate/utils/dataclasses.py).
    """
    if (launch := _launch(context)) is None:
        return
    on = launch.word("zero3_init_flag") in known.TRUE
    if on and context.has("zero_optimization") and context.stage != 3:
        text = f"is on, and counts in stage 3 only: the stage is {context.stage}"
        yield Hit(f"{OPTION}.zero3_init_flag", text, "Set it to false, or train in stage 3.")
    save = launch.word("zero3_save_16bit_model")
    if save != "true" and save in known.TRUE and launch.file is None:
        text = f"is {_shown(launch.options['zero3_save_16bit_model'])}, which accelerate takes for false"
        yield Hit(f"{OPTION}.zero3_save_16bit_model", text, "Write true.", severity="error", effect=DIFFERS)


@rule(
    "DS690",
    "error",
    DIFFERS,
    bad=[_case({"gradient_clipping": 0}), _case({"gradient_clipping": "0.0"})],
    good=[
        _case({"gradient_clipping": 0.1}),
        _case({"gradient_clipping": "auto"}),
        _case(),
        _case({"gradient_clipping": 0}) | {"_version": "0.9"},
    ],
)
def clipping_that_zero_leaves_on(context: Context) -> Iterator[Hit]:
    """DeepSpeedPlugin leaves a 0 out of the config (__post_init__ in accelerate/utils/dataclasses.py), and DeepSpeed
    then clips at a norm of its own (GRADIENT_CLIPPING_DEFAULT in runtime/constants.py).
    """
    launch = _launch(context)
    default = context.schema.describe("gradient_clipping")[0]
    if (
        launch is not None
        and launch.file is None
        and launch.clipping == 0
        and isinstance(default, (int, float))
        and default
    ):
        text = f"is 0, which accelerate leaves out: DeepSpeed clips at its own {default:g}"
        advice = f"Write a norm that is never reached, such as 1e9, or 0 in a {FILE}."
        yield Hit(f"{OPTION}.gradient_clipping", text, advice)

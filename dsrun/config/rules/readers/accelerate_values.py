"""DS682 and DS689 to DS691: values in an accelerate YAML that stop it, or mean something else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import FILE, SECTION, LaunchConfig, number, whole
from dsrun.config.rules.examples import zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.readers.accelerate_file import OPTION, TOP, case, in_yaml, launched, with_file


@rule("DS682", FAILS)
@bad(case(compute_environment="AMAZON_SAGEMAKER"), case(deepspeed_config="ds_config.json"))
@good(case(compute_environment="LOCAL_MACHINE", deepspeed_config=None), case(mixed_precision="BF16"))
def value_refused_by_accelerate(context: Context) -> Iterator[Finding]:
    """Each value is checked separately: _validate_launch_command (accelerate/commands/launch.py),
    prepare_deepspeed_cmd_env (accelerate/utils/launch.py), DeepSpeedPlugin (accelerate/utils/dataclasses.py).
    """
    launch = launched(context)
    if launch is not None:
        yield from _stops_at_the_top(launch)
        yield from _stops_at_a_count(launch)
        if launch.file is None:
            yield from _stops_at_an_option(launch)


def _stops_at_the_top(launch: LaunchConfig) -> Iterator[Finding]:
    given = launch.given
    if (where := given.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        text = f"is {in_yaml(where)}, where accelerate doesn't support DeepSpeed"
        yield Finding(f"{TOP}.compute_environment", text, "Set compute_environment: LOCAL_MACHINE.")
    section = given.get(SECTION)
    if section is not None and not isinstance(section, Mapping):
        advice = f"Set {FILE} in it, or write the settings there."
        yield Finding(OPTION, f"is {in_yaml(section)}, but must be a section with keys", advice)
    precision = given.get("mixed_precision")
    if precision is not None and launch.file is None and str(precision).lower() not in known.PRECISIONS:
        advice = 'Write "no", fp8, fp16 or bf16; without quotes YAML reads no as false.'
        yield Finding(
            f"{TOP}.mixed_precision", f"is {in_yaml(precision)}, not a precision of accelerate", advice
        )
    if not isinstance(given.get("gpu_ids"), (str, type(None))):
        shown = in_yaml(given["gpu_ids"])
        advice = f'Put it in quotes: "{shown.strip("[]")}".'
        yield Finding(f"{TOP}.gpu_ids", f"is {shown}, but must be a string", advice)
    if not isinstance(given.get("main_process_port"), (int, type(None))):
        shown = in_yaml(given["main_process_port"])
        yield Finding(
            f"{TOP}.main_process_port", f"is {shown}, not a port number", "Write the number without quotes."
        )


def _stops_at_a_count(launch: LaunchConfig) -> Iterator[Finding]:
    machines, processes = launch.given.get("num_machines", 1), launch.given.get("num_processes")
    if not isinstance(machines, int):
        advice = "Write the number without quotes, 1 for one machine."
        yield Finding(f"{TOP}.num_machines", f"is {in_yaml(machines)}, but must be a number", advice)
    if processes in (None, -1):
        text = "is missing: accelerate launch needs --num_processes"
        yield Finding(
            f"{TOP}.num_processes", text, "Write the number of GPUs of all machines.", severity="note"
        )
    elif launch.processes is None:
        advice = "Write the number of GPUs of all machines."
        yield Finding(f"{TOP}.num_processes", f"is {in_yaml(processes)}, not a number of processes", advice)
    elif launch.machines > 1 and isinstance(processes, str):
        text = f"is {in_yaml(processes)}, which accelerate can't divide by {launch.machines} machines"
        yield Finding(f"{TOP}.num_processes", text, "Write the number without quotes.")


def _stops_at_an_option(launch: LaunchConfig) -> Iterator[Finding]:
    given = launch.options
    stage, clipping = launch.text("zero_stage"), launch.word("gradient_clipping")
    steps, init = launch.text("gradient_accumulation_steps"), launch.word("zero3_init_flag")
    if stage is not None and not stage.strip().lstrip("+-").isdecimal():
        yield Finding(
            f"{OPTION}.zero_stage",
            f"is {in_yaml(given['zero_stage'])}, not a whole number",
            "Write 0, 1, 2 or 3.",
        )
    if clipping not in (None, "auto") and number(str(clipping)) is None:
        advice = "Write a number, such as 1.0, or leave it out to use the script's value."
        yield Finding(
            f"{OPTION}.gradient_clipping", f"is {in_yaml(given['gradient_clipping'])}, not a number", advice
        )
    if steps == "auto":
        text = 'is "auto", which HF Trainer fills in; the Accelerator() of any other script stops at it'
        yield Finding(f"{OPTION}.gradient_accumulation_steps", text, "Write the number.", severity="warning")
    elif steps is not None and whole(steps) is None:
        text = f"is {in_yaml(given['gradient_accumulation_steps'])}, not a whole number"
        yield Finding(
            f"{OPTION}.gradient_accumulation_steps", text, "Write the number of micro batches per step."
        )
    if init is not None and init not in known.TRUE + known.FALSE:
        text = f"is {in_yaml(given['zero3_init_flag'])}, neither true nor false"
        yield Finding(f"{OPTION}.zero3_init_flag", text, "Write one of the two.")


@rule("DS689", "warning")
@bad(
    case({"zero_stage": 2, "zero3_init_flag": True}), case({"zero_stage": 3, "zero3_save_16bit_model": "yes"})
)
@good(
    case({"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": "True"}) | zero(3),
    case({"zero_stage": 2, "zero3_init_flag": False}),
)
def flag_ignored_by_accelerate(context: Context) -> Iterator[Finding]:
    """Below stage 3 accelerate turns zero3_init_flag off, with a warning; zero3_save_16bit_model it compares with
    the string true only (DeepSpeedPlugin.__post_init__ in accelerate/utils/dataclasses.py).
    """
    if (launch := launched(context)) is None:
        return
    on = launch.word("zero3_init_flag") in known.TRUE
    if on and context.has("zero_optimization") and context.stage != 3:
        text = f"is on, but acts in stage 3 only: the stage is {context.stage}"
        yield Finding(f"{OPTION}.zero3_init_flag", text, "Set it to false, or train in stage 3.")
    save = launch.word("zero3_save_16bit_model")
    if save != "true" and save in known.TRUE and launch.file is None:
        text = f"is {in_yaml(launch.options['zero3_save_16bit_model'])}, which accelerate treats as false"
        yield Finding(
            f"{OPTION}.zero3_save_16bit_model", text, "Write true.", severity="error", effect=DIFFERS
        )


@rule("DS690", DIFFERS)
@bad(case({"gradient_clipping": 0}), case({"gradient_clipping": "0.0"}))
@good(case({"gradient_clipping": 0.1}), case({"gradient_clipping": "auto"}))
def clipping_not_turned_off_by_0(context: Context) -> Iterator[Finding]:
    """DeepSpeedPlugin leaves a 0 out of the config (__post_init__ in accelerate/utils/dataclasses.py), and DeepSpeed
    then clips at its default (GRADIENT_CLIPPING_DEFAULT in runtime/constants.py).
    """
    launch = launched(context)
    default = context.schema.describe("gradient_clipping")[0]
    if (
        launch is not None
        and launch.file is None
        and launch.clipping == 0
        and isinstance(default, (int, float))
        and default
    ):
        text = f"is 0, which accelerate leaves out: DeepSpeed clips at its default {default:g}"
        advice = f"Write a norm that is never reached, such as 1e9, or 0 in a {FILE}."
        yield Finding(f"{OPTION}.gradient_clipping", text, advice)


@rule("DS691", "warning")
@bad(case(use_cpu=True), with_file(use_cpu=True))
@good(case(use_cpu=False), case(distributed_type="NO", use_cpu=True))
def use_cpu_beside_deepspeed(context: Context) -> Iterator[Finding]:
    """Only --cpu on the command line counts: the key sets a number of threads, and no more (launch_command and
    _validate_launch_command in accelerate/commands/launch.py).
    """
    launch = launched(context)
    if launch is not None and launch.given.get("use_cpu") is True:
        text = "is true, but accelerate starts DeepSpeed on the GPUs all the same"
        yield Finding(f"{TOP}.use_cpu", text, "Set it to false, or export DS_ACCELERATOR=cpu.")

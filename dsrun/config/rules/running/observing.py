"""DS71x-DS72x: monitors, loggers, profilers and the autotuner."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.catalog import closest
from dsrun.config import tree
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import removal
from dsrun.config.rules.examples import hf
from dsrun.config.rules.frame import REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, remove, report
from dsrun.config.rules.running.batch import MICRO
from dsrun.config.schemas import schema

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Monitor -> the package that it imports (monitor/utils.py)."""

FILES = ("tensorboard", "csv_monitor")
"""Monitors that write to a folder."""

OPS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_reduce_coalesced", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "inference_all_reduce", "irecv", "isend", "log_summary_barrier", "monitored_barrier", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
"""Names under which communication is logged: the log_name of every timed_op in comm/comm.py."""

START, END = 3, 5
"""autotuning's start_profile_step and end_profile_step where they aren't given (autotuning/constants.py)."""


@rule("DS710", "note")
@bad(*({name: {"enabled": True}} for name in PACKAGES))
@good({"tensorboard": {"enabled": False}}, {"csv_monitor": {"enabled": True, "output_path": "logs"}})
def package_of_a_monitor_needed(context: Context) -> Iterator[Finding]:
    """The first rank imports it at the start, and fails without it (MonitorMaster in monitor/monitor.py)."""
    for name, package in PACKAGES.items():
        if context.flag(f"{name}.enabled"):
            advice = f"Install it where the first rank runs: pip install {package}."
            yield Finding(name, f"needs the package {package}, or the start fails", advice)


@rule("DS711", "warning")
@bad({"comet": {"enabled": False, "api_key": "abc"}})
@good({"comet": {"enabled": True, "project": "mine"}}, {"comet": {"api_key": ""}})
def secret_in_the_file() -> Table:
    """Comet also reads the key from COMET_API_KEY (CometConfig in monitor/config.py)."""
    path = "comet.api_key"
    text = "is a secret in a file that others may read. Remove it, and export COMET_API_KEY."
    return report(path, text, lambda context: context.text(path), remove(path, safe=False))


@rule("DS712", "note")
@bad(
    {"csv_monitor": {"enabled": True}},
    {"tensorboard": {"enabled": True, "output_path": "", "job_name": "mine"}},
)
@good({"csv_monitor": {"enabled": True, "output_path": "logs"}}, {"csv_monitor": {"enabled": False}})
def monitor_without_a_folder(context: Context) -> Iterator[Finding]:
    """An empty path is the folder the job starts in; a second run appends to its files (monitor/csv_monitor.py)."""
    for name in FILES:
        if context.flag(f"{name}.enabled") and not context.text(f"{name}.output_path"):
            folder = context.text(f"{name}.job_name") or "DeepSpeedJobName"
            yield Finding(
                f"{name}.output_path",
                f"is empty: every run writes to ./{folder}",
                "Set it to a folder of the run.",
            )


@rule("DS713", "warning")
@bad({"comms_logger": {"enabled": False}}, {"comms_logger": {"verbose": True}})
@good({"comms_logger": {"enabled": True}}, {"_comms_logger": {"enabled": False}})
def comms_logger_stays_on(context: Context) -> Iterator[Finding]:
    """The section itself turns it on; `enabled` is never read (DeepSpeedCommsConfig in comm/config.py).

    Then every operation waits for the GPU (timed_op in comm/comm.py).
    """
    given = context.get("comms_logger")
    if not isinstance(given, dict) or given.get("enabled", False) is not False:
        return
    why = "although enabled is false" if "enabled" in given else "although enabled is missing"
    yield Finding(
        "comms_logger",
        f"is on, {why}: the section alone turns it on, and every operation waits for the GPU",
        "Remove the section to turn it off.",
        removal(context, "comms_logger", safe="enabled" in given),
    )


@rule("DS714", "warning")
@bad(
    {"comms_logger": {"enabled": True, "prof_all": False}},
    {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["allreduce"]}},
)
@good(
    {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}},
    {"comms_logger": {"enabled": True, "prof_all": True, "prof_ops": []}},
)
def operations_not_logged(context: Context) -> Iterator[Finding]:
    """Without prof_all only the operations in prof_ops are logged (timed_op in comm/comm.py)."""
    off = context.flag("comms_logger.enabled") is False  # nothing is to be logged (DS713)
    if context.flag("comms_logger.prof_all") is not False or off:
        return
    path, ops = "comms_logger.prof_ops", context.section("comms_logger").get("prof_ops") or []
    if not ops:
        yield Finding(
            path,
            "is empty and prof_all is false: nothing is logged",
            "Set prof_all to true, or name operations.",
        )
    for op in ops if isinstance(ops, list) else ():
        if isinstance(op, str) and op not in OPS:
            near = closest(op, OPS)
            advice = f"Did you mean {near}?" if near else f"Known: {', '.join(OPS)}."
            yield Finding(path, f'unknown operation "{op}": nothing is logged for it', advice)


@rule("DS715", "note")
@bad({"wall_clock_breakdown": True}, {"memory_breakdown": True})
@good({"wall_clock_breakdown": False}, {"memory_breakdown": False})
def measuring_slows_training() -> Table:
    """Timers wait for the GPU around forward, backward and step (_start_timers in runtime/engine.py, utils/timer.py).

    The profiler of FLOPs turns them on for the whole run (runtime/config.py).
    """
    advice = "Set it to false for runs whose speed matters."
    costs = {
        "wall_clock_breakdown": "makes each step wait for the GPU several times",
        "flops_profiler.enabled": "also turns on wall_clock_breakdown for the whole run",
        "memory_breakdown": "prints the memory several times a step",
    }
    return all_of(*(report(path, f"{cost}. {advice}", when.on(path)) for path, cost in costs.items()))


@rule("DS716", "warning")
@bad(
    {"_for": "hf", "_trainer": {"max_steps": 5}, "flops_profiler": {"enabled": True, "profile_step": 5}},
    {"_for": "hf", "_trainer": {"max_steps": 1}, "flops_profiler": {"enabled": True}},
)
@good(
    {"_for": "hf", "_trainer": {"max_steps": 5}, "flops_profiler": {"enabled": True, "profile_step": 4}},
    {"_for": "hf", "_trainer": {"max_steps": 2}, "flops_profiler": {"enabled": True}},
)
def profile_after_the_end(context: Context) -> Iterator[Finding]:
    """It measures when global_steps, counted from 0, equals profile_step (_forward_prologue in runtime/engine.py)."""
    path = "flops_profiler.profile_step"
    step = context.integer(path) if context.has(path) else 1
    steps = context.argument("max_steps")
    if (
        context.flag("flops_profiler.enabled")
        and step is not None
        and isinstance(steps, int)
        and 0 < steps <= step
    ):
        text = f"{step} is never reached: max_steps is {steps}, and steps count from 0"
        yield Finding(path, text, f"Set it to at most {steps - 1}.")


@rule("DS717", "note")
@bad({"_for": "hf", "steps_per_print": 10}, {"_for": "accelerate", "steps_per_print": 2000})
@good({"steps_per_print": 10}, {"_for": "lightning", "steps_per_print": 10})
def printing_turned_off_by_accelerate(context: Context) -> Iterator[Finding]:
    """accelerate sets it to infinity (DeepSpeedPlugin in accelerate/utils/dataclasses.py)."""
    value = context.integer("steps_per_print")
    if context.target in schema.FILLING and value is not None:
        yield Finding(
            "steps_per_print",
            f"{value} has no effect: accelerate turns DeepSpeed's own printing off",
            "Set logging_steps in the TrainingArguments instead."
            if context.by_trainer
            else "Print in the code instead.",
            removal(context, "steps_per_print"),
        )


@rule("DS718", "note")
@bad({"vocabulary_size": 50257})
@good({"vocabulary_size": 50264}, {"vocabulary_size": None})
def vocabulary_size_no_multiple_of_8(context: Context) -> Iterator[Finding]:
    """The size is only used for this check (_do_warning_check in runtime/config.py); it doesn't change the model."""
    size = context.integer("vocabulary_size")
    if size is not None and size % 8:
        text = f"{size} is not a multiple of 8, which tensor cores prefer"
        yield Finding(
            "vocabulary_size",
            text,
            f"Pad the model's embedding to {size + 8 - size % 8}; this key itself changes nothing.",
        )


@rule("DS719", REFUSED)
@bad({"wall_clock_breakdown": "true"}, {"wall_clock_breakdown": 0.0})
@good({"wall_clock_breakdown": True}, {"wall_clock_breakdown": 1})
def string_or_float_for_a_flag(context: Context) -> Iterator[Finding]:
    """The two are joined by |, which accepts no string and no float (_initialize_params in runtime/config.py)."""
    for path in ("wall_clock_breakdown", "flops_profiler.enabled"):
        value = tree.get(context.config, path)
        if isinstance(value, (str, float)) and value != schema.AUTO:
            kind = "a string" if isinstance(value, str) else "a float"
            text = f"is {schema.shorten(value)}, {kind}: DeepSpeed stops at it"
            yield Finding(path, text, "Write true or false.")


@rule("DS720", "warning")
@bad({"autotuning": {"enabled": True}}, {"autotuning": {"enabled": True, "end_profile_step": 9}})
@good({"autotuning": {"enabled": False}}, {"autotuning": {"enabled": False, "end_profile_step": 9}})
def run_that_ends_early(context: Context) -> Iterator[Finding]:
    """With autotuning each process exits after the measured steps (step in runtime/engine.py).

    A config with arg_mappings is one for the autotuner: there it is a note.
    """
    if context.flag("autotuning.enabled"):
        yield Finding(
            "autotuning.enabled",
            f"ends every run after step {(_profile_step(context, 'end_profile_step', END) or END) + 1}",
            "Start with deepspeed --autotuning tune (or run), and remove it from the training config.",
            severity="note" if context.section("autotuning.arg_mappings") else "",
        )


@rule("DS723", "warning")
@bad(hf(autotuning={"enabled": True}), hf(autotuning={"enabled": True, "arg_mappings": {}}))
@good(
    {"autotuning": {"enabled": True}},
    hf(autotuning={"enabled": True, "arg_mappings": {MICRO: "--per_device_train_batch_size"}}),
)
def autotuning_without_arg_mappings() -> Table:
    """The autotuner changes the script's arguments by arg_mappings only (Autotuner._get_user_arg in
    autotuning/autotuner.py): the Trainer's own batch size stays, and it stops where the two differ.
    """
    path, example = "autotuning.arg_mappings", f'{{{{"{MICRO}": "--per_device_train_batch_size"}}}}'
    return report(
        path,
        "is missing: the autotuner can't change the Trainer's batch size, and its experiments fail. "
        f"Add arg_mappings, such as {example}.",
        (when.read_by(schema.HF), when.on("autotuning.enabled"), lambda context: not context.section(path)),
    )


@rule("DS721", "warning")
@bad(
    {"autotuning": {"enabled": True, "start_profile_step": 5, "end_profile_step": 5}},
    {"autotuning": {"enabled": True, "start_profile_step": 6}},
)
@good(
    {"autotuning": {"enabled": False, "start_profile_step": 9}},
    {"autotuning": {"enabled": True, "start_profile_step": 4}},
)
def no_steps_to_measure(context: Context) -> Iterator[Finding]:
    """Latency is the mean of the steps from start to end (_autotuning_exit in runtime/engine.py)."""
    start = _profile_step(context, "start_profile_step", START)
    end = _profile_step(context, "end_profile_step", END)
    if context.flag("autotuning.enabled") and start is not None and end is not None and end <= start:
        text = f"{end} leaves no step to measure after start_profile_step {start}"
        yield Finding("autotuning.end_profile_step", text, f"Set it to {start + 2} or more.")


@rule("DS722", "warning")
@bad(
    {"autotuning": {"enabled": True, "min_train_batch_size": 64, "max_train_batch_size": 32}},
    {
        "autotuning": {
            "enabled": True,
            "min_train_micro_batch_size_per_gpu": 8,
            "max_train_micro_batch_size_per_gpu": 4,
        }
    },
)
@good(
    {"autotuning": {"enabled": True, "min_train_batch_size": 32, "max_train_batch_size": 32}},
    {"autotuning": {"enabled": True, "min_train_batch_size": 32}},
)
def autotuning_bounds_swapped(context: Context) -> Iterator[Finding]:
    """The sizes to try lie between the two (get_min_max_micro_batch_size in autotuning/autotuner.py)."""
    if not context.flag("autotuning.enabled"):
        return
    for size in ("train_batch_size", MICRO):
        least, most = (context.integer(f"autotuning.{edge}_{size}") for edge in ("min", "max"))
        if least is not None and most is not None and least > most:
            yield Finding(
                f"autotuning.min_{size}", f"{least} is above max_{size} {most}", f"Set it to at most {most}."
            )


def _profile_step(context: Context, key: str, default: int) -> int | None:
    path = f"autotuning.{key}"
    return context.integer(path) if context.has(path) else default

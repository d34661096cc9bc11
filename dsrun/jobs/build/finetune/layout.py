"""--layout auto: the planner chooses preset, tensor and sequence parallelism, micro batch and recomputing."""

from __future__ import annotations

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.jobs.build import layouts
from dsrun.jobs.build.checks.memory_check import MemoryRequest
from dsrun.jobs.build.finetune.stages import Requested, WithDevices
from dsrun.options.commands import FinetuneOptions
from dsrun.options.derived import BY_LAYOUT
from dsrun.options.groups import AUTO_LAYOUT
from dsrun.options.table import Layer, Source, flag_of
from dsrun.planner.layouts import RECOMPUTED, reasons
from dsrun.planner.plan import OUT

WHERE = f"--layout {AUTO_LAYOUT}"


def check_alone(requested: Requested) -> None:
    """Raise DsrunError where something that a layout decides is asked for beside it."""
    given = [name for name in BY_LAYOUT if requested.resolved.source(name) >= Source.LAB_PRESET]
    flags = [flag_of(FinetuneOptions, name) for name in given]
    raise_all(Problem(f"is chosen by {WHERE}", flag, "Leave one of them out.") for flag in flags)


def unknown() -> DsrunError:
    """The refusal where a layout can't be chosen, as nothing is known to choose by."""
    hint = "Say --preset, and --tp or --sp, yourself."
    return DsrunError("needs GPUs and a network that the planner knows", where=WHERE, hint=hint)


def by_layout(placed: WithDevices, request: MemoryRequest) -> Layer:
    """The fastest layout that fits and that finetune trains, with the examples of a step that were asked for.

    Raises DsrunError where something of it is asked for, where nothing is known to choose by, or where nothing fits.
    """
    check_alone(placed)
    base = request.base(placed.machine) if placed.allocation.known else None
    if base is None or placed.machine.accelerator == "cpu":
        raise unknown()
    room, options = request.room(placed.machine), placed.options
    own = placed.resolved.source("activation_checkpointing") >= Source.LAB_PRESET
    found = layouts.best_layouts(
        base, room, request.architecture, examples=options.global_batch, method=placed.peft.method,
        optimizer=options.optimizer, recomputed=(base.checkpointing,) if own else RECOMPUTED,
    )  # fmt: skip
    running = [one for one in found if not one.refused and one.plan.verdict != OUT]
    if not running:
        hint = "`dsrun plan --layouts` shows what would; a smaller model, LoRA or more GPUs help."
        raise DsrunError("no layout fits that finetune trains", where=WHERE, hint=hint)
    best = running[0]
    why = f"{best.plan.layout.text}, the fastest of {len(running)} layouts that fit"
    return Layer.settled(best.options, why, "; ".join([f"layout {why}", *reasons(best.plan, room)]))

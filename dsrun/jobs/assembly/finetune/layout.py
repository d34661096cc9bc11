"""--layout auto: the planner chooses preset, tensor and sequence parallelism, micro batch and recomputing."""

from __future__ import annotations

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.jobs.assembly import layouts
from dsrun.jobs.assembly.checks.memory_check import MemoryRequest
from dsrun.jobs.assembly.finetune.stages import Requested
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.options.derived import BY_LAYOUT
from dsrun.options.layers import Layer, Source
from dsrun.options.table import AUTO_LAYOUT
from dsrun.planner.layouts import RECOMPUTED, reasons
from dsrun.planner.plan import OUT

WHERE = f"--layout {AUTO_LAYOUT}"


def by_layout(requested: Requested, request: MemoryRequest | None) -> Layer:
    """The fastest layout that fits and that finetune trains, with the examples of a step that were asked for.

    request: None where the model or the devices aren't known. Raises DsrunError where something of it is asked for,
    where nothing is known to choose by, or where nothing fits.
    """
    given = [name for name in BY_LAYOUT if requested.resolved.source(name) >= Source.LAB_PRESET]
    flags = [flag_of(FinetuneOptions, name) for name in given]
    raise_all(Problem(f"is chosen by {WHERE}", flag, "Leave one of them out.") for flag in flags)
    base = request.base(requested.machine) if request else None
    if request is None or base is None or requested.machine.accelerator == "cpu":
        hint = "Say --preset, and --tp or --sp, yourself."
        raise DsrunError("needs GPUs and a network that the planner knows", where=WHERE, hint=hint)
    room, options = request.room(requested.machine), requested.options
    own = requested.resolved.source("activation_checkpointing") >= Source.LAB_PRESET
    marked = layouts.best_layouts(
        base, room, request.architecture, examples=options.global_batch, method=requested.peft.method,
        optimizer=options.optimizer, recomputed=(base.checkpointing,) if own else RECOMPUTED,
    )  # fmt: skip
    running = [layout for layout in marked if not layout.refused and layout.plan.verdict != OUT]
    if not running:
        hint = "`dsrun plan --layouts` shows what would; a smaller model, LoRA or more GPUs help."
        raise DsrunError("no layout fits that finetune trains", where=WHERE, hint=hint)
    best = running[0]
    why = f"{best.plan.layout.text}, the fastest of {len(running)} layouts that fit"
    return Layer.settled(best.options, why, "; ".join([f"layout {why}", *reasons(best.plan, room)]))

"""--layout auto: the planner chooses preset, tensor and sequence parallelism, micro batch and recomputing."""

from __future__ import annotations

from dsrun.errors import DsrunError, Problem
from dsrun.jobs.build import layouts
from dsrun.jobs.build.checks.memory_check import MemoryRequest
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.options.commands import FinetuneOptions
from dsrun.options.derived import BY_LAYOUT
from dsrun.options.groups import AUTO_LAYOUT
from dsrun.options.table import Source, flag_of
from dsrun.planner.layouts import RECOMPUTED, reasons
from dsrun.planner.plan import OUT

WHERE = f"--layout {AUTO_LAYOUT}"


def choose_layout(draft: Draft, request: MemoryRequest | None) -> None:
    """Fill in the fastest layout that fits and that finetune trains, with the examples of a step that were asked for.

    Raises DsrunError where something of it is asked for, where nothing is known to choose by, or where nothing fits.
    """
    said = [name for name in BY_LAYOUT if draft.asked.source(name) >= Source.LAB_PRESET]
    if said:
        flags = [flag_of(FinetuneOptions, name) for name in said]
        raise DsrunError([Problem(f"is chosen by {WHERE}", flag, "Leave one of them out.") for flag in flags])
    base = request.base(draft.machine) if request and draft.placed and draft.placed.known else None
    if request is None or base is None or draft.machine.accelerator == "cpu":
        hint = "Say --preset, and --tp or --sp, yourself."
        raise DsrunError("needs GPUs and a network that the planner knows", where=WHERE, hint=hint)
    room, options = request.room(draft.machine), draft.options
    own = draft.asked.source("activation_checkpointing") >= Source.LAB_PRESET
    found = layouts.best_layouts(
        base, room, request.architecture, examples=options.global_batch, method=draft.peft.method,
        optimizer=options.optimizer, recomputed=(base.checkpointing,) if own else RECOMPUTED,
    )  # fmt: skip
    running = [one for one in found if not one.refused and one.plan.verdict != OUT]
    if not running:
        hint = "`dsrun plan --layouts` shows what would; a smaller model, LoRA or more GPUs help."
        raise DsrunError("no layout fits that finetune trains", where=WHERE, hint=hint)
    best = running[0]
    why = f"{best.plan.layout.text}, the fastest of {len(running)} layouts that fit"
    draft.asked = draft.asked.settled(best.options, why)
    draft.preset = best.options["preset"]
    draft.notes.append("; ".join([f"layout {why}", *reasons(best.plan, room)]))

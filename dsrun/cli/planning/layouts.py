"""`dsrun plan --layouts`: decided first (`decide`), then shown as text or JSON (`report`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.results import print_json
from dsrun.cli.planning import plan_text as text
from dsrun.cli.planning.plan_case import PlanCase, base_of
from dsrun.jobs.assembly.planning.search import SURE, TIE
from dsrun.planner.layouts import RECOMPUTED, reasons
from dsrun.planner.plan import OUT, MemoryBudget, chance
from dsrun.planner.units import significant

if TYPE_CHECKING:
    from dsrun.jobs.assembly.layouts import MarkedLayout
    from dsrun.planner.setup import Setup

MOST_LAYOUTS = 8
"""Layouts without --wide."""


@dataclasses.dataclass(frozen=True)
class RankedLayouts:
    """All that is shown of a case's layouts, the best first. base: their setup."""

    case: PlanCase
    base: Setup
    layouts: Sequence[MarkedLayout]
    notes: list[str]

    def report(self) -> bool:
        """Print the layouts. Returns whether one fits."""
        if self.case.options.as_json:
            print_json("plan-layouts", value_of(self))
        else:
            show(self)
        return bool(self.layouts) and self.layouts[0].plan.verdict != OUT


def decide(case: PlanCase) -> RankedLayouts:
    """The best layouts of the case. Raises click.UsageError for CPUs."""
    from dsrun.jobs.assembly import layouts
    from dsrun.jobs.assembly.planning import search

    room = case.target.room
    if room.accelerator == "cpu":
        raise click.UsageError("--layouts is for GPUs: name them with --gpu, --gpus and --nodes.")
    requested, _, notes = search.batches(case.requested, room.ranks)
    options = requested.options
    base = base_of(case, case.target, options, case.mean_tokens)
    fixed = requested.said("activation_checkpointing")
    best = layouts.best_layouts(
        base, room, case.subject.architecture, examples=options.global_batch, method=options.method,
        optimizer=options.optimizer, recomputed=(base.checkpointing,) if fixed else RECOMPUTED,
    )  # fmt: skip
    shown, tied = collapsed(best)
    if tied and not options.wide:
        notes.append(
            f"{tied} layouts that tie with a simpler one of those shown are left out; --wide shows them."
        )
    return RankedLayouts(case, base, best if options.wide else shown, notes)


def collapsed(layouts: Sequence[MarkedLayout]) -> tuple[list[MarkedLayout], int]:
    """The layouts in order: those that fit and that finetune runs, those that fit, the others; where some tie in
    seconds the simplest and surest alone. And the number of those that are left out."""

    def place(layout: MarkedLayout) -> tuple[bool, bool]:
        return layout.plan.verdict == OUT, bool(layout.refused)

    found: list[MarkedLayout] = []
    for _, alike in itertools.groupby(sorted(layouts, key=place), key=place):
        left = list(alike)
        while left:
            tied = [layout for layout in left if layout.plan.seconds <= TIE * left[0].plan.seconds]
            found.append(min(tied, key=_simple))
            left = [layout for layout in left if layout not in tied]
    return found, len(layouts) - len(found)


def _simple(layout: MarkedLayout) -> tuple[int, float]:
    """Ways in which a layout divides beside data parallelism, and how sure it is."""
    return layout.plan.layout.ways, -min(SURE, chance(layout.plan.used))


def value_of(ranked: RankedLayouts) -> dict[str, Any]:
    """The layouts for machines."""
    return significant(
        {
            "model": ranked.case.subject.name,
            "place": ranked.case.target.text,
            "layouts": [layout_value(layout) for layout in ranked.layouts],
            "notes": ranked.notes,
        }
    )


def show(ranked: RankedLayouts) -> None:
    """Print the layouts for people."""
    case, target = ranked.case, ranked.case.target
    text.heading(case.subject, target)
    text.say(text.batch_text(ranked.base))
    layout_table(ranked.layouts, target.room, wide=case.options.wide)
    text.print_notes([*ranked.notes, *target.notes])


def layout_table(layouts: Sequence[MarkedLayout], room: MemoryBudget, *, wide: bool = False) -> None:
    """Layouts, to stdout: the first ones, or all of them; why the first is so, and what dsrun would run."""
    fitting = [layout for layout in layouts if layout.plan.verdict != OUT] or layouts
    shown = layouts if wide else fitting[:MOST_LAYOUTS]
    plans = [layout.plan for layout in shown]
    text.aligned(
        {
            "layout": [plan.layout.text for plan in plans],
            "batch": [f"{plan.micro_batch} x {plan.grad_accum}" for plan in plans],
            "ckpt": [
                {0: "no", 1: "yes"}.get(plan.checkpointing, f"1/{plan.checkpointing}") for plan in plans
            ],
            "verdict": [plan.verdict for plan in plans],
            "GPU": [text.gib(plan.gpu_bytes) for plan in plans],
            "s/step": [text.seconds_text(plan.seconds) for plan in plans],
            "link": [_gb(plan.link_bytes) for plan in plans],
            "net": [_gb(plan.network_bytes) for plan in plans],
            "runs": ["no" if layout.refused else "yes" for layout in shown],
        }
    )
    text.say("link, net: GB in a step over a GPU's links in its node, and into a node from others")
    first = layouts[0]
    for reason in reasons(first.plan, room):
        text.say(f"  {reason}")
    if first.refused:
        text.say(f"{first.plan.layout.text}: not by dsrun ({first.refused}), but by {first.engine}")
    runs_here = next(
        (layout for layout in layouts if not layout.refused and layout.plan.verdict != OUT), None
    )
    if runs_here is None:
        click.echo("Nothing that finetune runs fits." if first.plan.verdict != OUT else "Nothing fits.")
    else:
        text.with_finetune(runs_here.command)


def _gb(size: float) -> str:
    """10^9 bytes as a table shows them."""
    value = size / 1e9
    return f"{value:.0f}" if value >= 10 or not value else f"{value:.2g}"


def layout_value(layout: MarkedLayout) -> dict[str, Any]:
    """A layout for machines: bytes, seconds."""
    plan = layout.plan
    return {
        **dataclasses.asdict(plan.layout), "micro_batch": plan.micro_batch, "grad_accum": plan.grad_accum,
        "checkpointing": plan.checkpointing, "verdict": plan.verdict, "chance": chance(plan.used), "used": plan.used,
        "gpu_bytes": plan.gpu_bytes, "seconds_per_step": plan.seconds, "terms": plan.terms,
        "link_bytes": plan.link_bytes, "network_bytes": plan.network_bytes, "engine": layout.engine,
        "refused": layout.refused or None,
    }  # fmt: skip

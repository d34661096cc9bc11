"""What makes a tight plan safe: every change by itself, with the memory that it saves and the time that it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.planner.advice import changes
from dsrun.planner.plan import FITS, MemoryBudget, Plan, judge

KINDS = ("attention", "micro batch", "preset", "checkpointing", "loss", "length")
"""Kinds of change that leave the model, the method and the machines as they are."""
LEAST = 0.01
"""Share of what a plan needs from which on a saving is worth a line."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A change of one thing."""

    text: str
    """The change, as options or in words."""
    costs: str
    """Its price, in words."""
    saves_bytes: float
    """Bytes of the scarce memory that it saves."""
    seconds: float
    """Seconds a step beside the plan's, of as many tokens; negative: faster."""
    verdict: str
    """The plan's verdict with it."""
    chance: float


def knobs(
    plan: Plan, presets: Mapping[str, Mapping[str, Any]], room: MemoryBudget, *, bf16: bool
) -> list[Knob]:
    """The changes that save something, those first that cost the least time among the ones that make it fit.

    presets: those that may be taken instead, with their fields of a Setup. Both sides are by formula: a plan that was
    traced is judged anew.
    """
    found = []
    plan = judge(plan.preset, plan.setup, room)
    others = {name: fields for name, fields in presets.items() if name != plan.preset}
    for change in changes(plan.setup, others, bf16=bf16):
        setup = change.apply(plan.setup) if change.kind in KINDS else None
        if setup is None:
            continue
        changed = judge(change.preset or plan.preset, setup, room)
        saved = _scarce(plan, plan.scarce) - _scarce(changed, plan.scarce)
        if saved < LEAST * _scarce(plan, plan.scarce) or changed.used >= plan.used:
            continue
        tokens = plan.setup.seq_len / setup.seq_len  # a shorter example is a smaller step
        seconds = tokens * changed.speed.seconds_per_step - plan.speed.seconds_per_step
        found.append(Knob(change.text, change.costs, saved, seconds, changed.verdict, changed.chance))
    return sorted(found, key=lambda knob: (knob.verdict != FITS, knob.seconds, -knob.saves_bytes))


def _scarce(plan: Plan, name: str) -> float:
    """Bytes that a plan needs of a memory."""
    return {"GPU": plan.demand, "host": plan.host.peak, "NVMe": plan.nvme_bytes}[name]

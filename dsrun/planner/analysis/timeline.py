"""The memory of one step over time: what is held throughout, and what comes and goes."""

from __future__ import annotations

import math
from typing import NamedTuple

from dsrun.planner.gpu_memory import AT, persistent
from dsrun.planner.plan import Plan
from dsrun.planner.terms import MOMENTS

FORWARD = (0.25, 0.5, 0.75)
"""Shares of the blocks that forward has gone through, at moments before the turn."""
GATHERED = "gathered"


class Instant(NamedTuple):
    """A moment of a step."""

    when: str
    """In words."""
    size: float
    """Bytes in use, as torch counts them."""
    parts: dict[str, float]
    """Term -> bytes of those that are there, the largest first."""


def timeline(plan: Plan) -> list[Instant]:
    """A step of a plan from its start to the optimizer's end; what only initialisation needs comes before it."""
    terms, peaks = plan.gpu.terms, plan.gpu.peaks
    held = {name: size for name, size in persistent(plan.setup).items() if size}
    instants = [Instant(MOMENTS[name], peaks[name], {}) for name in ("start", "flat") if peaks.get(name)]
    gathered = {GATHERED: terms.get(GATHERED, 0.0)}
    for share in FORWARD:
        passing = {**gathered, "activations": share * terms.get("activations", 0.0)}
        instants.append(_instant(f"forward, {share:.0%}".replace("%", " %"), held, passing))
    for moment in ("turn", "middle", "end", "step"):
        shares = {name: share * terms.get(name, 0.0) for name, share in AT[moment].items()}
        instant = _instant(MOMENTS[moment], held, shares)
        instants.append(instant._replace(size=peaks[moment]))
    return instants


def _instant(when: str, held: dict[str, float], passing: dict[str, float]) -> Instant:
    parts = {name: size for name, size in {**held, **passing}.items() if size}
    ordered = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return Instant(when, math.fsum(ordered.values()), ordered)

"""Whether the first loss after a resume fits those before it.

A checkpoint without digests, or with --no-digests, may hold other weights than were saved; so may another layout's that
was read wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STEPS = 20
"""Steps before the checkpoint whose losses are looked at."""
FEWEST = 5
"""Changes from step to step that it takes to know how much a loss changes."""
TIMES = 2.0
"""How many times their largest change the first loss may lie from the last one. Of losses that scatter around one value
it is 1 in 1,300 that lies further out without a reason, 1 in 380 where the tails are heavy (100,000 draws, normal and
Laplace)."""
TIMES_AGAIN, SHARE_AGAIN = 0.5, 0.02
"""The same for a step that was taken before, whose examples are the same: half of the largest change, and 2 % of the
loss, which another number of ranks or another precision doesn't make."""


@dataclass(frozen=True)
class LossBefore:
    """What metrics.jsonl says of the losses before a resume."""

    step: int
    """The step whose loss `loss` is: the last one before the checkpoint, or the first after it where the run had come
    so far."""
    loss: float
    room: float
    """How far from it the next loss may lie."""

    def surprise(self, step: int, loss: float) -> str:
        """What to say of the first loss, of optimizer step `step`; empty where it is near enough."""
        if not math.isfinite(loss) or abs(loss - self.loss) <= self.room:
            return ""
        known = (
            f"it was {self.loss:.4g}"
            if step == self.step
            else f"that of step {self.step} was {self.loss:.4g}"
        )
        advice = "compare the curve with the one before; an older checkpoint: dsrun resume RUN --checkpoint N"
        return f"the first loss after the resume, {loss:.4g} in step {step}, is far from what it was: {known}; {advice}"


def loss_before(lines: Iterable[Mapping[str, Any]], start: int) -> LossBefore | None:
    """What is known for a run that goes on after step `start`; None where it is too little.

    lines: of metrics.jsonl, before those after `start` are dropped.
    """
    losses = {line["step"]: line["loss"] for line in lines if isinstance(line.get("loss"), float)}
    window = [losses[step] for step in range(start - STEPS, start + 1) if step in losses]
    changes = [abs(after - before) for before, after in pairwise(window)]
    if len(changes) < FEWEST or start not in losses:
        return None
    if (again := losses.get(start + 1)) is not None:
        return LossBefore(start + 1, again, max(TIMES_AGAIN * max(changes), SHARE_AGAIN * abs(again)))
    return LossBefore(start, losses[start], TIMES * max(changes))

"""Whether the first loss after a resume fits those before it.

It doesn't where a checkpoint holds other weights than were saved, which nobody sees without digests (or with
--no-digests), or where another layout's checkpoint was read wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

WINDOW_STEPS = 20
"""Steps before the checkpoint whose losses are looked at."""
FEWEST_CHANGES = 5
"""Changes from step to step that it takes to know how much a loss changes."""
ROOM_TIMES = 2.0
"""Room for the first loss around the last one, as a multiple of the largest change. Of losses that scatter around one
value 1 in 1,300 lies further out without a reason, 1 in 380 where the tails are heavy (100,000 draws, normal and
Laplace)."""
REPEATED_TIMES, REPEATED_SHARE = 0.5, 0.02
"""The room around the earlier loss of the same step, whose examples are the same: half of the largest change, and at
least 2 % of the loss, which is more than another number of ranks or another precision makes."""


@dataclass(frozen=True)
class LossBefore:
    """The loss before a resume, by metrics.jsonl, and the room around it."""

    step: int
    """The step of `loss`: the first one after the checkpoint, where the run had come so far; else the last before
    it."""
    loss: float
    room: float
    """The distance from it that the next loss may have."""

    def surprise(self, step: int, loss: float) -> str:
        """A note on the first loss, of optimizer step `step`; empty where it is near enough."""
        if not math.isfinite(loss) or abs(loss - self.loss) <= self.room:
            return ""
        before = "it" if step == self.step else f"that of step {self.step}"
        advice = "compare the curve with the one before; an older checkpoint: dsrun resume RUN --checkpoint N"
        return (
            f"the first loss after the resume, {loss:.4g} in step {step}, is far from what it was: "
            f"{before} was {self.loss:.4g}; {advice}"
        )


def loss_before(lines: Iterable[Mapping[str, Any]], start: int) -> LossBefore | None:
    """The loss before a run goes on after step `start`; None where too few losses are known.

    lines: those of metrics.jsonl, before it is cut off after `start`.
    """
    losses = {line["step"]: line["loss"] for line in lines if isinstance(line.get("loss"), float)}
    window = [losses[step] for step in range(start - WINDOW_STEPS, start + 1) if step in losses]
    changes = [abs(after - before) for before, after in pairwise(window)]
    if len(changes) < FEWEST_CHANGES or start not in losses:
        return None
    if (again := losses.get(start + 1)) is not None:
        return LossBefore(start + 1, again, max(REPEATED_TIMES * max(changes), REPEATED_SHARE * abs(again)))
    return LossBefore(start, losses[start], ROOM_TIMES * max(changes))

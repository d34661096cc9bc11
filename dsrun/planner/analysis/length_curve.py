"""Memory against the length of an example, with everything else of a plan as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsrun.planner.plan import OUT, MemoryBudget, Plan, judge

STEP = 64
"""Tokens between the lengths that are looked at for the longest."""
MOST = 4_194_304
"""The longest example that is looked for, in tokens."""


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """A plan's need of the scarcest memory at several lengths."""

    preset: str
    """The plan's preset, and what it computes again."""
    micro_batch: int
    points: tuple[tuple[int, float], ...]
    """Tokens of an example, and bytes of a GPU (on CPUs: of the node)."""
    longest: int
    """Tokens of the longest example that fits; 0: not even STEP do."""
    longest_recomputed: int
    """The same with one row and every block computed again."""


def length_curve(plan: Plan, room: MemoryBudget, lengths: Sequence[int]) -> LengthCurve:
    """The curve of a plan."""
    points = tuple((length, needed_bytes(_at(plan, room, length), room)) for length in lengths)
    name = plan.preset + (f" +ckpt/{plan.setup.checkpointing}" if plan.setup.checkpointing else "")
    alone = judge(plan.preset, plan.setup.changed(micro_batch=1, checkpointing=1), room, plan.speed)
    return LengthCurve(
        name.removesuffix("/1"), plan.setup.micro_batch, points, longest(plan, room), longest(alone, room)
    )


def longest(plan: Plan, room: MemoryBudget) -> int:
    """Tokens of the longest example that isn't out of memory, a multiple of STEP; 0: none."""

    def fits(steps: int) -> bool:
        return _at(plan, room, steps * STEP).verdict != OUT

    if not fits(1):
        return 0
    low, high = 1, 2
    while high * STEP <= MOST and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(low * STEP, MOST)


def usual_lengths(length: int, longest_length: int) -> list[int]:
    """Lengths for a curve: doubling from an eighth of the plan's to beyond the longest that fits."""
    found = [max(STEP, length // 8)]
    while found[-1] < max(2 * length, longest_length) and found[-1] < MOST and len(found) < 12:
        found.append(found[-1] * 2)
    return found


def needed_bytes(plan: Plan, room: MemoryBudget) -> float:
    """Bytes of a GPU that a plan can't do without; on CPUs, of a node."""
    if room.accelerator != "cuda":
        return plan.host.peak
    return plan.demand


def _at(plan: Plan, room: MemoryBudget, length: int) -> Plan:
    return judge(plan.preset, plan.setup.changed(seq_len=length, example=0), room, plan.speed)

"""A schedule, replayed: what is allocated and reserved at the most, when, by whom, and what a card has to have."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.planner.trace.actions import Action
from dsrun.planner.trace.allocator import (
    AllocatorOptions,
    CachingAllocator,
    MemoryBlock,
    OutOfDeviceMemoryError,
)

PRECISION = 0.01
"""The share to which the least capacity is looked for."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay came to. Sizes are in bytes."""

    allocated: int
    """torch.cuda.max_memory_allocated."""
    reserved: int
    """torch.cuda.max_memory_reserved."""
    peaks: Mapping[str, int]
    """Phase -> the most that was allocated in it."""
    at_peak: Mapping[str, int]
    """Owner -> what was allocated for it at the peak."""
    retries: int
    """Times that everything free was given back to the driver, for lack of room."""
    failure: OutOfDeviceMemoryError | None = None
    """The end of a training that didn't fit."""


def replay(
    actions: Iterable[Action], capacity: float = math.inf, options: AllocatorOptions | None = None
) -> Replay:
    """The replay of a schedule on a device of that many bytes."""
    allocator = CachingAllocator(capacity, options)
    blocks: dict[Hashable, tuple[MemoryBlock, str]] = {}
    owned: dict[str, int] = {}
    peaks: dict[str, int] = {}
    at_peak: dict[str, int] = {}
    phase, highest, failure = "", 0, None
    try:
        for action in actions:
            if action.kind == "allocate":
                block = allocator.allocate(int(action.size), action.stream)
                blocks[action.key] = block, action.owner
                owned[action.owner] = owned.get(action.owner, 0) + block.size
                if allocator.allocated > peaks.get(phase, 0):
                    peaks[phase] = allocator.allocated
                    if allocator.allocated > highest:
                        highest, at_peak = allocator.allocated, dict(owned)
            elif action.kind == "phase":
                phase = str(action.key)
                peaks[phase] = max(peaks.get(phase, 0), allocator.allocated)
            elif (known := blocks.pop(action.key, None)) is not None:
                owned[known[1]] -= known[0].size
                allocator.free(known[0])
    except OutOfDeviceMemoryError as error:
        failure = error
    return Replay(
        allocator.peak_allocated, allocator.peak_reserved, peaks, at_peak, allocator.retries, failure
    )


def least_capacity(
    actions: Sequence[Action], unlimited: Replay, options: AllocatorOptions | None = None
) -> int:
    """Bytes of the smallest device on which a schedule still runs, within PRECISION.

    Where the card is full, torch gives back what is free as a whole and tries again: less than it would reserve with
    more room is enough, but never less than is allocated.
    """
    low, high = unlimited.allocated, unlimited.reserved
    if replay(actions, low * (1 + PRECISION), options).failure is None:
        return low
    while high > low * (1 + PRECISION):
        middle = (low + high) // 2
        low, high = (low, middle) if replay(actions, middle, options).failure is None else (middle, high)
    return high

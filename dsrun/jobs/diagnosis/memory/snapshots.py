"""torch's own memory snapshots (torch/cuda/memory.py, `_dump_snapshot`): what filled the GPU, and what failed.

They are pickles, read as data (flight_recorder/data_pickle.py). Of the history, which is nearly all of a large file,
only failed allocations are kept, and counts of what came after them.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.job.memory_division import MemoryDivision, calls_of, divide, place_of
from dsrun.jobs.diagnosis.flight_recorder import data_pickle
from dsrun.words import GIB

MOST_BYTES = 4 << 30
"""Largest snapshot that is read, in bytes; what is held of it at once has a limit of its own."""
HEAD = 4096
"""Bytes at a file's beginning by which a snapshot is recognised."""
EVENT, FAILED = "action", "oom"
"""Key of the events of a history, and the action of an allocation that failed."""
OWN = ("snapshot", FAILED)
"""Actions that change nothing of the memory."""


def is_snapshot(path: Path) -> bool:
    """Whether a file is a memory snapshot, by its beginning. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(HEAD)
    return head.startswith(b"\x80") and b"segments" in head[:64]


@dataclass(frozen=True)
class Snapshot:
    """What a snapshot says of the GPU that counts: that of the last failed allocation, or the fullest."""

    division: MemoryDivision
    failed: bool
    """Whether an allocation failed."""
    has_stacks: bool
    """Whether blocks have the calls that allocated them."""


class _History:
    """The events of a snapshot as they pass: failed allocations, and how much came after the last one."""

    def __init__(self) -> None:
        self.failed: list[dict[str, Any]] = []
        self.later = 0
        self._shared: set[int] = set()
        """Stacks of blocks, which events have as well."""

    def passes(self, item: dict[Any, Any]) -> int | None:
        """See data_pickle.read: events leave nothing behind, unless an allocation failed."""
        if "state" in item:
            self._shared.add(id(item.get("frames")))
        if EVENT not in item:
            return None
        if item[EVENT] == FAILED:
            self.failed.append(item)
            self.later = 0
            return None
        self.later += item[EVENT] not in OWN
        freed, frames = data_pickle.CONTAINER + 2 * len(item), item.get("frames")
        if self._shared and type(frames) is list and id(frames) not in self._shared:
            freed += len(frames)
            frames.clear()
        item.clear()
        return freed


def read(path: Path) -> Snapshot:
    """A memory snapshot. Raises DsrunError for what isn't one, is cut off, or names code."""
    history = _History()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            content = data_pickle.read(data, MOST_BYTES, history.passes)
        return _snapshot(content, history)
    except DsrunError as error:
        raise DsrunError(error.problems[0].what, where=str(path)) from error
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise DsrunError(f"is no memory snapshot of torch's ({error!r})", where=str(path)) from error


def _snapshot(content: Mapping[str, Any], history: _History) -> Snapshot:
    segments = content["segments"]
    reserved = Counter[int]()
    for segment in segments:
        reserved[segment.get("device", 0)] += segment["total_size"]
    failures: list[tuple[int, Mapping[str, Any]]] = [
        (device, event)
        for device, events in enumerate(content.get("device_traces") or ())
        for event in events
        if event.get(EVENT) == FAILED
    ]
    fullest = max(reserved, key=lambda one: reserved[one], default=0)
    # The last one: an allocator that fails frees what it can, and may be asked again.
    device, event = max(failures, key=lambda failure: failure[1].get("time_us", 0), default=(fullest, {}))
    free = event.get("device_free")
    division = divide(
        content, device, requested_gib=event["size"] / GIB if event else None,
        free_gib=None if free is None else free / GIB, failed_in=_failed_in(event),
        later=history.later if event else 0,
    )  # fmt: skip
    has_stacks = any(
        block.get("frames") or block.get("history") for one in segments for block in one["blocks"]
    )
    return Snapshot(division, bool(event), has_stacks)


def _failed_in(event: Mapping[str, Any]) -> str:
    return place_of(calls_of(event.get("frames")))

"""Trackers: where a run's curves are shown while it goes on, beside metrics.jsonl, which stays the truth.

One module a tracker, named like it, with one function: `start(run: TrackedRun) -> Tracker`. It imports the tracker's
own package, which reads its own variables (where to send to, keys, offline modes); no key passes through dsrun. What
any of it raises is told once and changes nothing for the training (dsrun/training/reports/tracking.py).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class TrackedRun(NamedTuple):
    """What a tracker is told of a run as it starts."""

    folder: Path
    """The run's; a tracker keeps its own files in a folder of its own in there."""
    name: str
    project: str
    config: Mapping[str, Any]
    """The run's options; no secrets."""
    earlier: str | None
    """What identifies the run with this tracker, where it was started before."""
    step: int
    """Steps that are done; later ones may have been logged, and come again."""


class Tracker(Protocol):
    """A run that is being tracked."""

    run_id: str
    """By which `start` finds it again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values of an optimizer step."""

    def finish(self, *, failed: bool) -> None:
        """All is logged; send what is left."""


def start(name: str, run: TrackedRun) -> Tracker:
    """Start a tracker by its name, or go on with the run that it knows."""
    tracker: Tracker = importlib.import_module(f"{__name__}.{name}").start(run)
    return tracker

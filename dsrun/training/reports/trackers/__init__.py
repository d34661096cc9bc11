"""Trackers: where a run's curves are shown while it goes on, beside metrics.jsonl, which stays the truth.

One module a tracker, named like it, with one function: `start(run: TrackedRun) -> Tracker`. It imports the tracker's
own package, which reads its own variables (where to send to, keys, offline modes); no key passes through dsrun. Its
errors become notes, and change nothing for the training (dsrun/training/reports/tracking.py).

accelerate.tracking, which has all five, is not used: its `finish` can't say that a run failed, its MLflow run belongs
to the thread that started it, its wandb curves follow a step that only goes up, and it knows nothing of resuming by an
id. A layer that adds these for each tracker would be as long as the modules here, of about thirty lines each.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class TrackedRun(NamedTuple):
    """A run, as its trackers get it at the start."""

    folder: Path
    """The run's folder; a tracker keeps its own files in a folder in it."""
    name: str
    project: str
    config: Mapping[str, Any]
    """The run's options; no secrets."""
    earlier: str | None
    """The tracker's id of the run, where it was started before."""
    step: int
    """Steps that are done; later ones may have been logged, and come again."""


class Tracker(Protocol):
    """A run that is being tracked."""

    run_id: str
    """The id by which `start` finds the run again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values of an optimizer step."""

    def finish(self, *, failed: bool) -> None:
        """Send what is left: all is logged."""


def start(name: str, run: TrackedRun) -> Tracker:
    """Start a tracker by its name, or go on with the run that it knows."""
    tracker: Tracker = importlib.import_module(f"{__name__}.{name}").start(run)
    return tracker

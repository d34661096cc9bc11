"""A run's metrics for its trackers, sent by rank 0 in threads: no tracker holds up a step, and none ends the training.

A tracker may be slow, full or not reachable. Each has a thread and a queue of its own. An error becomes a note of the
run, once; later values are tried again, since a network comes back. At the end a tracker gets CLOSE_S to send the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.job.job import Job
from dsrun.job.layout import TRACKERS
from dsrun.json_numbers import is_finite
from dsrun.training.reports import trackers

CLOSE_S = 60.0
"""Time to send the rest, when all is done."""
FAILED_S = 5.0
"""Time to send the rest where the run failed: the job ends soon."""
MOST_WAITING = 20_000
"""Values that wait for a tracker, at most; further ones are not sent."""
NAMES = {
    "loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm",
    "tokens_per_second": "train/tokens_per_second", "eval_loss": "eval/loss",
}  # fmt: skip
"""Field of metrics.jsonl -> the curve's name."""
PROJECTS = {
    "wandb": "WANDB_PROJECT", "swanlab": "SWANLAB_PROJ_NAME", "mlflow": "MLFLOW_EXPERIMENT_NAME",
}  # fmt: skip
"""Tracker -> its own variable for the project; without it and without --log-project the project is PROJECT."""
PROJECT = "dsrun"
PRIVATE = ("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_", "HF_")
"""Variables whose values never come into a message: some are keys, and an address may hold a password."""


class Ended(NamedTuple):
    """The last message to a tracker's thread."""

    failed: bool


class Tracking:
    """All trackers of a run. say: called with a line for the user, from any thread."""

    def __init__(self, job: Job, step: int, say: Callable[[str], None]) -> None:
        self._feeds = [TrackerFeed(name, job, step, say) for name in job.trackers.log]

    def metrics(self, fields: Mapping[str, Any]) -> None:
        """Send the fields of a line of metrics.jsonl."""
        values = {NAMES[name]: value for name, value in fields.items() if name in NAMES and is_finite(value)}
        for feed in self._feeds if values else ():
            feed.put(int(fields["step"]), values)

    def close(self, *, failed: bool) -> bool:
        """Have everything sent. False where a tracker has not come to its end in time."""
        for feed in self._feeds:
            feed.end(failed=failed)
        within_s = FAILED_S if failed else CLOSE_S
        return not [feed for feed in self._feeds if not feed.ended(within_s)]


class TrackerFeed:
    """One tracker, fed from a queue by a thread."""

    def __init__(self, name: str, job: Job, step: int, say: Callable[[str], None]) -> None:
        self._name, self._job, self._step, self._say = name, job, step, say
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | Ended] = queue.Queue()
        self._noted: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"dsrun-{name}")
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Have values logged, soon."""
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put((step, values))
        else:
            self._note("is too slow: some values are left out")

    def end(self, *, failed: bool) -> None:
        """Have the tracker finish: nothing more will come."""
        self._queue.put(Ended(failed))

    def ended(self, within_s: float) -> bool:
        """Wait for the tracker's end; whether it came in time."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._note(f"has not sent everything within {within_s:g} s: it is left behind")
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Start the tracker, and log until the end."""
        try:
            tracker = self._started()
        except (Exception, SystemExit) as error:
            self._note(f"does not start, and logs nothing: {_words(error)}")
            return
        while True:
            message = self._queue.get()
            try:
                if isinstance(message, Ended):
                    tracker.finish(failed=message.failed)
                    return
                tracker.log(*message)
            except (Exception, SystemExit) as error:
                self._note(f"can't log everything; the training goes on: {_words(error)}")
                if isinstance(message, Ended):
                    return

    def _started(self) -> trackers.Tracker:
        name, job = self._name, self._job
        folder = Path(job.run_dir)
        their_project = os.environ.get(PROJECTS.get(name, ""), "")
        run = trackers.TrackedRun(
            folder=folder,
            name=folder.name,
            project=job.trackers.log_project or their_project or PROJECT,
            config=config_of(job),
            earlier=_ids(folder).get(name),
            step=self._step,
        )
        tracker = trackers.start(name, run)
        _keep_id(folder, name, tracker.run_id)
        return tracker

    def _note(self, text: str) -> None:
        """Tell the user, once for each text before its colon."""
        kind = text.partition(":")[0]
        if kind not in self._noted:
            self._noted.add(kind)
            self._say(f"{self._name} {text}")


def config_of(job: Job) -> dict[str, Any]:
    """A run's options for its trackers, as --explain shows them; nothing from the environment."""
    return {
        "model": job.model.name, "preset": job.preset, "precision": job.precision, "ranks": job.world_size,
        "micro_batch": job.micro_batch, "grad_accum": job.grad_accum, "dsrun_version": job.dsrun_version,
        **dataclasses.asdict(job.training), **dataclasses.asdict(job.data), **dataclasses.asdict(job.peft),
        **dataclasses.asdict(job.parallel),
    }  # fmt: skip


LOCK = threading.Lock()


def _ids(folder: Path) -> dict[str, str]:
    """Tracker -> the id of its run, from an earlier start."""
    with contextlib.suppress(OSError, ValueError):
        ids = json.loads((folder / TRACKERS).read_text(encoding="utf-8"))
        return ids if isinstance(ids, dict) else {}
    return {}


def _keep_id(folder: Path, name: str, run_id: str) -> None:
    with LOCK:
        ids = {**_ids(folder), name: run_id}
        (folder / TRACKERS).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def _words(error: BaseException) -> str:
    """An error's first line, with the trackers' own variables by their names instead of their values."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    for name, value in os.environ.items():
        if name.startswith(PRIVATE) and len(value) > 3:
            text = text.replace(value, f"${name}")
    return text[:400]

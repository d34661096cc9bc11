"""A run told to its trackers, by rank 0: in threads, so that none of them holds up a step, and none ends the training.

A tracker may be slow, full or not reachable. Each has a thread and a queue of its own. What it raises is said once, as
a note of the run; the values after it are tried again, since a network comes back. At the end it gets CLOSE_S to send
what is left.
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
"""For what is left to be sent, when all is done."""
FAILED_S = 5.0
"""The same where the run failed: the job ends soon."""
MOST = 20_000
"""Values that wait for a tracker, at most; those beyond are not sent."""
NAMES = {
    "loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm",
    "tokens_per_second": "train/tokens_per_second", "eval_loss": "eval/loss",
}  # fmt: skip
"""Field of metrics.jsonl -> the curve's name."""
PROJECTS = {
    "wandb": "WANDB_PROJECT", "swanlab": "SWANLAB_PROJ_NAME", "mlflow": "MLFLOW_EXPERIMENT_NAME",
}  # fmt: skip
"""The trackers' own variables for the project; without one and without --log-project it is PROJECT."""
PROJECT = "dsrun"
OWN = ("WANDB_", "SWANLAB_", "MLFLOW_", "TRACKIO_", "HF_")
"""Variables whose values never come into a message: some are keys, and an address may hold a password."""


class Ended(NamedTuple):
    """The last word to a tracker's thread."""

    failed: bool


class Tracking:
    """All trackers of a run. say: called with a line for the user, from any thread."""

    def __init__(self, job: Job, step: int, say: Callable[[str], None]) -> None:
        self._feeds = [TrackerFeed(name, job, step, say) for name in job.trackers.log]

    def metrics(self, fields: Mapping[str, Any]) -> None:
        """The fields of a line of metrics.jsonl."""
        values = {NAMES[name]: value for name, value in fields.items() if name in NAMES and is_finite(value)}
        for feed in self._feeds if values else ():
            feed.put(int(fields["step"]), values)

    def close(self, *, failed: bool) -> bool:
        """Have everything sent. False where one of them has not come to its end in time."""
        for feed in self._feeds:
            feed.end(failed=failed)
        within_s = FAILED_S if failed else CLOSE_S
        return not [feed for feed in self._feeds if not feed.ended(within_s)]


class TrackerFeed:
    """One tracker, fed from a queue by a thread."""

    def __init__(self, name: str, job: Job, step: int, say: Callable[[str], None]) -> None:
        self._name, self._job, self._step, self._say = name, job, step, say
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | Ended] = queue.Queue()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"dsrun-{name}")
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Values to log, soon."""
        if self._queue.qsize() < MOST:
            self._queue.put((step, values))
        else:
            self._tell("is too slow: some values are left out")

    def end(self, *, failed: bool) -> None:
        """Nothing more will come."""
        self._queue.put(Ended(failed))

    def ended(self, within_s: float) -> bool:
        """Whether all is sent, in time."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._tell(f"has not sent everything within {within_s:g} s: it is left behind")
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Start the tracker, and log until the end."""
        try:
            tracker = self._started()
        except (Exception, SystemExit) as error:
            self._tell(f"does not start, and logs nothing: {_words(error)}")
            return
        while True:
            message = self._queue.get()
            try:
                if isinstance(message, Ended):
                    tracker.finish(failed=message.failed)
                    return
                tracker.log(*message)
            except (Exception, SystemExit) as error:
                self._tell(f"can't log everything; the training goes on: {_words(error)}")
                if isinstance(message, Ended):
                    return

    def _started(self) -> trackers.Tracker:
        name, job = self._name, self._job
        folder = Path(job.run_dir)
        own = os.environ.get(PROJECTS.get(name, ""), "")
        run = trackers.TrackedRun(
            folder=folder,
            name=folder.name,
            project=job.trackers.log_project or own or PROJECT,
            config=config_of(job),
            earlier=_ids(folder).get(name),
            step=self._step,
        )
        tracker = trackers.start(name, run)
        _keep_id(folder, name, tracker.run_id)
        return tracker

    def _tell(self, text: str) -> None:
        what = text.partition(":")[0]
        if what not in self._told:
            self._told.add(what)
            self._say(f"{self._name} {text}")


def config_of(job: Job) -> dict[str, Any]:
    """A run's options for its trackers: what --explain shows of the training; nothing from the environment."""
    return {
        "model": job.model.name,
        "preset": job.preset,
        "precision": job.precision,
        "ranks": job.world_size,
        "micro_batch": job.micro_batch,
        "grad_accum": job.grad_accum,
        "dsrun_version": job.dsrun_version,
        **dataclasses.asdict(job.training),
        **dataclasses.asdict(job.data),
        **dataclasses.asdict(job.peft),
        **dataclasses.asdict(job.parallel),
    }


LOCK = threading.Lock()


def _ids(folder: Path) -> dict[str, str]:
    """Tracker -> its run's id, of an earlier start."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / TRACKERS).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
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
        if name.startswith(OWN) and len(value) > 3:
            text = text.replace(value, f"${name}")
    return text[:400]

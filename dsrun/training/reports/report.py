"""A rank's reports: files in the run folder, which `dsrun` reads while it watches and afterwards.

events.jsonl (rank 0): the run's phases, evaluations, checkpoints and results. metrics.jsonl (rank 0): one line per
optimizer step and evaluation. state/rank-N.json (every rank): whether it lives, how it ended, and the most memory that
it held.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import DsrunError, TrainingError
from dsrun.files import json_text, plain
from dsrun.job import rank_state
from dsrun.job.health import RANKS_EACH_STEP, WAITS
from dsrun.job.layout import EVENTS, METRICS
from dsrun.job.run_folder import json_object
from dsrun.words import counted

if TYPE_CHECKING:
    from dsrun.training.reports.tracking import Tracking

BASELINE = "loading the model"
"""The phase that begins with the libraries loaded and nothing else."""


def host_bytes() -> tuple[int, int]:
    """This process's resident memory, in bytes: now, and the most since the program started.

    The kernel's high-water mark (VmHWM), because getrusage's begins with what the parent process held.
    """
    try:
        with Path("/proc/self/status").open(encoding="ascii", errors="replace") as file:
            status = dict(line.split(":", 1) for line in file)
        now, most = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return most, most
    return now, max(now, most)


def gpu_bytes() -> tuple[int | None, int | None]:
    """The most that torch had allocated and reserved on this rank's GPU, in bytes; None where it uses none."""
    torch = sys.modules.get("torch")
    # A GPU that has failed answers nothing more, and a torch that broke while it was imported lacks names.
    with contextlib.suppress(RuntimeError, AttributeError):
        if torch and torch.cuda.is_initialized():
            return int(torch.cuda.max_memory_allocated()), int(torch.cuda.max_memory_reserved())
    return None, None


class Report:
    """One rank's reports. Only rank 0 writes events and metrics."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self._seconds: list[float] = []
        self._resident: dict[str, int] = {}
        self._phase, self._step = "", 0
        self._peak_of_loading: int | None = None
        self._state = rank_state.of(run_dir, rank)
        self.tracking: Tracking | None = None
        """The trackers that show metrics, too; rank 0's."""

    def phase(self, text: str) -> None:
        """Begin a new phase, in words for the user: "loading the model"."""
        now, most = host_bytes()
        self._resident.setdefault(text, now)
        if self._phase == BASELINE and text != BASELINE:
            self._peak_of_loading = most
        self._phase = text
        self.event("phase", text=text)

    @property
    def doing(self) -> str:
        """What this rank is doing, in words: "training, after step 3"."""
        return f"{self._phase}, after step {self._step}" if self._step else self._phase

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        self._append(EVENTS, {"time": round(time.time(), 3), "event": kind, **fields})

    def metrics(self, **fields: Any) -> None:
        """Append to metrics.jsonl. Floats keep every digit: runs are compared by them.

        JSON has no NaN and no infinity: such a value is null, and "not_finite" has it in words, by its name.
        """
        if "seconds" in fields:
            self._seconds.append(fields["seconds"])
            self._step = int(fields.get("step", self._step))
        if self.tracking:
            self.tracking.metrics(fields)
        line = {"time": round(time.time(), 3), **fields}
        if strange := {name: repr(value) for name, value in fields.items() if plain(value) != value}:
            line["not_finite"] = strange
        self._append(METRICS, line)

    def waits(self, step: int, seconds: float, waited: Sequence[float]) -> None:
        """Append to waits.jsonl. waited: the seconds that each rank waited in the step; of many ranks not of every
        step."""
        if step % max(1, len(waited) // RANKS_EACH_STEP) == 0:
            line = {"step": step, "seconds": round(seconds, 4), "waited": [round(one, 4) for one in waited]}
            self._append(WAITS, line)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that have a step; other lines are left out."""
        return [line for _, line in _of_steps(self._whole_lines())]

    def _whole_lines(self) -> list[bytes]:
        """The lines of metrics.jsonl, without half a line at its end."""
        path = self.run_dir / METRICS
        return path.read_bytes().split(b"\n")[:-1] if path.exists() else []

    def close_trackers(self, *, failed: bool = False) -> bool:
        """Have the trackers send what is left. False where one did not in time: its threads may never end."""
        tracking, self.tracking = self.tracking, None
        return tracking.close(failed=failed) if tracking else True

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after `step`, which a resumed run writes again, and lines without a step: a disk or a power
        cut may have damaged them, and the rest of the run doesn't hang on it."""
        path = self.run_dir / METRICS
        if self.rank or not path.exists():
            return
        texts = self._whole_lines()
        lines = _of_steps(texts)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(b"".join(text + b"\n" for text, line in lines if line["step"] <= step))
        temporary.replace(path)
        if damaged := len(texts) - len(lines):
            self.event("note", text=f"{METRICS}: {counted(damaged, 'line')} can't be read and left out")

    @property
    def ended(self) -> bool:
        """Whether the end is written down."""
        return self._state.ended

    def finished(self) -> None:
        """Write down that this rank did all its work."""
        self._end(rank_state.FINISHED)

    def stopped(self) -> None:
        """Write down that this rank ends early, by request; a checkpoint has been written."""
        self._end(rank_state.STOPPED)

    def failed(self, error: BaseException) -> None:
        """Write down why this rank can't go on: the last line of the error, and the whole of it."""
        if isinstance(error, TrainingError):
            self._end(rank_state.FAILED, error=str(error), traceback="", agreed=True)
            return
        text = "".join(traceback.format_exception(error))
        last_line = traceback.format_exception_only(error)[-1].strip()
        summary = str(error) if isinstance(error, DsrunError) else last_line
        self._end(rank_state.FAILED, error=summary, traceback=text)

    def peaks(self) -> dict[str, int | float | None]:
        """This rank's use: bytes on the GPU and in the host's memory, and a step's seconds (the median).

        host_baseline_bytes: resident memory before the model was loaded, None if it never came to that;
        host_loading_peak_bytes: the most until it was loaded, mapped parts of its files included.
        """
        allocated, reserved = gpu_bytes()
        return {
            "rank": self.rank, "gpu_allocated_bytes": allocated, "gpu_reserved_bytes": reserved,
            "host_peak_bytes": host_bytes()[1], "host_baseline_bytes": self._resident.get(BASELINE),
            "host_loading_peak_bytes": self._peak_of_loading,
            "step_seconds": statistics.median(self._seconds) if self._seconds else None,
        }  # fmt: skip

    def _end(self, status: str, **fields: str | bool) -> None:
        peaks = self.peaks()
        self._state.end(status, **fields, peaks=peaks)
        with contextlib.suppress(OSError):  # the disk is full: the state says what matters
            self.event("peaks", **peaks)

    def _append(self, name: str, fields: dict[str, Any]) -> None:
        if self.rank == 0:
            with (self.run_dir / name).open("a", encoding="utf-8") as file:
                file.write(json_text(fields) + "\n")


def _of_steps(texts: Iterable[bytes]) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of metrics.jsonl that have a step, each as its text and its fields."""
    parsed = ((text, json_object(text)) for text in texts)
    return [(text, line) for text, line in parsed if isinstance(line.get("step"), int)]

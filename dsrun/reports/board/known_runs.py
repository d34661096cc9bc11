"""The runs of a folder as they are now, read again only where a file of theirs has changed.

500 runs are 2,000 questions to the file system for each look, and no file that was read before. A thread looks, and
whoever asks waits for it a moment: where there is more to read, or a page is being made beside it, the answer is what
was known, and the table fills. Each run's line in the table is kept; of runs whose pages were opened,
their metrics as columns (dsrun.jobs.runs.metrics_file).
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.job.layout import EVENTS, METRICS, STATE
from dsrun.job.run_folder import JOB
from dsrun.job.run_folder import STATE as RECORD
from dsrun.jobs.runs.metrics_file import StepColumns, time_of
from dsrun.jobs.runs.run_summaries import BROKEN, Summary, named_runs, newest_first, summary

FRESH_S = 1.0
"""Seconds that a look holds: several windows that ask at once share one."""
LOOK_S = 0.05
"""Seconds that a caller waits for the look that is at work."""
FOLDERS_S = 10.0
"""Seconds that the list of folders holds: to look for new runs costs more than to look at known ones."""
MOST_COLUMNS = 24
"""Runs whose metrics are kept; one of 100,000 steps takes 6 MB."""
FILES = (JOB, RECORD, EVENTS, METRICS)
OF_A_PAGE = (*FILES, STATE, "data.json", "generated_predictions.jsonl")

UNREAD = "not read yet"
"""The state of a run until somebody has come to it."""

Signature = tuple[object, ...]


@dataclass(frozen=True)
class _Kept:
    signature: Signature
    line: Summary


class KnownRuns:
    """The runs below a folder. For several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.on_read: Callable[[Summary], object] = lambda _: None
        """Gets each line that a look has read, so that a table needs not make its row."""
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._paths: dict[str, Path] = {}
        self._look: threading.Thread | None = None
        self._known = threading.Event()
        """Whether the first look has found which runs there are, or that the folder is gone."""
        self._gone: Sequence[Problem] = ()
        """The problems of the last look, where the folder is gone."""
        self._listed = self._looked = float("-inf")
        self._columns: OrderedDict[Path, StepColumns] = OrderedDict()

    def lines(self) -> Sequence[Summary]:
        """Every run in a line, newest first. Raises DsrunError where the folder is gone."""
        with self._lock:
            look = self._look
            if look is None and time.monotonic() - self._looked > FRESH_S:
                self._look = look = threading.Thread(target=self._look_again, daemon=True)
                look.start()
        # The first caller needs the list of runs, and waits for it; the others have the last one, and give a look that
        # is at work only a moment: with nothing new it is done by then, and else the next request shows it.
        self._known.wait()
        if look is not None:
            look.join(LOOK_S)
        with self._lock:
            raise_all(self._gone)
            return newest_first(kept.line for kept in self._kept.values())

    def _look_again(self) -> None:
        """Find the runs and read what has changed, those that nobody has read and the newest first."""
        try:
            changed = self._changed()
            self._known.set()
            for name, then in changed.items():
                # The signature from before the reading: a file that changes meanwhile is read again at the next look.
                read = _Kept(then, _line_of(self._paths[name], name))
                with self._lock:
                    self._kept[name] = read
                self.on_read(read.line)
        except DsrunError as error:
            self._gone = error.problems
        finally:
            with self._lock:
                self._look, self._looked = None, time.monotonic()
            self._known.set()

    def _changed(self) -> dict[str, Signature]:
        """The runs to read, and their files as they are now. Raises DsrunError where the folder is gone."""
        if time.monotonic() - self._listed > FOLDERS_S:
            paths = named_runs(self.folder)
            self._listed = time.monotonic()
        else:
            paths = self._paths
        now = {name: signature(path) for name, path in paths.items()}
        before = self._kept
        kept = {name: before.get(name) or _unread(name, path) for name, path in paths.items()}
        with self._lock:
            self._paths, self._kept, self._gone = paths, kept, ()
        changed = [name for name in now if kept[name].signature != now[name] or _goes_on(kept[name].line)]
        changed.sort(key=lambda name: (name in before, -(kept[name].line.started or 0.0)))
        return {name: now[name] for name in changed}

    def path_of(self, name: str) -> Path | None:
        """The folder of a run that the table has; None for anything else."""
        if name not in self._paths:
            self.lines()
        return self._paths.get(name)

    def state_of(self, name: str) -> str:
        """A run's state, as the table has it."""
        self.lines()
        kept = self._kept.get(name)
        return kept.line.state if kept else ""

    def name_of(self, key: str) -> str | None:
        """The run that an address means: see `key_of`."""
        self.lines()
        return next((name for name in self._paths if key_of(name) == key), None)

    def columns(self, path: Path) -> StepColumns:
        """A run's metrics as they were last read; `read()` adds what is new."""
        with self._lock:
            columns = self._columns.pop(path, None) or StepColumns(path)
            self._columns[path] = columns
            while len(self._columns) > MOST_COLUMNS:
                self._columns.popitem(last=False)
            return columns


def _line_of(path: Path, name: str) -> Summary:
    """A run's line; whatever comes of one is no reason to leave out the others."""
    try:
        return summary(path, name)
    except Exception as error:
        problem = f"can't be read: {type(error).__name__}: {error}"
        return Summary(name, str(path.absolute()), BROKEN, problem, started=time_of(path))


def _unread(name: str, path: Path) -> _Kept:
    """A run that is known to be there."""
    return _Kept((), Summary(name, str(path.absolute()), UNREAD, started=time_of(path / JOB)))


def key_of(name: str) -> str:
    """A run's name in an address: names may hold anything, and an address not."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:16]


def _goes_on(line: Summary) -> bool:
    """Whether a run's line changes by itself: with the clock, and when the dsrun that holds it is gone."""
    return line.state in ("running", "preparing")


def signature(path: Path, names: Sequence[str] = FILES) -> Signature:
    """A value that changes as soon as a file of the run does."""
    marks: list[object] = []
    for name in names:
        try:
            stat = os.stat(f"{path}/{name}")  # noqa: PTH116 - thousands a second, and a Path takes longer than the question
            marks.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            marks.append(None)
    return tuple(marks)

"""What the ranks of a script print, told while it runs: one text, what all of them print only once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dsrun.jobs.runs.rank_logs import PATIENCE_S, Merger, RankLog
from dsrun.jobs.spec.run_folder import rank_log

LOOK_S = 0.1
LOOK_S_A_RANK = 0.002
"""Between two looks at the logs: many ranks' are on a file system that others use, too."""


class ScriptView(AbstractContextManager["ScriptView"]):
    """Called again and again, writes what is new, and returns whether anything was.

    Entered at each start of the ranks, left at their end: then all that was kept back is written. ranks: how many;
    write: called with each line.
    """

    def __init__(self, run_dir: Path, ranks: int, write: Callable[[str], None]) -> None:
        self._logs = {rank: RankLog(run_dir / rank_log(rank), from_end=True) for rank in range(ranks)}
        self._sizes = dict.fromkeys(self._logs, -1)  # a rank that has begun is news, too
        self._merger = Merger(list(self._logs))
        self._write = write
        self._every_s = LOOK_S + LOOK_S_A_RANK * ranks
        self._looked = 0.0

    def __exit__(self, *error: object) -> None:
        for rank, log in self._logs.items():
            self._merger.feed(rank, log.lines(last=True))
        self._tell(0.0)

    def __call__(self) -> bool:
        """Tell what is new. A bar that is drawn over itself is a sign of life, too, though no line is told of it."""
        now = time.monotonic()
        if now - self._looked < self._every_s:
            return False
        self._looked = now
        grown = [rank for rank, log in self._logs.items() if self._has_grown(rank, log.path)]
        for rank in grown:
            self._merger.feed(rank, self._logs[rank].lines())
        self._tell(PATIENCE_S)
        return bool(grown)

    def _has_grown(self, rank: int, path: Path) -> bool:
        try:
            size = path.stat().st_size
        except OSError:
            return False
        before, self._sizes[rank] = self._sizes[rank], size
        return size != before

    def _tell(self, patience_s: float) -> None:
        for rank, text in self._merger.take(patience_s):
            alone = rank is None or len(self._logs) == 1
            self._write(text if alone else f"[rank {rank}] {text}")


class Output:
    """Writes lines to a stream, for as long as somebody reads it: a job does not end with its reader.

    say: called once with why it is quiet from then on.
    """

    def __init__(self, stream: Any, say: Callable[[str], None]) -> None:
        self._stream, self._say = stream, say
        self._closed = False

    def __call__(self, line: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        except OSError as error:  # the reader is gone, or the disk is full
            self._closed = True
            self._drop()
            self._say(f"the ranks' output can't be written any longer ({error.strerror}); the job continues")

    def _drop(self) -> None:
        """What is still in the stream's buffer would be written at Python's end, and fail again."""
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass

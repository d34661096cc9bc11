"""What the ranks of a script print, told while it runs: one text, what all of them print only once."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from dsrun.host.hiding import without_secrets
from dsrun.jobs.runs.rank_logs import PATIENCE_S, Merger, RankLog
from dsrun.jobs.spec.run_folder import rank_log

LOOK_S = 0.1
LOOK_S_A_RANK = 0.002
"""Between two looks at the logs: many ranks' are on a file system that others use, too."""


class ScriptView(AbstractContextManager["ScriptView"]):
    """Called again and again, writes what is new, and returns whether anything was.

    Entered at each start of the ranks, left at their end: then all that was kept back is written. ranks: how many;
    write: called with each line, without secrets.
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
            self._write(without_secrets(text if alone else f"[rank {rank}] {text}"))

"""The output of a script's ranks while it runs, as one text: a line that all of them print is shown once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from dsrun.host.hiding import without_secrets
from dsrun.job.run_folder import rank_log
from dsrun.jobs.runs.rank_log import RankLog
from dsrun.jobs.runs.rank_logs import PATIENCE_S, MergedLogs

LOOK_S = 0.1
LOOK_S_A_RANK = 0.002
"""Between two looks at the logs: many ranks' are on a file system that others use, too."""


class ScriptView(AbstractContextManager["ScriptView"]):
    """Called again and again, writes what is new, and returns whether anything was.

    Entered at each start of the ranks, left at their end: then all that was kept back is written. ranks: how many;
    write: called with each line, without secrets.
    """

    def __init__(self, run_dir: Path, ranks: int, write: Callable[[str], None]) -> None:
        logs = {rank: RankLog(run_dir / rank_log(rank), from_end=True) for rank in range(ranks)}
        self._merged = MergedLogs(logs)
        self._sizes = dict.fromkeys(logs, (-1, -1))  # a rank that has begun is news, too
        self._write = write
        self._every_s = LOOK_S + LOOK_S_A_RANK * ranks
        self._looked = 0.0

    def __exit__(self, *error: object) -> None:
        self._tell(self._merged.all_told(last=True))

    def __call__(self) -> bool:
        """Tell what is new. A bar that is drawn over itself is a sign of life, too, though no line is told of it."""
        now = time.monotonic()
        if now - self._looked < self._every_s:
            return False
        self._looked = now
        grown = [rank for rank, log in self._merged.logs.items() if self._has_grown(rank, log.path)]
        # No more than fits into the window: what watches the ranks must not wait for a rank that prints without end.
        self._tell(self._merged.told(PATIENCE_S, grown=grown))
        return bool(grown)

    def _has_grown(self, rank: int, path: Path) -> bool:
        try:
            stat = path.stat()
        except OSError:
            return False
        before, self._sizes[rank] = self._sizes[rank], (stat.st_ino, stat.st_size)
        return self._sizes[rank] != before

    def _tell(self, lines: Iterable[tuple[int | None, str]]) -> None:
        for rank, text in lines:
            alone = rank is None or len(self._merged.logs) == 1
            self._write(without_secrets(text if alone else f"[rank {rank}] {text}"))

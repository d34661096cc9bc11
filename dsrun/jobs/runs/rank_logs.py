"""The logs of all ranks as one: in the order in which the lines appeared, as far as that can be told.

Logs have no times of their own. Each rank's lines keep their order; lines that every rank prints are printed by all at
about the same moment, so they tie the logs together and are shown once; between them, times in the lines decide. A line
that was shown for one rank, as the others were late with it, is not shown again for them.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dsrun.errors import DsrunError
from dsrun.files import open_inside
from dsrun.jobs.runs.past_runs import Run, slurm_log, waits
from dsrun.jobs.spec.run_folder import LAUNCHER_LOG, LOGS, PREPARE_LOG, in_use, rank_log
from dsrun.jobs.spec.run_folder import STATE as RECORD

POLL_S = 0.3
PATIENCE_S = 1.0
"""How long a new line waits for the other ranks to print it too."""
KNOWN = 10_000
"""Texts of which it is known who has said them: a long run's are without number."""
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d+))?")
VARYING = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|\[\d\d:\d\d<.*?\]|\brank ?\d+\b|0x[0-9a-f]+", re.I
)
"""What differs between ranks that say the same: times, a bar's speed, the rank's own number, addresses."""


class LogLine(NamedTuple):
    """key: the text without what differs between ranks; when: the last time that the rank's log told; arrived: when
    it was read, in seconds of the monotonic clock."""

    text: str
    key: str
    when: str
    arrived: float


class RankLog:
    """Reads the whole lines that were added to a rank's log since the last look. from_end: not those that it has."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._place, self._half, self._when = 0, b"", ""
        if from_end and path.exists():
            self._place = path.stat().st_size

    def lines(self, *, last: bool = False) -> list[LogLine]:
        """New lines without blank ones. last: nothing more will come, so half a line counts."""
        try:
            with open_inside(self.path.parent, self.path.name, most=sys.maxsize) as file:
                file.seek(self._place)
                content = file.read()
        except OSError:
            return []
        self._place += len(content)
        *whole, self._half = (self._half + content).split(b"\n")
        if last and self._half:
            whole, self._half = [*whole, self._half], b""
        return [self._line(text) for raw in whole if (text := _drawn(raw)).strip()]

    def _line(self, text: str) -> LogLine:
        if found := TIME.search(text):
            day, clock, part = found.groups()
            self._when = f"{day} {clock}.{part or ''}"
        return LogLine(text, VARYING.sub("#", text), self._when, time.monotonic())


def _drawn(raw: bytes) -> str:
    """The text of a line; of a bar that was drawn over itself the last state."""
    return raw.decode("utf-8", errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


class Merger:
    """Ranks' lines in, one order out. A rank's nth line of a text is told unless another rank's nth one was."""

    def __init__(self, ranks: list[int]) -> None:
        self._queues: dict[int, deque[LogLine]] = {rank: deque() for rank in ranks}
        self._keys: dict[int, Counter[str]] = {rank: Counter() for rank in ranks}
        self._said: dict[str, Counter[int]] = {}
        """A text's key -> how often each rank has said it so far; of the last KNOWN texts."""

    def feed(self, rank: int, lines: list[LogLine]) -> None:
        """Add a rank's new lines."""
        self._queues[rank].extend(lines)
        self._keys[rank].update(line.key for line in lines)

    def take(self, patience_s: float = 0.0) -> Iterator[tuple[int | None, str]]:
        """(rank, or None for all of them, text) of each line that can be told now.

        patience_s: a line of one rank alone is kept for this long, as the others may still print it.
        """
        while heads := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            if (
                len(self._queues) > 1
                and len(heads) == len(self._queues)
                and len({line.key for line in heads.values()}) == 1
            ):
                first = min(heads)
                new = [self._pop(rank) for rank in heads]
                if any(new):
                    yield None, heads[first].text
                continue
            own = {rank: line for rank, line in heads.items() if not self._everywhere(line.key)}
            # All heads are everybody's, but in another order: one of them has to be told by itself.
            rank = min(own or heads, key=lambda rank: (heads[rank].when, rank))
            line = heads[rank]
            late = self._is_late(rank, line.key)
            if own and not late and len(self._queues) > 1 and time.monotonic() - line.arrived < patience_s:
                return
            if self._pop(rank):
                yield rank, line.text

    def _everywhere(self, key: str) -> bool:
        return len(self._queues) > 1 and all(keys[key] for keys in self._keys.values())

    def _is_late(self, rank: int, key: str) -> bool:
        """Whether another rank has said it more often already."""
        said = self._said.get(key, Counter())
        return said[rank] < max(said.values(), default=0)

    def _pop(self, rank: int) -> bool:
        """Take a rank's next line; returns whether it is to be told."""
        key = self._queues[rank].popleft().key
        self._keys[rank][key] -= 1
        if not self._keys[rank][key]:
            del self._keys[rank][key]
        late = self._is_late(rank, key)
        said = self._said[key] = self._said.pop(key, Counter())  # now the newest
        said[rank] += 1
        if len(self._said) > KNOWN:
            del self._said[next(iter(self._said))]
        return not late


def paths(run: Run) -> dict[int, Path]:
    """Rank -> its log, of every rank of the job and of those that have one."""
    there = {
        int(path.stem.removeprefix("rank-")): path
        for path in (run.path / LOGS).glob("rank-*.log")
        if path.stem.removeprefix("rank-").isdecimal()
    }
    own = {rank: run.path / rank_log(rank) for rank in range(run.any_job.world_size)}
    return dict(sorted({**own, **there}.items()))


def tell(
    run: Run, rank: int | None, *, follow: bool, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[int | None, str]]:
    """(rank, or None for all of them, text) of each line; of one rank where it is named.

    follow: until no dsrun holds the folder any more. Raises DsrunError where nothing can be told.
    """
    found = paths(run)
    if rank is not None and rank not in found:
        raise DsrunError(
            f"has no rank {rank}",
            where=str(run.path),
            hint=f"Its ranks are 0 to {run.any_job.world_size - 1}.",
        )
    chosen = found if rank is None else {rank: found[rank]}
    if not (follow and run.alive) and not any(path.is_file() for path in chosen.values()):
        raise DsrunError(
            "no rank has printed anything" if rank is None else f"rank {rank} has printed nothing",
            where=str(run.path),
            hint=_elsewhere(run),
        )
    logs = {rank: RankLog(path) for rank, path in chosen.items()}
    merger = Merger(list(logs))
    patience_s = 0.0  # what was there before
    while True:
        goes_on = follow and in_use(
            run.path
        )  # asked before reading: all that was printed before the end is read
        for number, log in logs.items():
            merger.feed(number, log.lines(last=not goes_on))
        yield from merger.take(patience_s if goes_on else 0.0)
        if not goes_on:
            return
        patience_s = PATIENCE_S
        sleep(POLL_S)


def await_job(folder: Path, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until a job that was sent to Slurm has begun. say: gets a line when Slurm has written its first log."""
    log = None
    while waits(folder) or (in_use(folder) and not (folder / RECORD).is_file()):
        if log is None and (log := slurm_log(folder)):
            say(f"Slurm has started it: {log}")
        sleep(POLL_S)


def _elsewhere(run: Run) -> str:
    others = [run.path / name for name in (LAUNCHER_LOG, PREPARE_LOG) if (run.path / name).is_file()]
    return (
        f"What was printed before: {' and '.join(map(str, others))}" if others else f"The run is {run.state}."
    )

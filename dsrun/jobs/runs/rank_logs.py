"""The logs of all ranks as one: in the order in which the lines appeared, as far as that can be told.

Logs have no times of their own. Each rank's lines keep their order; lines that every rank prints are printed by all at
about the same moment, so they tie the logs together and are shown once; between them, times in the lines decide. A line
that was shown for one rank, as the others were late with it, is not shown again for them.
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from dsrun.errors import DsrunError
from dsrun.files import explained, why_not_readable
from dsrun.job.log_parts import log_of, pieces, place_at
from dsrun.job.run_folder import LAUNCHER_LOG, LOGS, PREPARE_LOG, in_use, rank_log
from dsrun.job.run_folder import STATE as RECORD
from dsrun.jobs.runs.past_runs import Run, slurm_log, waits
from dsrun.jobs.runs.rank_log import LogLine, RankLog, place_of_last

POLL_S = 0.3
PATIENCE_S = 1.0
"""Time that a new line waits for the other ranks to print it too."""
KNOWN = 10_000
"""Texts of which it is known who has said them: a long run's are without number."""
WINDOW_BYTES, LEAST_WINDOW_BYTES = 32 << 20, 64 << 10
"""Memory for lines that wait for other ranks', of all ranks together, and of each at least."""
LINE_BYTES = 400
"""Memory of a line beside its text, in bytes."""
ROUND_BLOCKS = 64
"""Blocks of each log that are read in a row: 4 MiB, so that a pattern which is seldom met is told where it is met."""
MARGIN_LINES = 200
"""More lines than the last ones that are wanted are read: what came just before says which of them are told once."""


class LineSelection(NamedTuple):
    """Which lines are shown. tail: the last ones; since: those printed after that moment (seconds since 1970, at most
    ten seconds more); grep: those with this pattern, of which `tail` then counts the last."""

    tail: int | None = None
    since: float | None = None
    grep: re.Pattern[str] | None = None


EVERYTHING = LineSelection()


class Merger:
    """Ranks' lines in, one order out. A rank's nth line of a text is told unless another rank's nth one was."""

    def __init__(self, ranks: list[int]) -> None:
        self._queues: dict[int, deque[LogLine]] = {rank: deque() for rank in ranks}
        self._keys: dict[int, Counter[str]] = {rank: Counter() for rank in ranks}
        self._said: dict[str, Counter[int]] = {}
        """A text's key -> how often each rank has said it so far; of the last KNOWN texts."""
        self.waiting = dict.fromkeys(ranks, 0)
        """Rank -> bytes of memory that its lines take."""

    def feed(self, rank: int, lines: list[LogLine]) -> None:
        """Add a rank's new lines."""
        self._queues[rank].extend(lines)
        self._keys[rank].update(line.key for line in lines)
        self.waiting[rank] += sum(map(_memory, lines))

    def take(
        self, patience_s: float = 0.0, *, more: Collection[int] = (), least: int = 0
    ) -> Iterator[tuple[int | None, str]]:
        """(rank, or None for all of them, text) of each line that can be told now.

        patience_s: a line of one rank alone is kept for this long, as the others may still print it. more: ranks of
        which there are more lines to be fed; it stops where one of them has fewer than `least` bytes waiting.
        """
        while heads := {rank: queue[0] for rank, queue in self._queues.items() if queue}:
            if any(self.waiting[rank] < least for rank in more):
                return
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
            # A line that not every rank has among those read is this rank's alone, or comes late in the others: it goes
            # out first, once it had its time to come there. The others wait for their turn, in step.
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
        """Whether another rank has printed it more often already."""
        counts = self._said.get(key, Counter())
        return counts[rank] < max(counts.values(), default=0)

    def _pop(self, rank: int) -> bool:
        """Take a rank's next line; returns whether it is to be told."""
        line = self._queues[rank].popleft()
        key = line.key
        self.waiting[rank] -= _memory(line)
        self._keys[rank][key] -= 1
        if not self._keys[rank][key]:
            del self._keys[rank][key]
        late = self._is_late(rank, key)
        counts = self._said[key] = self._said.pop(key, Counter())  # now the newest
        counts[rank] += 1
        if len(self._said) > KNOWN:
            del self._said[next(iter(self._said))]
        return not late


def _memory(line: LogLine) -> int:
    return LINE_BYTES + len(line.text) + len(line.key)


class MergedLogs:
    """The logs of some ranks, merged as they are read: no more than WINDOW_BYTES of them are in memory. sparse: few of
    their lines count, and none waits until the window is full."""

    def __init__(self, logs: Mapping[int, RankLog], *, sparse: bool = False) -> None:
        self.logs, self._sparse = logs, sparse
        self._merger = Merger(list(logs))
        self._window = max(WINDOW_BYTES // max(1, len(logs)), LEAST_WINDOW_BYTES)
        self.unread: list[int] = []
        """Ranks whose logs have more than the last look read."""

    def told(
        self, patience_s: float = 0.0, *, last: bool = False, grown: Iterable[int] | None = None
    ) -> Iterator[tuple[int | None, str]]:
        """Lines as of `Merger.take`, as many as the window holds. grown: ranks whose logs are looked at, else all."""
        for rank in {*self.unread, *grown} if grown is not None else self.logs:
            log = self.logs[rank]
            for _ in range(ROUND_BLOCKS):
                if self._merger.waiting[rank] >= self._window:
                    break
                self._merger.feed(rank, log.lines(last=last))
                if not log.unread:
                    break
        self.unread = [rank for rank, log in self.logs.items() if log.unread]
        # Where more is there already, waiting for others to print the same would only fill the window.
        patience_s = 0.0 if self.unread else patience_s
        yield from self._merger.take(
            patience_s, more=self.unread, least=0 if self._sparse else self._window // 2
        )

    def all_told(self, patience_s: float = 0.0, *, last: bool = False) -> Iterator[tuple[int | None, str]]:
        """The lines as of `told`, all that are there now."""
        while True:
            yield from self.told(patience_s, last=last)
            if not self.unread:
                return


def paths(run: Run) -> dict[int, Path]:
    """Rank -> its log, of every rank of the job and of those that have one."""
    there = {
        int(path.stem.removeprefix("rank-")): path
        for path in map(log_of, (run.path / LOGS).glob("rank-*.log*"))
        if path.suffix == ".log" and path.stem.removeprefix("rank-").isdecimal()
    }
    own = {rank: run.path / rank_log(rank) for rank in range(run.any_job.world_size)}
    return dict(sorted({**own, **there}.items()))


def tell(
    run: Run,
    rank: int | None,
    *,
    follow: bool,
    selection: LineSelection = EVERYTHING,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[int | None, str]]:
    """(rank, or None for all of them, text) of each line; of one rank where it is named.

    follow: until no dsrun holds the folder any more. Raises DsrunError where nothing can be told.
    """
    logs_by_rank = paths(run)
    if rank is not None and rank not in logs_by_rank:
        raise DsrunError(
            f"has no rank {rank}",
            where=str(run.path),
            hint=f"Its ranks are 0 to {run.any_job.world_size - 1}.",
        )
    chosen = logs_by_rank if rank is None else {rank: logs_by_rank[rank]}
    for path in chosen.values():
        _check_readable(path)
    if not (follow and run.alive) and not any(map(pieces, chosen.values())):
        raise DsrunError(
            "no rank has printed anything" if rank is None else f"rank {rank} has printed nothing",
            where=str(run.path),
            hint=_elsewhere(run),
        )
    with explained("can't be read"):
        starts = {rank: _start(path, selection) for rank, path in chosen.items()}
    readers = {rank: RankLog(path, start=starts[rank], grep=selection.grep) for rank, path in chosen.items()}
    merged = MergedLogs(readers, sparse=selection.grep is not None)
    # Asked before reading: all that was printed before the end is read.
    goes_on = follow and in_use(run.path)
    before = merged.all_told(last=not goes_on)
    yield from before if selection.tail is None else deque(before, selection.tail)
    while goes_on:
        sleep(POLL_S)
        goes_on = in_use(run.path)
        yield from merged.all_told(PATIENCE_S if goes_on else 0.0, last=not goes_on)


def _check_readable(log: Path) -> None:
    if why := why_not_readable(log):
        raise DsrunError(f"can't be read: {why}", where=str(log))


def _start(log: Path, selection: LineSelection) -> tuple[int, int] | None:
    """The place at which reading a log begins: number of a part and offset; None for its beginning. Raises
    DsrunError where it isn't known when its lines were printed."""
    places = [(0, 0)]
    if selection.since is not None and pieces(log):
        place = place_at(log, selection.since)
        if place is None:
            fault = "when its lines were printed was not kept: an older dsrun ran it"
            raise DsrunError(fault, where=str(log), hint="Take --tail instead of --since.")
        places.append(place)
    if selection.tail is not None and selection.grep is None:
        places.append(place_of_last(log, selection.tail + MARGIN_LINES))
    return max(places)


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

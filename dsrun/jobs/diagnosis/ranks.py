"""The rank that failed first, as far as logs tell: unknown is an answer, too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from dsrun.jobs.diagnosis.ends import lost_others
from dsrun.jobs.diagnosis.reading.log_lines import SPEAKS_OF_RANK, PeeledLine

ROOT_CAUSE = "Root Cause (first observed failure)"
FIELD = re.compile(r"^\s{0,8}(time|host|rank|exitcode)\s{1,10}: (\S{1,200})")
TORCHRUN_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: \d+\)")
DEEPSPEED_RANK = re.compile(r"--local_rank=(\d{1,4})\b")
DEEPSPEED_ENDED = "exits with return code"
SLURM_TASK = re.compile(r"srun: error: (?P<host>[\w.-]{1,100}): tasks? (?P<rank>\d{1,6})[:,-]")
ENQUEUED = re.compile(
    r"\[(?:PG [^\]\n]{0,80} )?Rank (\d{1,6})\][^\n]{0,300}last enqueued (?:NCCL )?work: (\d{1,12})"
)
BLOCK_LINES = 12


class FirstRank(NamedTuple):
    """The rank that failed first."""

    rank: int | None
    host: str | None = None
    when: str | None = None
    """As the log writes it."""
    why: str = ""
    """How it is known."""


NOBODY = FirstRank(None)


def first_rank(lines: Sequence[PeeledLine], seen: Sequence[PeeledLine], waits: bool = False) -> FirstRank:
    """The rank that failed first, as far as the logs tell.

    seen: the lines that show the cause, first things first. waits: these ranks waited for another one, so none of them
    is to blame.
    """
    if waits:
        behind = _behind(lines)
        return _silent(lines) if behind.rank is None else behind
    spoken = [(rank, line) for line in seen if (rank := _rank_of(line)) is not None]
    showing = {rank for rank, _ in spoken}
    # torchrun names the first failure that its agent noticed, which polls: where that rank's own lines show nothing of
    # the cause and another's do, those lines are the better witness.
    for block in sorted(_torchrun_blocks(lines), key=lambda block: _seconds(block.when)):
        if not spoken or block.rank in showing or block.rank not in {line.rank for line in lines}:
            return block
    if spoken:
        rank, line = min(spoken, key=lambda block: block[1].when or float("inf"))
        return FirstRank(rank, line.host, why="its lines show it")
    return _of_launcher(lines, seen)


def _rank_of(line: PeeledLine) -> int | None:
    if line.rank is not None:
        return line.rank
    hit = SPEAKS_OF_RANK.search(line.whole)
    return int(hit[1]) if hit and hit[1] else None


def _torchrun_blocks(lines: Sequence[PeeledLine]) -> list[FirstRank]:
    """torchrun's own report of the first failure, one a node."""
    blocks = []
    for at, line in enumerate(lines):
        if ROOT_CAUSE in line.whole:
            near = [other for other in lines[at : at + BLOCK_LINES] if other.source == line.source]
            fields = {hit[1]: hit[2] for other in reversed(near) if (hit := FIELD.search(other.text))}
            if (rank := fields.get("rank", "")).isdecimal():
                blocks.append(
                    FirstRank(int(rank), fields.get("host"), fields.get("time"), "torchrun observed it first")
                )
        elif hit := TORCHRUN_FAILED.search(line.whole):
            blocks.append(FirstRank(int(hit[2]), line.host, why="torchrun observed this local rank first"))
    return blocks


def _seconds(when: str | None) -> float:
    try:
        parsed = datetime.strptime(when or "", "%Y-%m-%d_%H:%M:%S")
    except ValueError:
        return float("inf")
    return parsed.replace(tzinfo=timezone.utc).timestamp()


def _of_launcher(lines: Sequence[PeeledLine], seen: Sequence[PeeledLine]) -> FirstRank:
    """The first process that a launcher saw end, on one node."""
    hosts = {line.host for line in lines if line.host}
    for line in lines:
        if DEEPSPEED_ENDED in line.whole and (hit := DEEPSPEED_RANK.search(line.whole)):
            # The command in that line is of the rank that was started last, whichever ended (launcher/launch.py, cmd).
            if int(hit[1]) == 0 and len(hosts) < 2:
                return FirstRank(0, line.host, why="it is the only rank")
            silent = _silent(lines)
            return silent if silent.rank is not None else FirstRank(None, line.host)
        if hit := SLURM_TASK.search(line.whole):
            return FirstRank(int(hit["rank"]), hit["host"], why="srun saw this task end first")
    return FirstRank(None, next((line.host for line in seen if line.host), None))


def _behind(lines: Iterable[PeeledLine]) -> FirstRank:
    """The rank that is behind all others, where they print how far they are."""
    at = {int(hit[1]): int(hit[2]) for line in lines if (hit := ENQUEUED.search(line.whole))}
    least = min(at.values(), default=0)
    behind = [rank for rank, work in at.items() if work == least]
    if len(at) > 1 and len(behind) == 1:
        return FirstRank(behind[0], why="it is behind the others by what it last enqueued")
    return NOBODY


def _silent(lines: Sequence[PeeledLine]) -> FirstRank:
    """The one rank of a node that wrote no error, where each of the others wrote that its peer was gone.

    How many there are, DeepSpeed's launcher says: the command at its end is that of the last rank.
    """
    if len({line.host for line in lines if line.host}) > 1 or len({line.source for line in lines}) > 1:
        return NOBODY
    last = [
        int(hit[1])
        for line in lines
        if DEEPSPEED_ENDED in line.whole and (hit := DEEPSPEED_RANK.search(line.whole))
    ]
    lost = {line.rank for line in lines if line.rank is not None and lost_others(line.text.strip())}
    silent = set(range(max(last, default=-1) + 1)) - lost
    if not lost or len(silent) != 1:
        return NOBODY
    return FirstRank(silent.pop(), why="it alone wrote no error: each of the others had lost its peer")

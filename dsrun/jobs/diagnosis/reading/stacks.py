"""Where ranks stood as their job was ended: the stacks that they wrote (rank.py), or that py-spy wrote of them.

A rank that others waited for in vain prints no error. What it did instead stands in its stack alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dsrun.files import read_inside
from dsrun.host.hiding import without_secrets
from dsrun.job.layout import STATE, stack_file
from dsrun.jobs.diagnosis.logs import STARTS_RANKS
from dsrun.jobs.diagnosis.reading import owners

MOST_BYTES = 1 << 20
"""Longest part of a file of stacks that is read."""
MOST_FRAMES = 12
THREAD = re.compile(
    r"^(?:Thread|Current thread) (?P<id>0x[0-9a-f]+|\d+)(?: \(\w+\)| \[[^\]\n]{0,100}\])*"
    r"(?:: \"(?P<name>[^\"\n]{0,200})\")?(?: \(most recent call first\):)?$"
)
"""A thread's heading, by faulthandler (Modules/faulthandler.c) and by py-spy."""
FRAME = re.compile(r"^  File \"(?P<file>[^\"\n]{1,500})\", line (?P<line>\d{1,9}) in (?P<name>[^\n]{1,200})$")
PY_SPY_FRAME = re.compile(r"^    (?P<name>[^(\n]{1,200}) \((?P<file>[^\n]{1,500}):(?P<line>\d{1,9})\)$")
BEGINS_MAIN = re.compile(r"^<frozen runpy>$|/runpy\.py$|/dsrun/jobs/supervision/rank\.py$")
"""The outermost frames of a rank's main thread: Python runs a module there."""
IN_COLLECTIVE = re.compile(r"/torch/distributed/distributed_c10d\.py$|/dsrun/training/ranks/barrier\.py$")
"""Files in which a rank stands that waits for others."""
STACK_FILE = re.compile(r"^stack-(\d+)\.txt$")


class Call(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    name: str


class RankStack(NamedTuple):
    """The main thread of a rank that was still running, the innermost call first."""

    rank: int
    calls: tuple[Call, ...]

    @property
    def waits(self) -> bool:
        """Whether the rank stands in a collective, and so waits for others."""
        return any(IN_COLLECTIVE.search(call.file) for call in self.calls)

    @property
    def place(self) -> str:
        """The innermost call of the user's own code (of any, where there is none), as "name (file:line)"."""
        own = (call for call in self.calls if owners.owner(call.file)[0] == owners.USER)
        call = next(own, self.calls[0])
        return without_secrets(f"{call.name} ({call.file}:{call.line})")

    @property
    def lines(self) -> tuple[str, ...]:
        """The calls as Python writes them."""
        texts = (f'File "{call.file}", line {call.line} in {call.name}' for call in self.calls[:MOST_FRAMES])
        return tuple(map(without_secrets, texts))


def taken(run_dir: Path) -> list[RankStack]:
    """The stacks of the ranks that were ended while they ran, by rank."""
    stacks = []
    for path in (run_dir / STATE).glob("stack-*.txt"):
        if named := STACK_FILE.match(path.name):
            rank = int(named[1])
            text = read_inside(run_dir, stack_file(rank), most=MOST_BYTES).decode("utf-8", errors="replace")
            if calls := next(_main_threads(text), ()):
                stacks.append(RankStack(rank, calls))
    return sorted(stacks)


def hanging(run_dir: Path, waited: Collection[int] = ()) -> list[RankStack]:
    """The stacks of the ranks that others waited for. waited: ranks that are known to have waited themselves.

    Of the ranks that were ended while they ran some waited, too, their time was not yet over; where all did, they
    waited in different collectives, and each of those that did not give up may be the one.
    """
    others = [stack for stack in taken(run_dir) if stack.rank not in waited]
    return [stack for stack in others if not stack.waits] or others


def counted_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: "rank 1", "ranks 0, 2, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


def hanging_in_words(stacks: Sequence[RankStack], chinese: bool = False) -> str:
    """The ranks that hang, and where they stand, as a clause."""
    ranks, place = [stack.rank for stack in stacks], stacks[0].place
    if stacks[0].waits:  # in a collective as well, which is another one
        if chinese:
            return f"进程 {', '.join(map(str, ranks))} 停在另一个集合通信里：{place}"
        return f"{counted_ranks(ranks)} stood in another collective, in {place}"
    if chinese:
        return f"进程 {', '.join(map(str, ranks))} 卡在 {place}"
    return f"{counted_ranks(ranks)} hang{'s' * (len(ranks) == 1)} in {place}"


def _main_threads(text: str) -> Iterator[tuple[Call, ...]]:
    """The main thread's calls in each dump, without those in which dsrun starts a rank."""
    is_main = False
    calls: list[Call] = []
    for line in [*text.splitlines(), "Thread 0"]:
        if heading := THREAD.match(line):
            shown = tuple(call for call in calls if not STARTS_RANKS.search(call.file))
            if shown and (is_main or BEGINS_MAIN.search(calls[-1].file)):
                yield shown
            is_main, calls = heading["name"] == "MainThread", []
        elif frame := FRAME.match(line) or PY_SPY_FRAME.match(line):
            calls.append(Call(frame["file"], int(frame["line"]), frame["name"]))

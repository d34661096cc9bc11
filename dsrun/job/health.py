"""How long each rank of a fine-tune computed and waited in its steps, and which rank or host the others wait for.

waits.jsonl has a line a step (of many ranks, of some steps): {"step", "seconds", "waited": seconds of each rank}. A
step takes all ranks the same time, since they meet in it; who waits least is the slowest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from dsrun.files import open_inside
from dsrun.job.job import HostDevices, ranks_of
from dsrun.job.run_folder import json_objects

WAITS = "waits.jsonl"
RANKS_EACH_STEP = 64
"""Ranks up to which every step has a line; of more ranks every second step, and so on."""
BLOCK = 1 << 20
"""Bytes at the file's end that are read."""
STEPS, FEWEST_STEPS = 50, 5
"""Newest steps that are looked at, and the fewest from which a rank is called slow."""
SLOWER, OFTEN = 0.2, 0.8
"""A slow rank computes longer than the others by more than this share of the step, in this share of the steps."""


@dataclass(frozen=True)
class Health:
    """The newest steps of a run."""

    steps: int
    """Steps that were looked at."""
    step_seconds: float
    """Median of a step."""
    computing_seconds: tuple[float, ...]
    """Median for each rank; the rest of a step it waited."""
    slow: tuple[int, ...] = ()
    """Ranks that the others wait for."""
    host: str | None = None
    """The host all of whose ranks these are, where there are other hosts."""

    @property
    def words(self) -> str:
        """The slow ranks as a sentence; empty where there is none."""
        return self._sentence(chinese=False)

    @property
    def words_zh(self) -> str:
        """The same in Chinese."""
        return self._sentence(chinese=True)

    def _sentence(self, *, chinese: bool) -> str:
        if not self.slow:
            return ""
        own = median(self.computing_seconds[rank] for rank in self.slow)
        others = median(
            seconds for rank, seconds in enumerate(self.computing_seconds) if rank not in self.slow
        )
        ranks = ", ".join(map(str, self.slow))
        if chinese:
            who = f"主机 {self.host}（进程 {ranks}）" if self.host else f"进程 {ranks}"
            return f"{who} 较慢：每步计算 {own:.3g} s，其他进程 {others:.3g} s，其余时间在等它。"
        who = f"host {self.host} (rank{'s' * (len(self.slow) > 1)} {ranks})" if self.host else ""
        who = who or f"rank{'s' * (len(self.slow) > 1)} {ranks}"
        verb = "is" if self.host or len(self.slow) == 1 else "are"
        return (
            f"{who} {verb} slow: {own:.3g} s of computing a step, the others {others:.3g} s, and the rest of the "
            f"{self.step_seconds:.3g} s they wait"
        )


def read(run_dir: Path, hosts: Sequence[HostDevices]) -> Health | None:
    """The health of a run by its newest steps; None where there is nothing to tell by."""
    try:
        with open_inside(run_dir, WAITS, most=1 << 40) as file:
            start = max(0, file.seek(0, os.SEEK_END) - BLOCK)
            file.seek(start)
            content = file.read(BLOCK)
    except OSError:
        return None
    return judged(json_objects(content.partition(b"\n")[2] if start else content), hosts)


def judged(lines: Sequence[dict[str, Any]], hosts: Sequence[HostDevices]) -> Health | None:
    """The health by lines of waits.jsonl, oldest first; None with fewer than FEWEST_STEPS that fit the hosts."""
    count = sum(len(host.devices) for host in hosts)
    fitting = [line for line in lines if _fits(line, count)][-STEPS:]
    if count < 2 or len(fitting) < FEWEST_STEPS:
        return None
    computed = [[max(0.0, line["seconds"] - waited) for waited in line["waited"]] for line in fitting]
    seconds = [line["seconds"] for line in fitting]
    medians = tuple(median(step[rank] for step in computed) for rank in range(count))
    slow = tuple(rank for rank in range(count) if _is_slow(rank, computed, seconds))
    if 2 * len(slow) > count:
        slow = ()
    host = None
    if len(hosts) > 1 and slow:
        of_host = {place.host: tuple(ranks_of(hosts, number)) for number, place in enumerate(hosts)}
        host = next((name for name, ranks in of_host.items() if ranks == slow), None)
    return Health(len(fitting), median(seconds), medians, slow, host)


def _fits(line: dict[str, Any], count: int) -> bool:
    """Whether a line has a number for each rank."""
    waited, seconds = line.get("waited"), line.get("seconds")
    if not isinstance(waited, list) or len(waited) != count:
        return False
    return all(type(value) in (int, float) and isfinite(value) for value in [seconds, *waited])


def _is_slow(rank: int, computed: Sequence[Sequence[float]], seconds: Sequence[float]) -> bool:
    """Whether a rank computes longer than the median of all ranks, by enough and often enough."""
    behind = 0
    for step, whole in zip(computed, seconds, strict=True):
        # The lower median: of two ranks the faster one's, and of two hosts' ranks the faster host's.
        usual = sorted(step)[(len(step) - 1) // 2]
        behind += step[rank] - usual > SLOWER * whole
    return behind >= OFTEN * len(computed)

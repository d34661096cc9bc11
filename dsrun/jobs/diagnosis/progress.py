"""Whether a program went on after something that looks like its failure: what it survived is not why it died.

A download or a connection that was tried again: lines of steps follow. A rank that failed prints none, and the others
stop at their next collective, after a step or two.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable

from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine

STEP = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|epoch)s?\b[\"']?\s{0,3}[=:/ ]\s{0,3}\d|\d{1,9}/\d{1,9} \[[\d:?]{4,9}<"
    r"|['\"]?(?:loss|train_loss)['\"]?\s{0,2}[=:]\s{0,2}[\d.]"
    r"|\b(?:fwd|bwd|step)_?\w{0,20}: \d|\bsamples/s(?:ec)?\b"
)
"""A line of a training that moves: a step's number, a bar's count, a loss, DeepSpeed's times."""
WENT_ON = 10
"""Different lines of that kind after which a program counts as having gone on."""


class Steps:
    """The lines of steps in logs, by log and rank: looked for once, asked of each line that may be a failure."""

    def __init__(self, lines: Iterable[PeeledLine]) -> None:
        self._by_rank: dict[tuple[int, int | None], list[tuple[int, str]]] = {}
        for line in lines:
            if STEP.search(line.text):
                steps = self._by_rank.setdefault((line.source, line.rank), [])
                steps.append((line.number, line.text))

    def follow(self, line: PeeledLine, least: int = WENT_ON) -> bool:
        """Whether the same rank's steps follow a line. least: different lines of them."""
        steps = self._by_rank.get((line.source, line.rank), [])
        seen = set()
        for number, text in steps[bisect_right(steps, line.number, key=lambda step: step[0]) :]:
            if number > line.number:
                seen.add(text)
            if len(seen) >= least:
                return True
        return False

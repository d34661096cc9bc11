"""Whether a program went on after something that looks like its failure: what it survived is not why it died.

A download that was tried again, memory that ran out in a search for a batch size, a warning at an import: lines of
steps follow, or the word that all is done. A rank that failed prints none, and the others stop at their next
collective, after a step or two. What stands behind that word may be noise of a process that is ending.
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
WENT_ON_UNRAISED = 4
"""The same behind a line that no exception raised: of a failure other ranks print a step or two."""
AT_WORK = 2
"""Different lines of any work behind a failure that its program tries again, and with nothing failing later."""
WORKS = re.compile(
    r"\d{1,3}%\s?\|[^|\n]{0,200}\|\s{0,3}\d{1,12}/\d|(?i:^[\W\d_]{0,12}(?:\[\w[\w.]{0,60}\] )?"
    r"(?:sav(?:ing|ed)|model weights saved|configuration saved|loading|running|evaluating|training completed)\b)"
)
"""A line of work that is no step: a progress bar, or what is being done."""
FINISHED = re.compile(
    r"(?i)\btrain_runtime\b|\btraining (?:is |was |has )?(?:completed?|done|finished)\b|\bfinished training\b"
    r"|\bexits successfully\b|\bState: COMPLETED\b"
    r"|\btrain\w*\b[^|\n]{0,40}\b100%\s?\|[^|\n]{0,200}\|\s{0,3}(\d{1,12})/\1\b"
    r"|\bfinal (?:validation |test |eval\w* )?metrics\b"
    r"|\bexiting program after \d|\bsuccessfully saved\b|^\W{0,4}(?:all )?done\W{0,4}$"
)
"""A line by which a training says that it is through."""
TRIES_AGAIN = re.compile(
    r"(?i)\bretrying\b|\[?\bretry \d|\bretry loop\b|\b(?:will|to) (?:re)?try again\b|\btrying again\b"
    r"|\battempt \d{1,3} ?(?:/|of) ?\d"
    r"|\b(?:decreas|reduc|lower|halv)ing (?:the )?(?:\w{1,20} ){0,2}(?:batch|bucket|chunk)"
    r"|\b(?:falling|fall|falls|fell) back (?:to|on)\b|\bcontinuing (?:with|without|anyway|training|offline|in)\b"
    r"|\b(?:skipp(?:ing|ed)|dropp(?:ing|ed)) (?:this |the |that |it\b|batch|sample|step|\d)"
)
"""Words of a program that has failed at something, and does it once more, otherwise, or leaves it out."""


class Steps:
    """The lines of steps in logs, by log and rank: looked for once, asked of each line that may be a failure."""

    def __init__(self, lines: Iterable[PeeledLine]) -> None:
        self._by_rank: dict[tuple[int, int | None], list[tuple[int, str]]] = {}
        self._work: dict[int, list[tuple[int, str]]] = {}
        self._tries: set[tuple[int, int]] = set()
        self._ends: dict[int, list[int]] = {}
        for line in lines:
            if FINISHED.search(line.text):
                self._ends.setdefault(line.source, []).append(line.number)
            if STEP.search(line.text) or WORKS.search(line.text) or FINISHED.search(line.text):
                self._work.setdefault(line.source, []).append((line.number, line.text))
            if TRIES_AGAIN.search(line.text):
                self._tries.add((line.source, line.number))
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

    def try_again(self, line: PeeledLine) -> bool:
        """Whether a line, or the one below it, says that what failed is tried again."""
        return not self._tries.isdisjoint((line.source, line.number + below) for below in (0, 1))

    def work_follows(self, line: PeeledLine) -> bool:
        """Whether the same log goes on with its work behind a line, or says that it is through."""
        return len({text for _, text in self._later(line)}) >= AT_WORK or self.finished(line)

    def finished(self, line: PeeledLine) -> bool:
        """Whether the same log says behind a line that its work is through."""
        return self._ends.get(line.source, [0])[-1] > line.number

    def is_behind_end(self, line: PeeledLine) -> bool:
        """Whether the same log says before a line that its work is through."""
        return self._ends.get(line.source, [line.number])[0] < line.number

    def _later(self, line: PeeledLine) -> list[tuple[int, str]]:
        work = self._work.get(line.source, [])
        return work[bisect_right(work, line.number, key=lambda step: step[0]) :]

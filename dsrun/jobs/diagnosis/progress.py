"""Whether a program went on after something that looks like its failure: what it survived is not why it died.

A download or a connection that was tried again: lines of steps follow. A rank that failed prints none, and the others
stop at their next collective, after a step or two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine

STEP = re.compile(
    r"(?i)\b(?:step|iter(?:ation)?|epoch)s?\b[\"']?\s{0,3}[=:/ ]\s{0,3}\d|\d{1,9}/\d{1,9} \[[\d:?]{4,9}<"
    r"|['\"]?(?:loss|train_loss)['\"]?\s{0,2}[=:]\s{0,2}[\d.]|\b(?:fwd|bwd|step)_?\w{0,20}: \d|\bsamples/s(?:ec)?\b"
)
"""A line of a training that moves: a step's number, a bar's count, a loss, DeepSpeed's times."""
WENT_ON = 10
"""Different lines of that kind after which a program counts as having gone on."""


def went_on(line: PeeledLine, lines: Sequence[PeeledLine], least: int = WENT_ON) -> bool:
    """Whether the same rank's steps follow a line. least: different lines of them."""
    seen = set()
    for other in lines:
        if other.source == line.source and line.number < other.number and other.rank == line.rank:
            if STEP.search(other.text):
                seen.add(other.text)
            if len(seen) >= least:
                return True
    return False

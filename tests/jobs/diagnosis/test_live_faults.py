"""Jobs that really fail, under each launcher (tests/live_faults.py): cause, first rank, stack and exit code."""

from __future__ import annotations

import pytest
from live_faults import FAULTS, LAUNCHERS, outcome_of

SHORT = {("exit", "dsrun launch"), ("hang", "dsrun launch"), ("exit", "torchrun")}
"""What the default lane runs: each of the three that were wrong once."""
GRID = [
    pytest.param(fault, launcher, id=f"{fault.name}-{launcher.split()[0]}",
                 marks=() if (fault.name, launcher) in SHORT else pytest.mark.full)
    for fault in FAULTS for launcher in LAUNCHERS
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "launcher"), GRID)
def test_what_is_said_of_a_fault(fault, launcher, tmp_path):
    outcome = outcome_of(fault, launcher, tmp_path)
    if outcome.is_in_log:
        assert outcome.problems == [], outcome.text[-3000:]
    else:
        assert outcome.diagnosis["cause"] is None
        assert outcome.rank_is_right


def test_there_are_nine_faults_and_three_launchers():
    assert len(GRID) == 27

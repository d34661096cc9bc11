"""A coordinator with many hosts: stubs that answer, of which one rank fails (bench/coordinator.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsrun.catalog import PACKAGE

BENCH = PACKAGE.parent / "bench" / "coordinator.py"


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "ranks"), [(40, 2), pytest.param(1000, 8, marks=pytest.mark.full)])
def test_the_rank_that_failed_is_named(hosts, ranks):
    words = [sys.executable, str(BENCH), "--hosts", str(hosts), "--ranks", str(ranks), "--seconds", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "seconds_to_name" in done.stdout, f"it isn't, or nothing failed: {done.stderr}"

"""The time that ranks wait in collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dsrun.cluster.ports import free_port
from dsrun.job import health
from dsrun.job.job import HostDevices
from dsrun.training.waiting import WaitClock


@pytest.mark.slow
def test_the_rank_that_comes_late_is_called_slow(environ):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("waiting_ranks.py")),
    ]  # fmt: skip
    done = subprocess.run(command, env=environ, text=True, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
    found = health.judged(lines, (HostDevices("localhost", (0, 1)),))
    assert found.slow == (1,)


@pytest.mark.usefixtures("alone")
def test_it_is_measured_while_it_runs_and_then_no_more():
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import Work

    wait = Work.wait
    clock = WaitClock(torch.device("cpu")).start()
    dist.all_reduce(torch.ones(4))
    assert clock.taken() > 0
    assert clock.taken() == 0
    clock.stop()
    dist.all_reduce(torch.ones(4))
    assert clock.taken() == 0
    assert Work.wait is wait

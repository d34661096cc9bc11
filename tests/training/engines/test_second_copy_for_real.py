"""zero3-hpz on four ranks beside zero3: the same numbers, with backward's weights from the ranks of a host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from second_copy import HOSTS, RANKS

pytestmark = [pytest.mark.slow, pytest.mark.full]
WAYS = ("whole", "frozen")


@pytest.fixture(scope="module")
def runs(environ):
    # One after the other: a process makes the groups of a host once.
    lines = {}
    for preset in ("zero3", "zero3-hpz"):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS),
            str(Path(__file__).with_name("second_copy.py")), *(f"{preset}:{way}" for way in (*WAYS, "sizes")),
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env={**environ, "OMP_NUM_THREADS": "1"},
            text=True,
            capture_output=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
        lines |= {line["case"]: line for line in records}
    return lines


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_are_zero3s(runs, way):
    plain, copied = runs[f"zero3:{way}"], runs[f"zero3-hpz:{way}"]
    assert copied["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    assert copied["losses"][-1] != pytest.approx(copied["losses"][0], abs=1e-3), "it learns"
    assert copied["evaluation"] == pytest.approx(plain["evaluation"], abs=1e-6)
    assert copied["weights"] == pytest.approx(plain["weights"], rel=1e-7)


@pytest.mark.parametrize("preset", ["zero3", "zero3-hpz"])
def test_other_buckets_are_the_same_losses(runs, preset):
    assert runs[f"{preset}:sizes"]["losses"] == pytest.approx(runs[f"{preset}:whole"]["losses"], abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_backward_gathers_within_a_host(runs, way):
    plain, copied = runs[f"zero3:{way}"], runs[f"zero3-hpz:{way}"]
    assert (plain["size"], copied["size"]) == (1, RANKS // HOSTS)
    assert set(plain["gathers"]) == {str(RANKS)} and not plain["copies"]
    assert copied["gathers"][str(RANKS // HOSTS)] > 0 and copied["copies"]
    assert copied["gathers"][str(RANKS)] < plain["gathers"][str(RANKS)]

"""A step whose gradient is no number, under each engine and precision, on two ranks: no weight moves in it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers")

from dsrun.cluster.ports import free_port

pytestmark = pytest.mark.slow
CASES = ["ddp:fp32:nan:0.5", "ddp:fp32:inf:0", "zero2:bf16:nan:0.5", "zero3:fp32:inf:0", "fsdp:fp32:nan:0"]
# fp16 skips by its loss scale, and few processors have it: it isn't here.
LAYOUTS = [
    *itertools.product(("ddp", "zero1", "zero2", "zero3"), ("fp32", "bf16")),
    *itertools.product(("zero2-offload", "zero3-offload"), ("fp32", "bf16")),
    ("fsdp", "fp32"), ("fsdp-hybrid", "fp32"),
]  # fmt: skip
MORE = sorted(
    {":".join((*layout, *bad)) for layout in LAYOUTS for bad in (("nan", "0.5"), ("inf", "0"))} - {*CASES}
)


@pytest.fixture(scope="module")
def results(request, environ):
    """What came of each case, all in one start of two ranks."""
    cases = [*CASES, *(MORE if request.config.getoption("--full") else ())]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("poisoned.py")), *cases,
    ]  # fmt: skip
    environ = {**environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, text=True, capture_output=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)])
def test_no_weight_moves_in_a_step_that_is_not_finite(results, case):
    line = results[case]
    assert line["same"]
    assert line["skipped"] == 1
    assert line["norm"] in ("inf", "nan")
    assert line["goes_on"]
    assert line["not_finite"] is None

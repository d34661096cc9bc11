"""Checkpoints written beside the training, on two ranks: the same bytes as of one written at once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from needed import needs

needs("torch", "deepspeed", "transformers")

from dsrun.cluster.ports import free_port

pytestmark = pytest.mark.slow
CASES = ("zero2:bf16", "zero3:fp32", "fsdp:fp32")
FP8 = ("fsdp-fp8:bf16",) if find_spec("torchao") else ()
"""Layers that compute in fp8, as a CPU emulates it."""
MORE = ("ddp:fp32", "ddp:bf16", "zero1:fp32", "zero2:fp32", "zero3:bf16", "zero2-offload:fp32", "zero3-offload:bf16",
        "fsdp:bf16", "fsdp-hybrid:fp32", *FP8)  # fmt: skip
UNIQUE = {".metadata"}
"""Files that hold a number drawn for each checkpoint: torch's id of a save."""


@pytest.fixture(scope="module")
def results(request, environ, tmp_path_factory):
    cases = [*CASES, *(MORE if request.config.getoption("--full") else ())]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port()),
        str(Path(__file__).with_name("captured.py")), str(tmp_path_factory.mktemp("captured")), *cases,
    ]  # fmt: skip
    env = {**environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, text=True, capture_output=True, env=env, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_the_same_bytes_and_losses_as_written_at_once(results, case):
    """Two steps were taken between the copy and the last byte; the mark, which lists digests, is among the files."""
    line = results[case]
    saved, beside = line["saved"], line["beside"]
    assert not line["marked_early"]
    assert saved.keys() == beside.keys() and "complete" in saved
    unlike = {name for name in saved if saved[name] != beside[name]}
    assert unlike <= (UNIQUE | {"complete"} if case.startswith("fsdp") else set())
    assert line["resumed"]["beside"] == line["resumed"]["at once"] == pytest.approx(line["losses"], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("case", FP8)
def test_fp8_is_in_no_checkpoint(results, case):
    """Weights have the names and the type that they have without; the losses are near."""
    plain, rounded = results["fsdp:bf16"], results[case]
    assert rounded["weights"] == plain["weights"] and set(plain["weights"].values()) == {"torch.float32"}
    assert rounded["losses"] != plain["losses"]
    assert rounded["losses"] == pytest.approx(plain["losses"], abs=5e-2)

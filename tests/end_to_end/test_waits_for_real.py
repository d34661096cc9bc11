"""How often a step of two real ranks waits for the device, by who asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers")

from running import COMMON

pytestmark = pytest.mark.slow
WAITS = Path(__file__).resolve().parents[1] / "waits"
ACCUMULATION = 4
ON_HOST = ("data/batches.py", "optim/optimizer.py _get_value")
"""Reads of tensors that lie in host memory on GPUs too: rows of the next step, and the step count of AdamW that torch's
fused one, which ranks on GPUs have, keeps on the device."""
MASK = "__bool__ in transformers/masking_utils.py find_packed_sequence_indices"
NORM = "__bool__ in runtime/utils.py is_invalid_grad_norm"
OWN = {"tolist in training/loop.py _on_host": 1}
EXPECTED = {
    "zero2": {MASK: ACCUMULATION, NORM: 2, **OWN},
    "zero3": {MASK: ACCUMULATION, NORM: 1, **OWN},
    "fsdp": {MASK: ACCUMULATION, "__float__ in engines/fsdp.py step": 1, **OWN},
}


@pytest.mark.parametrize(
    "preset", [name if name == "zero2" else pytest.param(name, marks=pytest.mark.full) for name in EXPECTED]
)
def test_waits_of_a_step(preset, tmp_path, environ, data):
    """dsrun's own is one a step, and FSDP's norm; no timer of DeepSpeed's synchronises the device."""
    run_dir, counts = tmp_path / "run", tmp_path / "counts"
    counts.mkdir()
    words = [
        "finetune", "llama-tiny", "--output-dir", str(run_dir), "--gpus", "2", *COMMON, "--preset", preset,
        "--max-steps", "4", "--micro-batch", "2", "--grad-accum", str(ACCUMULATION), *data,
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "dsrun", *words],
        env={**environ, "PYTHONPATH": f"{WAITS}{os.pathsep}{environ['PYTHONPATH']}", "WAITS": str(counts)},
        text=True, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        steps = json.loads((counts / f"{rank}.json").read_text())
        assert len(steps) == 4
        for step in steps[1:]:  # the first has what happens once
            waits = {who: times for who, times in step.items() if not any(place in who for place in ON_HOST)}
            assert waits == EXPECTED[preset]

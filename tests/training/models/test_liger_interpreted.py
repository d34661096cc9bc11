"""liger-kernel's kernels against torch's own numbers, without a GPU: Triton's interpreter computes them.

Where liger-kernel is installed: `pip install '.[gpu]'`, or `bash tests/run.sh --versions ...`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

needs("torch", "transformers", "liger_kernel", "triton")

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.usefixtures("alone")]


def test_losses_and_gradients_are_the_plain_ones(environ):
    """For one token, for some and for many; all of them or few trained on; in one chunk and in several; in a model."""
    script = str(Path(__file__).with_name("interpreted.py"))
    done = subprocess.run(
        [sys.executable, script], env=environ, text=True, capture_output=True, check=False, timeout=850
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    off = {json.dumps(line["case"]): line["off"] for line in lines}
    assert len(off) >= 7
    assert {case: far for case, far in off.items() if max(far) > 1e-5} == {}

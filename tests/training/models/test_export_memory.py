"""Memory of the rank that writes a trained model: bench/exporting.py on a smaller one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.full]
BENCH = Path(__file__).resolve().parents[3] / "bench/exporting.py"


def test_no_more_than_two_files_of_weights_are_held(environ):
    """Under every division of the weights, whole and with LoRA merged: files of 100 MB of a model of 400 MB."""
    argv = [sys.executable, str(BENCH), "--layers", "5"]
    done = subprocess.run(argv, env=environ, text=True, capture_output=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert set(rows) == {"zero2", "zero3", "fsdp", "zero2-lora", "zero3-lora", "fsdp-lora"}
    for case, row in rows.items():
        assert row["files"] <= 2, case
        assert row["written"] > 380e6, "all of it is written"

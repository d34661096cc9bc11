"""The tutorial as a reader follows it: its blocks in a shell, in an empty folder, but those that set up Python."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_the_tutorial(tmp_path):
    pytest.importorskip("deepspeed")
    folder, programs = tmp_path / "work", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name, rest in (("dsrun", "-m dsrun "), ("python", "")):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {rest}"$@"\n', encoding="utf-8")
        path.chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}

    def run(block: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["bash", "-c", block], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    _setup, data, look, examples, train, asking, _real = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    run(data)
    dry = run(look)
    assert "a classifier: prompts are column 'text', responses 'label'" in dry.stderr
    assert '"train_batch_size"' in dry.stdout and not (folder / "runs").exists()
    assert run(examples).stdout.count("⟦") == 2
    said = run(train).stdout
    losses = re.search(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert float(losses[2]) < 1 < 7 < float(losses[1]), said
    accuracy = re.search(r"^after .*ACCURACY ([\d.]+).*MAJORITY ([\d.]+)", said, re.MULTILINE)
    assert float(accuracy[1]) > 90 > float(accuracy[2]), said
    assert re.search(r"^use it +dsrun chat ", said, re.MULTILINE), said
    assert run(asking).stdout.strip() in ("positive", "negative")

"""The tutorial as a reader follows it: its blocks in a shell, in an empty folder, but those that set up Python."""

from __future__ import annotations

import json
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

    _setup, data, look, named, train, answers, _real = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    run(data)
    assert "Name it with --prompt-column." in run(look, code=1).stderr
    assert '"train_batch_size"' in run(named).stdout and not (folder / "runs").exists()
    said = run(train).stdout
    losses = re.search(r"loss ([\d.]+) -> ([\d.]+)", said)
    assert float(losses[2]) < 1 < 7 < float(losses[1]), said
    rows = [json.loads(line) for line in run(answers).stdout.splitlines()]
    assert [row["prompt"] for row in rows] == ["What is 0 plus 0?", "What is 0 plus 10?", "What is 1 plus 0?"]
    (asking,) = re.findall(r"^use it +(.*)$", said, re.MULTILINE)
    assert asking.startswith("dsrun chat "), asking
    assert run(f"{asking} --prompt 'What is 1 plus 1?'").stdout.strip()

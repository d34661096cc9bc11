"""A program drives dsrun by JSON, as docs/reference/for-agents.md says: from a name to a trained model and its page."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from running import until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "for-agents.md"
SMALL = {"llama-2-7b --gpus 8": "llama-tiny --gpus 2 --max-steps 3 --generate-rows 0"}
"""Text of the page -> the same for a machine without a GPU."""

pytestmark = [pytest.mark.slow, pytest.mark.full]


def test_a_job_from_beginning_to_end(environ, tmp_path):
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for shown, small in SMALL.items():
        assert shown in block
        block = block.replace(shown, small)
    commands = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]

    def answer(words: list[str], *codes: int) -> dict:
        done = subprocess.run(
            [sys.executable, "-m", "dsrun", *words],
            env={**environ, "DS_ACCELERATOR": "cpu"}, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in (0, *codes), done.stderr
        return json.loads(done.stdout) if "--json" in words else {"version": 1}

    show = next(words for words in commands if words[0] == "show")
    said = {}
    for words in commands:
        said[" ".join(words[:1])] = answer(words, 1) if words[0] == "doctor" else answer(words)
        if "--detach" in words:
            assert Path(said["finetune"]["run_dir"]).is_dir()
            until(lambda: answer(show)["state"] not in ("running", "preparing"), "the run's end", 900, 2)
    assert all("version" in one for one in said.values())
    assert said["plan"]["plans"][0]["verdict"] == "fits"
    assert (said["show"]["state"], said["show"]["steps"], said["show"]["total_steps"]) == ("finished", 3, 3)
    assert said["show"]["loss"]["last"] < 10
    assert "training" in (tmp_path / "mine.html").read_text(encoding="utf-8")

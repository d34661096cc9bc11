"""Faults that are drawn, in one run (tests/drawn_faults.py), and what its page says of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from argparse import Namespace

import pytest
from needed import needs

needs("deepspeed", "transformers")

from drawn_faults import FAULTS, PAGE, ROOT, Row, difference, drawn, page
from running import Done


@pytest.mark.slow
@pytest.mark.full
def test_three_faults(lab, tmp_path):
    """lab: only so that it is skipped where there can't be one; the script makes its own."""
    command = [
        sys.executable,
        ROOT / "tests/drawn_faults.py",
        "--faults",
        "3",
        "--page",
        tmp_path / "page.md",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 faults went as they should" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_every_kind_is_drawn_before_any_comes_again():
    faults = drawn(20, random.Random(3))
    assert len(faults) == 20
    assert {fault.name for fault in faults[: len(FAULTS)]} == {fault.name for fault in FAULTS}
    assert faults == drawn(20, random.Random(3)) != drawn(20, random.Random(4))


def test_the_page_names_what_went_wrong():
    rows = [
        Row("kill -9 of a rank: rank 0", 5, "exit 137", 4.2, 4, 1),
        Row("full disk", 9, "exit 3", 7.1, 4, 5, ["5 steps lost"]),
        Row("cable out for 5 s", 14, "went on", 6),
    ]
    text = page(rows, Namespace(faults=20, seed=3), 20, 0.0, 2e-7)
    assert "There was no time for 17 of 20 drawn faults." in text
    assert "2 of 3 faults went as they should" in text
    assert "| 2 | full disk | 9 | **wrong**: 5 steps lost; exit 3 | 7.1 | 4 | 5 |" in text
    assert "| 3 | cable out for 5 s | 14 | went on | - | - | - |" in text


def test_two_runs_that_differ(tmp_path):
    import torch
    from safetensors.torch import save_file

    runs = []
    for number, (loss, weight) in enumerate([(2.0, 1.0), (2.5, 1.25)]):
        folder = tmp_path / str(number)
        (folder / "model").mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n", encoding="utf-8")
        save_file({"a": torch.full((2,), weight), "b": torch.ones(3)}, folder / "model/model.safetensors")
        runs.append(Done(0, "", "", folder))
    assert difference(*runs) == (0.5, 0.25)


def test_the_page_that_ships_has_every_fault():
    text = PAGE.read_text(encoding="utf-8")
    assert [fault.name for fault in FAULTS if f"| {fault.name}" not in text] == []

"""Real configs with DeepSpeed's own verdict, where a collection of them is at hand: $DSRUN_CORPUS names its folder.

index.json there is a list: file, ds_accepts (by DeepSpeedConfig of 0.19, "auto" filled in), world_size_used, and the
faults that were found by hand: silently_ignored, no_effect, deprecated, removed_in_0_19, auto_not_filled_by_hf
(dotted paths), engine_issues (words).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from corpus import FAULTS

from dsrun.config.rules import Setting
from dsrun.config.validation.validate import validate

FOLDER = Path(os.environ.get("DSRUN_CORPUS", ""))
INDEX = FOLDER / "index.json"
CASES = json.loads(INDEX.read_text(encoding="utf-8")) if "DSRUN_CORPUS" in os.environ else []
NAMED = ("silently_ignored", "removed_in_0_19", "auto_not_filled_by_hf", "deprecated")

pytestmark = pytest.mark.skipif(not CASES, reason="DSRUN_CORPUS names no folder with an index.json")


@pytest.fixture(params=CASES, ids=lambda case: case["file"])
def judged(request):
    case = request.param
    data = (FOLDER / case["file"]).read_bytes()
    return case, validate(data, case["file"], Setting(world_size=case["world_size_used"])).findings


def test_what_deepspeed_takes_has_no_error(judged):
    case, findings = judged
    errors = [each for each in findings if each.finding.severity == "error"]
    # max_grad_norm in optimizer.params is read without a word, and refused by deepspeed.initialize.
    errors = [each for each in errors if each.finding.rule != "DS401"]
    if case["ds_accepts"] and not any(case[fault] for fault in FAULTS):
        assert errors == []


def test_what_deepspeed_refuses_has_an_error(judged):
    case, findings = judged
    if not case["ds_accepts"] or case["engine_issues"]:
        assert any(each.finding.severity == "error" for each in findings)


def test_every_fault_is_named(judged):
    case, findings = judged
    paths = {each.path for each in findings}
    missed = [path for fault in NAMED for path in case[fault] if path not in paths]
    assert [path for path in missed if not path.rpartition(".")[2].startswith(("_", "comment"))] == []

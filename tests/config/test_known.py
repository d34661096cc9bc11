"""Configs whose outcome under DeepSpeed 0.19.8 was measured: tests/config/known/{wrong,tricky}.jsonl.

Each line is one config (or its text) with who reads it, the world size and the TrainingArguments beside it, on a
machine without GPUs. A wrong one names the rules that have to catch it and how severe they are (`rules`,
`severity`), and what came of it (`outcome`, `where`, `message`); `elsewhere` says why a config alone can't tell.
A tricky one looks wrong and trains.
"""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

from running import each

from dsrun.config.rules import Setting
from dsrun.config.rules.frame import ModelInfo
from dsrun.config.validation.validate import validate

KNOWN = Path(__file__).with_name("known")


def cases(name):
    lines = (KNOWN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return list(map(json.loads, lines))


WRONG, TRICKY = cases("wrong"), cases("tricky")


def findings(case):
    text = case["text"] if "text" in case else json.dumps(case["config"], indent=2)
    setting = Setting(
        world_size=case["world_size"],
        device="cpu",
        trainer=case.get("trainer"),
        model=ModelInfo(**case["model"]) if "model" in case else None,
    )
    return [located.finding for located in validate(text.encode(), "x", setting, target=case["for"]).findings]


def test_none_is_lost():
    assert len(WRONG) >= 204
    assert len(TRICKY) >= 99
    assert sum("elsewhere" in case for case in WRONG) <= 10


def check_wrong(case):
    results = findings(case)
    if "elsewhere" in case:
        assert not [finding for finding in results if finding.severity == "error"], "it can be told after all"
        return
    assert {finding.rule for finding in results if finding.severity == case["severity"]} >= set(case["rules"])


def check_tricky(case):
    assert [finding for finding in findings(case) if finding.severity == "error"] == []


def test_wrong_is_caught():
    each(WRONG, check_wrong, itemgetter("name"))


def test_tricky_has_no_error():
    each(TRICKY, check_tricky, itemgetter("name"))

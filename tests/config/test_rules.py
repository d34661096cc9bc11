"""Each rule by its examples: those it carries, and tests/examples/{valid,invalid/DS123-what-is-wrong}.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsrun.config.rules import SEVERITIES, find_rules, run
from dsrun.config.rules.frame import EFFECTS, example

EXAMPLES = Path(__file__).parents[1] / "examples"
VALID = sorted((EXAMPLES / "valid").glob("*.json"))
INVALID = sorted((EXAMPLES / "invalid").glob("*.json"))
RULES = find_rules()
BAD = [(rule, given) for rule in RULES for given in rule.bad]
GOOD = [(rule, given) for rule in RULES for given in rule.good]


def findings(given):
    return run(*example(given))


def named(pairs):
    return [pytest.param(*pair, id=f"{pair[0].id}-{index}") for index, pair in enumerate(pairs)]


def test_there_are_rules_and_examples():
    assert len(RULES) >= 70
    assert len(VALID) >= 10
    assert len(INVALID) >= 30


@pytest.mark.parametrize(("rule", "given"), named(BAD))
def test_bad_example(rule, given):
    found = findings(given)
    (*mine,) = [finding for finding in found if finding.rule == rule.id]
    assert mine, f"{rule.id} says nothing of {given}"
    assert all(finding.message and finding.suggestion for finding in mine)
    if rule.severity == "error":
        others = [finding for finding in found if finding.severity == "error" and finding.rule != rule.id]
        assert not others, f"an example is wrong in one way: {others}"
        assert all(finding.effect in EFFECTS for finding in mine if finding.severity == "error")


@pytest.mark.parametrize(("rule", "given"), named(GOOD))
def test_good_example(rule, given):
    found = findings(given)
    assert not [finding for finding in found if finding.rule == rule.id]
    assert not [finding for finding in found if finding.severity == "error"]


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid(path):
    found = findings({**json.loads(path.read_text(encoding="utf-8")), "_bare": True})
    assert [finding for finding in found if finding.severity != "note"] == []


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid(path):
    found = findings({**json.loads(path.read_text(encoding="utf-8")), "_bare": True})
    assert {finding.rule for finding in found if finding.severity != "note"} == {path.stem.split("-")[0]}
    assert all(finding.path and finding.message and finding.suggestion for finding in found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_every_rule_is_documented(rule):
    assert rule.severity in SEVERITIES
    assert ".py" in rule.source or "issues" in rule.source, "a rule names where DeepSpeed does what it says"
    assert rule.bad
    assert rule.good

"""Each rule by its examples: those it carries, and tests/examples/{valid,invalid/DS123-what-is-wrong}.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import each

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


def by_id(pair):
    rule, given = pair
    return f"{rule.id} {given}"


def of_module(pairs, module):
    return [pair for pair in pairs if pair[0].function.__module__ == module]


def test_there_are_rules_and_examples():
    assert len(RULES) >= 70
    assert len(VALID) >= 10
    assert len(INVALID) >= 30


def check_bad_example(pair):
    rule, given = pair
    results = findings(given)
    (*mine,) = [finding for finding in results if finding.rule == rule.id]
    assert mine, f"{rule.id} says nothing of {given}"
    assert all(finding.message and finding.suggestion for finding in mine)
    if rule.severity == "error":
        others = [finding for finding in results if finding.severity == "error" and finding.rule != rule.id]
        assert not others, f"an example is wrong in one way: {others}"
        assert all(finding.effect in EFFECTS for finding in mine if finding.severity == "error")


def check_good_example(pair):
    rule, given = pair
    results = findings(given)
    assert not [finding for finding in results if finding.rule == rule.id]
    assert not [finding for finding in results if finding.severity == "error"]


@pytest.mark.parametrize("module", sorted({rule.function.__module__ for rule in RULES}))
def test_examples_of_a_subject(module):
    each(of_module(BAD, module), check_bad_example, by_id)
    each(of_module(GOOD, module), check_good_example, by_id)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid(path):
    results = findings({**json.loads(path.read_text(encoding="utf-8")), "_bare": True})
    assert [finding for finding in results if finding.severity != "note"] == []


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid(path):
    results = findings({**json.loads(path.read_text(encoding="utf-8")), "_bare": True})
    own = path.stem.split("-")[0]
    shown = [finding for finding in results if finding.severity != "note" or finding.rule == own]
    assert {finding.rule for finding in shown} == {own}
    assert all(finding.path and finding.message and finding.suggestion for finding in results)


def test_every_rule_is_documented():
    for rule in RULES:
        assert rule.severity in SEVERITIES, rule.id
        assert ".py" in rule.source or "issues" in rule.source, (
            f"{rule.id} names where DeepSpeed does what it says"
        )
        assert rule.bad and rule.good, rule.id

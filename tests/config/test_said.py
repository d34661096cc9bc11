"""What exactly each rule says of a config, and that nothing is said of its right neighbour: said/DS22.jsonl.

A line holds an example and everything that the rules of that block of ten say of it; said.py prints a new one.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from said import in_json, says

from dsrun.config.edits import apply
from dsrun.config.rules import find_rules, run
from dsrun.config.rules.frame import example

FILES = sorted(Path(__file__).with_name("said").glob("DS*.jsonl"))
TOGETHER = (
    ("DS20", "DS21"),
    ("DS22", "DS23"),
    ("DS50", "DS52", "DS53", "DS54"),
    ("DS71", "DS72"),
    ("DS73", "DS74"),
)
"""Blocks of one subject: one is silent about a line of another's, unless it has the same line itself."""

TURNING_ON = {"DS014", "DS253"}
"""Rules whose unsafe fix turns on, or leaves on, what then lacks something else."""

IDLE = {"DS304"}
"""Rules that propose the value that is there, where another key is to blame: 1 below a first scale of 2^-1."""

LEAST = 1580
CASES = [
    (path.stem, number, json.loads(text))
    for path in FILES
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
]
NAMED = [pytest.param(block, line, id=f"{block}:{number}") for block, number, line in CASES]
SAYS = defaultdict(dict)
for block, _, line in CASES:
    SAYS[block][in_json(line["given"])] = line["says"]


@cache
def findings(given):
    """What all rules say of an example, which stands in for itself as JSON."""
    return run(*example(json.loads(given)))


def errors(found):
    return [(finding.rule, finding.path) for finding in found if finding.severity == "error"]


@pytest.mark.parametrize(("block", "line"), NAMED)
def test_said(block, line):
    given = in_json(line["given"])
    (blocks,) = [blocks for blocks in (*TOGETHER, (block,)) if block in blocks][:1]
    expected = [text for name in blocks for text in SAYS[name].get(given, [])]
    assert [text for name in blocks for text in says(findings(given), name)] == expected


def changes(case):
    return any(re.search(r" \| (un)?safe \w+", text) for text in case.values[1]["says"])


@pytest.mark.parametrize(("block", "line"), list(filter(changes, NAMED)))
def test_a_fix_settles_its_finding(block, line):
    """One by one, and all of a rule at once. In place of the error there may be one that it hid, but no more."""
    config, setting, _ = example(line["given"])
    found = run(config, setting)
    fixed = [finding for finding in found if finding.rule.startswith(block) and finding.fix]
    for finding in fixed:
        changed = apply(config, finding.fix.edits)
        after = run(changed, setting)
        still = (finding.rule, finding.path) in [(other.rule, other.path) for other in after]
        assert not still or (finding.rule in IDLE and changed == config)
        if finding.fix.safe:
            assert len(errors(after)) <= len(errors(found))
    for rule in {finding.rule for finding in fixed} - IDLE:
        mine = [finding for finding in found if finding.rule == rule]
        edits = [edit for finding in mine if finding.fix for edit in finding.fix.edits]
        after = run(apply(config, tuple(edits)), setting)
        left = {finding.path for finding in mine if not finding.fix}
        below = tuple(f"{finding.path}." for finding in mine)
        new = {finding.path for finding in after if finding.rule == rule} - left
        assert not [path for path in new if not path.startswith(below)]
        assert len(errors(after)) <= len(errors(found)) or rule in TURNING_ON


def test_every_rule_is_seen():
    seen = {re.search(r"\bDS\d+\b", text)[0] for _, _, line in CASES for text in line["says"]}
    assert seen == {rule.id for rule in find_rules()}


def test_lines_are_not_lost_or_doubled():
    assert len(CASES) >= LEAST
    assert len(CASES) == sum(map(len, SAYS.values()))

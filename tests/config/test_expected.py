"""Which findings the rules have on an example, and that its right neighbours have none: expected/DS22-DS23.jsonl.

expected.py prints a new line, and writes wording.txt.
"""

from __future__ import annotations

import pytest
from expected import FOLDER, WORDING, all_wording, as_json, cases, expectation
from running import each

from dsrun.config.rules import find_rules, run
from dsrun.config.rules.frame import example
from dsrun.config.validation.edits import apply

TURNING_ON = {"DS014", "DS253", "DS606"}
"""Rules whose unsafe fix turns on, or leaves on, what then lacks something else."""

IDLE = {"DS304"}
"""Rules that propose the value that is there, where another key is to blame: 1 below a first scale of 2^-1."""

LEAST = 1889
CASES = cases()
FIXED = [case for case in CASES if any("safe_fix" in row or "unsafe_fix" in row for row in case.expected)]


def by_name(case):
    return case.name


def errors(findings):
    return [(finding.rule, finding.path) for finding in findings if finding.severity == "error"]


def check_findings(case):
    assert [expectation(finding) for finding in case.findings()] == case.expected


def check_fixes(case):
    """One by one, and all of a rule at once. In place of the error there may be one that it hid, but no more."""
    config, setting, _ = example(case.given)
    findings = run(config, setting)
    fixed = [finding for finding in findings if finding.rule.startswith(case.blocks) and finding.fix]
    for finding in fixed:
        changed = apply(config, finding.fix.edits)
        after = run(changed, setting)
        still = (finding.rule, finding.path) in [(other.rule, other.path) for other in after]
        assert not still or (finding.rule in IDLE and changed == config)
        if finding.fix.safe:
            assert len(errors(after)) <= len(errors(findings))
    for rule in {finding.rule for finding in fixed} - IDLE:
        mine = [finding for finding in findings if finding.rule == rule]
        edits = [edit for finding in mine if finding.fix for edit in finding.fix.edits]
        after = run(apply(config, tuple(edits)), setting)
        left = {finding.path for finding in mine if not finding.fix}
        below = tuple(f"{finding.path}." for finding in mine)
        new = {finding.path for finding in after if finding.rule == rule} - left
        assert not [path for path in new if not path.startswith(below)]
        assert len(errors(after)) <= len(errors(findings)) or rule in TURNING_ON


@pytest.mark.parametrize("blocks", sorted({case.blocks for case in CASES}), ids="-".join)
def test_findings_and_fixes(blocks):
    """A file of lines, all rules of a subject."""
    each([case for case in CASES if case.blocks == blocks], check_findings, by_name)
    if fixed := [case for case in FIXED if case.blocks == blocks]:
        each(fixed, check_fixes, by_name)


def test_every_rule_is_expected_somewhere():
    assert {row["rule"] for case in CASES for row in case.expected} == {rule.id for rule in find_rules()}


def test_lines_are_not_lost_or_doubled():
    assert len(CASES) >= LEAST
    assert len(CASES) == len({(case.blocks, as_json(case.given)) for case in CASES})
    blocks = [block for path in FOLDER.glob("*.jsonl") for block in path.stem.split("-")]
    assert len(blocks) == len(set(blocks))


def test_wording():
    """Where a message was changed on purpose: `PYTHONPATH=. python tests/config/expected.py --wording`."""
    assert all_wording() == WORDING.read_text(encoding="utf-8").splitlines()

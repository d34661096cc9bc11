"""Examples and the findings expected of them: tests/config/expected/DS22-DS23.jsonl, a file for each subject.

    PYTHONPATH=. python tests/config/expected.py DS22 '{"zero_optimization": {"stage": 2, "cpu_offload_param": true}}'

prints the line for a new example, to be read and then added by hand.

    PYTHONPATH=. python tests/config/expected.py --wording

writes the messages and suggestions of all findings here and of the rules' own examples to wording.txt, each once, with
the cases that have it: the one
place where they are compared. Read its diff.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.config.rules import Finding, find_rules, run
from dsrun.config.rules.frame import example

FOLDER = Path(__file__).with_name("expected")
WORDING = Path(__file__).with_name("wording.txt")
AT = "  @ "


class Case(NamedTuple):
    """A line of a file: an example, what the rules of the file's blocks ("DS22", "DS23") find in it, other errors."""

    name: str
    blocks: tuple[str, ...]
    given: Mapping[str, Any]
    expected: list[dict[str, Any]]

    def findings(self) -> list[Finding]:
        return expected_of(self.given, self.blocks)

    def wording(self) -> set[str]:
        """Of the blocks' own findings."""
        return {wording(each) for each in self.findings() if each.rule.startswith(self.blocks)}


def cases() -> list[Case]:
    return [
        Case(f"{path.stem}:{number}", tuple(path.stem.split("-")), **json.loads(line))
        for path in sorted(FOLDER.glob("DS*.jsonl"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def findings(given: Mapping[str, Any]) -> list[Finding]:
    """What all rules find in an example."""
    return _findings(as_json(given))


@cache
def _findings(given: str) -> list[Finding]:
    return run(*example(json.loads(given)))


def expected_of(given: Mapping[str, Any], blocks: tuple[str, ...]) -> list[Finding]:
    """All that the rules of some blocks find in an example, and the errors of all others."""
    results = findings(given)
    return [each for each in results if each.severity == "error" or each.rule.startswith(blocks)]


def expectation(finding: Finding) -> dict[str, Any]:
    """A finding without its wording."""
    expected = {"rule": finding.rule, "severity": finding.severity, "path": finding.path}
    if finding.effect:
        expected["effect"] = finding.effect
    if finding.fix:
        edits = [list(edit if edit.value is not None else edit[:2]) for edit in finding.fix.edits]
        expected["safe_fix" if finding.fix.safe else "unsafe_fix"] = edits
    return expected


def wording(finding: Finding) -> str:
    return f"{finding.rule}  {finding.message} | {finding.suggestion}"


def all_wording() -> list[str]:
    """Every wording, sorted, with the cases and the rules' own examples that have it."""
    own = [
        Case(f"{rule.id}.bad{number}", (rule.id,), given, [])
        for rule in find_rules()
        for number, given in enumerate(rule.bad, 1)
    ]
    names: dict[str, list[str]] = defaultdict(list)
    for case in [*own, *cases()]:
        for text in case.wording():
            names[text].append(case.name)
    return [f"{text}{AT}{' '.join(cases)}" for text, cases in sorted(names.items())]


def recorded() -> dict[str, set[str]]:
    """The name of a case -> its wordings in wording.txt."""
    wordings: dict[str, set[str]] = defaultdict(set)
    for text, _, names in (line.rpartition(AT) for line in WORDING.read_text(encoding="utf-8").splitlines()):
        for name in names.split():
            wordings[name].add(text)
    return wordings


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def line(block: str, given: Mapping[str, Any]) -> str:
    """The line for a new example of a block. A block without a file is a new file."""
    (blocks,) = [case.blocks for case in cases() if block in case.blocks][:1] or [(block,)]
    return as_json({"given": given, "expected": list(map(expectation, expected_of(given, blocks)))})


if __name__ == "__main__":
    if sys.argv[1:] == ["--wording"]:
        WORDING.write_text("".join(f"{text}\n" for text in all_wording()), encoding="utf-8")
    else:
        print(line(sys.argv[1], json.loads(sys.argv[2])))

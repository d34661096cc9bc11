"""What the rules say of an example, as one line of tests/config/said/DS22.jsonl.

    PYTHONPATH=. python tests/config/said.py DS22 '{"zero_optimization": {"stage": 2, "cpu_offload_param": true}}'

prints the line for a new case: to be read, and added by hand where it says what DeepSpeed does. Nothing is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from dsrun.config.edits import Edit
from dsrun.config.rules import Finding, run
from dsrun.config.rules.frame import example


def in_words(finding: Finding) -> str:
    """severity effect rule path: message | suggestion | safe replace path value, ..."""
    head = " ".join(filter(None, (finding.severity, finding.effect, finding.rule, finding.path)))
    parts = [f"{head}: {finding.message}", finding.suggestion]
    if finding.fix:
        edits = (" ".join(filter(None, (edit.op, edit.path, _value(edit)))) for edit in finding.fix.edits)
        parts.append(f"{'safe' if finding.fix.safe else 'unsafe'} {', '.join(edits)}")
    return " | ".join(parts)


def _value(edit: Edit) -> str:
    return in_json(edit.value) if edit.value is not None or edit.op in ("add", "replace") else ""


def says(found: Iterable[Finding], block: str) -> list[str]:
    """What the rules of a block (DS22) say, in order."""
    return [in_words(finding) for finding in found if finding.rule.startswith(block)]


def in_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def line(block: str, given: Mapping[str, Any]) -> str:
    return in_json({"given": given, "says": says(run(*example(given)), block)})


if __name__ == "__main__":
    print(line(sys.argv[1], json.loads(sys.argv[2])))

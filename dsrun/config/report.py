"""Findings as text, JSON, GitHub's annotations or SARIF 2.1.0: values in, text out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dsrun import __version__
from dsrun.config import document, rules
from dsrun.config.validate import Located, Verdict

LEVELS = {"error": "error", "warning": "warning", "note": "note"}
GITHUB = {"error": "error", "warning": "warning", "note": "notice"}
LONGEST = 2000
"""Characters of a path, message or suggestion that are shown to people; machines get them whole."""
UNSEEN = re.compile(r"[^\x20-\x7e]")


def text(verdicts: Sequence[Verdict]) -> str:
    """Each finding on its line, then the lines it stands in and what would be right."""
    return "".join(f"{_block(verdict, located)}\n" for verdict, located in _each(verdicts))


def as_json(verdicts: Sequence[Verdict]) -> str:
    """A list of objects: file, line, column, path, rule, severity, message, suggestion, effect, fix.

    In ASCII, which any stream takes, and which holds half surrogates too.
    """
    rows = [row(verdict, located) for verdict, located in _each(verdicts)]
    return json.dumps(rows, indent=2) + "\n"


def github(verdicts: Sequence[Verdict]) -> str:
    """Workflow commands, which GitHub shows beside the lines of a pull request."""
    lines = []
    for verdict, located in _each(verdicts):
        finding, place = located.finding, located.place
        options = {"file": verdict.name, "line": place.line, "col": place.column, "title": finding.rule}
        given = ",".join(f"{name}={_escaped(str(value), ',:')}" for name, value in options.items())
        message = _escaped(
            f"{_plain(_shown(located))}: {_plain(finding.message)}\n{_plain(finding.suggestion)}"
        )
        lines.append(f"::{GITHUB[finding.severity]} {given}::{message}\n")
    return "".join(lines)


def sarif(verdicts: Sequence[Verdict]) -> str:
    """Static Analysis Results Interchange Format 2.1.0, for code scanning."""
    known = rules.find_rules()
    index = {rule.id: number for number, rule in enumerate(known)}
    results = [_result(verdict, located, index[located.finding.rule]) for verdict, located in _each(verdicts)]
    driver = {"name": "dsrun", "version": __version__, "rules": [_described(rule) for rule in known]}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


FORMATS: dict[str, Callable[[Sequence[Verdict]], str]] = {
    "text": text,
    "json": as_json,
    "github": github,
    "sarif": sarif,
}


def row(verdict: Verdict, located: Located) -> dict[str, Any]:
    """One finding for machines. fix: "safe", "unsafe" or null."""
    finding = located.finding
    return {
        "file": verdict.name,
        "line": located.place.line,
        "column": located.place.column,
        "path": _shown(located),
        "rule": finding.rule,
        "severity": finding.severity,
        "message": finding.message,
        "suggestion": finding.suggestion,
        "effect": finding.effect or None,
        "fix": None if finding.fix is None else "safe" if finding.fix.safe else "unsafe",
    }


def summary(verdicts: Sequence[Verdict]) -> str:
    """`2 errors and 1 warning in 3 files`."""
    counts = {name: sum(verdict.count(name) for verdict in verdicts) for name in rules.SEVERITIES}
    said = [f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items() if count]
    files = "1 file" if len(verdicts) == 1 else f"{len(verdicts)} files"
    return f"{_joined(said) if said else 'nothing to say'} in {files}"


def _joined(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _each(verdicts: Iterable[Verdict]) -> Iterator[tuple[Verdict, Located]]:
    return ((verdict, located) for verdict in verdicts for located in verdict.findings)


def _shown(located: Located) -> str:
    return f"$.{located.path}" if located.path else "$"


def _plain(value: str) -> str:
    """A text as a terminal may have it: on one line, without control codes or half surrogates, not endless."""
    value = value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
    return UNSEEN.sub(_seen, value)


def _seen(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else found[0].encode("unicode_escape").decode("ascii")


def _block(verdict: Verdict, located: Located) -> str:
    finding, place = located.finding, located.place
    head = f"{_plain(verdict.name)}:{place.line}:{place.column}  {_plain(_shown(located))}  {finding.rule}  "
    lines = [f"{head}{finding.severity}: {_plain(finding.message)}"]
    if verdict.document is not None:
        lines += [f"  {line}" for line in document.excerpt(verdict.document, place, 0).splitlines()]
    fix = "" if finding.fix is None else "  [--fix]" if finding.fix.safe else "  [--unsafe-fixes]"
    return "\n".join([*lines, f"    {_plain(finding.suggestion)}{fix}"]) + "\n"


def _escaped(value: str, also: str = "") -> str:
    """As GitHub wants it: percent-encoded line ends, and in options commas and colons too."""
    return "".join(f"%{ord(char):02X}" if char in "%\r\n" + also else char for char in value)


def _described(rule: rules.Rule) -> dict[str, Any]:
    source = " ".join(rule.source.split())
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.about},
        "fullDescription": {"text": source},
        "help": {"text": f"{source} More: dsrun explain {rule.id}"},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
    }


def _result(verdict: Verdict, located: Located, rule_index: int) -> dict[str, Any]:
    finding = located.finding
    what = {"artifactLocation": {"uri": _uri(verdict.name)}, "region": _region(verdict, located)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": LEVELS[finding.severity],
        "message": {
            "text": f"{_plain(_shown(located))}: {_plain(finding.message)}. {_plain(finding.suggestion)}"
        },
        "locations": [{"physicalLocation": what}],
    }


def _region(verdict: Verdict, located: Located) -> dict[str, int]:
    """The place, no further than to the end of its first line."""
    place = located.place
    width = place.end - place.start
    if (
        verdict.document is not None
        and (line := verdict.document.text.find("\n", place.start, place.end)) >= 0
    ):
        width = line - place.start
    return {"startLine": place.line, "startColumn": place.column, "endColumn": place.column + max(1, width)}


def _uri(name: str) -> str:
    """The name as a URI; the bytes of the file system, whatever they mean."""
    import os
    from urllib.parse import quote

    return ("file://" if name.startswith("/") else "") + quote(os.fsencode(name))

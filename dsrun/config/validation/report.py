"""Findings as text, JSON, GitHub's annotations or SARIF 2.1.0: values in, text out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dsrun import __version__
from dsrun.config import rules
from dsrun.config.reading.excerpt import excerpt
from dsrun.config.rules import Finding
from dsrun.config.validation.validate import LocatedFinding, ValidationResult
from dsrun.json_outputs import versioned
from dsrun.words import counted, listed, printable

LEVELS = {"error": "error", "warning": "warning", "note": "note"}
GITHUB = {"error": "error", "warning": "warning", "note": "notice"}
MOST_PLACES = 5
"""Other places of a note that are listed, at most."""
LONGEST = 2000
"""Characters of a path, message or suggestion that are shown to people, at most; machines get them whole."""


def text(results: Sequence[ValidationResult]) -> str:
    """Each finding on its line, then the line it stands in and what would be right.

    Findings that say the same of several keys of a section are shown once, and so is a note that several files get.
    """
    groups: dict[tuple[object, ...], list[tuple[ValidationResult, LocatedFinding]]] = {}
    for result, located in _each(results):
        groups.setdefault(_shared(result, located), []).append((result, located))
    return "".join(f"{_block(group)}\n" for group in groups.values())


def _shared(result: ValidationResult, located: LocatedFinding) -> tuple[object, ...]:
    """The facts that findings share which are shown together."""
    finding = located.finding
    if finding.severity == "note":
        return finding.rule, located.path
    safe = finding.fix.safe if finding.fix else None
    section, dot, _ = located.path.rpartition(".")
    section = f"{section}{dot}" if located.path else str(located.place)
    return result.name, finding.rule, finding.severity, section, finding.message, finding.suggestion, safe


def as_json(results: Sequence[ValidationResult]) -> str:
    """An object with all findings: file, line, column, path, rule, severity, message, suggestion, effect, fix.

    In ASCII, which any stream takes, and which holds half surrogates too.
    """
    rows = [row(result, located) for result, located in _each(results)]
    return json.dumps(versioned("validate", {"findings": rows}), indent=2) + "\n"


def github(results: Sequence[ValidationResult]) -> str:
    """Workflow commands, which GitHub shows beside the lines of a pull request."""
    lines = []
    for result, located in _each(results):
        finding, place = located.finding, located.place
        options = {"file": result.name, "line": place.line, "col": place.column, "title": finding.rule}
        given = ",".join(f"{name}={_escaped(str(value), ',:')}" for name, value in options.items())
        message = _escaped(f"{_plain(_message(located))}\n{_plain(finding.suggestion)}")
        lines.append(f"::{GITHUB[finding.severity]} {given}::{message}\n")
    return "".join(lines)


def sarif(results: Sequence[ValidationResult]) -> str:
    """Static Analysis Results Interchange Format 2.1.0, for code scanning."""
    known = rules.find_rules()
    index = {rule.id: number for number, rule in enumerate(known)}
    rows = [_result(result, located, index[located.finding.rule]) for result, located in _each(results)]
    driver = {"name": "dsrun", "version": __version__, "rules": [_described(rule) for rule in known]}
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": rows}],
    }
    return json.dumps(log, indent=2) + "\n"


FORMATS: dict[str, Callable[[Sequence[ValidationResult]], str]] = {
    "text": text,
    "json": as_json,
    "github": github,
    "sarif": sarif,
}


def row(result: ValidationResult, located: LocatedFinding) -> dict[str, Any]:
    """One finding for machines. fix: "safe", "unsafe" or null."""
    finding = located.finding
    return {
        "file": result.name,
        "line": located.place.line,
        "column": located.place.column,
        "path": _shown(located),
        "rule": finding.rule,
        "severity": finding.severity,
        "message": _message(located),
        "suggestion": finding.suggestion,
        "effect": finding.effect or None,
        "fix": None if finding.fix is None else "safe" if finding.fix.safe else "unsafe",
    }


def summary(results: Sequence[ValidationResult]) -> str:
    """`2 errors and 1 warning in 3 files`."""
    counts = {name: sum(result.count(name) for result in results) for name in rules.SEVERITIES}
    counts_in_words = [counted(count, name) for name, count in counts.items() if count] or ["no findings"]
    return f"{listed(counts_in_words)} in {counted(len({result.name for result in results}), 'file')}"


def _each(results: Iterable[ValidationResult]) -> Iterator[tuple[ValidationResult, LocatedFinding]]:
    return ((result, located) for result in results for located in result.findings)


def _shown(located: LocatedFinding) -> str:
    return f"$.{located.path}" if located.path else "$"


def _message(located: LocatedFinding) -> str:
    """The message with the key that it is about, so that it can stand alone."""
    return f"{located.path}: {located.finding.message}" if located.path else located.finding.message


def _plain(value: str) -> str:
    """A text as a terminal may have it: on one line, without control codes or half surrogates, not endless."""
    return printable(value, LONGEST)


def _block(group: Sequence[tuple[ValidationResult, LocatedFinding]]) -> str:
    """The text of a finding at one or more places."""
    (result, located), *others = group
    finding = located.finding
    keys = dict.fromkeys(other.path.rpartition(".")[2] for _, other in others if other.path != located.path)
    shown = _plain(", ".join([_shown(located), *keys]))
    lines = [
        f"{_at(result, located)}  {shown}  {finding.rule}  {finding.severity}: {_plain(finding.message)}"
    ]
    if result.document is not None:
        lines += [f"  {line}" for line in excerpt(result.document.text, located.place).splitlines()]
    lines.append(f"    {_plain(finding.suggestion)}{_option(finding)}")
    elsewhere = [_at(other, place) for other, place in others if other.name != result.name]
    if elsewhere:
        more = f" and {len(elsewhere) - MOST_PLACES} more" if len(elsewhere) > MOST_PLACES else ""
        lines.append(f"    Also at {', '.join(elsewhere[:MOST_PLACES])}{more}.")
    return "\n".join(lines) + "\n"


def _at(result: ValidationResult, located: LocatedFinding) -> str:
    return f"{_plain(result.name)}:{located.place.line}:{located.place.column}"


def _option(finding: Finding) -> str:
    """The option that applies its fix."""
    if finding.fix is None:
        return ""
    selected = f" --select {finding.rule}" if finding.severity == "note" else ""
    return f"  [--fix{selected}]" if finding.fix.safe else f"  [--unsafe-fixes{selected}]"


def _escaped(value: str, also: str = "") -> str:
    """A value as GitHub wants it: percent-encoded line ends, and in options commas and colons, too."""
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


def _result(result: ValidationResult, located: LocatedFinding, rule_index: int) -> dict[str, Any]:
    finding = located.finding
    physical = {"artifactLocation": {"uri": _uri(result.name)}, "region": _region(result, located)}
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{_plain(_message(located))}. {_plain(finding.suggestion)}"},
        "locations": [{"physicalLocation": physical}],
    }


def _region(result: ValidationResult, located: LocatedFinding) -> dict[str, int]:
    """The place, no further than to the end of its first line."""
    place = located.place
    width = place.end - place.start
    if result.document is not None and (line := result.document.text.find("\n", place.start, place.end)) >= 0:
        width = line - place.start
    return {"startLine": place.line, "startColumn": place.column, "endColumn": place.column + max(1, width)}


def _uri(name: str) -> str:
    """The name as a URI; the bytes of the file system, whatever they mean."""
    import os
    from urllib.parse import quote

    return ("file://" if name.startswith("/") else "") + quote(os.fsencode(name))

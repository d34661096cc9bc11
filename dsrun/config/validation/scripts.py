"""`dsrun validate` of a script: the configs in it, and names that its packages' versions don't have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dsrun import packages
from dsrun.config import rules
from dsrun.config.reading import scripts
from dsrun.config.reading.document import Span
from dsrun.config.validation import validate as validation
from dsrun.config.validation.sources import TELLING, ConfigText
from dsrun.config.validation.validate import LocatedFinding, RuleSelection, ValidationResult
from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.config.rules import Setting

TEMPLATES = "DS018"
"""The rule of placeholders: here they are the script's own variables."""


def validate(
    source: ConfigText, setting: Setting, selection: RuleSelection, *, target: str | None = None
) -> list[ValidationResult]:
    """The results on each config in a script, at the script's lines, and of Python the one on its names.

    Raises DsrunError where a shell's script holds no config.
    """
    text = source.data.decode("utf-8", "replace")
    selection = replace(selection, ignore=(*selection.ignore, TEMPLATES))
    try:
        configs = _configs(source, text)
    except DsrunError as error:
        return [validation.unread(error, source.name, setting)]
    found = [
        _unfixed(
            validation.validate(config.encode(), source.name, setting, target=target, selection=selection)
        )
        for config in configs
    ]
    if source.is_python:
        found.append(_names(source.name, text, setting, selection))
    elif not found:
        hint = f"A here-document with one of {', '.join(sorted(TELLING))} is judged; or name the config's own file."
        raise DsrunError("holds no DeepSpeed config", where=source.name, hint=hint)
    return found


def _unfixed(result: ValidationResult) -> ValidationResult:
    """A result without fixes: they are made for JSON, and would be written over the script."""
    findings = (replace(located, finding=replace(located.finding, fix=None)) for located in result.findings)
    return replace(result, findings=tuple(findings))


def _configs(source: ConfigText, text: str) -> list[str]:
    read = scripts.configs_of_python if source.is_python else scripts.configs_of_shell
    return list(read(text, TELLING))


def _names(name: str, text: str, setting: Setting, selection: RuleSelection) -> ValidationResult:
    """What the named versions, or else the installed ones, lack of a script's names."""
    versions = {**packages.installed(), **(setting.versions or {})}
    findings = rules.run({}, replace(setting, script=text, versions=versions))
    chosen = [finding for finding in findings if selection.takes(finding.rule)]
    return ValidationResult(
        name,
        setting.target,
        tuple(_located(finding for finding in chosen if selection.shows(finding))),
        hidden=sum(not selection.shows(finding) for finding in chosen),
    )


def _located(findings: Iterable[rules.Finding]) -> Iterable[LocatedFinding]:
    return (LocatedFinding(finding, "", Span(0, 0, finding.line, 1)) for finding in findings)

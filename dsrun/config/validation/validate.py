"""From the text of a deepspeed.json to findings with their places: the core of `dsrun validate`.

Pure: text in, findings out. sources.py chooses the files, report.py shows the findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dsrun.config import rules, tree
from dsrun.config.reading.document import Document, Span
from dsrun.config.rules import Finding, Setting
from dsrun.config.rules.file.text import ignored, unreadable
from dsrun.config.rules.frame import REFUSED, Fix, read_config
from dsrun.config.schemas import schema
from dsrun.config.schemas.violations import unfilled
from dsrun.config.validation import edits
from dsrun.errors import DsrunError, Problem

START = Span(0, 0, 1, 1)
ROUNDS = 8
"""Fixes are applied again as long as they change something, at most as often."""
SWALLOWING = ("python-literal", "non-finite", "bad-number", "unquoted-text")
"""Kinds of issues after which Hjson reads the rest of the line as a string."""


@dataclass(frozen=True)
class RuleSelection:
    """The findings that count: of which rules, and how severe at least."""

    select: tuple[str, ...] = ()
    """Ids or their beginnings ("DS2" is every rule of ZeRO); none is all."""
    ignore: tuple[str, ...] = ()
    level: str = "note"
    """The least severity that counts. A rule that is selected by its whole id counts at any."""

    def takes(self, rule_id: str) -> bool:
        return (not self.select or rule_id.startswith(self.select)) and not rule_id.startswith(self.ignore)

    def shows(self, finding: Finding) -> bool:
        """Whether a finding of a rule that counts is severe enough."""
        severe = rules.SEVERITIES.index(finding.severity) <= rules.SEVERITIES.index(self.level)
        return severe or finding.rule in self.select

    def fixes(self, finding: Finding) -> bool:
        """Whether its fix may be applied: a note's only where the rule is selected by its whole id."""
        return finding.severity != "note" or finding.rule in self.select


@dataclass(frozen=True)
class LocatedFinding:
    """A finding and its place in the file."""

    finding: Finding
    path: str
    """The path as the file spells it: with an alias, or the keys of a YAML."""
    place: Span
    """The text to underline."""


@dataclass(frozen=True)
class ValidationResult:
    """The findings in one file."""

    name: str
    target: str
    """The reader that was assumed: deepspeed, hf, accelerate or lightning."""
    findings: tuple[LocatedFinding, ...]
    """The findings in the order of the file."""
    document: Document | None = None
    """None where the file can't be read."""
    hidden: int = 0
    """The number of findings that are too little severe to be shown."""

    def count(self, severity: str) -> int:
        return sum(located.finding.severity == severity for located in self.findings)


def validate(
    data: bytes,
    name: str,
    setting: Setting,
    *,
    target: str | None = None,
    selection: RuleSelection | None = None,
) -> ValidationResult:
    """Check a config's text. target: its reader; None finds it out from the text.

    Raises DsrunError only where the file is not to blame, as for an unknown version.
    """
    selection = selection or RuleSelection()
    try:
        read, setting = _read(data, name, setting, target)
    except DsrunError as error:
        return unread(error, name, replace(setting, target=target or setting.target))
    return validate_document(read, setting, selection)


def validate_document(
    read: Document,
    setting: Setting,
    selection: RuleSelection,
    in_file: Callable[[str], str] = lambda path: path,
) -> ValidationResult:
    """The result on a document. in_file: turns a path of the config into the file's path."""
    unwanted = set(ignored(read.value))
    findings = rules.run(read.value, setting, read.issues)
    chosen = [
        finding for finding in findings if selection.takes(finding.rule) and finding.rule not in unwanted
    ]
    shown = [finding for finding in chosen if selection.shows(finding)]
    locator = _Locator(read, schema.load(setting.version), in_file)
    located = sorted((locator.of(finding) for finding in shown), key=_order)
    return ValidationResult(read.name, setting.target, tuple(located), read, len(chosen) - len(shown))


def _read(data: bytes, name: str, setting: Setting, target: str | None) -> tuple[Document, Setting]:
    """The document, and the setting with its reader.

    Read as JSON first, which shows best what was meant; as Hjson where DeepSpeed is the reader.
    """
    read = read_config(data, name, "json")
    setting = replace(setting, target=target or reader(read.value, setting))
    if setting.dialect == "hjson" and read.issues:
        read = _as_hjson(data, read)
    return read, setting


def _as_hjson(data: bytes, lenient: Document) -> Document:
    """The document as DeepSpeed reads it. lenient: the same read as JSON.

    A bare True swallows the rest of its line, closing braces too: then the text can't be read, far below the cause.
    """
    try:
        return read_config(data, lenient.name, "hjson")
    except DsrunError as error:
        causes = [odd for odd in lenient.issues if odd.kind in SWALLOWING]
        if causes and all(unfilled(tree.get(lenient.value, odd.path)) for odd in causes):
            return lenient  # a template
        problems = [
            Problem(
                f"{odd.message}: DeepSpeed reads the rest of the line as a string",
                f"{lenient.name}:{odd.place.line}:{odd.place.column}",
                "Write true, false, null, a plain number, or a string in double quotes.",
            )
            for odd in causes
        ]
        raise DsrunError([*problems, *error.problems]) from None


def reader(config: Mapping[str, Any], setting: Setting) -> str:
    """The reader that a config is for: HF Trainer where there are TrainingArguments, or an "auto" that it fills in."""
    known = schema.load(setting.version)
    autos = any(value == schema.AUTO and known.is_auto(path) for path, value in tree.leaves(config))
    return schema.HF if autos or setting.trainer is not None else setting.target


def unread(error: DsrunError, name: str, setting: Setting) -> ValidationResult:
    """The result on a file that can't be read."""
    issues = tuple(unreadable(problem, name) for problem in error.problems)
    findings = rules.run({}, setting, issues)
    located = (
        LocatedFinding(finding, "", issue.place) for finding, issue in zip(findings, issues, strict=True)
    )
    return ValidationResult(name, setting.target, tuple(located))


def _order(located: LocatedFinding) -> tuple[int, int, int, str]:
    severity = rules.SEVERITIES.index(located.finding.severity)
    return located.place.line, located.place.column, severity, located.finding.rule


class _Locator:
    """The places of findings in a document. in_file: turns a path of the config into the file's path."""

    def __init__(self, read: Document, known: schema.Schema, in_file: Callable[[str], str]) -> None:
        self.read = read
        self.known = known
        self.in_file = in_file
        self.issues = list(read.issues)

    @cached_property
    def spelled(self) -> dict[str, str]:
        """Paths as rules name them (aliases resolved) -> as the file spells them."""
        return {self.known.canonical(path): path for path in self.read.entries if path}

    def of(self, finding: Finding) -> LocatedFinding:
        path = self.in_file(finding.path)
        path = path if path in self.read.entries else self.spelled.get(path, path)
        return LocatedFinding(finding, path, self.of_text(finding) or self.key(path))

    def key(self, path: str) -> Span:
        """The key at a path; one that is missing is shown at the section that lacks it."""
        while path:
            if entry := self.read.entries.get(path):
                return entry.key or entry.value
            path = path.rpartition(".")[0]
        return START

    def of_text(self, finding: Finding) -> Span | None:
        """The place of the syntax issue that a finding about the text (DS02x) begins with; each is used once."""
        if finding.rule.startswith("DS02"):
            for index, odd in enumerate(self.issues):
                if odd.path == finding.path and finding.message.startswith(odd.message):
                    return self.issues.pop(index).place
        return None


def apply_fixes(
    result: ValidationResult, setting: Setting, selection: RuleSelection, *, unsafe: bool
) -> ValidationResult:
    """The result after its fixes: `document` holds the new text.

    They are applied in rounds, as one fix may show the next. Unsafe ones wait until nothing safe is left: they may no
    longer be needed. A section that was off or misspelt may have slips of its own, at which DeepSpeed stops once it is
    read. Where it would refuse more in the end than before, all is done again with each fix by itself, and those that
    add a refusal are left out.
    """
    setting = replace(setting, target=result.target)
    fixed = _fixed(result, setting, selection, unsafe=unsafe, one_by_one=False)
    if _refusals(fixed.document, setting) > _refusals(result.document, setting):
        fixed = _fixed(result, setting, selection, unsafe=unsafe, one_by_one=True)
    return fixed


def _fixed(
    result: ValidationResult, setting: Setting, selection: RuleSelection, *, unsafe: bool, one_by_one: bool
) -> ValidationResult:
    for _ in range(ROUNDS):
        read = result.document
        if read is None:
            break
        findings = [located.finding for located in result.findings if selection.fixes(located.finding)]
        fixes = [finding.fix for finding in findings if finding.fix]
        groups = [[fix for fix in fixes if fix.safe], [fix for fix in fixes if unsafe and not fix.safe]]
        # A generator: unsafe fixes are tried only where the safe ones have changed nothing.
        texts = (
            _one_by_one(read, group, setting) if one_by_one else edits.fixed(read, group, setting.dialect)
            for group in groups
        )
        after = next((after for after in texts if after.text != read.text), None)
        if after is None:
            break
        result = validate_document(after, setting, selection)
    return result


def _one_by_one(read: Document, fixes: Iterable[Fix], setting: Setting) -> Document:
    for fix in fixes:
        after = edits.fixed(read, [fix], setting.dialect)
        if _refusals(after, setting) <= _refusals(read, setting):
            read = after
    return read


def _refusals(read: Document | None, setting: Setting) -> int:
    """How many errors DeepSpeed stops at while it reads a config, whichever rules were selected."""
    found = rules.run(read.value, setting, read.issues) if read else []
    return sum(finding.effect == REFUSED for finding in found)


def count_fixes(results: Iterable[ValidationResult], selection: RuleSelection) -> tuple[int, int]:
    """How many findings have a safe fix that may be applied, and how many an unsafe one."""
    findings = [located.finding for result in results for located in result.findings]
    fixes = [finding.fix for finding in findings if selection.fixes(finding)]
    return sum(bool(fix and fix.safe) for fix in fixes), sum(bool(fix and not fix.safe) for fix in fixes)

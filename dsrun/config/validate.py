"""From the text of a deepspeed.json to findings with their places: what `dsrun validate` is made of.

Pure: text in, findings out. Which files, and how findings are shown, is for others (sources.py, report.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dsrun.config import document, rules, schema, tree
from dsrun.config.document import Document, Place
from dsrun.config.edits import Fix
from dsrun.config.rules import Finding, Setting
from dsrun.config.rules.frame import read_config
from dsrun.config.rules.text import ignored, unreadable
from dsrun.errors import DsrunError, Problem

START = Place(0, 0, 1, 1)
ROUNDS = 8
SWALLOWING = ("python-literal", "non-finite", "bad-number", "unquoted-text")
FIXING = 300_000
"""Characters that are read again for fixes, as each of them reads the whole text: what is left is for another --fix."""


@dataclass(frozen=True)
class Choice:
    """Which rules count: ids or their beginnings ("DS2" is every rule of ZeRO); nothing selected is all."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def takes(self, rule_id: str) -> bool:
        return (not self.select or rule_id.startswith(self.select)) and not rule_id.startswith(self.ignore)


@dataclass(frozen=True)
class Located:
    """A finding and where it stands: `place` is what to underline, `path` as the file spells it."""

    finding: Finding
    path: str
    place: Place


@dataclass(frozen=True)
class Verdict:
    """What is said of one file. target: who was taken to read it; document: None where it can't be read."""

    name: str
    target: str
    findings: tuple[Located, ...]
    document: Document | None = None

    def count(self, severity: str) -> int:
        return sum(located.finding.severity == severity for located in self.findings)


def validate(
    data: bytes, name: str, setting: Setting, *, target: str | None = None, choice: Choice | None = None
) -> Verdict:
    """Judge a config's text. target: who reads it; None finds it out from the text.

    Raises DsrunError only for what is no fault of the file, as an unknown version.
    """
    choice = choice or Choice()
    try:
        read, setting = _read(data, name, setting, target)
    except DsrunError as error:
        return Verdict(name, target or setting.target, tuple(_unreadable(error, name, setting)))
    return judge(read, setting, choice)


def judge(
    read: Document, setting: Setting, choice: Choice, places: Mapping[str, str] | None = None
) -> Verdict:
    """The verdict on a document. places: for each path of the config, the path in the file where they differ."""
    unwanted = set(ignored(read.value))
    found = rules.run(read.value, setting, read.oddities)
    chosen = [finding for finding in found if choice.takes(finding.rule) and finding.rule not in unwanted]
    locate = _Places(read, schema.load(setting.version), places or {})
    located = sorted((locate.of(finding) for finding in chosen), key=_order)
    return Verdict(read.name, setting.target, tuple(located), read)


def _read(data: bytes, name: str, setting: Setting, target: str | None) -> tuple[Document, Setting]:
    """The document, and the setting with whoever reads it.

    Read as JSON first, which takes the most of what was meant; as Hjson where DeepSpeed is the reader.
    """
    read = read_config(data, name, "json")
    setting = replace(setting, target=target or reader(read.value, setting))
    if setting.dialect == "hjson" and read.oddities:
        read = _as_hjson(data, read)
    return read, setting


def _as_hjson(data: bytes, lenient: Document) -> Document:
    """The document as DeepSpeed reads it. lenient: as it was surely meant.

    A bare True swallows the rest of its line, closing braces too: then the text can't be read, far below the slip.
    """
    try:
        return read_config(data, lenient.name, "hjson")
    except DsrunError as error:
        slips = [odd for odd in lenient.oddities if odd.kind in SWALLOWING]
        problems = [
            Problem(
                f"{odd.message}: DeepSpeed takes the rest of the line for a text",
                f"{lenient.name}:{odd.place.line}:{odd.place.column}",
                "Write it as JSON has it: true, false, null, a plain number, or a text in double quotes.",
            )
            for odd in slips
        ]
        raise DsrunError([*problems, *error.problems]) from None


def reader(config: Mapping[str, Any], setting: Setting) -> str:
    """Who a config is for: HF Trainer where there are TrainingArguments, or an "auto" that it fills in."""
    known = schema.load(setting.version)
    autos = any(value == schema.AUTO and known.is_auto(path) for path, value in tree.leaves(config))
    return schema.HF if autos or setting.trainer is not None else setting.target


def _unreadable(error: DsrunError, name: str, setting: Setting) -> Iterator[Located]:
    oddities = tuple(unreadable(problem, name) for problem in error.problems)
    for finding, oddity in zip(rules.run({}, setting, oddities), oddities, strict=True):
        yield Located(finding, "", oddity.place)


def _order(located: Located) -> tuple[int, int, int, str]:
    severity = rules.SEVERITIES.index(located.finding.severity)
    return located.place.line, located.place.column, severity, located.finding.rule


class _Places:
    """Where findings stand in a document. places: for paths of the config, the paths in the file where they differ."""

    def __init__(self, read: Document, known: schema.Schema, places: Mapping[str, str]) -> None:
        self.read = read
        self.known = known
        self.places = places
        self.oddities = list(read.oddities)

    @cached_property
    def spelled(self) -> dict[str, str]:
        """The path as rules name it (aliases resolved) -> as the file spells it."""
        return {self.known.canonical(path): path for path in self.read.entries if path}

    def of(self, finding: Finding) -> Located:
        path = self.places.get(finding.path, finding.path)
        path = path if path in self.read.entries else self.spelled.get(path, path)
        return Located(finding, path, self.oddity(finding) or self.key(path))

    def key(self, path: str) -> Place:
        """The key at a path; one that is missing is shown at the section that lacks it."""
        while path:
            if entry := self.read.entries.get(path):
                return entry.key or entry.value
            path = path.rpartition(".")[0]
        return START

    def oddity(self, finding: Finding) -> Place | None:
        """Where the slip stands that a finding about the text itself (DS02x) begins with; each is taken once."""
        if finding.rule.startswith("DS02"):
            for index, odd in enumerate(self.oddities):
                if odd.path == finding.path and finding.message.startswith(odd.message):
                    return self.oddities.pop(index).place
        return None


def mended(verdict: Verdict, setting: Setting, choice: Choice, *, unsafe: bool) -> Verdict:
    """The verdict after its fixes: `document` holds the new text.

    Rounds, as one fix may show the next. Unsafe ones wait until nothing safe is left: they may no longer be needed.
    """
    from dsrun.config import repair

    setting = replace(setting, target=verdict.target)
    tried: list[Fix] = []  # Not a set: values may be lists.
    room = FIXING // max(1, len(verdict.document.text)) if verdict.document else 0
    for _ in range(ROUNDS):
        found = [located.finding.fix for located in verdict.findings]
        fixes = [fix for fix in found if fix and fix not in tried]
        fixes = [fix for fix in fixes if fix.safe] or (fixes if unsafe else [])
        if not fixes or not room or verdict.document is None:
            break
        read = verdict.document
        if texts := [fix for fix in fixes if fix.edits[0].op == "plain"]:
            verdict = _as_json(verdict, read, setting, choice, drop_comments=not texts[0].safe)
            tried += texts
            continue
        asked = fixes[: min(repair.MAX_FIXES, room)]
        room -= len(asked)
        result = repair.repair(read, asked, setting.dialect)
        if not result.done:
            tried += result.left  # Otherwise they may be possible in the next round.
            continue
        verdict = judge(document.read(result.text, verdict.name, setting.dialect), setting, choice)
    return verdict


def _as_json(
    verdict: Verdict, read: Document, setting: Setting, choice: Choice, *, drop_comments: bool
) -> Verdict:
    """The verdict on the text as plain JSON; the same where it can't be written so."""
    from dsrun.config import repair

    plain = repair.plain_json(read, drop_comments=drop_comments)
    if plain is None:
        return verdict
    return judge(document.read(plain, verdict.name, setting.dialect), setting, choice)


def fixable(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """How many findings have a safe fix, and how many an unsafe one."""
    fixes = [located.finding.fix for verdict in verdicts for located in verdict.findings]
    return sum(bool(fix and fix.safe) for fix in fixes), sum(bool(fix and not fix.safe) for fix in fixes)

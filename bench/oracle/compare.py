"""dsrun's findings in a config beside DeepSpeed's behaviour: where the two disagree, and in how small a config."""

from __future__ import annotations

import copy
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from dsrun.config import tree
from dsrun.config.rules import Finding, Setting, run
from dsrun.config.rules.frame import DIFFERS, FAILS
from oracle import reading, training
from oracle.draw import SCHEMA, Case, Config, places, take
from oracle.known import KNOWN
from oracle.reading import ACCEPTED, REFUSED, Outcome

MISSED, FALSE_ALARM, CRASHED = "missed", "false alarm", "crashed"
SILENT = "nothing"
"""The verdict where dsrun finds no error."""

DENIED = {ACCEPTED: {REFUSED}, "trained": {REFUSED, FAILS}}
"""Outcome -> the effects that an error can't have if it is right."""
STOPPED = (REFUSED, "failed")
"""The outcomes that at least one error has to announce."""

CPU = {"device": "cpu"}
"""The setting of everything here: DeepSpeed is asked on the CPU."""

Ask = Callable[[Case], Outcome]
Narrow = Callable[[Case, Outcome, Ask], tuple[Case, Outcome]]


@dataclass(frozen=True)
class Verdict:
    """dsrun's findings. crash: the exception, where it raised one."""

    findings: tuple[Finding, ...] = ()
    crash: str = ""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def gravest(self) -> str:
        """The effect of the gravest error: refused, fails or differs; SILENT without one."""
        effects = {finding.effect for finding in self.errors}
        return next((effect for effect in (REFUSED, FAILS, DIFFERS) if effect in effects), SILENT)


@dataclass(frozen=True)
class Disagreement:
    """kind: missed, false alarm or crashed. cause: what counts as the same disagreement. known: why it is all right."""

    kind: str
    cause: str
    case: Case
    outcome: Outcome
    verdict: Verdict
    known: str = ""


@dataclass
class Tally:
    """The disagreements of one cause: the first, and how many there were."""

    first: Disagreement
    count: int = 0


@dataclass(frozen=True)
class Comparison:
    """Outcome of a case and dsrun's verdict. core: dsrun's verdict on the core, where there is one."""

    outcome: Outcome
    verdict: Verdict
    core: Verdict | None = None
    disagreements: tuple[Disagreement, ...] = ()


@dataclass
class Report:
    """Everything counted. table: outcome -> verdict -> configs.

    differs: rule -> configs that DeepSpeed takes, of which it says that they mean something else.
    milder: rule -> configs that DeepSpeed stops at, of which all errors say just that.
    """

    table: dict[str, Counter[str]] = field(default_factory=dict)
    differs: Counter[str] = field(default_factory=Counter)
    milder: Counter[str] = field(default_factory=Counter)
    causes: dict[str, Tally] = field(default_factory=dict)

    def add(self, found: Comparison) -> None:
        self.table.setdefault(found.outcome.kind, Counter())[found.verdict.gravest] += 1
        if found.outcome.kind in DENIED:
            self.differs.update({each.rule for each in found.verdict.errors if each.effect == DIFFERS})
        least = found.core or found.verdict
        if found.outcome.kind in STOPPED and least.gravest == DIFFERS:
            self.milder.update({each.rule for each in least.errors})
        for disagreement in found.disagreements:
            name = f"{disagreement.kind}: {disagreement.cause}"
            self.causes.setdefault(name, Tally(disagreement)).count += 1

    def merge(self, other: Report) -> None:
        for outcome, row in other.table.items():
            self.table.setdefault(outcome, Counter()).update(row)
        self.differs.update(other.differs)
        self.milder.update(other.milder)
        for name, tally in other.causes.items():
            self.causes.setdefault(name, Tally(tally.first)).count += tally.count

    @property
    def unexplained(self) -> list[Tally]:
        return [tally for tally in self.causes.values() if not tally.first.known]


def judge(case: Case) -> Verdict:
    """dsrun's verdict on a case."""
    try:
        setting = Setting(version=SCHEMA.version, world_size=case.world_size, **CPU)
        return Verdict(tuple(run(copy.deepcopy(case.config), setting)))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rpartition('/dsrun/')[2]}:{frame.lineno}"
        return Verdict(crash=f"{type(error).__name__}: {error} ({place})")


def compare(case: Case, outcome: Outcome, verdict: Verdict) -> list[Disagreement]:
    """Contradictions between a verdict and an outcome."""
    return [
        Disagreement(kind, cause, case, outcome, verdict, explain(kind, cause, case, outcome))
        for kind, cause in contradictions(case.config, outcome, verdict)
    ]


def explain(kind: str, cause: str, case: Case, outcome: Outcome) -> str:
    """The reason of a known disagreement; "" for any other."""
    return next((known.reason for known in KNOWN if known.holds(kind, cause, case.config, outcome)), "")


def contradictions(config: Config, outcome: Outcome, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """(kind, cause) of each."""
    if verdict.crash:
        yield CRASHED, re.sub(r"\d+", "N", verdict.crash)
    elif outcome.kind in STOPPED and not verdict.errors:
        yield MISSED, cause_of(outcome)
    denied = DENIED.get(outcome.kind, set())
    wrong = {
        (finding.rule, canonical(finding.path)) for finding in verdict.errors if finding.effect in denied
    }
    for rule, path in sorted(wrong):
        yield FALSE_ALARM, f"{rule} at {path}{shape(config, path)}"


def shape(config: Config, path: str) -> str:
    """The type of the value at a path, in brackets."""
    value = tree.get(config, path, tree.MISSING)
    return "" if value is tree.MISSING else f" ({type(value).__name__})"


@lru_cache(maxsize=4096)
def canonical(path: str) -> str:
    """A path under the names that aliases stand for; list indexes as N, keys that the schema hasn't as ?."""
    known = SCHEMA
    keys: list[str] = []
    for key in known.canonical(path).split("."):
        here = ".".join([*keys, key])
        keys.append("N" if key.isdigit() else key if known.node(here) is not None else "?")
    return ".".join(keys)


def cause_of(outcome: Outcome) -> str:
    """Text that an exception shares with others of its kind: numbers and quoted words left out."""
    text = re.sub(r"'[^']*'", "'...'", outcome.said)
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)
    return f"{text[:160]} ({outcome.where})"


def minimised(
    case: Case, ask: Ask, holds: Callable[[Case, Outcome], bool], most: int = 400
) -> tuple[Case, Outcome]:
    """A case with every key left out without which it still `holds`, and its outcome."""
    outcome, tries, again = ask(case), 0, True
    while again:
        again = False
        for path in sorted(places(case.config), key=lambda path: path.count(".")):
            if tree.get(case.config, path, tree.MISSING) is tree.MISSING or tries >= most:
                continue
            smaller = Case(copy.deepcopy(case.config), case.world_size, case.how)
            take(smaller.config, path)
            tries += 1
            if holds(smaller, answer := ask(smaller)):
                case, outcome, again = smaller, answer, True
    return case, outcome


def smallest(found: Disagreement, ask: Ask) -> Disagreement:
    """The same disagreement in as small a config as leaving out keys gives."""

    def holds(case: Case, outcome: Outcome) -> bool:
        return (found.kind, found.cause) in contradictions(case.config, outcome, judge(case))

    if not holds(found.case, ask(found.case)):
        return found
    case, outcome = minimised(found.case, ask, holds)
    return Disagreement(found.kind, found.cause, case, outcome, judge(case), found.known)


def core(case: Case, outcome: Outcome, ask: Ask) -> tuple[Case, Outcome]:
    """The keys that DeepSpeed takes in a config that it stops at: nothing else is left for dsrun to blame."""
    return minimised(case, ask, lambda _, answer: same(answer, outcome))


def unblamed(case: Case, outcome: Outcome, ask: Ask) -> tuple[Case, Outcome]:
    """The same with fewer questions: every key that dsrun blames left out, as long as DeepSpeed stops just so."""
    while blamed := [each.path for each in judge(case).errors if each.path in places(case.config)]:
        smaller = Case(copy.deepcopy(case.config), case.world_size, case.how)
        for path in sorted(set(blamed), key=len, reverse=True):
            take(smaller.config, path)
        if not same(answer := ask(smaller), outcome):
            break
        case, outcome = smaller, answer
    return case, outcome


def same(one: Outcome, other: Outcome) -> bool:
    return (one.kind, cause_of(one)) == (other.kind, cause_of(other))


def ask_reading(case: Case) -> Outcome:
    return reading.read(case.config, case.world_size)


def compared(case: Case, outcome: Outcome, ask: Ask, narrow: Narrow = core) -> Comparison:
    """A case beside what came of it. Where DeepSpeed stops, its core counts too: there no other key lends an error."""
    verdict = judge(case)
    found = compare(case, outcome, verdict)
    if outcome.kind not in STOPPED or found:
        return Comparison(outcome, verdict, None, tuple(found))
    small, answer = narrow(case, outcome, ask)
    least = judge(small)
    return Comparison(outcome, verdict, least, tuple(compare(small, answer, least)))


def compare_reading(case: Case) -> Comparison:
    """Let DeepSpeed read a case, and compare."""
    return compared(case, ask_reading(case), ask_reading)


def compare_training(case: Case, outcome: Outcome) -> Comparison:
    """Compare a case with what came of training with it."""
    return compared(case, outcome, training.train, unblamed)


def example(found: Disagreement) -> str:
    """A disagreement as a test shows it."""
    said = [
        f"{each.severity} {each.rule} {each.effect} at {each.path}: {each.message}"
        for each in found.verdict.findings
    ]
    lines = [
        f"{found.kind}: {found.cause}",
        f"  {found.case.world_size} ranks: {found.case.config!r}",
        f"  DeepSpeed: {found.outcome.kind} {found.outcome.text}",
        *(f"  dsrun: {line}" for line in said or [found.verdict.crash or "nothing"]),
    ]
    return "\n".join(lines)

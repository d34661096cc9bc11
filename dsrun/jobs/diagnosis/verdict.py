"""What logs say of a failure: one named cause, or that they don't say it.

1. Every line is held against the signatures; what looks like a failure and is none is put aside.
2. Kinds decide before the order of lines: a cause (root) before an exception that no signature knows, before what
   another failure did to a rank (symptom), before an end without a reason (tail).
3. Of several causes the first counts: by the clock where logs of several ranks have one, else by the order of lines.
   One that says less about the same failure (`FailureSignature.over`) gives way, and one that programs try again and
   after which this one went on (progress.py). Where others of another class follow, nobody is sure.
4. Which rank was first is torchrun's word, or that of the line's prefix, or nobody's (ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsrun.jobs.diagnosis import exception_types, memory_text, progress, ranks, unknown_exceptions
from dsrun.jobs.diagnosis.reading.log_lines import GOES_ON, PeeledLine
from dsrun.jobs.diagnosis.reading.tracebacks import CODE, RaisedException, exceptions, exceptions_inside
from dsrun.jobs.diagnosis.signatures import (
    HARMLESS,
    PLACE,
    ROOT,
    SYMPTOM,
    TAIL,
    FailureSignature,
    SignatureIndex,
)

LINES_ABOVE = 70
"""In which `above` of a signature is looked for."""
TRIED_AGAIN = ("network", "hub_offline", "hub_limit")
"""Causes that programs try again by themselves, even where another start wouldn't help."""
WARNED, FAILED = "WARNING", "ERROR"
MOST_QUOTED = 400
"""Characters of a line that are quoted."""


class Sighting(NamedTuple):
    """A signature in a line."""

    signature: FailureSignature
    line: PeeledLine
    values: Mapping[str, str]
    """What the pattern's named groups hold."""


@dataclass(frozen=True)
class Reading:
    """All that was found in some logs."""

    lines: Sequence[PeeledLine]
    sightings: Sequence[Sighting]
    """In context, without what is harmless; first things first."""
    unknown: Sequence[RaisedException]
    """Exceptions that no signature knows."""
    index: SignatureIndex

    def of_kind(self, kind: str) -> list[Sighting]:
        """The sightings of one kind."""
        return [one for one in self.sightings if one.signature.kind == kind]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of a failure."""

    cause: str | None = None
    """The class of failures; None where the logs don't name one."""
    signature: FailureSignature | None = None
    meaning: exception_types.TypeMeaning | None = None
    """What the type of `raised` says, where that names the cause."""
    raised: RaisedException | None = None
    values: Mapping[str, str]
    line: PeeledLine | None = None
    """The one that shows it."""
    confidence: str = "none"
    first: ranks.FirstRank = ranks.NOBODY
    others: tuple[str, ...] = ()
    """Ids of other signatures that were seen, the first first."""


def judge(lines: Sequence[PeeledLine], index: SignatureIndex) -> Verdict:
    """The verdict on the lines of some logs."""
    reading = read(lines, index)
    unexplained = None
    for decide in (_root, _exception, _symptom, _logged, _tail):
        if verdict := decide(reading):
            if verdict.cause is None and unknown_exceptions.came_of_others(verdict.raised):
                unexplained = unexplained or verdict
            elif unexplained is None or verdict.cause is not None:
                return verdict
    return unexplained or Verdict(values={}, line=_last_line(lines))


def read(lines: Sequence[PeeledLine], index: SignatureIndex) -> Reading:
    """Find everything that is known in the lines of some logs. What Python says that it ignored counts where there is
    nothing else: an object that wasn't finished complains when it is deleted."""
    seen = [one for line in lines for one in _sightings(line, index)]
    raised = exceptions(lines)
    ignored = {(one.line.source, number) for one in raised if one.ignored for number in _own_lines(one)}
    reading = _read(lines, seen, raised, ignored, index)
    return reading if reading.of_kind(ROOT) or reading.unknown else _read(lines, seen, raised, set(), index)


def _read(
    lines: Sequence[PeeledLine],
    seen: Sequence[Sighting],
    raised: Sequence[RaisedException],
    ignored: set[tuple[int, int]],
    index: SignatureIndex,
) -> Reading:
    """ignored: places of lines that don't count."""
    fitting = list(_in_context(seen, lines))
    harmless = ignored | {_place(one.line) for one in fitting if one.signature.kind == HARMLESS}
    telling = _by_time(one for one in fitting if _place(one.line) not in harmless)
    known = {_place(one.line) for one in telling if one.signature.kind != PLACE} | harmless
    below = known - {_place(one.line) for one in telling if one.signature.kind == TAIL}
    unknown = [
        one
        for one in raised or exceptions_inside(lines)
        if not one.ignored
        and not one.is_warning
        and one.name not in exception_types.LAUNCHERS
        and _place(one.line) not in known
        and below.isdisjoint((one.line.source, number) for number in _own_lines(one)[1:])
    ]
    in_threads = [one for one in unknown if one.handled]
    return Reading(lines, telling, [one for one in unknown if not one.handled] or in_threads, index)


def _own_lines(raised: RaisedException) -> range:
    """Numbers of an exception's line and of those below that may belong to its message."""
    return range(raised.line.number, raised.last + 1)


def _sightings(line: PeeledLine, index: SignatureIndex) -> Iterator[Sighting]:
    """Of several of one kind in a line the one that needs most of it comes first."""
    found = index.matches(line.whole)
    found.sort(key=lambda one: one[1].start() - one[1].end())
    for signature, hit in found:
        yield Sighting(signature, line, {key: value for key, value in hit.groupdict().items() if value})


def _place(line: PeeledLine) -> tuple[int, int]:
    return line.source, line.number


def _by_time(seen: Iterable[Sighting]) -> list[Sighting]:
    """In order: of several logs by the clock, as far as their lines tell it; of one as its lines stand."""
    found = list(seen)
    if len({one.line.source for one in found}) < 2:
        return sorted(found, key=lambda one: _place(one.line))
    late = float("inf")
    return sorted(
        found, key=lambda one: (late if one.line.when is None else one.line.when, *_place(one.line))
    )


def _in_context(seen: Iterable[Sighting], lines: Sequence[PeeledLine]) -> Iterator[Sighting]:
    """Those whose surroundings are as their signature says."""
    place = {id(line): number for number, line in enumerate(lines)}
    ends = _ends_of_logs(lines)
    for one in seen:
        above, anywhere = one.signature.searched("above"), one.signature.searched("anywhere")
        near = lines[max(0, place[id(one.line)] - LINES_ABOVE) : place[id(one.line)] + 1]
        if one.signature.at_end and id(one.line) not in ends:
            continue
        if one.signature.others_hold and not memory_text.others_hold(one.line.whole):
            continue
        if above and not any(above.search(line.whole) for line in near if _same_rank(line, one.line)):
            continue
        if anywhere and not any(anywhere.search(line.whole) for line in lines):
            continue
        yield one


def _same_rank(one: PeeledLine, other: PeeledLine) -> bool:
    return one.source == other.source and (one.rank == other.rank or one.rank is None)


def _ends_of_logs(lines: Sequence[PeeledLine]) -> set[int]:
    """The last line with text of each log, by identity: where a job that hangs has stopped."""
    return {id(line) for line in {line.source: line for line in lines if line.text.strip()}.values()}


def _last_line(lines: Sequence[PeeledLine]) -> PeeledLine | None:
    return next((line for line in reversed(lines) if line.text.strip()), None)


def _root(reading: Reading) -> Verdict | None:
    """A cause that is known. One told at a level at which programs go on counts where there is no other failure, or
    where it says more of the one that there is (the driver's age, before "no GPU")."""
    found = reading.of_kind(ROOT)
    loud = [one for one in found if one.line.level not in GOES_ON]
    warned = [one for one in found if one.line.level == WARNED]
    if loud:
        said = {one.signature.id for one in loud}
        more = [one for one in warned if not said.isdisjoint(one.signature.over)]
        telling = [
            one for one in found if (one in loud or one in more) and not CODE.match(one.line.text)
        ] or loud
        fatal = [one for one in telling if not _survived(one, reading)]
        if not fatal and _fails_later(telling[-1].line, reading):
            return None
        verdict = _named(fatal or telling, reading)
        return verdict and _less_sure(verdict, fatal)
    named = None if reading.unknown else _named(warned, reading)
    return replace(named, confidence="low") if named and named.cause else None


def _survived(one: Sighting, reading: Reading) -> bool:
    """Whether it is of a kind that programs try again, and this one went on after it."""
    again = one.signature.retry or one.signature.cause in TRIED_AGAIN
    return again and progress.went_on(one.line, reading.lines)


def _fails_later(line: PeeledLine, reading: Reading) -> bool:
    """Whether something else fails behind a line of the same log."""
    failed = [one.line for one in reading.sightings if one.signature.kind in (SYMPTOM, TAIL)]
    failed += [one.line for one in reading.unknown]
    return any(one.source == line.source and one.number > line.number for one in failed)


def _less_sure(verdict: Verdict, fatal: Sequence[Sighting]) -> Verdict:
    """Of a cause that the program survived, or beside which others are seen, nobody is sure. A signature that says less
    of the same failure is no other cause."""
    if not fatal:
        return replace(verdict, confidence="low") if verdict.cause else verdict
    less = verdict.signature.over if verdict.signature else ()
    others = {one.signature.cause for one in fatal if one.signature.id not in less} - {verdict.cause}
    return replace(verdict, confidence="medium") if others and verdict.confidence == "high" else verdict


def _named(found: Sequence[Sighting], reading: Reading) -> Verdict | None:
    """The first of some sightings that none of the others says more than."""
    if not found:
        return None
    over = {less for one in found for less in one.signature.over}
    left = [one for one in found if one.signature.id not in over] or list(found)
    first = left[0]
    same = [one.line for one in found if one.signature.cause == first.signature.cause]
    others = dict.fromkeys(
        one.signature.id for one in reading.sightings if one.signature.id != first.signature.id
    )
    named = first.signature.confidence != "none"
    return Verdict(
        cause=first.signature.cause if named else None,
        signature=first.signature,
        values=first.values,
        line=first.line,
        confidence=first.signature.confidence,
        first=_first_rank(first, same, reading),
        others=tuple(others),
    )


def _first_rank(shown: Sighting, same: Sequence[PeeledLine], reading: Reading) -> ranks.FirstRank:
    """Which rank failed first. same: the lines that show this cause."""
    if shown.signature.of_job:
        return ranks.NOBODY
    if shown.signature.names_rank:
        return ranks.FirstRank(
            shown.line.rank, shown.line.host, why="its own record, and those of the others"
        )
    return ranks.first_rank(reading.lines, same, shown.signature.waits)


def _exception(reading: Reading) -> Verdict | None:
    """An exception that no signature knows: its type may say enough, its message, or the file that it was raised in."""
    if not reading.unknown:
        return None
    raised = unknown_exceptions.first_of(reading.unknown, reading.lines)
    places = [one.signature for one in reading.of_kind(PLACE)]
    said = unknown_exceptions.explained(raised, places, reading.index)
    same = [one.line for one in reading.unknown if one.type == raised.type]
    others = dict.fromkeys(one.signature.id for one in reading.sightings if one.signature.kind != PLACE)
    return Verdict(
        cause=said.named.cause if said.named else None,
        signature=said.signature,
        meaning=said.meaning,
        raised=raised,
        values={},
        line=raised.line,
        confidence=said.named.confidence if said.named else "none",
        first=ranks.first_rank(reading.lines, same),
        others=tuple(others),
    )


def _symptom(reading: Reading) -> Verdict | None:
    """What another failure did: one that names a cause all the same comes before one that doesn't."""
    found = reading.of_kind(SYMPTOM)
    return _named([one for one in found if one.signature.confidence != "none"] or found, reading)


def _logged(reading: Reading) -> Verdict | None:
    """What a program logged as an error in plain words, where nothing was raised: the first that says what is wrong."""
    known = {_place(one.line) for one in reading.sightings}
    for line in reading.lines:
        if line.level != FAILED or _place(line) in known or progress.went_on(line, reading.lines):
            continue
        if said := unknown_exceptions.logged(line, reading.index):
            verdict = _named([Sighting(said, line, {})], reading)
            return verdict and replace(verdict, confidence="low")
    return None


def _tail(reading: Reading) -> Verdict | None:
    """An end without a reason."""
    found = reading.of_kind(TAIL)
    return _named([one for one in found if one.signature.confidence != "none"] or found, reading)

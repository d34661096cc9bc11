"""The verdict on a failure's logs: one named cause, or that they don't name it.

1. Every line is held against the signatures; what looks like a failure and is none is put aside.
2. Kinds decide before the order of lines: a cause (root) before an exception that no signature knows, before what
   another failure did to a rank (symptom), before an end without a reason (tail).
3. Of several causes the first counts: by the clock where logs of several ranks have one, else by the order of lines.
   One that says less about the same failure (`FailureSignature.over`) gives way, and one that programs try again and
   after which this one went on (progress.py). Where others of another class follow, nobody is sure.
4. Whose code raised an exception decides what it can mean: what Python raises at the user's own expression is no
   library's failure, source code and printed records are none, and a wording that no example has, a denial, or
   another failure beside it leave less confidence. What the releases of packages and the expression itself say comes
   before a signature's sentence.
5. Which rank was first is torchrun's word, or that of the line's prefix, or nobody's (ranks.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from dsrun.jobs.diagnosis import likeness, ranks
from dsrun.jobs.diagnosis.exceptions import (
    api_history,
    exception_types,
    language_errors,
    own_modules,
    unknown_exceptions,
)
from dsrun.jobs.diagnosis.memory import memory_text
from dsrun.jobs.diagnosis.progress import WENT_ON, WENT_ON_UNRAISED, Steps
from dsrun.jobs.diagnosis.reading import owners, phases, samples, suppositions
from dsrun.jobs.diagnosis.reading.log_lines import GOES_ON, PeeledLine, narrow
from dsrun.jobs.diagnosis.reading.tracebacks import (
    BEGIN,
    CODE,
    OF_LANGUAGE,
    RaisedException,
    chain_of,
    exceptions,
    exceptions_inside,
    is_code,
)
from dsrun.jobs.diagnosis.signatures import (
    HARMLESS,
    MESSAGE,
    PLACE,
    ROOT,
    SYMPTOM,
    TAIL,
    FailureSignature,
    SignatureIndex,
)

LINES_ABOVE = 70
"""Lines before one in which a signature's `above` is looked for."""
TRACKER = "tracker"
"""The cause of failures of a service that only keeps a run's record."""
TRIED_AGAIN = ("network", "hub_offline", "hub_limit", TRACKER)
"""Causes that programs retry by themselves, even where another start wouldn't help."""
STEPS_AFTER_WARNING = 2
"""Different lines of steps behind a warning after which it was no more than that."""
GOES_ON_WITH = ("nan", "loss_scale", "hangup", "gpu_hardware", "driver")
"""Causes with which steps go on for a while: what they spoil shows later."""
SHOWS_IN_STEPS = ("nan", "gpu_hardware")
"""Those of them that are sure although many steps follow."""
WARNED, FAILED = "WARNING", "ERROR"
SPOKEN_OF = re.compile(
    r"(?i)\b(?:no|never|without|avoids?|avoiding|prevents?|preventing|in case of|whenever|if you (?:see|get|hit)"
    r"|handles?|caught(?: an?)?|catching|ignoring|ignored|recovers? from|recovered from|fixes|fixed|instead of)"
    r"[: ]{1,2}"
    r"(?:an? |the |any )?['\"`]?(?:[\w.]{1,80}(?:Error|Exception): )?(?:\[Errno -?\d{1,3}\] )?$"
)
"""Words right before those of a failure by which it is denied or supposed."""
LONGEST_SPEECH = 140
"""Letters before a failure's words in which these are looked for."""
RECORD = re.compile(r"^\s{0,8}[\[(]?\{['\"]\w[\w .-]{0,60}['\"]: ")
"""A line that is a record of data: a dict or JSON with a key in quotation marks first."""
FAILURE = re.compile(
    r"(?:\b(?:ERROR|FATAL|CRITICAL|Fatal error|fatal)\b[: ]"
    r"|\b(?:[A-Z]\w{0,60})?(?:Error|Exception)\b(?::|$)|^[Ee]rror\b"
    r"|(?i:\b(?:failed with|failed to|exit(?:ed)? (?:with )?(?:code|status)|return(?:ed)? (?:with )?code|error code))"
    r"(?![ :=]{0,4}0\b))"
)
"""Words of a line that something failed: a level, a type of an exception, an exit code other than 0."""
PARAMETER_CAUSES = ("script_api", "version")
"""Classes of a call that a release doesn't take: by who is to change, which a signature may know."""
MOST_FAILED = 5
"""Lines that speak of a failure that are shown where no cause is named."""
MOST_QUOTED = 400
"""Longest quotation of a line, in characters."""


class Sighting(NamedTuple):
    """A signature in a line."""

    signature: FailureSignature
    line: PeeledLine
    values: Mapping[str, str]
    """Values of the pattern's named groups."""
    supposed: bool = False
    """Whether it is one of several possible causes that the program lists, or only supposes."""


@dataclass(frozen=True)
class Reading:
    """Everything that is known in some logs."""

    lines: Sequence[PeeledLine]
    sightings: Sequence[Sighting]
    """Sightings in context, without the harmless; first things first."""
    unknown: Sequence[RaisedException]
    """Exceptions that no signature knows."""
    index: SignatureIndex
    raised: Sequence[RaisedException] = ()
    """All exceptions, those that a signature knows, too."""
    harmless: Set[tuple[int, int]] = frozenset()
    """Places of lines that look like a failure and are none."""
    slow: Sequence[Sighting] = ()
    """Sightings of notes on slower ways of computing, the first of each signature."""

    @cached_property
    def last_failed(self) -> Mapping[int, int]:
        """The number of the last line of each log that shows a consequence, an end, or an exception nobody knows, and
        after which the program didn't go on, nor was through."""
        last: dict[int, int] = {}
        failed = [
            (sighting.line, sighting)
            for sighting in self.sightings
            if sighting.signature.kind in (SYMPTOM, TAIL)
        ]
        unknown = [(exception.line, None) for exception in self.unknown]
        for line, sighting in sorted([*failed, *unknown], key=lambda one: one[0].number, reverse=True):
            survived = self.steps.finished(line) or _is_noise_at_end(line, self)
            if line.source not in last and not survived and not (sighting and _works_on(sighting, self)):
                last[line.source] = line.number
        return last

    @cached_property
    def steps(self) -> Steps:
        """The lines of steps."""
        return Steps(self.lines)

    def ended_well(self, line: PeeledLine) -> bool:
        """Whether the log says behind a line that all is done, and nothing fails later; or whether the line is noise of
        a process that was done."""
        if _fails_later(line, self):
            return False
        return self.steps.finished(line) or _is_noise_at_end(line, self)

    def left_out(self, line: PeeledLine) -> bool:
        """Whether a line, or the one below, says that what failed is left out or done otherwise, and work follows."""
        goes_on = self.steps.try_again(line) and self.steps.work_follows(line)
        return goes_on and not _fails_later(line, self)

    def exception_of(self, line: PeeledLine | None) -> RaisedException | None:
        """The exception whose line, or a line of whose message, this is."""
        return next((one for one in self.raised if line and _place(line) in _own_places(one)), None)

    def of_kind(self, kind: str) -> list[Sighting]:
        """The sightings of one kind."""
        return [sighting for sighting in self.sightings if sighting.signature.kind == kind]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome: a cause, how sure it is, and where it shows."""

    cause: str | None = None
    """The class of failures; None where the logs name none."""
    signature: FailureSignature | None = None
    meaning: exception_types.TypeMeaning | None = None
    """The meaning of the type of `raised`, where that names the cause."""
    raised: RaisedException | None = None
    values: Mapping[str, str]
    line: PeeledLine | None = None
    """The line that shows the cause."""
    confidence: str = "none"
    first: ranks.FirstRank = ranks.NOBODY
    others: tuple[str, ...] = ()
    """Ids of other signatures in the logs, in order."""
    told: language_errors.Told | None = None
    """What Python's own exception means, by the code at which it was raised."""
    api: api_history.ApiFinding | None = None
    """What the releases of a package say about the name that is asked for in vain."""
    exception: RaisedException | None = None
    """The exception on the line that shows the cause, if it is one."""
    chain: Sequence[RaisedException] = ()
    """The others of its chain."""
    lines: Sequence[PeeledLine] = field(default=(), repr=False)
    """All lines, for what stands around the one that shows the cause."""
    failed: Sequence[PeeledLine] = ()
    """Without a cause: lines that speak of a failure."""
    like: likeness.Likeness | None = None
    """Without a cause: the signature whose example is most like the line."""
    phase: phases.Phase | None = None
    """Of a time-out: what the job was doing before it."""
    slow: Sequence[Sighting] = ()
    """Notes of programs that compute in a slower way than they could, each once."""


def judge(lines: Sequence[PeeledLine], index: SignatureIndex) -> Verdict:
    """The verdict on the lines of some logs."""
    lines = samples.without(lines)
    reading = read(lines, index)
    verdict = _doubted(_with_details(_decided(reading), reading), reading)
    verdict = replace(verdict, lines=lines, slow=reading.slow)
    return _with_phase(verdict, reading) if verdict.cause else _unexplained(verdict, reading)


def _doubted(verdict: Verdict, reading: Reading) -> Verdict:
    """The verdict, no surer than its evidence: nobody is sure of what a job trained on after, of a failure's words amid
    others, of an exception of a type that none of the signature's examples has, and of the script's call where a
    package called."""
    line, signature = verdict.line, verdict.signature
    if verdict.confidence != "high" or line is None:
        return verdict
    lasts = verdict.cause in SHOWS_IN_STEPS
    doubtful = reading.steps.finished(line) or (not lasts and reading.steps.follow(line))
    if signature and signature.kind not in (PLACE, MESSAGE) and not verdict.api:
        raised = reading.exception_of(line)
        if raised:
            other_type = raised.line is line and bool(signature.types) and raised.name not in signature.types
            others_call = verdict.cause == "script_api" and raised.owner in (owners.LIBRARY, owners.TRAINER)
            doubtful = doubtful or other_type or others_call
        doubtful = doubtful or signature.is_amid_others_words(narrow(line.text.strip()))
    return replace(verdict, confidence="medium") if doubtful else verdict


def _with_phase(verdict: Verdict, reading: Reading) -> Verdict:
    """The verdict on a time-out with what the job was doing before it, which makes it surer."""
    signature, line = verdict.signature, verdict.line
    if signature is None or line is None or not signature.waits or signature.names_rank:
        return verdict
    phase = phases.before(line, reading.lines, reading.raised)
    if phase is None or phase.name not in phases.ADVICE:
        return replace(verdict, phase=phase)
    confidence = "medium" if verdict.confidence == "low" else verdict.confidence
    return replace(verdict, phase=phase, confidence=confidence)


def _decided(reading: Reading) -> Verdict:
    """The verdict by signatures, types and words alone."""
    lines, unexplained = reading.lines, None
    # From the surest kind to the least. An exception that is a consequence of another failure is kept back: a symptom
    # or a tail below it may still name that failure.
    for decide in (_root, _exception, _symptom, _logged, _tail):
        if verdict := decide(reading):
            if verdict.cause is None and unknown_exceptions.came_of_others(verdict.raised):
                unexplained = unexplained or verdict
            elif unexplained is None or verdict.cause is not None:
                return verdict
    return unexplained or Verdict(values={}, line=next(filter(_has_text, reversed(lines)), None))


def _with_details(verdict: Verdict, reading: Reading) -> Verdict:
    """The verdict with what the code at an exception, and the releases of packages, say beyond its class."""
    decided = verdict.raised is not None or verdict.signature is not None
    raised = verdict.raised or (reading.exception_of(verdict.line) if decided else None)
    if raised is None or raised.ignored:
        return verdict
    others = [one for one in chain_of(raised, reading.raised) if one is not raised]
    verdict = replace(verdict, exception=raised, chain=others)
    if api := api_history.finding(raised, reading.lines):
        return _by_history(verdict, api)
    if told := own_modules.told(raised):
        cause = told.cause or "script_error"
        return replace(
            verdict, cause=cause, told=told, signature=None, confidence="medium", raised=raised, meaning=None
        )
    if verdict.signature and verdict.signature.kind not in (PLACE, MESSAGE):
        return replace(verdict, confidence=_by_owner(verdict, raised))
    if verdict.signature and verdict.signature.kind == MESSAGE and not raised.message.strip():
        return verdict  # it knows what is asserted
    if told := language_errors.told(raised, reading.lines):
        # A sentence on the very expression says more than a file's signature.
        by_place = verdict.signature is not None and verdict.signature.kind == PLACE
        kept = verdict.cause if verdict.meaning or by_place else None
        cause = told.cause or kept or "script_error"
        confidence = told.confidence if verdict.confidence in ("none", "low") else verdict.confidence
        return replace(verdict, cause=cause, told=told, signature=None, confidence=confidence, raised=raised)
    return verdict


def _unexplained(verdict: Verdict, reading: Reading) -> Verdict:
    """A verdict without a cause, with the lines that speak of a failure, and what they look like."""
    raised = verdict.raised
    spoken = (
        line
        for line in reading.lines
        if _place(line) not in reading.harmless
        and _speaks_of_failure(line)
        and not reading.ended_well(line)
        and not reading.left_out(line)
    )
    failed = [raised.line] if raised else list(islice(spoken, MOST_FAILED))
    if not failed or verdict.signature:
        return replace(verdict, failed=tuple(failed))
    text = f"{raised.name}: {raised.message}" if raised else failed[0].text
    like = likeness.index_of(reading.index.all).like(text)
    line = verdict.line if raised else failed[0]
    return replace(verdict, failed=tuple(failed), like=like, line=line)


def _speaks_of_failure(line: PeeledLine) -> bool:
    """Whether a line has the level or the words of a failure, and no program goes on by its level."""
    return (
        line.level not in GOES_ON
        and not CODE.match(line.text)
        and (line.level == FAILED or bool(FAILURE.search(line.text)))
    )


def _by_history(verdict: Verdict, api: api_history.ApiFinding) -> Verdict:
    """The verdict as the releases of a package make it."""
    if api.direction == api_history.NEVER and api.kind not in ("model type", "name"):
        # That no release has a name is sure only of what was read; a signature that knows the line knows more.
        known = verdict.signature and verdict.signature.kind not in (PLACE, MESSAGE)
        if known and not api.instead:
            return verdict
        if known:
            return replace(verdict, api=api)
        confidence = "medium" if api.near or api.is_own else "low"
        cause = "script_error" if api.is_own else "version"
        return replace(verdict, api=api, cause=cause, confidence=confidence, raised=verdict.exception)
    surely = api.is_sure and api.direction in (api_history.NEWER, api_history.OLDER)
    cause = "import" if api.direction == api_history.BROKEN else "version"
    if api.kind in ("parameter", "positional", "required") and verdict.cause in PARAMETER_CAUSES:
        cause = verdict.cause or cause
    return replace(verdict, api=api, cause=cause, confidence="high" if surely else "medium")


def _by_owner(verdict: Verdict, raised: RaisedException) -> str:
    """The confidence in a signature, at most "medium" where the user's own code raised what it takes for a library's
    failure, or where Python's own words are all that there is."""
    own_words = raised.owner == owners.USER and raised.raiser is not None and CODE.match(raised.raiser.code)
    bare = raised.name in OF_LANGUAGE and not raised.frames
    return "medium" if verdict.confidence == "high" and (own_words or bare) else verdict.confidence


def read(lines: Sequence[PeeledLine], index: SignatureIndex) -> Reading:
    """Find everything that is known in the lines of some logs.

    Exceptions that Python ignored count only where there is nothing else: an object that wasn't finished complains when
    it is deleted. Behind a good end they count nowhere.
    """
    seen = [sighting for line in lines for sighting in _sightings(line, index)]
    raised = exceptions(lines)
    ignored = [exception for exception in raised if exception.ignored]
    reading = _read(lines, seen, raised, _places_of(ignored), index)
    if reading.of_kind(ROOT) or reading.unknown:
        return reading
    at_end = [exception for exception in ignored if reading.steps.is_behind_end(exception.line)]
    return _read(lines, seen, raised, _places_of(at_end), index)


def _places_of(raised: Iterable[RaisedException]) -> set[tuple[int, int]]:
    """Places of all lines of some exceptions."""
    return {place for exception in raised for place in _own_places(exception)}


def _read(
    lines: Sequence[PeeledLine],
    seen: Sequence[Sighting],
    raised: Sequence[RaisedException],
    ignored: set[tuple[int, int]],
    index: SignatureIndex,
) -> Reading:
    """A reading of the lines. ignored: places of lines that don't count."""
    theirs = _of_users_own_code(raised)
    index_of_line = {id(line): place for place, line in enumerate(lines)}
    fitting = [
        sighting
        for sighting in _in_context(seen, lines)
        if (sighting.signature.own_code or _place(sighting.line) not in theirs)
        and (sighting.signature.reads_code or not is_code(index_of_line[id(sighting.line)], lines))
    ]
    # A notebook's traceback begins with the type alone: the exception's own line says more, where the log has it.
    full = {sighting.signature.id for sighting in fitting if BEGIN not in sighting.line.text}
    fitting = [one for one in fitting if BEGIN not in one.line.text or one.signature.id not in full]
    harmless = ignored | {
        _place(sighting.line) for sighting in fitting if sighting.signature.kind == HARMLESS
    }
    telling = _by_time(
        sighting for sighting in _decided_by_others(fitting) if _place(sighting.line) not in harmless
    )
    # An exception whose own line, or a line of its message, has a signature is known by that; a tail below it says
    # nothing of it, and so doesn't make it known.
    known = {_place(sighting.line) for sighting in telling if sighting.signature.kind != PLACE} | harmless
    below = known - {_place(sighting.line) for sighting in telling if sighting.signature.kind == TAIL}
    unknown = [
        exception
        for exception in raised or exceptions_inside(lines)
        if not exception.ignored
        and not exception.is_warning
        and exception.name not in exception_types.LAUNCHERS
        and _place(exception.line) not in known
        and below.isdisjoint((exception.line.source, number) for number in _own_lines(exception)[1:])
    ]
    in_threads = [exception for exception in unknown if exception.handled]
    in_no_thread = [exception for exception in unknown if not exception.handled]
    return Reading(lines, telling, in_no_thread or in_threads, index, raised, harmless, _slow(fitting))


def _decided_by_others(seen: Sequence[Sighting]) -> Iterator[Sighting]:
    """The sightings without what programs only suppose, in logs that have a line which says what failed."""
    decided = {
        sighting.line.source
        for sighting in seen
        if not sighting.supposed and sighting.signature.kind in (ROOT, SYMPTOM)
    }
    return (sighting for sighting in seen if not sighting.supposed or sighting.line.source not in decided)


def _slow(seen: Sequence[Sighting]) -> tuple[Sighting, ...]:
    """Of each signature of a slower way the first sighting, where no other one says more of that line."""
    slow = [sighting for sighting in seen if sighting.signature.slows]
    less = {(*_place(sighting.line), id_) for sighting in slow for id_ in sighting.signature.over}
    first = {
        sighting.signature.id: sighting
        for sighting in reversed(slow)
        if (*_place(sighting.line), sighting.signature.id) not in less
    }
    return tuple(first.values())


def _of_users_own_code(raised: Sequence[RaisedException]) -> set[tuple[int, int]]:
    """Places of exceptions that Python raised at an expression of the user's own: no library's failure."""
    return {_place(exception.line) for exception in raised if exception.is_users_own}


def _own_places(raised: RaisedException) -> set[tuple[int, int]]:
    return {(raised.line.source, number) for number in _own_lines(raised)}


def _own_lines(raised: RaisedException) -> range:
    """Numbers of an exception's line and of those below that may belong to its message: Python's own is one line."""
    if raised.is_users_own:
        return range(raised.line.number, raised.line.number + 1)
    return range(raised.line.number, raised.last + 1)


def _sightings(line: PeeledLine, index: SignatureIndex) -> Iterator[Sighting]:
    """The signatures in a line; of several of one kind the one that matches most of it comes first."""
    matches = index.matches(line.whole)
    matches.sort(key=lambda match: match[1].start() - match[1].end())
    text = narrow(line.whole)
    for signature, hit in matches:
        values = {key: value for key, value in hit.groupdict().items() if value}
        supposed = suppositions.is_supposed(text, hit.start()) and not signature.supposes
        yield Sighting(signature, line, values, supposed)


def _place(line: PeeledLine) -> tuple[int, int]:
    return line.source, line.number


def _by_time(seen: Iterable[Sighting]) -> list[Sighting]:
    """Sightings in order: by the clock where they are of several logs and have one, else as their lines stand."""
    ordered = list(seen)
    if len({sighting.line.source for sighting in ordered}) < 2:
        return sorted(ordered, key=lambda sighting: _place(sighting.line))

    def moment(sighting: Sighting) -> tuple[float, int, int]:
        line = sighting.line
        return (float("inf") if line.when is None else line.when, *_place(line))

    return sorted(ordered, key=moment)


def _in_context(seen: Iterable[Sighting], lines: Sequence[PeeledLine]) -> Iterator[Sighting]:
    """The sightings whose surroundings are as their signature requires."""
    place = {id(line): number for number, line in enumerate(lines)}
    ends = _ends_of_logs(lines)
    for sighting in seen:
        above, anywhere = sighting.signature.searched("above"), sighting.signature.searched("anywhere")
        near = lines[max(0, place[id(sighting.line)] - LINES_ABOVE) : place[id(sighting.line)] + 1]
        if sighting.signature.at_end and id(sighting.line) not in ends:
            continue
        if sighting.signature.others_hold and not memory_text.others_hold(sighting.line.whole):
            continue
        if sighting.signature.has_room and not memory_text.has_room(sighting.line.whole):
            continue
        if above and not any(above.search(line.whole) for line in near if _same_rank(line, sighting.line)):
            continue
        if anywhere and not any(anywhere.search(line.whole) for line in lines):
            continue
        listed = suppositions.is_item_of_list(near[:-1], sighting.line)
        yield sighting._replace(supposed=True) if listed else sighting


def _same_rank(line: PeeledLine, other: PeeledLine) -> bool:
    return line.source == other.source and (line.rank == other.rank or line.rank is None)


def _ends_of_logs(lines: Sequence[PeeledLine]) -> set[int]:
    """The last line with text of each log, by identity: where a job that hangs has stopped."""
    return {id(line) for line in {line.source: line for line in lines if _has_text(line)}.values()}


def _has_text(line: PeeledLine) -> bool:
    return bool(line.text.strip())


def _root(reading: Reading) -> Verdict | None:
    """A known cause.

    One that was logged as a warning counts only where nothing else failed, or where it says more of that failure (the
    driver's age, before "no GPU").
    """
    roots = reading.of_kind(ROOT)
    loud = [sighting for sighting in roots if sighting.line.level not in GOES_ON]
    warned = [
        sighting
        for sighting in roots
        if sighting.line.level == WARNED
        and not reading.steps.follow(sighting.line, STEPS_AFTER_WARNING)
        and not _went_on(sighting, reading)
    ]
    # "Loud" is what no program survives by its level. Of these, lines of source code in a traceback go (they quote the
    # message that the exception's own line has), then those that a program retried and went on after.
    if loud:
        loud_ids = {sighting.signature.id for sighting in loud}
        more = [sighting for sighting in warned if not loud_ids.isdisjoint(sighting.signature.over)]
        telling = [
            sighting
            for sighting in roots
            if (sighting in loud or sighting in more) and not CODE.match(sighting.line.text)
        ]
        if not telling:  # nothing but source code that would say it
            named = None if reading.unknown else _named(loud, reading)
            return replace(named, confidence="low") if named and named.cause else None
        telling = [sighting for sighting in telling if not _went_on(sighting, reading)]
        fatal = [sighting for sighting in telling if not _survived(sighting, reading)]
        tried_again = any(_is_tried_again(one) for one in telling)
        if not fatal and (not tried_again or _fails_later(telling[-1].line, reading)):
            return None  # it went on, and failed later or not at all
        verdict = _named(fatal or telling, reading)
        return verdict and _less_sure(verdict, fatal, reading)
    named = None if reading.unknown else _named(warned, reading)
    return replace(named, confidence="low") if named and named.cause else None


def _survived(sighting: Sighting, reading: Reading) -> bool:
    """Whether the program went on after what looks like its failure, of a kind that doesn't show in later steps."""
    line = sighting.line
    if _is_tried_again(sighting):
        return reading.steps.follow(line)
    # Steps behind it may be of other ranks, whose lines have no prefix: they count only where nothing fails later.
    if sighting.signature.cause in GOES_ON_WITH or _fails_later(line, reading):
        return False
    raised = reading.exception_of(line)
    return reading.steps.follow(line, WENT_ON if raised and raised.frames else WENT_ON_UNRAISED)


def _went_on(sighting: Sighting, reading: Reading) -> bool:
    """Whether a program did its work to the log's good end, or warned of a failure, or tried again what had failed, and
    then works to where the log ends."""
    if sighting.signature.cause not in SHOWS_IN_STEPS and reading.ended_well(sighting.line):
        return True
    if sighting.signature.cause == TRACKER and reading.steps.is_behind_end(sighting.line):
        return True  # the work was done, and only its record is cut
    return _works_on(sighting, reading) and not _fails_later(sighting.line, reading)


def _works_on(sighting: Sighting, reading: Reading) -> bool:
    """Whether work follows after a warning, or after what was tried again or left out; nobody raised it, or the program
    says below it how it goes on."""
    line = sighting.line
    says_so = reading.steps.try_again(line)
    tries = says_so or line.level == WARNED or _is_tried_again(sighting)
    return tries and reading.steps.work_follows(line) and (says_so or not reading.exception_of(line))


def _is_noise_at_end(line: PeeledLine, reading: Reading) -> bool:
    """Whether a line is a warning of a process that had said that its work is through."""
    return line.level in GOES_ON and reading.steps.is_behind_end(line)


def _is_tried_again(sighting: Sighting) -> bool:
    """Whether a failure is of a kind that programs try again by themselves."""
    return sighting.signature.retry or sighting.signature.cause in TRIED_AGAIN


def _fails_later(line: PeeledLine, reading: Reading) -> bool:
    """Whether something else fails behind a line of the same log."""
    return reading.last_failed.get(line.source, 0) > line.number


def _less_sure(verdict: Verdict, fatal: Sequence[Sighting], reading: Reading) -> Verdict:
    """The verdict with less confidence, where the program survived the cause, others stand beside it, or its line only
    quotes it.

    A signature that says less of the same failure is no other cause.
    """
    if verdict.line and verdict.signature and _is_quoted(verdict.line, verdict.signature):
        return replace(verdict, confidence="low") if verdict.cause else verdict
    if not fatal:
        return replace(verdict, confidence="low") if verdict.cause else verdict
    less = verdict.signature.over if verdict.signature else ()
    others = {sighting.signature.cause for sighting in fatal if sighting.signature.id not in less} - {
        verdict.cause
    }
    others |= {"script_error" for raised in reading.unknown if raised.is_users_own and not raised.is_wrapped}
    return replace(verdict, confidence="medium") if others and verdict.confidence == "high" else verdict


def _is_quoted(line: PeeledLine, signature: FailureSignature) -> bool:
    """Whether a line only speaks of a failure: it is a record of data that a program prints, or denies or supposes it
    in the words before it."""
    text = narrow(line.whole)
    hit = signature.compiled.search(text)
    if hit is None:
        return False
    if SPOKEN_OF.search(text[max(0, hit.start() - LONGEST_SPEECH) : hit.start()]):
        return True
    return RECORD.match(line.text) is not None and text.find('"', hit.end()) >= 0


def _named(sightings: Sequence[Sighting], reading: Reading) -> Verdict | None:
    """The verdict on the first of some sightings that no other one says more than."""
    if not sightings:
        return None
    over = {less for sighting in sightings for less in sighting.signature.over}
    candidates = [sighting for sighting in sightings if sighting.signature.id not in over] or list(sightings)
    first = candidates[0]
    same = [sighting.line for sighting in sightings if sighting.signature.cause == first.signature.cause]
    others = dict.fromkeys(
        sighting.signature.id for sighting in reading.sightings if sighting.signature.id != first.signature.id
    )
    named = first.signature.confidence != "none"
    return Verdict(
        cause=first.signature.cause if named else None,
        signature=first.signature,
        values=first.values,
        line=first.line,
        confidence=_confidence(first),
        first=_first_rank(first, same, reading),
        others=tuple(others),
    )


def _confidence(sighting: Sighting) -> str:
    """The signature's confidence, a grade less where no example has the wording that matched, or in source code."""
    confidence = sighting.signature.confidence
    if sighting.supposed and confidence != "none":
        return "low"
    surely = sighting.signature.is_shown_by_example(narrow(sighting.line.whole)) and not CODE.match(
        sighting.line.text
    )
    return "medium" if confidence == "high" and not surely else confidence


def _first_rank(shown: Sighting, same: Sequence[PeeledLine], reading: Reading) -> ranks.FirstRank:
    """The rank that failed first. same: the lines that show this cause."""
    if shown.signature.of_job:
        return ranks.NOBODY
    if shown.signature.names_rank:
        return ranks.FirstRank(
            shown.line.rank, shown.line.host, why="its own record, and those of the others"
        )
    return ranks.first_rank(reading.lines, same, shown.signature.waits)


def _exception(reading: Reading) -> Verdict | None:
    """An exception that no signature knows, explained by its type, its message, or the file that raised it."""
    fatal = [
        exception
        for exception in reading.unknown
        if not reading.ended_well(exception.line) and not reading.left_out(exception.line)
    ]
    if not fatal:
        return None
    raised = unknown_exceptions.first_of(fatal, reading.steps)
    places = [sighting.signature for sighting in reading.of_kind(PLACE)]
    explanation = unknown_exceptions.explained(raised, places, reading.index)
    same = [exception.line for exception in fatal if exception.type == raised.type]
    others = dict.fromkeys(
        sighting.signature.id for sighting in reading.sightings if sighting.signature.kind != PLACE
    )
    return Verdict(
        cause=explanation.named.cause if explanation.named else None,
        signature=explanation.signature,
        meaning=explanation.meaning,
        raised=raised,
        values={},
        line=raised.line,
        confidence=explanation.named.confidence if explanation.named else "none",
        first=ranks.first_rank(reading.lines, same),
        others=tuple(others),
    )


def _symptom(reading: Reading) -> Verdict | None:
    """A consequence of another failure: one that names its cause comes before one that doesn't."""
    symptoms = [symptom for symptom in reading.of_kind(SYMPTOM) if not _went_on(symptom, reading)]
    return _named(
        [symptom for symptom in symptoms if symptom.signature.confidence != "none"] or symptoms, reading
    )


def _logged(reading: Reading) -> Verdict | None:
    """An error that was logged in plain words, where nothing was raised: the first that says what is wrong."""
    known = {_place(sighting.line) for sighting in reading.sightings}
    for line in reading.lines:
        survived = reading.steps.follow(line) or reading.ended_well(line)
        if line.level != FAILED or _place(line) in known or survived:
            continue
        if signature := unknown_exceptions.logged(line, reading.index):
            verdict = _named([Sighting(signature, line, {})], reading)
            return verdict and replace(verdict, confidence="low")
    return None


def _tail(reading: Reading) -> Verdict | None:
    """An end without a reason."""
    tails = [tail for tail in reading.of_kind(TAIL) if not reading.ended_well(tail.line)]
    return _named([tail for tail in tails if tail.signature.confidence != "none"] or tails, reading)

"""Failures that are known by what they print: a table each in the TOML files beside this one, a file a subject.

They are found by looking; a lab's own lie in signatures/ of a folder on $DSRUN_PATH, and come before these. The keys
are the fields of `FailureSignature`; CONTRIBUTING.md says how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from dsrun import catalog, versions
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.diagnosis.reading.literal_search import LiteralSearch
from dsrun.jobs.diagnosis.reading.log_lines import folded, narrow, peeled
from dsrun.jobs.diagnosis.reading.suppositions import is_supposed
from dsrun.jobs.diagnosis.reading.tracebacks import BEGIN, CODE, EXCEPTION, FRAME
from dsrun.jobs.diagnosis.signatures import alternatives
from dsrun.jobs.diagnosis.signatures.literals import needed

FOLDER = Path(__file__).parent
ROOT, SYMPTOM, TAIL, PLACE, MESSAGE, HARMLESS = "root", "symptom", "tail", "place", "message", "harmless"
KINDS = (ROOT, SYMPTOM, TAIL, PLACE, MESSAGE, HARMLESS)
"""A cause; a consequence of another failure in this rank; an end without a reason; for an exception that no signature
knows, the file in which it was raised, and the words of its message; a line that looks like a failure and is none."""
CONFIDENCES = ("high", "medium", "low", "none")
"""none: the line names no cause by itself."""
CLASSES = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])+\]")
"""An escaped character, or a class of characters, in a pattern."""
UNBOUNDED = re.compile(r"[.C)][*+]|\{\d{0,6},\}")
"""Repeats without an end, before which a literal is looked for again and again in a line of megabytes. C: a class."""


WORD = re.compile(r"[A-Za-z]{2,60}|[\u4e00-\u9fff]")
LEADS = re.compile(r"^(?:[\w./-]{1,120}(?:\[\d{1,9}\])?(?:\(\))?: ){1,6}")
"""Names with a colon at a line's beginning: who speaks, and the exception's type."""
WORDS_OF_A_PROGRAM = 3
"""Words before a failure's own that a program may add in which no example is."""


@dataclass(frozen=True, kw_only=True)
class FailureSignature:
    """A failure, known by a line that it prints."""

    id: str
    """The name that `dsrun explain` takes."""
    subject: str
    """Its file."""
    cause: str
    """Its class of failures: "cause" in --json."""
    kind: str = ROOT
    pattern: str
    """A regular expression, searched in one line; `means` and `next` have its named groups' values in braces,
    and as {caller} the package whose code raised it, where a frame tells."""
    means: str
    """The headline: the cause in a sentence."""
    means_zh: str = ""
    next: str = ""
    """What to do."""
    next_zh: str = ""
    causes: tuple[str, ...] = ()
    """Possible reasons, likeliest first."""
    tell_apart: str = ""
    """How the log or the machine decides among them."""
    check: str = ""
    """A command that confirms it."""
    confidence: str = "high"
    retry: bool = False
    """Whether the same job, started again, may succeed."""
    above: str = ""
    """A pattern that has to match in the lines before it, of the same rank (a traceback's frames)."""
    anywhere: str = ""
    """A pattern that has to match somewhere in the logs."""
    at_end: bool = False
    """Whether it counts only as the log's last line: a job that hangs."""
    others_hold: bool = False
    """Whether it counts only where the line's own sizes show that other processes hold much of the GPU."""
    has_room: bool = False
    """Whether it counts only where the line's own sizes show that there was room for what was asked for."""
    slows: bool = False
    """Whether its line is no failure, but says that something is computed in a slower way than it could be."""
    waits: bool = False
    """Whether a rank that prints it only waited for another one."""
    names_rank: bool = False
    """Whether its line is of the rank to blame, whoever else shows the same failure."""
    own_code: bool = False
    """Whether it holds for an exception of Python's at an expression of the user's own code, too: by default such an
    exception says nothing of a library."""
    of_job: bool = False
    """Whether it ends the job as a whole, so that no rank was first."""
    over: tuple[str, ...] = ()
    """Signatures that say less about the same failure."""
    versions: tuple[str, ...] = ()
    """Combinations of releases that end in it, by their names in presets/versions/."""
    source: str = ""
    """Where the text or the behaviour comes from."""
    examples: tuple[str, ...]
    """Logs in which it is found."""
    near_misses: tuple[str, ...] = ()
    """Logs like the examples that mean something else: it is not found in them."""

    @property
    def compiled(self) -> re.Pattern[str]:
        """The pattern; `re` keeps it."""
        return _compiled(self.pattern)

    @property
    def versions_in_words(self) -> str:
        """The releases of its combinations."""
        return "; ".join(versions.combinations()[name].in_words for name in self.versions)

    def is_shown_by_example(self, line: str) -> bool:
        """Whether the alternative of the pattern that is in a line is in an example, too."""
        return any(one.search(line) for one in alternatives.shown(self.pattern, self.examples))

    @cached_property
    def reads_code(self) -> bool:
        """Whether its own examples show it in a traceback's frame or source code: else it is no failure there."""
        lines = (line for example in self.examples for line in example.split("\n"))
        return any(self.compiled.search(line) and (CODE.match(line) or FRAME.search(line)) for line in lines)

    @cached_property
    def _shown(self) -> list[tuple[str, re.Match[str]]]:
        """The lines of the examples in which it is found, without prefixes, each with the place."""
        lines = (
            narrow(peeled(0, 0, line).text.strip())
            for example in self.examples
            for line in example.split("\n")
        )
        return [(line, hit) for line in lines if (hit := self.compiled.search(line))]

    @cached_property
    def supposes(self) -> bool:
        """Whether its own examples show it in a sentence that supposes: that is how this failure is told."""
        return any(is_supposed(line, hit.start()) for line, hit in self._shown)

    @cached_property
    def types(self) -> frozenset[str]:
        """Names of the exceptions that have it as their message in its examples."""
        hits = (EXCEPTION.match(line) for line, _ in self._shown)
        return frozenset(hit["type"].rpartition(".")[2] for hit in hits if hit)

    def is_amid_others_words(self, text: str) -> bool:
        """Whether more words stand before it in a line than in any example of that wording: somebody speaks of it.
        text: the line without prefixes."""
        hits = (
            (one, hit) for one in alternatives.shown(self.pattern, self.examples) if (hit := one.search(text))
        )
        return all(
            words_before(text, hit.start()) > self._most_before(wording) + WORDS_OF_A_PROGRAM
            for wording, hit in hits
        )

    def _most_before(self, wording: re.Pattern[str]) -> int:
        """The most words before one wording of it in an example."""
        lines = (line for line, _ in self._shown)
        return max(
            (words_before(line, hit.start()) for line in lines if (hit := wording.search(line))), default=0
        )

    def searched(self, name: str) -> re.Pattern[str] | None:
        """The compiled pattern of `above` or `anywhere`; None where there is none."""
        text = getattr(self, name)
        return _compiled(text) if text else None


def words_before(text: str, place: int) -> int:
    """Number of words before a place in a line; an exception's type and a program's name with a colon are none."""
    return len(WORD.findall(LEADS.sub("", text[:place])))


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@lru_cache(maxsize=1)
def _shipped() -> dict[str, FailureSignature]:
    return {signature.id: signature for path in sorted(FOLDER.glob("*.toml")) for signature in read(path)}


def find_signatures() -> dict[str, FailureSignature]:
    """Every signature by its id, a lab's own first. Raises DsrunError for one that can't be used."""
    labs = [signature for path in catalog.files("signatures").values() for signature in read(path)]
    signatures = {signature.id: signature for signature in labs}
    return signatures | {id_: signature for id_, signature in _shipped().items() if id_ not in signatures}


def read(path: Path) -> list[FailureSignature]:
    """The signatures of a file. Raises DsrunError with all problems in it."""
    problems: list[Problem] = []
    signatures = []
    for name, table in catalog.read_toml(path).items():
        problems_here = list(_problems(table))
        problems += [Problem(fault, where=f"{path}: [{name}]") for fault in problems_here]
        if not problems_here:
            signatures.append(_made(name, path.stem, table))
    if problems:
        raise DsrunError(problems)
    return signatures


def _made(name: str, subject: str, table: Mapping[str, Any]) -> FailureSignature:
    fields_given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return FailureSignature(id=name, subject=subject, **fields_given)


def _problems(table: Any) -> Iterator[str]:
    """Problems of a signature's table."""
    if not isinstance(table, Mapping):
        yield "is no table: a signature is [its-id] and keys below it"
        return
    known = {field.name: field for field in fields(FailureSignature)}
    needed = {key for key, field in known.items() if field.default is MISSING} - {"id", "subject"}
    if missing := sorted(needed - set(table)):
        yield f"lacks {', '.join(missing)}"
    for key, value in table.items():
        if key not in known or key in ("id", "subject"):
            yield f"unknown key {key!r}. {catalog.suggestion(key, known, '')}".strip()
        elif (wanted := _wanted(str(known[key].type))) and not wanted[0](value):
            yield f"{key} is {value!r}; expected {wanted[1]}"
    for key, choices in (("kind", KINDS), ("confidence", CONFIDENCES)):
        if key in table and table[key] not in choices:
            yield f"{key} is {table[key]!r}; expected one of {', '.join(choices)}"
    named = table.get("versions", ())
    for name in named if _are_texts(named) else ():
        if name not in versions.combinations():
            yield f"unknown versions {name!r}. {catalog.suggestion(name, versions.combinations(), '')}".strip()
    for key in ("pattern", "above", "anywhere"):
        if isinstance(text := table.get(key, ""), str):
            yield from _pattern_problems(key, text)


def _pattern_problems(key: str, text: str) -> Iterator[str]:
    try:
        _compiled(text)
    except (re.error, OverflowError, RecursionError) as error:
        yield f"{key} is no regular expression: {error}"
        return
    # Classes are blanked out first, so that a * or + inside one isn't taken for a repeat.
    plain = CLASSES.sub(lambda match: "C" if match[0][0] == "[" or match[0][1] in "swdSWD" else "x", text)
    if UNBOUNDED.search(plain):
        yield f"{key} has a repeat without an end (* or +); expected a bound, such as {{0,200}}"


def _wanted(kind: str) -> tuple[Any, str] | None:
    """The test of a value of a field's type, and the type's name for a message."""
    return {
        "str": (lambda value: isinstance(value, str), "a text"),
        "bool": (lambda value: isinstance(value, bool), "true or false"),
        "tuple[str, ...]": (_are_texts, "a list of texts"),
    }.get(kind)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(signature, str) for signature in value)


class SignatureIndex:
    """Signatures by the texts that their patterns can't match without, so that few are tried on a line."""

    def __init__(self, signatures: Mapping[str, FailureSignature]) -> None:
        self.all = tuple(signatures.values())
        self._messages = tuple(signature for signature in signatures.values() if signature.kind == MESSAGE)
        """Tried on exceptions only, of which there are few."""
        self._signatures = tuple(signature for signature in signatures.values() if signature.kind != MESSAGE)
        self._always = tuple(signature for signature in self._signatures if not needed(signature.pattern))
        """Signatures whose patterns have no such text: they are tried on every line."""

    @cached_property
    def search(self) -> LiteralSearch | None:
        """A search for texts of which every line with a signature holds one, and for the beginning of a traceback.

        None where a signature may match any line. All patterns are parsed for it, which takes an eighth of a second.
        """
        return None if self._always else self._in_line

    @cached_property
    def _owners(self) -> dict[bytes, list[FailureSignature]]:
        """The texts, each with the signatures that need it or another one; none need the beginning of a traceback."""
        owners: dict[bytes, list[FailureSignature]] = {folded(BEGIN.encode()): []}
        for signature in self._signatures:
            for text in needed(signature.pattern):
                owners.setdefault(text, []).append(signature)
        return owners

    @cached_property
    def _in_line(self) -> LiteralSearch:
        return LiteralSearch(self._owners)

    @cached_property
    def _patterns(self) -> dict[bytes, list[re.Pattern[str]]]:
        """The texts, each with the patterns that need it: several signatures have the same, and differ in what stands
        around."""
        return {
            text: list(dict.fromkeys(signature.compiled for signature in owners))
            for text, owners in self._owners.items()
        }

    def is_in(self, text: str) -> bool:
        """Whether any signature's pattern is in a line."""
        line = narrow(text)
        if any(signature.compiled.search(line) for signature in self._always):
            return True
        texts = self._in_line.texts_in(folded(line.encode("utf-8", errors="replace")))
        return any(pattern.search(line) for found in texts for pattern in self._patterns[found])

    def of_message(self, message: str) -> FailureSignature | None:
        """The signature of an exception's message, which no other signature knows: the first of a file counts."""
        return next((signature for signature in self._messages if signature.compiled.search(message)), None)

    def matches(self, text: str) -> list[tuple[FailureSignature, re.Match[str]]]:
        """The signatures whose pattern is in a line, in the order of their ids."""
        line = narrow(text)
        tried = {signature.id: signature for signature in self._possible(line)}
        hits = ((signature, signature.compiled.search(line)) for _, signature in sorted(tried.items()))
        return [(signature, hit) for signature, hit in hits if hit]

    def _possible(self, line: str) -> Iterator[FailureSignature]:
        """The signatures that may be in a line; the same one may come again."""
        yield from self._always
        for text in self._in_line.texts_in(folded(line.encode("utf-8", errors="replace"))):
            yield from self._owners[text]

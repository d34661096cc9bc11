"""Places in a text, the issues it can have, and its limits."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from operator import add

from dsrun.errors import DsrunError

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 100
# Every value costs about a microsecond for each of its places, and half a kilobyte to keep.
MAX_VALUES = 50_000
MAX_ISSUES = 200
# Python refuses to turn longer texts into integers (and such integers into text).
MAX_DIGITS = 4300

_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


@dataclass(frozen=True)
class Span:
    """A stretch of the text: offsets in characters (`end` exclusive), line and column from 1.

    Lines end at a line feed, so a lone carriage return does not count; a tab is one column.
    """

    start: int
    end: int
    line: int
    column: int


@dataclass(frozen=True)
class EntrySpans:
    """The places of one value of the document."""

    key: Span | None
    """The key with its quotes; None for the items of a list and for the root."""
    value: Span
    whole: Span
    """The stretch from the key to the end of the value; the value alone where it has no key."""


@dataclass(frozen=True)
class SyntaxIssue:
    """A fault that stops a JSON (or a DeepSpeed) reader, though it could be read here."""

    kind: str
    """comment, trailing-comma, missing-comma, unquoted-key, unquoted-text, single-quotes, multiline-text,
    python-literal, non-finite, no-braces, duplicate-key, bom, big-number, bad-number, bad-escape,
    control-character or lone-surrogate."""
    place: Span
    message: str
    """The text that stands there, as a part of a sentence."""
    path: str
    """The path of the value that it is about; for comments and commas of the section in which they stand."""
    equal: bool = False
    """Of a key that is there twice: whether both values are the same."""


class UnreadableError(Exception):
    """The text cannot be read: what is wrong at which offset.

    final: whether hjson gives up here too, rather than try the text as one single value.
    """

    def __init__(self, at: int, what: str, hint: str = "", *, final: bool = False) -> None:
        super().__init__(what)
        self.at = at
        self.what = what
        self.hint = hint
        self.final = final


Stretch = tuple[int, int]
"""The offsets of a part of the text: begin and end."""
Offsets = tuple[Stretch, Stretch]
"""A value's key (NO_KEY where it has none), and the value itself."""
NO_KEY: Stretch = (-1, -1)


class Lines:
    """A text and the offsets of its line feeds; the end of the text counts as one."""

    def __init__(self, text: str) -> None:
        self.text = text
        lengths = map(len, text.split("\n"))
        # Without a Python-level loop: the text may have millions of lines.
        self.feeds: list[int] = list(map(add, accumulate(lengths), count()))

    def place(self, start: int, end: int) -> Span:
        line = bisect_left(self.feeds, start)
        before = self.feeds[line - 1] if line else -1
        return Span(start, end, line + 1, start - before)


class Entries(Mapping[str, EntrySpans]):
    """The places of a text's values, by path. They are worked out when one is asked for: most texts have no findings.

    locate: gives the text's lines, and its values' offsets by path.
    """

    def __init__(self, locate: Callable[[], tuple[Lines, Mapping[str, Offsets]]]) -> None:
        self._locate = locate

    @cached_property
    def _located(self) -> tuple[Lines, Mapping[str, Offsets]]:
        return self._locate()

    @property
    def offsets(self) -> Mapping[str, Offsets]:
        return self._located[1]

    def __getitem__(self, path: str) -> EntrySpans:
        (start, end), (value_start, value_end) = self.offsets[path]
        place = self._located[0].place
        value = place(value_start, value_end)
        if start < 0:
            return EntrySpans(None, value, value)
        return EntrySpans(place(start, end), value, place(start, value_end))

    def __contains__(self, path: object) -> bool:
        return path in self.offsets

    def __iter__(self) -> Iterator[str]:
        return iter(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets)


@contextmanager
def located(text: str, name: str) -> Iterator[None]:
    """Raises an UnreadableError as a DsrunError, with the file's name and its place in the text."""
    try:
        yield
    except UnreadableError as error:
        place = Lines(text).place(error.at, error.at)
        where = f"{name}:{place.line}:{place.column}"
        raise DsrunError(error.what, where=where, hint=error.hint) from None


def decoded(data: bytes | str, name: str, kind: str, most: int = MAX_BYTES) -> str:
    """The text of a file, its byte order mark included. Raises DsrunError if it is too large, or not UTF-8.

    kind: what such a file is called. most: the largest size, in bytes.
    """
    if len(data) > most:
        message = f"the file is larger than {most // 1024:,} KiB ({len(data):,} bytes)"
        raise DsrunError(message, where=name, hint=f"A {kind} has a few kilobytes.")
    if isinstance(data, str):
        return data
    for mark, encoding in _BOMS.items():
        if data.startswith(mark):
            hint = "Save it as UTF-8 without a byte order mark."
            raise DsrunError(f"the file is {encoding}, not UTF-8", where=name, hint=hint)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8").removeprefix("\ufeff")
        message = f"the file is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        place = Lines(before).place(len(before), len(before))
        where = f"{name}:{place.line}:{place.column}"
        raise DsrunError(message, where=where, hint="Save it as UTF-8.") from None


def short(text: str) -> str:
    """A text for a message: without line breaks, not long."""
    flat = "".join(c if c.isprintable() else "?" for c in text[:41])
    return flat if len(text) <= 40 else f"{flat[:39]}…"


def character(char: str) -> str:
    """A character for a message; those that cannot be seen by name."""
    if char.isascii() and char.isalnum():
        return f"'{char}'"  # a lone letter reads like a word of the message
    if "!" <= char <= "~":
        return char
    name = unicodedata.name(char, "control character" if ord(char) < 32 else "character")
    shown = f" {char}" if char.isprintable() and not char.isspace() else ""
    return f"{name.lower()}{shown} (U+{ord(char):04X})"

"""Where things stand in a text, and what is said of them."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, count
from operator import add

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 100
# Every value costs about a microsecond for each of its places, and half a kilobyte to keep.
MAX_VALUES = 50_000
MAX_ODDITIES = 200
# Python refuses to turn longer texts into integers (and such integers into text).
MAX_DIGITS = 4300


@dataclass(frozen=True)
class Place:
    """A stretch of the text: offsets in characters (`end` exclusive), line and column from 1.

    Lines end at a line feed, so a lone carriage return does not count; a tab is one column.
    """

    start: int
    end: int
    line: int
    column: int


@dataclass(frozen=True)
class Entry:
    """One value of the document.

    key: the key with its quotes; None for the items of a list and for the root.
    whole: from the key to the end of the value; the value alone where there is no key.
    """

    key: Place | None
    value: Place
    whole: Place


@dataclass(frozen=True)
class Oddity:
    """What a JSON (or a DeepSpeed) reader trips over, though it could be read here.

    kind: comment, trailing-comma, missing-comma, unquoted-key, unquoted-text, single-quotes,
      multiline-text, python-literal, non-finite, no-braces, duplicate-key, bom, big-number,
      bad-number, bad-escape, control-character or lone-surrogate.
    message: what stands there, as a part of a sentence.
    path: the value it is about; for comments and commas the section they stand in.
    """

    kind: str
    place: Place
    message: str
    path: str


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


class Lines:
    """A text and the offsets of its line feeds; the end of the text counts as one."""

    def __init__(self, text: str) -> None:
        self.text = text
        lengths = map(len, text.split("\n"))
        # Without a Python-level loop: the text may have millions of lines.
        self.feeds: list[int] = list(map(add, accumulate(lengths), count()))

    def place(self, start: int, end: int) -> Place:
        line = bisect_left(self.feeds, start)
        before = self.feeds[line - 1] if line else -1
        return Place(start, end, line + 1, start - before)


def short(text: str) -> str:
    """A text for a message: without line breaks, not long."""
    flat = "".join(c if c.isprintable() else "?" for c in text[:41])
    return flat if len(text) <= 40 else f"{flat[:39]}…"


def character(char: str) -> str:
    """A character for a message; those that cannot be seen by name."""
    if "!" <= char <= "~":
        return char
    name = unicodedata.name(char, "control character" if ord(char) < 32 else "character")
    shown = f" {char}" if char.isprintable() and not char.isspace() else ""
    return f"{name.lower()}{shown} (U+{ord(char):04X})"

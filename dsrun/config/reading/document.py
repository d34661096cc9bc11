"""The text of a deepspeed.json: its value, the places of its keys, and its syntax issues.

DeepSpeed reads the file with the `hjson` package; HF Trainer, accelerate and Lightning read it
with Python's json. Neither tells where a value stands, hjson is not always installed, and both
answer a syntax error with a traceback. So the text is read here, in either dialect:

* "hjson": the value is what `hjson.loads` gives, its surprises included (`True,` is a text).
* "json": the value is what `json.loads` gives. What json refuses but is plain to see (a comment,
  a comma too many, True for true) is read as it was meant and noted, so that one mistake does not
  hide the next.

Where this differs on purpose: a text that is empty, larger than MAX_BYTES, nested deeper than
MAX_DEPTH, of more than MAX_VALUES values or with NUL bytes is refused though the other readers
might take it; and a number that is too large to hold is noted and read as infinity though hjson
refuses it (json takes 1e999, but no integer of more than 4300 digits). Of hjson's oddest habits
three are left out: digits of other scripts, \\u with signs or underscores among its four digits, and
what it takes off the lines of a ''' that opens on the first line of the text.

A UTF-8 byte order mark is noted ("bom") and left out of the text. hjson skips it. json does not:
`json.load` of a file opened as UTF-8 text refuses it ("Unexpected UTF-8 BOM"); only bytes, or a
file opened as utf-8-sig, get by.

Line breaks are read as they stand. `open` turns a lone carriage return into a line feed before
hjson sees it; that matters inside ''' only, and is not done here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dsrun.config import tree
from dsrun.config.reading.places import (
    MAX_DEPTH,
    MAX_ISSUES,
    MAX_VALUES,
    Entries,
    EntrySpans,
    Lines,
    Span,
    SyntaxIssue,
    UnreadableError,
    decoded,
    located,
)
from dsrun.config.reading.structure import CLOSERS, SPACE, Parser

__all__ = ["Document", "EntrySpans", "Span", "SyntaxIssue", "read"]


@dataclass(frozen=True)
class Document:
    """A text that was read, with its value."""

    name: str
    text: str
    value: Any
    entries: Mapping[str, EntrySpans]
    """The places of its values by dotted path, items of lists by index; the root is "". Of a key that is written twice
    the last one counts. Keys that have dots of their own can share a path with others."""
    issues: tuple[SyntaxIssue, ...]
    """Its syntax issues in the order of the text, the first MAX_ISSUES unless more were asked for."""


def read(data: bytes | str, name: str, dialect: str, *, most_issues: int = MAX_ISSUES) -> Document:
    """The document in `data`; DsrunError for what cannot be read.

    name: of the file, for messages.
    dialect: "hjson" or "json", see above.
    """
    if dialect not in ("hjson", "json"):
        raise ValueError(f"no such dialect: {dialect}")
    text = decoded(data, name, "deepspeed.json")
    if dialect == "json" and (value := _plain(text)) is not tree.MISSING:
        # The value is json's; the parser here reads the text only if somebody asks where something stands.
        entries = Entries(lambda: _read(text, "json", mark=False, most_issues=MAX_ISSUES)[0].located(value))
        return Document(name, text, value, entries, ())
    # hjson also knows the byte order mark as it looks when it was taken for Latin-1.
    plain = text.removeprefix("\ufeff").removeprefix("\xef\xbb\xbf")
    with located(plain, name):
        parser, value = _read(plain, dialect, mark=plain != text, most_issues=most_issues)
    return Document(name, plain, value, Entries(lambda: parser.located(value)), parser.noted())


def _plain(text: str) -> Any:
    """The value of a text that is plain JSON without anything to note; tree.MISSING for one that may not be.

    It is short, so that it holds no more than MAX_VALUES, and has no escapes, as they may be half surrogates.
    """
    if len(text) > MAX_VALUES or "\\u" in text or text.count("{") + text.count("[") > MAX_DEPTH:
        return tree.MISSING
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_float=_finite, parse_constant=_finite)
    except ValueError:
        return tree.MISSING


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _read(text: str, dialect: str, *, mark: bool, most_issues: int) -> tuple[Parser, Any]:
    """The value of the text, and the parser with its places and issues.

    Without a brace or bracket at its beginning the text may be the inside of an object. hjson
    tries that first, and if it fails it reads the text as one value, which succeeds for any
    single line. For a JSON text it is looked whether a key stands there, so that errors are about
    what is written.
    """
    if (nul := text.find("\0")) >= 0:
        hint = "is this a JSON file, saved as UTF-8?"
        raise UnreadableError(nul, "a NUL byte: this is not a text file", hint)
    if SPACE.fullmatch(text):
        raise UnreadableError(0, "the file is empty", "`dsrun preset zero2` prints a config to begin with")
    lines = Lines(text)
    parser = Parser(lines, dialect, mark=mark, most_issues=most_issues)
    pos = parser.gap(0)
    if pos == len(text) and not mark and dialect == "hjson":
        return parser, parser.nothing()
    braces = text[pos : pos + 1] in CLOSERS
    if braces or dialect == "json":
        return parser, parser.document(pos, braces=braces or not parser.starts_with_key(pos))
    try:
        return parser, parser.document(pos, braces=False)
    except UnreadableError as error:
        if not error.final and not parser.overflowed:
            single = Parser(lines, dialect, mark=mark, most_issues=most_issues)
            with suppress(UnreadableError):
                return single, single.document(single.gap(0), braces=True)
        raise

"""The text of a deepspeed.json: its value, where every key stands, and what a reader trips over.

DeepSpeed reads the file with the `hjson` package; HF Trainer, accelerate and Lightning read it
with Python's json. Neither tells where a value stands, hjson is not always installed, and both
answer a slip with a traceback. So the text is read here, in either dialect:

* "hjson": the value is what `hjson.loads` gives, its surprises included (`True,` is a text).
* "json": the value is what `json.loads` gives. What json refuses but is plain to see (a comment,
  a comma too many, True for true) is read as it was meant and noted, so that one slip does not
  hide the next.

Where this differs on purpose: a text that is empty, larger than MAX_BYTES, nested deeper than
MAX_DEPTH, of more than MAX_VALUES values or with NUL bytes is refused though the other readers
might take it; and a number that is too large to hold is noted and read as infinity though hjson
refuses it (json takes 1e999, but no integer of more than 4300 digits).

A UTF-8 byte order mark is noted ("bom") and left out of the text. hjson skips it. json does not:
`json.load` of a file opened as UTF-8 text refuses it ("Unexpected UTF-8 BOM"); only bytes, or a
file opened as utf-8-sig, get by.

Line breaks are read as they stand. `open` turns a lone carriage return into a line feed before
hjson sees it; that matters inside ''' only, and is not done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsrun.config.reading import excerpt as lines_around
from dsrun.config.reading.places import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_ODDITIES,
    MAX_VALUES,
    Entry,
    Lines,
    Oddity,
    Place,
    UnreadableError,
)
from dsrun.config.reading.structure import CLOSERS, SPACE, Reader
from dsrun.errors import DsrunError, Problem

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_ODDITIES",
    "MAX_VALUES",
    "Document",
    "Entry",
    "Oddity",
    "Place",
    "excerpt",
    "read",
]

_BOMS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


@dataclass(frozen=True)
class Document:
    """A text that was read.

    entries: by dotted path, items of lists by index; the root is "". Of a key that is written
      twice the last one counts. Keys that have dots of their own can share a path with others.
    oddities: in the order of the text, no more than MAX_ODDITIES.
    """

    name: str
    text: str
    value: Any
    entries: dict[str, Entry]
    oddities: tuple[Oddity, ...]


def read(data: bytes | str, name: str, dialect: str) -> Document:
    """The document in `data`; DsrunError for what cannot be read.

    name: of the file, for messages.
    dialect: "hjson" or "json", see above.
    """
    if dialect not in ("hjson", "json"):
        raise ValueError(f"no such dialect: {dialect}")
    text, mark = _without_mark(_decoded(data, name))
    lines = Lines(text)
    try:
        _refuse_unfit(text)
        reader, value = _read(lines, dialect, mark)
    except UnreadableError as error:
        place = lines.place(error.at, error.at)
        where = f"{name}:{place.line}:{place.column}"
        raise DsrunError([Problem(error.what, where, error.hint)]) from None
    return Document(name, text, value, reader.found(value), reader.noted())


def excerpt(document: Document, place: Place, context: int = 1) -> str:
    """The line of a place with a caret under it, and `context` lines before and after."""
    return lines_around.excerpt(document.text, place, context)


def _decoded(data: bytes | str, name: str) -> str:
    if len(data) > MAX_BYTES:
        what = f"the file is larger than {MAX_BYTES // 1024 // 1024} MiB ({len(data):,} bytes)"
        raise DsrunError(what, where=name, hint="a deepspeed.json has a few kilobytes")
    if isinstance(data, str):
        return data
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            hint = "save it as UTF-8 without a byte order mark"
            raise DsrunError(f"the file is {encoding}, not UTF-8", where=name, hint=hint)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return _refuse_bytes(data, error.start, name)


def _refuse_bytes(data: bytes, offset: int, name: str) -> str:
    before = data[:offset].decode("utf-8").removeprefix("\ufeff")
    place = Lines(before).place(len(before), len(before))
    raise DsrunError(
        f"the file is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}",
        where=f"{name}:{place.line}:{place.column}",
        hint="save it as UTF-8",
    )


def _without_mark(text: str) -> tuple[str, int]:
    """The text without a byte order mark, and the length of the mark.

    hjson also knows the mark as it looks when it was taken for Latin-1.
    """
    for mark in ("\ufeff", "\xef\xbb\xbf"):
        if text.startswith(mark):
            return text[len(mark) :], len(mark)
    return text, 0


def _refuse_unfit(text: str) -> None:
    nul = text.find("\0")
    if nul >= 0:
        hint = "is this a JSON file, saved as UTF-8?"
        raise UnreadableError(nul, "a NUL byte: this is not a text file", hint)
    if SPACE.fullmatch(text):
        raise UnreadableError(0, "the file is empty", "`dsrun preset zero2` prints a config to begin with")


def _read(lines: Lines, dialect: str, mark: int) -> tuple[Reader, Any]:
    """The value of the text, and the reader with what it found on the way.

    Without a brace or bracket at its beginning the text may be the inside of an object. hjson
    tries that first, and if it fails it reads the text as one value, which succeeds for any
    single line. Json texts are looked at for a key instead, so that errors are about what stands
    there.
    """
    reader = Reader(lines, dialect, mark)
    pos = reader.gap(0)
    text = lines.text
    if pos == len(text) and not mark and dialect == "hjson":
        return reader, reader.nothing()
    if text[pos : pos + 1] in CLOSERS:
        return reader, reader.document(pos, braces=True)
    if dialect == "json":
        return reader, reader.document(pos, braces=not reader.starts_with_key(pos))
    try:
        return reader, reader.document(pos, braces=False)
    except UnreadableError as error:
        if error.final or reader.overflowed:
            raise
        return _read_single(lines, mark, error)


def _read_single(lines: Lines, mark: int, error: UnreadableError) -> tuple[Reader, Any]:
    """The hjson text as one value; `error`, that of the first try, if it is none."""
    reader = Reader(lines, "hjson", mark)
    try:
        return reader, reader.document(reader.gap(0), braces=True)
    except UnreadableError:
        raise error from None

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

import json
import re
import unicodedata
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, count
from operator import add
from typing import Any, NoReturn

from dsrun.errors import DsrunError, Problem

MAX_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 100
# Every value costs about a microsecond for each of its places, and half a kilobyte to keep.
MAX_VALUES = 50_000
MAX_ODDITIES = 200
# Python refuses to turn longer texts into integers (and such integers into text).
MAX_DIGITS = 4300

_BOMS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_CLOSERS = {"{": "}", "[": "]"}
_PYTHON: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_AS_JSON = {"True": "true", "False": "false", "None": "null"}

_SPACE = re.compile(r"[ \t\n\r]*")
_COMMENT = re.compile(r"#[^\r\n]*|//[^\r\n]*|/\*[\s\S]*?\*/")
# All repeated groups here have an upper bound and are applied in a loop: the regex engine keeps
# a note of each round until the whole match is over, which for millions of rounds is much memory.
_GAP = re.compile(r"(?:[ \t\n\r]+|#[^\r\n]*|//[^\r\n]*|/\*[\s\S]*?\*/){0,1000}")

_PLAIN_STRING = re.compile(r'"([^"\\\x00-\x1f]*)"')
_STRING_PART = {quote: re.compile(rf"(?:[^{quote}\\\n]+|\\[^\n]){{1,1000}}") for quote in "\"'"}
# hjson hands the four characters after \u to int(), which forgives a line break among them.
_HJSON_PART = {
    quote: re.compile(rf"(?:[^{quote}\\\n]+|\\u[^\\\"']{{4}}|\\[^\n]){{1,1000}}") for quote in "\"'"
}
_ESCAPE = re.compile(r"\\(u[\s\S]{4}|[\s\S])")
_BAD_ESCAPE = re.compile(r"""\\(?!["'/bfnrt]|u[0-9a-fA-F]{4})""")
_ESCAPED = {
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
} | {c: c for c in "\"'\\/"}
_FOUR_DIGITS = re.compile(r"u[0-9a-fA-F]{4}")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LAX = json.JSONDecoder(strict=False)

_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
# hjson's numbers: any decimal digit of Unicode counts after the first one.
_HJSON_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?")
_NON_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE | re.ASCII)
_BASED_NUMBER = re.compile(r"[-+]?0(?:[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|[oO]_*[0-7][0-7_]*|[bB]_*[01][01_]*)")
_ODD_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_STOP = re.compile(r"[\r\n,}\]#]|/[/*]")
_LINE_END = re.compile(r"[\r\n]")
_HJSON_KEY = re.compile(r"([^:{}\[\], \t\n\r]+)([ \t\n\r]*)(?=:)")
_PATHS_SLASH = r"/(?![/*])"
_WORD = re.compile(rf"(?:[^\s,:;=(){{}}\[\]\"'#/\x00-\x1f]+|{_PATHS_SLASH}){{1,1000}}")
_ALPHANUMERIC = re.compile(r"\w")


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
    lines = _Lines(text)
    try:
        _refuse_unfit(text)
        reader, value = _read(lines, dialect, mark)
    except _UnreadableError as error:
        place = lines.place(error.at, error.at)
        where = f"{name}:{place.line}:{place.column}"
        raise DsrunError([Problem(error.what, where, error.hint)]) from None
    return Document(name, text, value, reader.found(value), reader.noted())


def excerpt(document: Document, place: Place, context: int = 1) -> str:
    """The line of a place with a caret under it, and `context` lines before and after."""
    text = document.text
    start = text.rfind("\n", 0, place.start) + 1
    end = _line_end(text, start)
    shown = [*_lines_before(text, start, context), (start, end), *_lines_after(text, end, context)]
    first = place.line - shown.index((start, end))
    gutter = len(str(first + len(shown) - 1))
    rows = []
    for number, (begin, stop) in enumerate(shown, first):
        here = number == place.line
        line, marks = _row(text, begin, stop, place if here else None)
        rows.append(f"{number:>{gutter}} | {line}".rstrip())
        if here:
            rows.append(f"{'':>{gutter}} | {marks}")
    return "\n".join(rows)


# ---------------------------------------------------------------- from bytes to text


class _UnreadableError(Exception):
    """The text cannot be read: what is wrong at which offset.

    final: whether hjson gives up here too, rather than try the text as one single value.
    """

    def __init__(self, at: int, what: str, hint: str = "", *, final: bool = False) -> None:
        super().__init__(what)
        self.at = at
        self.what = what
        self.hint = hint
        self.final = final


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
    place = _Lines(before).place(len(before), len(before))
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
        raise _UnreadableError(nul, "a NUL byte: this is not a text file", hint)
    if _SPACE.fullmatch(text):
        raise _UnreadableError(0, "the file is empty", 'the smallest config is "{}"')


class _Lines:
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


def _read(lines: _Lines, dialect: str, mark: int) -> tuple[_Reader, Any]:
    """The value of the text, and the reader with what it found on the way.

    Without a brace or bracket at its beginning the text may be the inside of an object. hjson
    tries that first, and if it fails it reads the text as one value, which succeeds for any
    single line. Json texts are looked at for a key instead, so that errors are about what stands
    there.
    """
    reader = _Reader(lines, dialect, mark)
    pos = reader.gap(0)
    text = lines.text
    if pos == len(text) and not mark and dialect == "hjson":
        return reader, reader.nothing()
    if text[pos : pos + 1] in _CLOSERS:
        return reader, reader.document(pos, braces=True)
    if dialect == "json":
        return reader, reader.document(pos, braces=not reader.starts_with_key(pos))
    try:
        return reader, reader.document(pos, braces=False)
    except _UnreadableError as error:
        if error.final or reader.overflowed:
            raise
        return _read_single(lines, mark, error)


def _read_single(lines: _Lines, mark: int, error: _UnreadableError) -> tuple[_Reader, Any]:
    """The hjson text as one value; `error`, that of the first try, if it is none."""
    reader = _Reader(lines, "hjson", mark)
    try:
        return reader, reader.document(reader.gap(0), braces=True)
    except _UnreadableError:
        raise error from None


# ---------------------------------------------------------------- the reader


class _Frame:
    """A dict or list whose end has not been reached.

    closer: the character that ends it; empty for a root object without braces.
    lines: the line of each key so far.
    """

    __slots__ = ("box", "closer", "key", "key_place", "lines", "path", "start")

    def __init__(self, closer: str, start: int, path: str) -> None:
        self.box: dict[str, Any] | list[Any] = [] if closer == "]" else {}
        self.closer = closer
        self.start = start
        self.path = path
        self.key = ""
        self.key_place: Place | None = None
        self.lines: dict[str, int] = {}

    def inner(self) -> str:
        """The path of the value that is being read."""
        key = str(len(self.box)) if isinstance(self.box, list) else self.key
        return f"{self.path}.{key}" if self.path else key


class _Reader:
    """Reads one text once. Offsets go in and out; what was found on the way stays here."""

    def __init__(self, lines: _Lines, dialect: str, mark: int) -> None:
        self.lines = lines
        self.text = lines.text
        self.hjson = dialect == "hjson"
        self.mark = mark
        self.stack: list[_Frame] = []
        self.entries: dict[str, Entry] = {}
        self.oddities: list[Oddity] = []
        self.values = 0
        self.root: Entry
        # The unquoted text read last, and whether a number was too large to hold.
        self.loose: Place | None = None
        self.overflowed = False
        self.replaced = False
        if mark:
            self.note("bom", 0, 0, "a UTF-8 byte order mark", "")

    # -- what is found

    def note(self, kind: str, start: int, end: int, message: str, path: str | None = None) -> None:
        if len(self.oddities) < MAX_ODDITIES:
            where = self.path() if path is None else path
            self.oddities.append(Oddity(kind, self.lines.place(start, end), message, where))

    def noted(self) -> tuple[Oddity, ...]:
        return tuple(sorted(self.oddities, key=lambda oddity: oddity.place.start))

    def found(self, value: Any) -> dict[str, Entry]:
        """The entries; those of values that a second key replaced are left out."""
        self.entries.pop("", None)
        if not self.replaced:
            return {"": self.root, **self.entries}
        paths = _paths(value)
        return {"": self.root} | {path: e for path, e in self.entries.items() if path in paths}

    def path(self) -> str:
        """The path of the value that is being read."""
        return self.stack[-1].inner() if self.stack else ""

    def section(self) -> str:
        return self.stack[-1].path if self.stack else ""

    # -- the tree

    def nothing(self) -> dict[str, Any]:
        """A text of nothing but comments, which hjson takes for an empty object."""
        end = len(self.text)
        place = self.lines.place(end, end)
        self.root = Entry(None, place, place)
        self.note("no-braces", end, end, "nothing but comments, read as an empty object", "")
        return {}

    def document(self, pos: int, *, braces: bool) -> Any:
        """The value of the whole text. No recursion: the text decides how deep it is nested."""
        if not braces:
            self.note("no-braces", pos, pos, "keys without the braces around them", "")
            self.stack.append(_Frame("", pos, ""))
            pos = self.item(pos)
        value, pos = self.tree(pos)
        pos = self.gap(pos)
        if pos < len(self.text):
            self.refuse(pos, "after the end of the value")
        return value

    def tree(self, start: int) -> tuple[Any, int]:
        """The value at `start` with all that is in it, and where it ends."""
        while True:
            closer = _CLOSERS.get(self.text[start : start + 1])
            if closer:
                pos = self.enter(start, closer)
                if self.text[pos : pos + 1] != closer:
                    start = self.item(pos)
                    continue
                value, stop = self.stack.pop().box, pos + 1
                pos = stop
            else:
                value, stop, pos = self.scalar(start)
            while self.stack:
                self.attach(value, start, stop)
                frame = self.stack[-1]
                pos, closed = self.onward(pos, stop)
                if not closed:
                    start = self.item(pos)
                    break
                self.stack.pop()
                start, value = frame.start, frame.box
                stop = pos if frame.closer else stop
            else:
                place = self.lines.place(start, stop)
                self.root = Entry(None, place, place)
                return value, pos

    def enter(self, start: int, closer: str) -> int:
        if len(self.stack) >= MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels"
            raise _UnreadableError(start, what, "a deepspeed.json has about five", final=True)
        self.stack.append(_Frame(closer, start, self.path()))
        return self.gap(start + 1)

    def attach(self, value: Any, start: int, stop: int) -> None:
        """Put a value into the dict or list that it stands in."""
        self.values += 1
        if self.values > MAX_VALUES:
            what = f"more than {MAX_VALUES:,} values"
            raise _UnreadableError(start, what, "a deepspeed.json has some dozens", final=True)
        frame = self.stack[-1]
        place = self.lines.place(start, stop)
        key = frame.key_place
        whole = Place(key.start, stop, key.line, key.column) if key else place
        self.entries[frame.inner()] = Entry(key, place, whole)
        if isinstance(frame.box, list):
            frame.box.append(value)
        else:
            self.replaced |= isinstance(frame.box.get(frame.key), (dict, list))
            frame.box[frame.key] = value

    def onward(self, pos: int, stop: int) -> tuple[int, bool]:
        """Past the comma or the closer that follows a value; whether it was the closer."""
        frame = self.stack[-1]
        pos = self.gap(pos)
        comma = pos if self.text[pos : pos + 1] == "," else -1
        if comma >= 0:
            pos = self.gap(pos + 1)
        at_end = pos == len(self.text)
        if at_end if not frame.closer else self.text[pos : pos + 1] == frame.closer:
            if comma >= 0:
                what = "a comma before the closing " + _CLOSED_BY.get(frame.closer, "end")
                self.note("trailing-comma", comma, comma + 1, what, frame.path)
            return pos + len(frame.closer), True
        if at_end:
            self.refuse_end()
        if self.text[pos] in "}],:":
            self.refuse_closer(pos)
        if comma < 0 and self.text[stop - 1] != ",":
            # An unquoted text that ends in a comma has swallowed the one that was meant.
            self.note("missing-comma", stop, stop, "no comma after this value", frame.path)
        return pos, False

    def item(self, pos: int) -> int:
        """Where the next value of the open dict or list begins: past the key in a dict."""
        frame = self.stack[-1]
        if isinstance(frame.box, dict):
            pos = self.key(pos, frame)
        if pos == len(self.text):
            self.refuse_end()
        return pos

    def key(self, pos: int, frame: _Frame) -> int:
        if pos == len(self.text):
            self.refuse_end()
        quoted = self.text[pos] in "\"'"
        frame.key, stop = self.quoted(pos, key=True) if quoted else self.loose_key(pos)
        frame.key_place = self.lines.place(pos, stop)
        self.note_key(frame, frame.key_place, quoted)
        colon = self.gap(stop)
        if self.text[colon : colon + 1] != ":":
            what = f"no colon after the key {_short(frame.key)}"
            raise _UnreadableError(stop, what, 'a key and its value: "key": value')
        return self.gap(colon + 1)

    def note_key(self, frame: _Frame, place: Place, quoted: bool) -> None:
        name = _short(frame.key)
        if not quoted:
            self.note("unquoted-key", place.start, place.end, f"the key {name} without quotes")
        if frame.key in frame.lines:
            what = f"the key {name} a second time (first at line {frame.lines[frame.key]})"
            self.note("duplicate-key", place.start, place.end, what)
        frame.lines.setdefault(frame.key, place.line)

    def loose_key(self, pos: int) -> tuple[str, int]:
        """An unquoted key and where it ends. hjson allows most characters, here words do."""
        if not self.hjson:
            word = self.word(pos)
            return word, pos + len(word)
        found = _HJSON_KEY.match(self.text, pos)
        if found is None:
            self.refuse(pos, "where a key was expected")
        name: str = found[1]
        return (name.rstrip() if found[2] else name), found.end(1)

    def starts_with_key(self, pos: int) -> bool:
        """Whether a key and its colon stand at `pos` (json dialect)."""
        if self.text[pos : pos + 1] in ('"', "'"):
            stop = self.string_end(pos) + 1
        else:
            word = _WORD.match(self.text, pos)
            stop = word.end() if word else pos
        return stop > pos and self.text[self.skip(stop) :][:1] == ":"

    # -- between the values

    def skip(self, pos: int) -> int:
        """Past white space and comments."""
        while (found := _GAP.match(self.text, pos)) and found.end() > pos:
            pos = found.end()
        return pos

    def gap(self, pos: int) -> int:
        """Past white space and comments, noting the comments."""
        space = _SPACE.match(self.text, pos)
        begin = space.end() if space else pos
        if self.text[begin : begin + 1] not in ("#", "/"):
            return begin
        end = self.skip(begin)
        self.note_comments(begin, end)
        if self.text.startswith("/*", end):
            raise _UnreadableError(end, "the comment that /* opens is never closed", final=True)
        return end

    def note_comments(self, begin: int, end: int) -> None:
        if end == begin or len(self.oddities) >= MAX_ODDITIES:
            return
        for found in _COMMENT.finditer(self.text, begin, end):
            self.note("comment", found.start(), found.end(), "a comment", self.section())
            if len(self.oddities) >= MAX_ODDITIES:
                return

    # -- values without an inside

    def scalar(self, pos: int) -> tuple[Any, int, int]:
        """A text, number or word at `pos`: its value, where it ends, where to read on."""
        text = self.text
        if text.startswith("'''", pos):
            value, stop = self.multiline(pos)
            return value, stop, stop
        if text[pos : pos + 1] in ('"', "'"):
            value, stop = self.quoted(pos)
            return value, stop, stop
        if text[pos : pos + 1] in ("", "{", "}", "[", "]", ",", ":"):
            self.refuse(pos, "where a value was expected")
        return self.hjson_bare(pos) if self.hjson else self.json_bare(pos)

    def hjson_bare(self, pos: int) -> tuple[Any, int, int]:
        """Without quotes hjson reads a word or number if it fills the space up to a comma, closer,
        comment or line end. Else all up to the line end is a text, commas and closers included.
        """
        stop = self.find(_STOP, pos)
        head = self.text[pos:stop]
        word = head.rstrip()
        if word in _WORDS:
            return _WORDS[word], pos + len(word), stop
        number = head.rstrip(" \t")
        if _HJSON_NUMBER.fullmatch(number):
            return self.hjson_number(number, pos), pos + len(number), stop
        line_end = self.find(_LINE_END, stop)
        text = self.text[pos:line_end]
        end = pos + len(text.rstrip()) if text.strip() else line_end
        self.loose = self.lines.place(pos, end)
        self.note_loose(head.strip(), text.strip(), pos, end)
        return text.strip(), end, line_end

    def find(self, pattern: re.Pattern[str], pos: int) -> int:
        """Where the pattern occurs next; the end of the text if nowhere."""
        found = pattern.search(self.text, pos)
        return found.start() if found else len(self.text)

    def note_loose(self, head: str, text: str, pos: int, end: int) -> None:
        """Note an unquoted text of hjson; `head` is its beginning, up to a comma or the like."""
        read_as = f' (read as the text "{_short(text)}")'
        if head in _PYTHON:
            what = f"{head}, which is Python; JSON has {_AS_JSON[head]}{read_as}"
            self.note("python-literal", pos, end, what)
        elif _NON_FINITE.fullmatch(head):
            self.note("non-finite", pos, end, f"{head}, which JSON does not have{read_as}")
        elif _BASED_NUMBER.fullmatch(head) or _ODD_NUMBER.fullmatch(head):
            what = f"{_short(head)}, which is no JSON number{read_as}"
            self.note("bad-number", pos, end, what)
        else:
            self.note_text("unquoted-text", text, pos, end)
        self.note_surrogate(text, pos, end)

    def note_text(self, kind: str, text: str, pos: int, end: int) -> None:
        self.note(kind, pos, end, f"the text {_short(text)} without quotes")

    def hjson_number(self, text: str, pos: int) -> int | float:
        if not _NUMBER.fullmatch(text):
            what = f"{_short(text)}, with digits that JSON does not have"
            self.note("bad-number", pos, pos + len(text), what)
        number = self.number(text, pos)
        if isinstance(number, float) and abs(number) < 1e10 and int(number) == number:
            return int(number)
        return number

    def json_bare(self, pos: int) -> tuple[Any, int, int]:
        word = self.word(pos)
        stop = pos + len(word)
        if word in _WORDS:
            return _WORDS[word], stop, stop
        if _NUMBER.fullmatch(word):
            return self.number(word, pos), stop, stop
        return self.odd_word(word, pos), stop, stop

    def odd_word(self, word: str, pos: int) -> Any:
        """What a word was meant to be that JSON does not have."""
        stop = pos + len(word)
        if word in _PYTHON:
            what = f"{word}, which is Python; JSON has {_AS_JSON[word]}"
            self.note("python-literal", pos, stop, what)
            return _PYTHON[word]
        if _NON_FINITE.fullmatch(word):
            self.note("non-finite", pos, stop, f"{word}, which JSON does not have")
            return float(word)
        if _BASED_NUMBER.fullmatch(word) or _ODD_NUMBER.fullmatch(word):
            return self.odd_number(word, pos)
        self.note_text("unquoted-text", word, pos, stop)
        self.note_surrogate(word, pos, stop)
        return word

    def word(self, pos: int) -> str:
        """The characters up to white space, punctuation or a comment (json dialect)."""
        stop = pos
        while found := _WORD.match(self.text, stop):
            stop = found.end()
        word = self.text[pos:stop]
        if not _ALPHANUMERIC.search(word):
            self.refuse(pos, "where a value or key was expected")
        return word

    def number(self, text: str, pos: int) -> int | float:
        """The number that `text` is in Python, infinity if it is too large."""
        value: int | float
        digits = text.lstrip("-+")
        if not digits.isdigit():
            value = float(text)
        elif len(digits) <= MAX_DIGITS:
            return int(text)
        else:
            value = float("-inf" if text.startswith("-") else "inf")
        if abs(value) == float("inf"):
            self.overflowed = True
            whole = f"an integer of {len(digits)} digits"
            what = whole if digits.isdigit() else f"{_short(text)}, which is too large for a float"
            self.note("big-number", pos, pos + len(text), what)
        return value

    def odd_number(self, word: str, pos: int) -> int | float:
        self.note("bad-number", pos, pos + len(word), f"{_short(word)}, which is no JSON number")
        plain = word.replace("_", "")
        if not _BASED_NUMBER.fullmatch(plain):
            return self.number(plain, pos)
        if len(plain) > MAX_DIGITS:
            self.note("big-number", pos, pos + len(word), f"a number of {len(plain)} digits")
            return float("-inf" if plain.startswith("-") else "inf")
        return int(plain, 0)

    # -- texts in quotes

    def quoted(self, pos: int, *, key: bool = False) -> tuple[str, int]:
        """The text in the quotes at `pos`, and where it ends."""
        plain = _PLAIN_STRING.match(self.text, pos)
        if plain is not None:
            self.note_surrogate(plain[1], pos, plain.end())
            return plain[1], plain.end()
        stop = self.string_end(pos)
        quote = self.text[pos]
        if stop == len(self.text) or self.text[stop] != quote:
            self.refuse_quote(pos, stop)
        if quote == "'":
            what = "a key in single quotes" if key else "a text in single quotes"
            self.note("single-quotes", pos, stop + 1, what)
        self.note_controls(pos, stop)
        value = self.unescaped(pos, stop)
        self.note_surrogate(value, pos, stop + 1)
        return value, stop + 1

    def string_end(self, pos: int) -> int:
        """Where the quote at `pos` is closed, or the line or text ends without that."""
        part = (_HJSON_PART if self.hjson else _STRING_PART)[self.text[pos]]
        pos += 1
        while found := part.match(self.text, pos):
            pos = found.end()
        return pos

    def note_controls(self, pos: int, stop: int) -> None:
        """Control characters between the quotes: json dialect only, hjson never takes them."""
        body = self.text[pos + 1 : stop]
        if self.hjson and _CONTROL.search(body):
            # But inside an escape hjson does not look, see `odd_escapes`.
            body = _ESCAPE.sub(lambda found: "-" * len(found[0]), body)
        for found in _CONTROL.finditer(body):
            at = pos + 1 + found.start()
            code = f"{ord(found[0]):04x}"
            what = f"a control character in a text (U+{code.upper()})"
            if self.hjson:
                raise _UnreadableError(at, what, f"write \\u{code}")
            self.note("control-character", at, at + 1, what)
            if len(self.oddities) >= MAX_ODDITIES:
                return

    def note_surrogate(self, value: str, pos: int, stop: int) -> None:
        if value.isascii():
            return
        found = _SURROGATE.search(value)
        if found:
            what = f"half a surrogate pair (\\u{ord(found[0]):04x}), which is no character"
            self.note("lone-surrogate", pos, stop, what)

    def unescaped(self, pos: int, stop: int) -> str:
        """The text between the quotes at `pos` and `stop`."""
        body = self.text[pos + 1 : stop]
        if "\\" not in body:
            return body
        # Without the escaped backslashes each one that is left begins an escape.
        rest = body.replace("\\\\", "")
        if _BAD_ESCAPE.search(rest):
            return self.odd_escapes(pos, body)
        if self.text[pos] == '"' and "\\'" in rest:
            self.note_apostrophes(pos, body)
        parts = (
            part.replace("\\'", "'").replace('\\"', '"').replace('"', '\\"') for part in body.split("\\\\")
        )
        text: str = _LAX.decode('"' + "\\\\".join(parts) + '"')
        return text

    def note_apostrophes(self, pos: int, body: str) -> None:
        for found in _ESCAPE.finditer(body):
            if found[0] == "\\'":
                at = pos + 1 + found.start()
                self.note("bad-escape", at, at + 2, "\\', which JSON does not have")

    def odd_escapes(self, pos: int, body: str) -> str:
        """Escapes one by one: some are wrong, or are such that only hjson reads them.

        After \\u hjson takes whatever int(..., 16) takes, such as "+12a" or "1_23".
        """
        pieces: list[str] = []
        last = high = -1
        done = 0
        for found in _ESCAPE.finditer(body):
            at = pos + 1 + found.start()
            code = self.escape(found[1], at)
            pieces.append(body[done : found.start()])
            done = found.end()
            if high >= 0 and last == found.start() and code & 0xFC00 == 0xDC00:
                code = 0x10000 + ((high - 0xD800) << 10 | (code - 0xDC00))
                pieces.pop()
                pieces.pop()
            high = code if code & 0xFC00 == 0xD800 and found[1][0] == "u" else -1
            last = done
            pieces.append(chr(code))
        return "".join(pieces) + body[done:]

    def escape(self, letters: str, at: int) -> int:
        """The code of the character that an escape stands for."""
        if letters in _ESCAPED:
            return ord(_ESCAPED[letters])
        if letters[0] != "u" or len(letters) < 5:
            self.refuse_escape(letters, at)
        if _FOUR_DIGITS.fullmatch(letters):
            return int(letters[1:], 16)
        # hjson looks for an x in this place only, so that 0x12 is no code.
        if not self.hjson or letters[2] in "xX":
            self.refuse_escape(letters, at)
        try:
            code = int(letters[1:], 16)
        except ValueError:
            self.refuse_escape(letters, at)
        if code < 0:
            self.refuse_escape(letters, at, final=True)
        self.note("bad-escape", at, at + 6, "an escape \\u without four digits")
        return code

    def refuse_escape(self, letters: str, at: int, *, final: bool = False) -> NoReturn:
        what = f"\\{_short(letters)}, which is no escape"
        raise _UnreadableError(at, what, "write \\\\ for a backslash", final=final)

    def multiline(self, pos: int) -> tuple[str, int]:
        """A text in three single quotes, without the indentation that its first line has."""
        indent = self.indent(pos)
        body = pos + 3
        close = self.text.find("'''", body)
        if close < 0:
            rest = self.text[body:].lstrip(" \t\r")
            what = "the ''' opened here are never closed"
            raise _UnreadableError(pos, what, final=not rest)
        self.note("multiline-text", pos, close + 3, "a text in three single quotes")
        first, *others = self.text[body:close].split("\n")
        first = first.lstrip(" \t\r")
        kept = [_unindented(line, indent) for line in others]
        lines = kept if kept and not first else [first, *kept]
        text = "\n".join(lines).replace("\r", "")
        self.note_surrogate(text, pos, close + 3)
        return text.removesuffix("\n"), close + 3

    def indent(self, pos: int) -> int:
        """How many characters hjson takes off the beginning of each line.

        As many as stand before the quotes. On the first line of the text hjson walks on from the
        end of the text (a negative index) until it meets a line feed, and breaks if there is none.
        """
        place = self.lines.place(pos, pos)
        if place.line > 1:
            return place.column - 1
        feeds = self.lines.feeds
        if len(feeds) > 1:
            return pos + self.mark - 1 + len(self.text) - feeds[-2]
        if self.hjson:
            what = "''' in a text of one line, which hjson cannot read"
            raise _UnreadableError(pos, what, "write the text in double quotes", final=True)
        return pos

    # -- what cannot be read

    def refuse(self, pos: int, where: str) -> NoReturn:
        if pos >= len(self.text):
            self.refuse_end()
        what = f"unexpected {_character(self.text[pos])} {where}"
        raise _UnreadableError(pos, what)

    def refuse_closer(self, pos: int) -> NoReturn:
        frame = self.stack[-1]
        if self.text[pos] in ",:" or not frame.closer:
            self.refuse(pos, "where a value or key was expected")
        opener = self.lines.place(frame.start, frame.start)
        what = (
            f"unexpected {self.text[pos]}: the {self.text[frame.start]} opened at "
            f"line {opener.line}, column {opener.column} is not closed yet"
        )
        raise _UnreadableError(pos, what, self.swallowed())

    def refuse_end(self) -> NoReturn:
        end = len(self.text)
        frame = self.stack[-1] if self.stack else None
        if frame is None or not frame.closer:
            raise _UnreadableError(end, "the text ends where a value or key was expected")
        opener = self.lines.place(frame.start, frame.start)
        what = (
            f"the text ends, but the {self.text[frame.start]} opened at "
            f"line {opener.line}, column {opener.column} is never closed"
        )
        raise _UnreadableError(end, what, self.swallowed())

    def swallowed(self) -> str:
        """The hint that an unquoted text took the closer, if it did."""
        place = self.loose
        if place is None or not re.search(r"[}\]]", self.text[place.start : place.end]):
            return ""
        text = _short(self.text[place.start : place.end])
        return f"a text without quotes goes on to the end of its line: {text} (line {place.line})"

    def refuse_quote(self, pos: int, stop: int) -> NoReturn:
        quote = "double" if self.text[pos] == '"' else "single"
        until = "on its line" if "\n" in self.text[stop : stop + 2] else "before the text ends"
        raise _UnreadableError(pos, f"the {quote} quote opened here is not closed {until}")


_CLOSED_BY = {"}": "brace", "]": "bracket"}


def _paths(value: Any) -> set[str]:
    """The dotted paths of everything in a value."""
    found: set[str] = set()
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        prefix, box = todo.pop()
        items = box.items() if isinstance(box, dict) else enumerate(box)
        for key, inner in items:
            path = f"{prefix}.{key}" if prefix else str(key)
            found.add(path)
            if isinstance(inner, (dict, list)):
                todo.append((path, inner))
    return found


def _unindented(line: str, indent: int) -> str:
    return line[min(len(line) - len(line.lstrip(" \t\r")), indent) :]


def _short(text: str) -> str:
    """A text for a message: without line breaks, not long."""
    flat = "".join(c if c.isprintable() else "?" for c in text[:41])
    return flat if len(text) <= 40 else f"{flat[:39]}…"


def _character(char: str) -> str:
    """A character for a message; those that cannot be seen by name."""
    if "!" <= char <= "~":
        return char
    name = unicodedata.name(char, "control character" if ord(char) < 32 else "character")
    shown = f" {char}" if char.isprintable() and not char.isspace() else ""
    return f"{name.lower()}{shown} (U+{ord(char):04X})"


# ---------------------------------------------------------------- lines for the eye

_WIDTH = 110


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _lines_before(text: str, start: int, wanted: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while start > 0 and len(found) < wanted:
        end = start - 1
        start = text.rfind("\n", 0, end) + 1
        found.append((start, end))
    return found[::-1]


def _lines_after(text: str, end: int, wanted: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    # The line feed at the very end of the text opens no further line.
    while end < len(text) - 1 and len(found) < wanted:
        start = end + 1
        end = _line_end(text, start)
        found.append((start, end))
    return found


def _row(text: str, start: int, end: int, place: Place | None) -> tuple[str, str]:
    """One line of the text, cut to _WIDTH, and the carets under the place."""
    if text[start:end].endswith("\r"):
        end -= 1
    focus = min(place.start, end) if place else start
    begin = _cut_before(text, start, focus, end)
    stop = _cut_after(text, begin, end)
    head = "…" if begin > start else ""
    tail = "…" if stop < end else ""
    line = head + "".join(map(_shown, text[begin:stop])) + tail
    if place is None:
        return line, ""
    blank = "".join(c if c == "\t" else " " * _width(c) for c in text[begin:focus])
    carets = sum(map(_width, text[focus : min(place.end, stop)]))
    return line, " " * len(head) + blank + "^" * max(carets, 1)


def _cut_before(text: str, start: int, focus: int, end: int) -> int:
    """Where to begin a line so that `focus` can be seen: half the width before it."""
    if end - start <= _WIDTH and sum(map(_width, text[start:end])) <= _WIDTH:
        return start
    room = _WIDTH // 2
    while focus > start and room > 0:
        focus -= 1
        room -= _width(text[focus])
    return focus


def _cut_after(text: str, begin: int, end: int) -> int:
    room = _WIDTH
    stop = begin
    # Bounded, for a line may consist of millions of characters without width.
    while stop < end and stop - begin < 2 * _WIDTH:
        room -= _width(text[stop])
        if room < 0:
            break
        stop += 1
    return stop


def _shown(char: str) -> str:
    """A character as it may be printed: escape codes and the like would change the screen."""
    return char if char == "\t" or char.isprintable() or char == " " else "?" * _width(char)


def _width(char: str) -> int:
    """The columns that a character takes on the screen."""
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1

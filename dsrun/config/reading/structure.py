"""The tree of a text: objects, lists, keys, and what stands between them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NoReturn

from dsrun.config import tree
from dsrun.config.reading.places import (
    MAX_DEPTH,
    MAX_VALUES,
    NO_KEY,
    Lines,
    Offsets,
    Stretch,
    SyntaxIssue,
    UnreadableError,
    character,
    short,
)
from dsrun.config.reading.scalars import WORD, ScalarParser

CLOSERS = {"{": "}", "[": "]"}
SPACE = re.compile(r"[ \t\n\r]*")
_COMMENT = re.compile(r"#[^\r\n]*|//[^\r\n]*|/\*[\s\S]*?\*/")
# All repeated groups here have an upper bound and are applied in a loop: the regex engine keeps
# a note of each round until the whole match is over, which for millions of rounds is much memory.
_GAP = re.compile(r"(?:[ \t\n\r]+|#[^\r\n]*|//[^\r\n]*|/\*[\s\S]*?\*/){0,1000}")
_HJSON_KEY = re.compile(r"([^:{}\[\], \t\n\r]+)([ \t\n\r]*)(?=:)")
_CLOSED_BY = {"}": "brace", "]": "bracket"}

TEMPLATE = re.compile(r"\$|\{\{|\{%|<[A-Za-z_]|%\(")
FULL_WIDTH = re.compile("[“”‘’：，｛｝]")


class OpenContainer:
    """A dict or list whose end has not been reached.

    closer: the character that ends it; empty for a root object without braces.
    keys: the offset at which each key so far begins.
    """

    __slots__ = ("box", "closer", "key", "key_at", "keys", "path", "start")

    def __init__(self, closer: str, start: int, path: str) -> None:
        self.box: dict[str, Any] | list[Any] = [] if closer == "]" else {}
        self.closer = closer
        self.start = start
        self.path = path
        self.key = ""
        self.key_at: Stretch = NO_KEY
        self.keys: dict[str, int] = {}

    def inner(self) -> str:
        """The path of the value that is being read."""
        key = str(len(self.box)) if isinstance(self.box, list) else self.key
        return tree.join(self.path, key)


class Parser(ScalarParser):
    """A reader of one text. Offsets go in and out; values' places and issues stay here."""

    def __init__(self, lines: Lines, dialect: str, *, mark: bool, most_issues: int) -> None:
        super().__init__(lines, dialect, most_issues)
        self.stack: list[OpenContainer] = []
        self.offsets: dict[str, Offsets] = {}
        self.values = 0
        self.root: Offsets
        self.replaced = False
        if mark:
            self.note("bom", 0, 0, "a UTF-8 byte order mark", "")

    # -- the results

    def noted(self) -> tuple[SyntaxIssue, ...]:
        return tuple(sorted(self.issues, key=lambda issue: issue.place.start))

    def located(self, value: Any) -> tuple[Lines, dict[str, Offsets]]:
        """The text's lines, and the offsets of all values in `value`, the one that was read."""
        self.offsets.pop("", None)
        inside = self.offsets
        # Under a key that is written twice, values of the first one were noted too. They are gone from the value.
        if self.replaced:
            paths = _paths(value)
            inside = {path: at for path, at in inside.items() if path in paths}
        return self.lines, {"": self.root, **inside}

    def path(self) -> str:
        """The path of the value that is being read."""
        return self.stack[-1].inner() if self.stack else ""

    def section(self) -> str:
        return self.stack[-1].path if self.stack else ""

    # -- the tree

    def nothing(self) -> dict[str, Any]:
        """A text of nothing but comments, which hjson takes for an empty object."""
        end = len(self.text)
        self.root = (NO_KEY, (end, end))
        self.note("no-braces", end, end, "nothing but comments, read as an empty object", "")
        return {}

    def document(self, pos: int, *, braces: bool) -> Any:
        """The value of the whole text."""
        if not braces:
            self.note("no-braces", pos, pos, "keys without the braces around them", "")
            self.stack.append(OpenContainer("", pos, ""))
            pos = self.item(pos)
        value, pos = self.tree(pos)
        pos = self.gap(pos)
        if pos < len(self.text):
            self.refuse(pos, "after the end of the value")
        return value

    def tree(self, start: int) -> tuple[Any, int]:
        """The value at `start` with all that is in it, and where it ends."""
        # No recursion, as the text decides how deep it is nested. Each round reads one value that has no inside (or
        # an empty one), and hangs it into the container on top of the stack. Where that is closed behind it, it is a
        # value itself: the inner loop goes on with it, container by container, until one stays open, and the outer
        # loop reads the next value in there.
        while True:
            closer = CLOSERS.get(self.text[start : start + 1])
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
                self.root = (NO_KEY, (start, stop))
                return value, pos

    def enter(self, start: int, closer: str) -> int:
        if len(self.stack) >= MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels"
            raise UnreadableError(start, message, "a deepspeed.json has about five", final=True)
        self.stack.append(OpenContainer(closer, start, self.path()))
        return self.gap(start + 1)

    def attach(self, value: Any, start: int, stop: int) -> None:
        """Put a value into the dict or list that it stands in."""
        self.values += 1
        if self.values > MAX_VALUES:
            message = f"more than {MAX_VALUES:,} values"
            raise UnreadableError(start, message, "a deepspeed.json has some dozens", final=True)
        frame = self.stack[-1]
        self.offsets[frame.inner()] = (frame.key_at, (start, stop))
        if isinstance(frame.box, list):
            frame.box.append(value)
        else:
            self.replaced |= isinstance(frame.box.get(frame.key), (dict, list))
            if frame.key in frame.box and tree.same(frame.box[frame.key], value):
                self.note_equal(frame.key_at[0])
            frame.box[frame.key] = value

    def onward(self, pos: int, stop: int) -> tuple[int, bool]:
        """The offset past the comma or the closer that follows a value; whether it was the closer."""
        frame = self.stack[-1]
        pos = self.gap(pos)
        comma = pos if self.text[pos : pos + 1] == "," else -1
        if comma >= 0:
            pos = self.gap(pos + 1)
        at_end = pos == len(self.text)
        if at_end if not frame.closer else self.text[pos : pos + 1] == frame.closer:
            if comma >= 0:
                message = "a comma before the closing " + _CLOSED_BY.get(frame.closer, "end")
                self.note("trailing-comma", comma, comma + 1, message, frame.path)
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
        """The offset of the next value in the open dict or list: past the key in a dict."""
        frame = self.stack[-1]
        if isinstance(frame.box, dict):
            pos = self.key(pos, frame)
        if pos == len(self.text):
            self.refuse_end()
        return pos

    def key(self, pos: int, frame: OpenContainer) -> int:
        if pos == len(self.text):
            self.refuse_end()
        quoted = self.text[pos] in "\"'"
        frame.key, stop = self.quoted(pos, key=True) if quoted else self.loose_key(pos)
        frame.key_at = (pos, stop)
        self.note_key(frame, quoted=quoted)
        colon = self.gap(stop)
        if self.text[colon : colon + 1] != ":":
            message = f"no colon after the key {short(frame.key)}"
            wide = (
                "full-width marks such as “ and ： are letters here: " if FULL_WIDTH.search(frame.key) else ""
            )
            raise UnreadableError(stop, message, f'{wide}a key and its value: "key": value')
        return self.gap(colon + 1)

    def note_key(self, frame: OpenContainer, *, quoted: bool) -> None:
        start, stop = frame.key_at
        if not quoted:
            self.note("unquoted-key", start, stop, f"the key {short(frame.key)} without quotes")
        first = frame.keys.setdefault(frame.key, start)
        if first != start:
            line = self.lines.place(first, first).line
            self.note(
                "duplicate-key",
                start,
                stop,
                f"the key {short(frame.key)} a second time (first at line {line})",
            )

    def note_equal(self, start: int) -> None:
        """Say of the key at an offset that it has the value of its first time."""
        for index, issue in enumerate(self.issues):
            if issue.kind == "duplicate-key" and issue.place.start == start:
                self.issues[index] = replace(issue, equal=True)

    def loose_key(self, pos: int) -> tuple[str, int]:
        """An unquoted key and where it ends. hjson takes most characters, the json dialect here words only."""
        if not self.hjson:
            word = self.word(pos)
            return word, pos + len(word)
        match = _HJSON_KEY.match(self.text, pos)
        if match is None:
            self.refuse(pos, "where a key was expected")
        name: str = match[1]
        return (name.rstrip() if match[2] else name), match.end(1)

    def starts_with_key(self, pos: int) -> bool:
        """Whether a key and its colon stand at `pos` (json dialect)."""
        if self.text[pos : pos + 1] in ('"', "'"):
            stop = self.string_end(pos) + 1
        else:
            word = WORD.match(self.text, pos)
            stop = word.end() if word else pos
        return stop > pos and self.text[self.skip(stop) :][:1] == ":"

    # -- between the values

    def skip(self, pos: int) -> int:
        """The offset past white space and comments."""
        while (match := _GAP.match(self.text, pos)) and match.end() > pos:
            pos = match.end()
        return pos

    def gap(self, pos: int) -> int:
        """The offset past white space and comments, which are noted."""
        space = SPACE.match(self.text, pos)
        begin = space.end() if space else pos
        if self.text[begin : begin + 1] not in ("#", "/"):
            return begin
        end = self.skip(begin)
        for comment in _COMMENT.finditer(self.text, begin, end):
            self.note("comment", comment.start(), comment.end(), "a comment", self.section())
        if self.text.startswith("/*", end):
            raise UnreadableError(end, "the comment that /* opens is never closed", final=True)
        return end

    # -- what cannot be read

    def refuse(self, pos: int, where: str) -> NoReturn:
        if pos >= len(self.text):
            self.refuse_end()
        message = f"unexpected {character(self.text[pos])} {where}"
        hint = "is this a template that was not filled in?" if TEMPLATE.match(self.text, pos) else ""
        raise UnreadableError(pos, message, hint)

    def refuse_closer(self, pos: int) -> NoReturn:
        frame = self.stack[-1]
        if self.text[pos] in ",:" or not frame.closer:
            self.refuse(pos, "where a value or key was expected")
        raise self.unclosed(pos, f"unexpected {self.text[pos]}:", "is not closed yet")

    def refuse_end(self) -> NoReturn:
        end = len(self.text)
        frame = self.stack[-1] if self.stack else None
        if frame is None or not frame.closer:
            raise UnreadableError(end, "the text ends where a value or key was expected")
        raise self.unclosed(end, "the text ends, but", "is never closed")

    def unclosed(self, at: int, before: str, after: str) -> UnreadableError:
        start = self.stack[-1].start
        place = self.lines.place(start, start)
        opener = f"the {self.text[start]} opened at line {place.line}, column {place.column}"
        return UnreadableError(at, f"{before} {opener} {after}", self.swallowed())

    def swallowed(self) -> str:
        """The hint that an unquoted text took the closer, if it did."""
        place = self.loose
        if place is None or not re.search(r"[}\]]", self.text[place.start : place.end]):
            return ""
        text = short(self.text[place.start : place.end])
        return f"a text without quotes goes on to the end of its line: {text} (line {place.line})"


def _paths(value: Any) -> set[str]:
    """The dotted paths of everything in a value."""
    paths: set[str] = set()
    todo: list[tuple[str, Any]] = [("", value)]
    while todo:
        prefix, box = todo.pop()
        items = box.items() if isinstance(box, dict) else enumerate(box)
        for key, inner in items:
            path = tree.join(prefix, str(key))
            paths.add(path)
            if isinstance(inner, (dict, list)):
                todo.append((path, inner))
    return paths

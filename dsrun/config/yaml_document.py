"""The text of a YAML file: its value as PyYAML's SafeLoader gives it, and where every key stands.

The same Document as a deepspeed.json has (document.py). A file that is meant to do harm is refused: PyYAML would
follow aliases without end, and goes down into what is nested by recursion.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import yaml

from dsrun.config.document import Document, Entry, Oddity, Place
from dsrun.errors import DsrunError

# Of a launch config, which has 2 kilobytes, 40 values and 3 levels. PyYAML reads 100 kilobytes a second.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_VALUES = 5_000
MAX_MERGES = 100
MAX_KEY = 200
# Python refuses to write longer numbers out.
MAX_NUMBER = 1_000

TAG = "tag:yaml.org,2002:"
# What SafeLoader's own constructors raise on a text that doesn't suit its tag.
UNSUITED = (ValueError, IndexError, KeyError, AttributeError, OverflowError, yaml.YAMLError)


class _UnreadableError(Exception):
    """What is wrong, at which offset."""

    def __init__(self, at: int, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.at = at
        self.what = what
        self.hint = hint


def read(data: bytes | str, name: str) -> Document:
    """The document in `data`, which is a mapping. Raises DsrunError with name:line:column for all else.

    Of a key that is written twice the last one counts, as for accelerate; that is noted.
    """
    text = _decoded(data, name)
    try:
        return _Reader(text, name).document()
    except _UnreadableError as error:
        place = _Lines(text).place(error.at, error.at)
        where = f"{name}:{place.line}:{place.column}"
        raise DsrunError(error.what, where=where, hint=error.hint) from None


def _decoded(data: bytes | str, name: str) -> str:
    if len(data) > MAX_BYTES:
        what = f"the file is larger than {MAX_BYTES // 1024} KiB"
        raise DsrunError(what, where=name, hint="A launch config has a few kilobytes.")
    if isinstance(data, str):
        return data.removeprefix("\ufeff")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"the file is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        raise DsrunError(what, where=f"{name}:1:1", hint="Save it as UTF-8.") from None


class _Lines:
    """The offsets of a text's line feeds."""

    def __init__(self, text: str) -> None:
        self.feeds = [offset for offset, char in enumerate(text) if char == "\n"]

    def place(self, start: int, end: int) -> Place:
        line = bisect_left(self.feeds, start)
        before = self.feeds[line - 1] if line else -1
        return Place(start, end, line + 1, start - before)


class _Loader(yaml.SafeLoader):
    """SafeLoader that stops before it is too deep, or has too much."""

    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        self.values += 1
        if self.depth > MAX_DEPTH:
            raise _UnreadableError(self.offset(), f"nested more than {MAX_DEPTH} levels deep")
        if self.values > 2 * MAX_VALUES:  # keys count here
            raise _UnreadableError(self.offset(), f"more than {MAX_VALUES:,} values")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def offset(self) -> int:
        return int(self.peek_event().start_mark.index)  # type: ignore[no-untyped-call]


class _Reader:
    """Makes one text's nodes values, and keeps where they stand."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.lines = _Lines(text)
        self.entries: dict[str, Entry] = {}
        self.oddities: list[Oddity] = []
        self.depth = self.values = self.merged = 0

    def document(self) -> Document:
        root = self.root()
        if root is None:
            raise _UnreadableError(0, "the file is empty", "`accelerate config` writes one.")
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise _UnreadableError(
                root.start_mark.index, f"is {kind}, not a config", "A config is `key: value` lines."
            )
        value = self.value(root, "", None)
        return Document(self.name, self.text, value, self.entries, tuple(self.oddities))

    def root(self) -> yaml.Node | None:
        try:
            self.loader = _Loader(self.text)
            return self.loader.get_single_node()
        except yaml.reader.ReaderError as error:
            what = f"a character that YAML does not allow (U+{error.character:04X})"
            raise _UnreadableError(error.position, what) from None
        except yaml.MarkedYAMLError as error:
            raise _unreadable(error) from None

    def value(self, node: yaml.Node, path: str, key: Place | None) -> Any:
        """The value of a node, which an alias may bring here more than once; notes where it stands."""
        start = node.start_mark.index
        self.values += 1
        if self.values > MAX_VALUES:
            raise _UnreadableError(start, f"more than {MAX_VALUES:,} values, those behind aliases included")
        if self.depth > MAX_DEPTH:
            raise _UnreadableError(
                start, f"nested more than {MAX_DEPTH} levels deep", "Does an alias hold itself?"
            )
        place = self.lines.place(start, self.end(node))
        whole = Place(key.start, place.end, key.line, key.column) if key and key.start <= start else place
        self.entries[path] = Entry(key, place, whole)
        self.depth += 1
        value = self.inside(node, path)
        self.depth -= 1
        return value

    def inside(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if node.tag not in (TAG + "map", TAG + "seq"):
            raise _UnreadableError(
                node.start_mark.index, f"the tag {_short(node.tag)} has no place in a launch config"
            )
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, _join(path, str(index)), None) for index, item in enumerate(node.value)]
        members = self.members(node, path) if isinstance(node, yaml.MappingNode) else {}
        return {name: self.value(item, _join(path, name), key) for name, (key, item) in members.items()}

    def members(self, node: yaml.MappingNode, path: str) -> dict[str, tuple[Place, yaml.Node]]:
        """The keys of a mapping with their nodes: of a key that is there twice the last, merged ones before its own."""
        merged: dict[str, tuple[Place, yaml.Node]] = {}
        own: dict[str, tuple[Place, yaml.Node]] = {}
        for key, item in node.value:
            start, end = key.start_mark.index, key.end_mark.index
            if key.tag == TAG + "merge":
                for other in self.merges(item):
                    merged = {**self.members(other, path), **merged}
                continue
            name, place = self.key(key), self.lines.place(start, end)
            if name in own:
                what = f"{name!r} is there twice, first on line {own[name][0].line}"
                self.oddities.append(Oddity("duplicate-key", place, what, _join(path, name)))
                del own[name]
            own[name] = place, item
        return {**merged, **own}

    def merges(self, node: yaml.Node) -> list[yaml.MappingNode]:
        """The mappings behind a `<<`, the first of which counts most."""
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        found = [item for item in items if isinstance(item, yaml.MappingNode)]
        self.merged += len(found)
        if len(found) < len(items) or self.merged > MAX_MERGES:
            what = (
                "<< merges mappings only"
                if len(found) < len(items)
                else f"more than {MAX_MERGES} mappings are merged"
            )
            raise _UnreadableError(node.start_mark.index, what)
        return found

    def key(self, node: yaml.Node) -> str:
        """A key as it is written: accelerate knows none that is no text."""
        start = node.start_mark.index
        if not isinstance(node, yaml.ScalarNode):
            raise _UnreadableError(start, "a list or a mapping is no key")
        if len(node.value) > MAX_KEY:
            raise _UnreadableError(start, f"a key of {len(node.value):,} characters")
        return str(node.value)

    def scalar(self, node: yaml.ScalarNode) -> Any:
        start = node.start_mark.index
        if not node.tag.startswith(TAG):
            raise _UnreadableError(start, f"the tag {_short(node.tag)} has no place in a launch config")
        if node.tag != TAG + "str" and len(node.value) > MAX_NUMBER:
            raise _UnreadableError(start, f"a number of {len(node.value):,} characters")
        try:
            return self.loader.construct_object(node)
        except UNSUITED:
            kind = node.tag.removeprefix(TAG)
            raise _UnreadableError(
                start, f"{_short(node.value)!r} is no {kind}", "Put a text in quotes."
            ) from None

    def end(self, node: yaml.Node) -> int:
        """Where a node ends: PyYAML has a block end where the next thing begins."""
        start, end = int(node.start_mark.index), int(node.end_mark.index)
        return start + len(self.text[start:end].rstrip())


def _unreadable(error: yaml.MarkedYAMLError) -> _UnreadableError:
    """PyYAML's words, at the place it stopped."""
    mark = error.problem_mark or error.context_mark
    said = ", ".join(part for part in (error.context, error.problem) if part)
    hint = HINTS.get(str(error.problem), "")
    return _UnreadableError(0 if mark is None else mark.index, f"this is no YAML: {said}", hint)


HINTS = {
    "found character '\\t' that cannot start any token": "Indent with blanks, not with tabs.",
    "mapping values are not allowed here": "Is a key indented too far, or a text with a colon in it not in quotes?",
    "could not find expected ':'": "Each line is `key: value`.",
}
"""What PyYAML's most frequent words come from."""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:39]}…"

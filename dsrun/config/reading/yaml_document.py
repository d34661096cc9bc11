"""The text of a YAML file: its value as PyYAML's SafeLoader gives it, and the places of its keys.

The same Document as a deepspeed.json has (document.py). A file that is meant to do harm is refused: PyYAML would
follow aliases without end, and goes down into what is nested by recursion.
"""

from __future__ import annotations

from typing import Any

import yaml

from dsrun.config import tree
from dsrun.config.reading.document import Document, EntrySpans, Span, SyntaxIssue
from dsrun.config.reading.places import Lines, UnreadableError, decoded, located, short

# Limits for a launch config, which has 2 kilobytes, 40 values and 3 levels. PyYAML reads 100 kilobytes a second.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAX_VALUES = 5_000
MAX_MERGES = 100
MAX_KEY = 200
# Python refuses to write longer numbers out.
MAX_NUMBER = 1_000

TAG = "tag:yaml.org,2002:"
# Errors that SafeLoader's own constructors raise on a text that doesn't suit its tag.
UNSUITED = (ValueError, IndexError, KeyError, AttributeError, OverflowError, yaml.YAMLError)


def read(data: bytes | str, name: str) -> Document:
    """The document in `data`, which is a mapping. Raises DsrunError with name:line:column for all else.

    Of a key that is written twice the last one counts, as for accelerate; that is noted.
    """
    text = decoded(data, name, "launch config", MAX_BYTES).removeprefix("\ufeff")
    with located(text, name):
        return _Reader(text, name).document()


class _Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader, which stops where a text is nested too deep or has too many values."""

    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.depth += 1
        self.values += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError(self.offset(), f"nested more than {MAX_DEPTH} levels deep")
        if self.values > 2 * MAX_VALUES:  # keys count here
            raise UnreadableError(self.offset(), f"more than {MAX_VALUES:,} values")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def offset(self) -> int:
        return int(self.peek_event().start_mark.index)  # type: ignore[no-untyped-call]


class _Reader:
    """A reader of one text: makes values of its nodes, and keeps their places."""

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.lines = Lines(text)
        self.entries: dict[str, EntrySpans] = {}
        self.issues: list[SyntaxIssue] = []
        self.depth = self.values = self.merged = 0

    def document(self) -> Document:
        root = self.root()
        if root is None:
            raise UnreadableError(0, "the file is empty", "`accelerate config` writes one.")
        if not isinstance(root, yaml.MappingNode):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise _refused(root, f"the file is {kind}, not a config", "A config is `key: value` lines.")
        value = self.value(root, "", None)
        return Document(self.name, self.text, value, self.entries, tuple(self.issues))

    def root(self) -> yaml.Node | None:
        try:
            self.loader = _Loader(self.text)
            return self.loader.get_single_node()
        except yaml.reader.ReaderError as error:
            message = f"a character that YAML does not allow (U+{error.character:04X})"
            raise UnreadableError(error.position, message) from None
        except yaml.MarkedYAMLError as error:
            raise _unreadable(error) from None

    def value(self, node: yaml.Node, path: str, key: Span | None) -> Any:
        """The value of a node, which an alias may bring here more than once; notes where it stands."""
        start = node.start_mark.index
        self.values += 1
        if self.values > MAX_VALUES:
            raise _refused(node, f"more than {MAX_VALUES:,} values, those behind aliases included")
        if self.depth > MAX_DEPTH:
            raise _refused(node, f"nested more than {MAX_DEPTH} levels deep", "Does an alias hold itself?")
        place = self.lines.place(start, self.end(node))
        whole = Span(key.start, place.end, key.line, key.column) if key and key.start <= start else place
        self.entries[path] = EntrySpans(key, place, whole)
        self.depth += 1
        value = self.inside(node, path)
        self.depth -= 1
        return value

    def inside(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if node.tag not in (TAG + "map", TAG + "seq"):
            raise _refused(node, f"the tag {short(node.tag)} doesn't belong in a launch config")
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value(item, tree.join(path, str(index)), None) for index, item in enumerate(node.value)
            ]
        members = self.members(node, path) if isinstance(node, yaml.MappingNode) else {}
        return {name: self.value(item, tree.join(path, name), key) for name, (key, item) in members.items()}

    def members(self, node: yaml.MappingNode, path: str) -> dict[str, tuple[Span, yaml.Node]]:
        """The keys of a mapping with their nodes: of a key that is there twice the last, merged ones before direct
        ones.
        """
        merged: dict[str, tuple[Span, yaml.Node]] = {}
        direct: dict[str, tuple[Span, yaml.Node]] = {}
        for key, item in node.value:
            start, end = key.start_mark.index, key.end_mark.index
            if key.tag == TAG + "merge":
                for other in self.merges(item):
                    merged = {**self.members(other, path), **merged}
                continue
            name, place = self.key(key), self.lines.place(start, end)
            if name in direct:
                message = f"{name!r} is there twice, first on line {direct[name][0].line}"
                self.issues.append(SyntaxIssue("duplicate-key", place, message, tree.join(path, name)))
                del direct[name]  # so that it stands where its last one does
            direct[name] = place, item
        return {**merged, **direct}

    def merges(self, node: yaml.Node) -> list[yaml.MappingNode]:
        """The mappings behind a `<<`, the first of which counts most."""
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        mappings = [item for item in items if isinstance(item, yaml.MappingNode)]
        self.merged += len(mappings)
        if len(mappings) < len(items) or self.merged > MAX_MERGES:
            too_many = f"more than {MAX_MERGES} mappings are merged"
            raise _refused(node, too_many if len(mappings) == len(items) else "<< merges mappings only")
        return mappings

    def key(self, node: yaml.Node) -> str:
        """A key as it is written: every key that accelerate knows is a text."""
        if not isinstance(node, yaml.ScalarNode):
            raise _refused(node, "a list or a mapping can't be a key")
        if len(node.value) > MAX_KEY:
            raise _refused(node, f"a key of {len(node.value):,} characters")
        return str(node.value)

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if not node.tag.startswith(TAG):
            raise _refused(node, f"the tag {short(node.tag)} doesn't belong in a launch config")
        if node.tag != TAG + "str" and len(node.value) > MAX_NUMBER:
            raise _refused(node, f"a number of {len(node.value):,} characters")
        try:
            return self.loader.construct_object(node)
        except UNSUITED:
            kind = node.tag.removeprefix(TAG)
            raise _refused(
                node, f"{short(node.value)!r} is not a valid {kind}", "Put a string in quotes."
            ) from None

    def end(self, node: yaml.Node) -> int:
        """The offset of a node's end. PyYAML lets a block end where the next thing begins."""
        start, end = int(node.start_mark.index), int(node.end_mark.index)
        return start + len(self.text[start:end].rstrip())


def _refused(node: yaml.Node, message: str, hint: str = "") -> UnreadableError:
    return UnreadableError(node.start_mark.index, message, hint)


def _unreadable(error: yaml.MarkedYAMLError) -> UnreadableError:
    """PyYAML's words, at the place it stopped."""
    mark = error.problem_mark or error.context_mark
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    hint = HINTS.get(str(error.problem), "")
    return UnreadableError(0 if mark is None else mark.index, f"this is not YAML: {problem}", hint)


HINTS = {
    "found character '\\t' that cannot start any token": "Indent with blanks, not with tabs.",
    "mapping values are not allowed here": "Is a key indented too far, or a text with a colon in it not in quotes?",
    "could not find expected ':'": "Each line is `key: value`.",
}
"""PyYAML's most frequent complaints, and what they come from."""

"""Fixes done to a config's text: what isn't fixed keeps its lines, order, comments, quotes and line ends.

Every change is tried on the text, which is then read again. It counts only if the reader finds exactly
the value that `edits.apply` gives, and no slip of a kind that wasn't there before.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.config import document as documents
from dsrun.config import edits, tree
from dsrun.config.document import Document, Entry, Oddity
from dsrun.config.edits import Edit, Fix
from dsrun.errors import DsrunError

MAX_FIXES = 200
"""As many are done in one round: the text is read again for each."""
OPERATIONS = ("replace", "remove", "rename", "move", "add")

_COMMENT = r"#[^\r\n]*|//[^\r\n]*|/\*[\s\S]*?\*/"
_GAP = re.compile(rf"(?:[ \t\r\n]+|{_COMMENT}){{1,1000}}")
_BEHIND = re.compile(rf"[ \t]*(?:{_COMMENT})")
_BLANK = re.compile(r"[ \t]*")
_LINE_END = re.compile(r"[ \t]*(?:\r\n|\n|\r|\Z)")
_LINES = re.compile(r"(?<=\n)")
_COLON = re.compile(r"[ \t]*:[ \t]*")
_JOINT = re.compile(r"[ \t]*,[ \t]*")
_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SIMPLE = re.compile(r"[^'\"\\\x00-\x1f\ud800-\udfff]*")
# A text without quotes, and the comma and the comment that it has swallowed.
_LOOSE = re.compile(r"(.+?)([ \t]*,)?([ \t]+(?:#|//|/\*).*|(?<=,)(?:#|//|/\*).*)?", re.DOTALL)
_LOOSE_KINDS = {"unquoted-text", "python-literal", "non-finite", "bad-number", "no-braces"}


@dataclass(frozen=True)
class Repair:
    """text: what the file holds now, without a byte order mark (as in Document). done, left: the fixes, in order.

    What is left may still be possible in the next round: fixes that meet wait for each other.
    """

    text: str
    done: tuple[Fix, ...]
    left: tuple[Fix, ...]


def repair(document: Document, fixes: Iterable[Fix], dialect: str) -> Repair:
    """The document's text with the fixes done, each as a whole or not at all. Raises nothing.

    A fix is left if a path of it is, holds or lies in a path that an earlier one of the round has changed;
    if a path isn't there, or its target is; if it changes nothing; or if the text can't be made to say it.

    dialect: the one that the document was read in.
    """
    writer = _Writer(document, dialect)
    taken: list[str] = []
    done: list[Fix] = []
    left: list[Fix] = []
    for fix in fixes:
        paths = _paths(fix)
        free = len(done) < MAX_FIXES and not any(_meet(path, other) for path in paths for other in taken)
        after = writer.fixed(document, fix) if free and paths else None
        if after is None or after.text == document.text:
            left.append(fix)
        else:
            document = after
            done.append(fix)
            taken += paths
    return Repair(document.text, tuple(done), tuple(left))


def diff(before: str, after: str, name: str) -> str:
    """A unified diff of two texts of the file `name`, as patch and git take it; empty if they are the same."""
    old, new = ([line for line in _LINES.split(text) if line] for text in (before, after))
    found = difflib.unified_diff(old, new, f"a/{name.lstrip(chr(47))}", f"b/{name.lstrip(chr(47))}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found
    )


def _paths(fix: Fix) -> list[str]:
    """The paths that a fix changes; none if it isn't one that can be done."""
    found: list[str] = []
    for op, path, value in fix.edits:
        if op not in OPERATIONS or not isinstance(path, str) or not path:
            return []
        found.append(path)
        if op in ("rename", "move"):
            if not isinstance(value, str) or not value:
                return []
            found.append(_join(path.rpartition(".")[0], value) if op == "rename" else value)
    return found if all(path.count(".") < documents.MAX_DEPTH for path in found) else []


def _meet(path: str, other: str) -> bool:
    return tree.under(path, other) or tree.under(other, path)


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


# ---------------------------------------------------------------- what is wanted


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal: true is not 1, but 1 is 1.0 (hjson reads the second as the first)."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(item, other[key]) for key, item in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124


# ---------------------------------------------------------------- how the file is written


@dataclass(frozen=True)
class _Style:
    """unit: one step of indentation. colon: with the blanks around it. quote: of keys, empty for none.

    commas: whether values on lines of their own have a comma between them.
    """

    unit: str
    newline: str
    colon: str
    quote: str
    commas: bool

    @property
    def comma(self) -> str:
        return "," if self.colon == ":" else ", "

    def key(self, name: str, quote: str | None = None) -> str:
        quote = self.quote if quote is None else quote
        if quote == "" and _BARE.fullmatch(name):
            return name
        return f"'{name}'" if quote == "'" and _SIMPLE.fullmatch(name) else _plain(name)

    def render(self, value: Any, indent: str, *, flat: bool, tall: bool = False) -> str:
        """A value as text, to stand in a line with this indentation.

        flat: all on one line. tall: lists have a line for each item even if these are short.
        """
        if isinstance(value, _Cut):
            return value.at(indent)
        if not isinstance(value, (Mapping, list, tuple)):
            return _plain(value)
        named = isinstance(value, Mapping)
        rows = [f"{self.key(str(key))}{self.colon}" for key in value] if named else [""] * len(value)
        inner = list(value.values()) if isinstance(value, Mapping) else list(value)
        flat = flat or not (named or tall or any(isinstance(item, (Mapping, list, tuple)) for item in inner))
        below = indent if flat else indent + self.unit
        rows = [
            row + self.render(item, below, flat=flat, tall=tall)
            for row, item in zip(rows, inner, strict=True)
        ]
        opening, closing = "{}" if named else "[]"
        if flat or not rows:
            return opening + self.comma.join(rows) + closing
        between = ("," if self.commas else "") + self.newline + below
        return f"{opening}{self.newline}{below}{between.join(rows)}{self.newline}{indent}{closing}"


def _plain(value: Any) -> str:
    """A text, number or word as JSON; only half surrogates are escaped, for UTF-8 doesn't have them."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


def _style(document: Document, dialect: str) -> _Style:
    text = document.text
    named = [entry for entry in document.entries.values() if entry.key]
    spaces = Counter(text[entry.key.end : entry.value.start] for entry in named if entry.key)
    colons = [space for space, _ in spaces.most_common() if _COLON.fullmatch(space)]
    kinds = {oddity.kind for oddity in document.oddities}
    firsts = Counter(text[entry.whole.start] for entry in named).most_common(1)
    quote = firsts[0][0] if firsts else "" if "no-braces" in kinds else '"'
    return _Style(
        unit=_unit(document),
        newline="\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n",
        colon=colons[0] if colons else ": ",
        quote='"' if dialect == "json" else quote if quote in ("'", '"') else "",
        commas=dialect == "json" or not kinds & {"missing-comma", "no-braces"},
    )


def _unit(document: Document) -> str:
    """What lines are indented by, as most lines have it; two blanks if none is."""
    steps: Counter[str] = Counter()
    for path, entry in document.entries.items():
        above = document.entries.get(path.rpartition(".")[0])
        if path and above and entry.key and _alone(document.text, entry):
            outer, inner = _indent(document.text, above), _indent(document.text, entry)
            if inner != outer and inner.startswith(outer):
                steps[inner[len(outer) :]] += 1
    return steps.most_common(1)[0][0] if steps else "  "


# ---------------------------------------------------------------- looking around in the text


def _line_start(entry: Entry) -> int:
    return entry.whole.start - entry.whole.column + 1


def _blank_end(text: str, pos: int) -> int:
    found = _BLANK.match(text, pos)
    return found.end() if found else pos


def _indent(text: str, entry: Entry) -> str:
    """The blanks at the beginning of the line in which an entry begins."""
    start = _line_start(entry)
    return text[start : _blank_end(text, start)]


def _alone(text: str, entry: Entry) -> bool:
    """Whether an entry is the first thing on its line."""
    return _blank_end(text, _line_start(entry)) == entry.whole.start


def _gap(text: str, pos: int) -> int:
    """Past white space and comments."""
    while found := _GAP.match(text, pos):
        pos = found.end()
    return pos


def _comma(text: str, pos: int) -> int:
    """Where the comma stands that comes next; -1 if something else does."""
    pos = _gap(text, pos)
    return pos if text[pos : pos + 1] == "," else -1


def _behind(text: str, pos: int) -> int:
    """Past the comments that begin on the same line."""
    while found := _BEHIND.match(text, pos):
        pos = found.end()
    return pos


def _splice(text: str, *changes: tuple[int, int, str]) -> str:
    """The text with stretches of it replaced: (start, end, by what), none of which overlap."""
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _section(document: Document, path: str) -> Any:
    return tree.get(document.value, path) if path else document.value


def _members(document: Document, section: str) -> list[Entry]:
    """The entries of a section, in the order of the text."""
    paths = (_join(section, key) for key in _section(document, section))
    found = [document.entries[path] for path in paths if path in document.entries]
    return sorted(found, key=lambda entry: entry.whole.start)


@dataclass(frozen=True)
class _Cut:
    """The text of a value that was cut out. indent: that of the line where it stood."""

    text: str
    indent: str

    def at(self, indent: str) -> str:
        first, *others = _LINES.split(self.text)
        return first + "".join(self._moved(line, indent) for line in others)

    def _moved(self, line: str, indent: str) -> str:
        own = line.removeprefix(self.indent) if line.startswith(self.indent) else line.lstrip(" \t")
        return indent + own if own.strip() else own


# ---------------------------------------------------------------- one edit after the other


class _Writer:
    """Does edits to a document. Texts are tried in turn; the first that reads as wanted is taken."""

    def __init__(self, document: Document, dialect: str) -> None:
        self.dialect = dialect
        self.hjson = dialect == "hjson"
        self.style = _style(document, dialect)
        self.kinds = {oddity.kind for oddity in document.oddities}
        if self.hjson and self.kinds & _LOOSE_KINDS:
            # After a text without quotes a comma would be part of it, as a comment is.
            self.kinds |= {"missing-comma", "comment"}
        if self.style.quote == "":
            self.kinds.add("unquoted-key")

    def fixed(self, document: Document, fix: Fix) -> Document | None:
        """The document after all edits of a fix; None if one of them can't be done."""
        found: Document | None = document
        for edit in fix.edits:
            found = self.edited(found, edit) if found else None
        return found

    def edited(self, document: Document, edit: Edit) -> Document | None:
        if not isinstance(document.value, dict) or not _writable(edit.value):
            return None
        wanted = edits.apply(document.value, (edit,))
        texts = (self.read(text, document.name, wanted) for text in self.texts(document, edit))
        return next((found for found in texts if found), None)

    def read(self, text: str, name: str, wanted: Any) -> Document | None:
        """The document in a text, if it is as wanted and as free of slips as the first one."""
        try:
            found = documents.read(text, name, self.dialect)
        except DsrunError:
            return None
        clean = {oddity.kind for oddity in found.oddities} <= self.kinds
        return found if clean and found.text == text and _same(found.value, wanted) else None

    def texts(self, document: Document, edit: Edit) -> Iterator[str]:
        """What the text could be after an edit, the best first."""
        entry = document.entries.get(edit.path)
        if edit.op == "add":
            yield from self.added(document, edit.path, edit.value)
        elif entry is None:
            return
        elif edit.op == "replace":
            yield from self.replaced(document.text, entry, edit.value)
        elif entry.key is None or not isinstance(_section(document, edit.path.rpartition(".")[0]), dict):
            return
        elif edit.op == "remove":
            yield self.removed(document, edit.path, entry)
        elif edit.op == "move":
            yield from self.moved(document, edit, entry)
        elif tree.get(document.value, _paths(Fix((edit,)))[1], tree.MISSING) is tree.MISSING:
            quote = document.text[entry.key.start]
            token = self.style.key(edit.value, quote if quote in "\"'" else "")
            yield _splice(document.text, (entry.key.start, entry.key.end, token))

    # -- replace

    def replaced(self, text: str, entry: Entry, value: Any) -> Iterator[str]:
        start, end = entry.value.start, entry.value.end
        for token in self.tokens(text, entry, value):
            yield _splice(text, (start, end, token))

    def tokens(self, text: str, entry: Entry, value: Any) -> Iterator[str]:
        """How a value could be written in the place of an entry's."""
        old = text[entry.value.start : entry.value.end]
        if old[:1] == "'" and old[:3] != "'''" and isinstance(value, str):
            yield self.style.key(value, "'")
            return
        tall = "\n" in old
        flat = not tall and (not _alone(text, entry) or (old[:1] in ("{", "[") and old[1:-1].strip() != ""))
        new = self.style.render(value, _indent(text, entry), flat=flat, tall=tall and old[:1] == "[")
        loose = _LOOSE.fullmatch(old) if self.loose(text, entry) and len(old) < 1000 else None
        comma, comment = (loose[2] or "", loose[3] or "") if loose else ("", "")
        if loose and not comma and not comment and isinstance(value, str) and _BARE.fullmatch(value):
            yield value
        yield from (new + comma + comment, new + comment, new)

    def loose(self, text: str, entry: Entry) -> bool:
        """Whether a value is a text of hjson without quotes, which only the line's end ends."""
        word = text[entry.value.start : entry.value.end]
        if not self.hjson or word[:1] in ('"', "'", "{", "[") or word in ("true", "false", "null"):
            return False
        return not re.fullmatch(r"-?\d+(\.\d+)?([eE][-+]?\d+)?", word)

    # -- remove

    def removed(self, document: Document, path: str, entry: Entry) -> str:
        """The text without an entry, its comma, the comments behind it and its line if nothing else is there."""
        text = document.text
        section = path.rpartition(".")[0]
        members = _members(document, section)
        before = [other for other in members if other.whole.start < entry.whole.start][-1:]
        start = entry.whole.start
        stop, comma = self.end(text, entry)
        after = _gap(text, max(entry.whole.end, comma + 1))
        last = text[after : after + 1] in ("}", "")
        earlier = _comma(text, before[0].whole.end) if before else -1
        drop = last and 0 <= earlier < start and not (self.hjson and comma >= 0)
        changes = [(comma, _blank_end(text, comma + 1), "")] if comma >= stop else []
        if changes and 0 <= earlier < start and "\n" not in text[earlier:start]:
            # Commas begin the lines here: the one on its line goes, the one behind stays.
            start, changes = earlier, []
        line_start = _line_start(entry)
        line_end = _LINE_END.match(text, stop)
        if line_end and _blank_end(text, line_start) == start:
            start, stop = line_start, line_end.end()
        elif (
            last and before and not changes and (joint := self.joint(text, before[0], entry, drop=drop)) >= 0
        ):
            start, drop = joint, False
        elif line_end:
            start = len(text[:start].rstrip(" \t"))
        elif not last:
            stop = _blank_end(text, stop)
        changes += [(start, stop, "")] + ([(earlier, earlier + 1, "")] if drop else [])
        text = _splice(text, *changes)
        return self.closed(document, text, section) if len(members) == 1 else text

    def end(self, text: str, entry: Entry) -> tuple[int, int]:
        """Up to where an entry's text goes with it, and where its comma is (-1: it has none).

        Comments go too if nothing but a closer comes after them on the line: else they are about that.
        """
        end = entry.whole.end
        comma = -1 if self.loose(text, entry) else _comma(text, end)
        stop = comma + 1 if comma >= 0 and "\n" not in text[end:comma] else end
        tail = _behind(text, stop)
        closer = text[_blank_end(text, tail) :][:1] == "}"
        return (tail if closer or _LINE_END.match(text, tail) else stop), comma

    def joint(self, text: str, before: Entry, entry: Entry, *, drop: bool) -> int:
        """Where the blanks (and the comma, to `drop`) between two entries begin; -1 if something needs them."""
        between = text[before.whole.end : entry.whole.start]
        if between.strip(" \t\r\n") not in ("", ",") or self.loose(text, before):
            return -1
        return entry.whole.start - len(between if drop else between.split(",")[-1])

    def closed(self, document: Document, text: str, section: str) -> str:
        """The text after the only entry of a section went: braces with nothing between them are closed up."""
        place = document.entries[section].value
        start, end = place.start, place.end - len(document.text) + len(text)
        if text[start : start + 1] != "{" or text[start + 1 : end - 1].strip():
            return text
        return text[: start + 1] + text[end - 1 :]

    # -- add and move

    def moved(self, document: Document, edit: Edit, entry: Entry) -> Iterator[str]:
        """An entry's value, as it is written, behind the others of another section, with its comments."""
        text = document.text
        there = tree.get(document.value, edit.value, tree.MISSING) is not tree.MISSING
        without = None if there else self.edited(document, Edit("remove", edit.path))
        if without is None:
            return
        stop, comma = self.end(text, entry)
        end = entry.whole.end
        behind = text[end:stop] if comma < end else text[end:comma] + text[comma + 1 : stop]
        cut = _Cut(text[entry.value.start : entry.value.end], _indent(text, entry))
        if behind.strip():
            yield from self.added(without, edit.value, cut, behind.rstrip())
        yield from self.added(without, edit.value, cut)
        # A text that ends with its line, or whose lines depend on its column.
        yield from self.added(without, edit.value, tree.get(document.value, edit.path))

    def added(self, document: Document, path: str, value: Any, behind: str = "") -> Iterator[str]:
        """The text with a value at a path that isn't there yet. behind: a comment to follow it."""
        section, *keys = _missing(document.value, path)
        if not keys or section not in document.entries:
            return
        name, *below = keys
        for key in reversed(below):
            value = {key: value}
        members = _members(document, section)
        if members:
            yield self.after(document, section, members, (name, value), "" if below else behind)
        else:
            yield self.first(document, section, (name, value), "" if below else behind)

    def member(self, named: tuple[str, Any], indent: str, *, flat: bool) -> str:
        return self.style.key(named[0]) + self.style.colon + self.style.render(named[1], indent, flat=flat)

    def after(
        self, document: Document, section: str, members: list[Entry], named: tuple[str, Any], behind: str
    ) -> str:
        """The text with a further member behind the last one, on a line of its own if that has one."""
        text = document.text
        last = members[-1]
        loose = self.loose(text, last)
        end = last.whole.end
        comma = -1 if loose else _comma(text, end)
        if not _alone(text, last) and not loose:
            joint = self.style.comma
            if len(members) > 1 and _JOINT.fullmatch(
                between := text[members[-2].whole.end : last.whole.start]
            ):
                joint = between
            new = self.member(named, _indent(text, last), flat=True) + behind
            if comma < 0:
                return _splice(text, (end, end, joint + new))
            return _splice(text, (comma + 1, comma + 1, joint.lstrip(" \t")[1:] + new))
        indent = _indent(text, last)
        if not _alone(text, last):
            indent = _indent(text, document.entries[section]) + self.style.unit
        at = _behind(text, max(end, comma + 1))
        joint = "," if comma < 0 and not loose and self.commas(text, members) else ""
        new = self.style.newline + indent + self.member(named, indent, flat=False) + behind
        return text[:end] + joint + text[end:at] + new + text[at:]

    def commas(self, text: str, members: list[Entry]) -> bool:
        """Whether the members of a section have commas between them; as in the whole file if it has only one."""
        others = [entry for entry in members[:-1] if not self.loose(text, entry)]
        return _comma(text, others[-1].whole.end) >= 0 if self.hjson and others else self.style.commas

    def first(self, document: Document, section: str, named: tuple[str, Any], behind: str) -> str:
        """The text with a member in a section that had none."""
        text, newline = document.text, self.style.newline
        entry = document.entries[section]
        start, end = entry.value.start, entry.value.end
        if text[start : start + 1] != "{":
            head = text if text.endswith("\n") or not text else text + newline
            return head + self.member(named, "", flat=False) + behind + newline
        inner = text[start + 1 : end - 1]
        outer = _indent(text, entry)
        if not (inner.strip() or "\n" in inner or _alone(text, entry)):
            return _splice(text, (start + 1, end - 1, self.member(named, outer, flat=True) + behind))
        indent = outer + self.style.unit
        new = inner.rstrip() + newline + indent + self.member(named, indent, flat=False) + behind
        return _splice(text, (start + 1, end - 1, new + newline + outer))


def _writable(value: Any) -> bool:
    """Whether JSON can hold a value (NaN and infinity it can't) and the reader takes it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _fits(value, documents.MAX_DEPTH)


def _fits(value: Any, depth: int) -> bool:
    """Whether a value is nested no deeper than that."""
    if not isinstance(value, (dict, list, tuple)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_fits(item, depth - 1) for item in inner)


def _missing(value: Any, path: str) -> list[str]:
    """The deepest section on the way to a path, then the keys that are missing below it.

    Nothing, if the path is there or something that is no section is in the way.
    """
    keys = path.split(".")
    for depth, key in enumerate(keys):
        if not isinstance(value, dict):
            return [""]
        if key not in value:
            return [".".join(keys[:depth]), *keys[depth:]]
        value = value[key]
    return [""]


# ---------------------------------------------------------------- slips that make it no JSON

MAX_PASSES = 20
"""How often the text is mended: no more oddities are listed at once than documents.MAX_ODDITIES."""
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPE = re.compile(r"\\[\s\S]|\"|[\x00-\x1f]")
PLAIN_KINDS = frozenset(
    (
        "trailing-comma",
        "missing-comma",
        "python-literal",
        "single-quotes",
        "unquoted-key",
        "unquoted-text",
        "multiline-text",
        "bad-number",
        "bad-escape",
        "control-character",
        "no-braces",
    )
)
"""The kinds of oddities that `plain_json` mends (and "bom"); it never touches what a value says."""


def plain_json(document: Document, *, drop_comments: bool = False) -> str | None:
    """The text as JSON, changed no more than that takes; None if it can't be made so.

    The text is taken in the json dialect, whichever it was read in: True is true there. Comments stay
    (and the text no JSON) unless they are to be dropped. What is no slip of writing stays too: keys that
    are there twice, NaN and Infinity, numbers that are too large.
    """
    kinds = PLAIN_KINDS | {"comment"} if drop_comments else PLAIN_KINDS
    try:
        found = first = documents.read(document.text, document.name, "json")
        for _ in range(MAX_PASSES):
            slips = [oddity for oddity in found.oddities if oddity.kind in kinds]
            if not slips:
                # The list of oddities may be too full to show a slip.
                return found.text if len(found.oddities) < documents.MAX_ODDITIES else None
            found = documents.read(_mended(found, slips), document.name, "json")
            if not _same(found.value, first.value):
                return None
    except DsrunError:
        pass
    return None


def _mended(document: Document, slips: list[Oddity]) -> str:
    """The text with each slip mended; those inside of another one go with it."""
    changes: list[tuple[int, int, str]] = []
    done = 0
    for slip in sorted(slips, key=lambda slip: (slip.place.start, -slip.place.end)):
        start, end = slip.place.start, slip.place.end
        if slip.kind == "no-braces":
            continue
        if slip.kind == "comment":
            start, end = _without_comment(document.text, start, end)
        new = "" if slip.kind == "comment" else _mend(document, slip)
        if start >= done and new is not None:
            changes.append((start, end, new))
            done = end
    text = _splice(document.text, *changes)
    if changes or all(slip.kind != "no-braces" for slip in slips):
        return text
    newline = _style(document, "json").newline
    return "{" + newline + text.rstrip() + newline + "}" + newline


def _mend(document: Document, slip: Oddity) -> str | None:
    """What belongs in the place of a slip; None if that isn't known."""
    text = document.text[slip.place.start : slip.place.end]
    if slip.kind == "trailing-comma":
        return ""
    if slip.kind == "missing-comma":
        return ","
    if slip.kind == "python-literal":
        return _WORDS.get(text)
    if slip.kind in ("unquoted-key", "unquoted-text"):
        return _plain(text)
    if slip.kind == "single-quotes":
        return '"' + _ESCAPE.sub(lambda found: _escaped(found[0]), text[1:-1]) + '"'
    if slip.kind in ("bad-escape", "control-character"):
        return _escaped(text)
    entry = document.entries.get(slip.path)
    holder = edits.through_list([document.value], f"0.{slip.path}")
    if entry is None or holder is None or entry.value != slip.place:
        return None
    value = holder[0][holder[1]]
    return _plain(value) if _writable(value) else None


def _escaped(text: str) -> str:
    """A character or an escape as it stands in double quotes."""
    if text == "\\'":
        return "'"
    return text if text[0] == "\\" else json.dumps(text)[1:-1]


def _without_comment(text: str, start: int, end: int) -> tuple[int, int]:
    """What goes with a comment: its line if it has one for itself, else the blanks before it."""
    blank = len(text[:start].rstrip(" \t"))
    line_end = _LINE_END.match(text, end)
    if line_end is None:
        return start, _blank_end(text, end)
    if blank == 0 or text[blank - 1] == "\n":
        return blank, line_end.end()
    return blank, end

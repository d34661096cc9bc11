"""Fixes: changes to a config as values, which rules propose, and the same changes in the file's text.

The text is changed where the value stands, and then read again: a change counts only if the new text holds
exactly what `apply` gives, with no new kind of syntax issue. What can't be placed so is left to the user.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.reading import document as documents
from dsrun.config.reading.document import Document, EntrySpans, SyntaxIssue
from dsrun.config.reading.places import MAX_DEPTH
from dsrun.errors import DsrunError

MAX_READ = 100_000
"""Characters that one round of fixes may read again: the text is read once for each edit."""

COMMENT = r"(?:#[^\r\n]*|//[^\r\n]*|/\*[\s\S]*?\*/)"
GAP = re.compile(rf"(?:[ \t\r\n]|{COMMENT})*")
OWN = re.compile(rf"(?:[ \t]*(,))?(?:(?:[ \t]*{COMMENT})*(?=[ \t]*(?:[\r\n}}]|\Z)))?")
"""The end of an object's member: the comma after it, and comments up to the end of its line."""
SWALLOWED = re.compile(r"([ \t]*,)?([ \t]*(?:(?<=[ \t,])(?:#|//|/\*).*)?)\Z")
"""The comma and comment that Hjson reads as part of a text without quotes."""
LOOSE = frozenset(("unquoted-text", "python-literal", "non-finite", "bad-number"))
"""The kinds of syntax issues that Hjson reads as a text up to the end of its line."""
BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


# ---------------------------------------------------------------- as values


def apply(config: Mapping[str, Any], edits: tuple[Edit, ...]) -> dict[str, Any]:
    """The config after the edits. An edit whose path is gone changes nothing; "replace" reaches into lists."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    for edit in edits:
        if edit.op == "add":
            tree.put(result, edit.path, edit.value)
        elif edit.op not in ("plain", "once") and (place := _holder(result, edit.path)):
            holder, key = place
            if edit.op == "replace":
                holder[key] = edit.value
            elif isinstance(holder, dict):
                old = holder.pop(key)
                if edit.op != "remove":
                    tree.put(result, _target(edit), old)
    return result


def _holder(config: Mapping[str, Any], path: str) -> tuple[Any, Any] | None:
    """The object or list that holds the value at a path, and its key or index there; None where the path is gone."""
    holder: Any = None
    key: Any = None
    value: Any = config
    for part in path.split("."):
        holder, key = value, part
        if isinstance(holder, list) and re.fullmatch(r"0|[1-9][0-9]{0,8}", part, re.ASCII):
            key = int(part)
        inside = key in holder if isinstance(holder, dict) else isinstance(key, int) and key < len(holder)
        if not inside:
            return None
        value = holder[key]
    return holder, key


def _target(edit: Edit) -> str:
    """The path at which a value stands after the edit."""
    if edit.op == "rename":
        return tree.join(edit.path.rpartition(".")[0], edit.value)
    return edit.value if edit.op == "move" else edit.path


# ---------------------------------------------------------------- in the text


def fixed(document: Document, fixes: Iterable[Fix], dialect: str) -> Document:
    """The document with every fix that can be placed, each as a whole or not at all. Raises nothing.

    A fix whose paths meet those of an earlier one waits for the next round, as it may no longer be right.
    dialect: the one that the document was read in.
    """
    fixes = list(fixes)
    for fix in fixes:
        if fix.edits[:1] and fix.edits[0].op == "plain":
            text = plain_json(document, drop_comments=not fix.safe)
            if text is not None and text != document.text:
                with suppress(DsrunError):
                    return documents.read(text, document.name, dialect)
    kinds = {issue.kind for issue in document.issues}
    if kinds & LOOSE:
        kinds |= {"missing-comma", "comment"}  # a text without quotes takes both in
    taken: list[str] = []
    for fix in fixes[: MAX_READ // max(1, len(document.text))]:
        paths = [path for edit in fix.edits for path in (edit.path, _target(edit))]
        if any(tree.under(path, earlier) or tree.under(earlier, path) for path in paths for earlier in taken):
            continue
        after: Document | None = document
        for edit in fix.edits:
            after = after and _edited(after, edit, dialect, kinds)
        if after and after.text != document.text:
            document = after
            taken += paths
    return document


def _edited(document: Document, edit: Edit, dialect: str, kinds: set[str]) -> Document | None:
    """The document after an edit; None if it can't be placed. kinds: the syntax issues that its text may have."""
    if not isinstance(document.value, dict) or not _writable(edit):
        return None
    wanted = apply(document.value, (edit,))
    # Nothing here trusts the splicing: a text is only a proposal, and the one that is read back with exactly the wanted
    # value, and no new kind of issue, is taken. So `_texts` may try layouts that do not fit every file.
    for text in _texts(document, edit, dialect, kinds):
        try:
            after = documents.read(text, document.name, dialect)
        except DsrunError:
            continue
        if {issue.kind for issue in after.issues} <= kinds and _same(after.value, wanted):
            return after
    return None


def _writable(edit: Edit) -> bool:
    """Whether the path isn't too deep, and JSON can hold the value (it has no NaN)."""
    try:
        json.dumps(edit.value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _target(edit).count(".") < MAX_DEPTH


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal: true is not 1, but 1 is 1.0 (Hjson reads the second as the first)."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(item, right[key]) for key, item in left.items())
    if isinstance(left, list) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right or (left != left and right != right))  # noqa: PLR0124


def _texts(document: Document, edit: Edit, dialect: str, kinds: set[str]) -> Iterator[str]:
    """Proposals for the text after an edit, the best first."""
    text, entry = document.text, document.entries.get(edit.path)
    free = tree.get(document.value, _target(edit), tree.MISSING) is tree.MISSING
    if edit.op == "add":
        yield from _added(document, edit.path, edit.value)
    elif entry and edit.op == "replace":
        yield from _replaced(document, entry, edit.value)
    elif entry is None or entry.key is None:
        return
    elif edit.op == "remove":
        yield from _removed(document, edit.path, entry)
    elif edit.op == "once":  # the last of both is the one that is known
        before = text[: entry.whole.start].rstrip()
        for kept in (before.removesuffix(","), before):
            yield kept + text[entry.whole.end :]
    elif edit.op == "rename" and free:
        bare = BARE.fullmatch(edit.value) and text[entry.key.start] not in "\"'"
        yield _spliced(text, entry.key.start, entry.key.end, edit.value if bare else _plain(edit.value))
    elif edit.op == "move" and free:
        without = _edited(document, Edit("remove", edit.path), dialect, kinds)
        written = _Written(text[entry.value.start : entry.value.end], _indent(text, entry))
        if without:
            yield from _added(without, edit.value, written)
            yield from _added(without, edit.value, tree.get(document.value, edit.path))


def _replaced(document: Document, entry: EntrySpans, value: Any) -> Iterator[str]:
    text, (start, end) = document.text, (entry.value.start, entry.value.end)
    old = text[start:end]
    flat = "\n" not in old and (not _alone(text, entry) or (old[1:-1].strip() != "" and old[0] in "{["))
    new = _Layout.of(document, flat=flat).render(value, _indent(text, entry))
    swallowed = SWALLOWED.search(old) if old[:1] not in ('"', "'", "{", "[") else None
    for tail in (swallowed[0], swallowed[2], "") if swallowed else ("",):
        yield _spliced(text, start, end, new + tail)


def _removed(document: Document, path: str, entry: EntrySpans) -> Iterator[str]:
    """The text without an entry, one comma, the comments behind it, and its line if nothing else is there."""
    # `before` is the text between the entry and the one ahead of it (or the brace), `after` the text up to the next one
    # (or the brace). Both keep their comments; what goes is the entry with its own end, and one comma of the two.
    text, section = document.text, path.rpartition(".")[0]
    members, home = _members(document, section), document.entries[section].value
    braces, at = int(text[home.start : home.start + 1] == "{"), members.index(entry)
    last = at == len(members) - 1
    start = members[at - 1].whole.end if at else home.start + braces
    end = home.end - braces if last else members[at + 1].whole.start
    comma, own_end = _own(text, entry)
    before, after = text[start : entry.whole.start], text[own_end:end]
    if not comma:  # the comma stands before it, or begins the next line
        before, after = (_without_comma(before), after) if at else (before, _without_comma(after))
    if re.match(r"[ \t]*\r?\n", after):
        before = re.sub(r"\r?\n?[ \t]*\Z", "", before)
    elif not last:
        after = after.lstrip(" \t")
    if last:
        closed = len(members) == 1 and not after.strip()
        yield text[:start] + before.rstrip() + ("" if closed else after) + text[end:]
    yield text[:start] + before + after + text[end:]


def _own(text: str, entry: EntrySpans) -> tuple[bool, int]:
    """Whether a comma follows an entry on its line, and the offset where all that belongs to the entry ends."""
    match = OWN.match(text, entry.whole.end)
    return bool(match and match[1]), match.end() if match else entry.whole.end


def _without_comma(gap: str) -> str:
    """A text between two members without its comma."""
    match = GAP.match(gap)
    at = match.end() if match else 0
    return gap[:at] + gap[at + 1 :]


def _added(document: Document, path: str, value: Any) -> Iterator[str]:
    """The text with a value behind the others of its section, on a line of its own if the last one has one."""
    section, keys = "", path.split(".")
    while len(keys) > 1 and isinstance(tree.get(document.value, tree.join(section, keys[0])), dict):
        section = tree.join(section, keys.pop(0))
    if section not in document.entries:
        return
    for key in reversed(keys[1:]):
        value = {key: value}
    text, home, members = document.text, document.entries[section], _members(document, section)
    layout = _Layout.of(document)
    flat = layout._replace(unit=None)
    outer = _indent(text, home)
    if not members:
        start, end = home.value.start + 1, home.value.end - 1
        inner, indent = text[start:end].rstrip(), outer + (layout.unit or "")
        if not inner and "\n" not in text[start:end] and not _alone(text, home):
            yield _spliced(text, start, end, flat.member(keys[0], value, outer))
        new = layout.newline + indent + layout.member(keys[0], value, indent) + layout.newline + outer
        yield _spliced(text, start, end, inner + new)
        return
    last, alone = members[-1], _alone(text, members[-1])
    indent = _indent(text, last) if alone else outer + (layout.unit or "")
    has_comma, at = _own(text, last)
    bare = has_comma or any(issue.kind == "missing-comma" for issue in document.issues)
    if not alone:
        joint = "," if layout.colon == ":" else ", "
        yield _spliced(text, last.whole.end, last.whole.end, joint + flat.member(keys[0], value, indent))
    for comma in ("", ",") if bare else (",", ""):
        head = text[: last.whole.end] + comma + text[last.whole.end : at]
        yield head + layout.newline + indent + layout.member(keys[0], value, indent) + text[at:]


def _members(document: Document, section: str) -> list[EntrySpans]:
    """The entries of a section, in the order of the text; none where a key with dots stands in the way."""
    keys = tree.get(document.value, section, ()) if section else document.value
    entries = [document.entries.get(tree.join(section, key)) for key in keys]
    return sorted(filter(None, entries), key=lambda entry: entry.whole.start)


def _indent(text: str, entry: EntrySpans) -> str:
    """The blanks at the beginning of the line in which an entry begins."""
    line = text[entry.whole.start - entry.whole.column + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _alone(text: str, entry: EntrySpans) -> bool:
    """Whether an entry is the first thing on its line."""
    return text[entry.whole.start - entry.whole.column + 1 : entry.whole.start].strip() == ""


def _spliced(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


@dataclass(frozen=True)
class _Written:
    """A value in the words of the text. indent: the blanks at the beginning of the line where it stood."""

    text: str
    indent: str


class _Layout(NamedTuple):
    """The style of new text, which is that of the rest of the file."""

    unit: str | None
    """One step of indentation; None: all on one line."""
    newline: str
    colon: str
    """The colon with the blanks around it."""

    @classmethod
    def of(cls, document: Document, *, flat: bool = False) -> _Layout:
        text, first = document.text, _members(document, "")[:1]
        unit = "".join(_indent(text, entry) for entry in first if _alone(text, entry)) or "  "
        colons = [text[entry.key.end : entry.value.start] for entry in first if entry.key]
        colon = colons[0] if colons and re.fullmatch(r"[ \t]*:[ \t]*", colons[0]) else ": "
        return cls(None if flat else unit, "\r\n" if "\r\n" in text else "\n", colon)

    def member(self, key: str, value: Any, indent: str) -> str:
        return _plain(key) + self.colon + self.render(value, indent)

    def render(self, value: Any, indent: str) -> str:
        """A value, to stand in a line with this indentation. A list of plain values stays on its line."""
        if isinstance(value, _Written):
            return value.text.replace(f"\n{value.indent}", f"\n{indent}")
        named = isinstance(value, Mapping)
        items = list(value) if isinstance(value, (Mapping, list, tuple)) else []
        if not items or not (named or any(isinstance(item, (Mapping, list, tuple)) for item in items)):
            return _plain(value)
        below = indent + (self.unit or "")
        rows = [self.member(key, value[key], below) if named else self.render(key, below) for key in items]
        opening, closing = "{}" if named else "[]"
        if self.unit is None:
            return opening + ("," if self.colon == ":" else ", ").join(rows) + closing
        lines = f",{self.newline}{below}".join(rows)
        return f"{opening}{self.newline}{below}{lines}{self.newline}{indent}{closing}"


def _plain(value: Any) -> str:
    """A value as JSON on one line; only half surrogates are escaped, which UTF-8 can't hold."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if re.search("[\ud800-\udfff]", text) else text


# ---------------------------------------------------------------- syntax issues

REWRITABLE = frozenset({
    "trailing-comma", "missing-comma", "python-literal", "single-quotes", "unquoted-key", "unquoted-text", "bad-number",
    "bad-escape", "control-character", "no-braces",
})  # fmt: skip
"""The kinds of syntax issues that `plain_json` can write as JSON."""
STRICT = frozenset(("bom", "duplicate-key", "non-finite", "big-number", "lone-surrogate"))
"""The kinds of syntax issues that Python's json reads over."""


def plain_json(document: Document, *, drop_comments: bool = False) -> str | None:
    """The text as JSON, in its own layout and with its value; None if it can't be made so.

    It is taken as it was meant (True is true), whichever dialect it was read in. Comments stay, unless they are
    to be dropped. So does what isn't about syntax, as a key that is there twice.
    """
    kinds = REWRITABLE | {"comment"} if drop_comments else REWRITABLE
    try:
        rewritten = first = documents.read(
            document.text, document.name, "json", most_issues=len(document.text)
        )
        while issues := [issue for issue in rewritten.issues if issue.kind in kinds]:
            text = _rewritten(rewritten, issues)  # those inside another one wait for the next round
            rewritten = documents.read(text, document.name, "json", most_issues=len(text))
            if not _same(rewritten.value, first.value):
                return None
    except DsrunError:
        return None
    return rewritten.text


def _rewritten(document: Document, issues: list[SyntaxIssue]) -> str:
    """The text with each issue written as JSON. Issues inside another one are left."""
    text, parts, done = document.text, [], 0
    for issue in sorted(
        issues, key=lambda issue: (issue.place.start, issue.kind != "no-braces", -issue.place.end)
    ):
        start, end = issue.place.start, issue.place.end
        if issue.kind == "comment":
            start, end = _with_line(text, start, end)
        if start >= done:
            parts += [text[done:start], _as_json(issue.kind, text[issue.place.start : issue.place.end])]
            done = end
    text = "".join(parts) + text[done:]
    return text + "}\n" if any(issue.kind == "no-braces" for issue in issues) else text


def _as_json(kind: str, written: str) -> str:
    """The text that JSON has in the place of an issue."""
    if kind in ("comment", "trailing-comma"):
        return ""
    if kind in ("missing-comma", "no-braces"):
        return "," if kind == "missing-comma" else "{\n"
    if kind in ("bad-escape", "control-character"):
        return "'" if written == "\\'" else _plain(written)[1:-1]
    return _plain(documents.read(written, "", "json").value)


def _with_line(text: str, start: int, end: int) -> tuple[int, int]:
    """A comment with its line if it is alone there, else with the blanks before it (or behind, inside a line)."""
    line_end = re.compile(r"[ \t]*(\r?\n|\Z)").match(text, end)
    if line_end is None:
        return start, end + len(text[end:]) - len(text[end:].lstrip(" \t"))
    blank = len(text[:start].rstrip(" \t"))
    return blank, line_end.end() if blank == 0 or text[blank - 1] == "\n" else end


def in_place(before: Document, after: Document) -> bool:
    """Whether a fixed text may take the place of the old one: plain JSON that was no Hjson and has lost no comment."""
    try:
        old, new = (
            {issue.kind for issue in documents.read(read.text, read.name, "json").issues}
            for read in (before, after)
        )
    except DsrunError:
        return False
    return new <= STRICT and not old & {"comment", "no-braces"}


# ---------------------------------------------------------------- as a patch


def patch(before: str, after: str, name: str) -> str:
    """A unified diff of two texts of the file `name`, for `patch -p1` and git; empty if they are the same."""
    old, new = ([line for line in re.split(r"(?<=\n)", text) if line] for text in (before, after))
    name = name.lstrip("/") + ("\t" if " " in name else "")  # a tab ends a name with blanks
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )

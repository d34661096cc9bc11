"""The packed form of a package's history, and how it is read.

A file is MAGIC, the length of the header, the header (JSON under zlib), and then blocks. Each block is the text of some
modules, in order of their names, under LZMA. In that text a line is what its first character says, with fields parted
by tabs; the last is the span of releases, and is left out where it is that of what the line belongs to:

    @module           a module
    *                 it answers some names at run time
    %                 only its names were read, not what its classes and functions take
    !text             a text in it that tells of something deprecated, renamed or gone
    ~module           what took the place of a module that is gone
    Name  kind        a name of it; a link is `=` and where it leads
    >path             what took the place of a name that is gone
    <path             a base class
    (a,b,c            parameters
    ?old>new          a parameter that a decorator still takes, and its new name
    .member  kind     a member of a class
    )a,b,c            parameters of a member
    ;old>new          a parameter of a member that a decorator still takes

A span is the numbers of releases, "3-17,20-": from the fourth to the eighteenth, and since the twenty-first.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MAGIC = b"dsrun releases 1\n"
FOLDER = Path(__file__).parent
SUFFIX = ".history"
PRESET = 9 | 1 << 31
"""LZMA's, extreme."""
LENGTH = 4
"""Bytes of the header's length."""


@dataclass(eq=False)
class PackedEntry:
    """A line, with those that belong to it."""

    sign: str
    """What kind of line it is; empty for a name."""
    text: str
    kind: str
    releases: int
    """One bit a release, the oldest the lowest."""
    below: list[PackedEntry] = field(default_factory=list)

    def of(self, sign: str, text: str | None = None) -> Iterator[PackedEntry]:
        """The lines below of one kind."""
        return (entry for entry in self.below if entry.sign == sign and text in (None, entry.text))


class PackedModule(PackedEntry):
    """A module, of whose lines only those are parsed that are asked for: some have thousands."""

    def __init__(self, text: str, every: int) -> None:
        head, _, lines = text.rstrip("\n").partition("\n")
        self._lines = f"\n{lines}"
        name, *fields = head[1:].split("\t")
        super().__init__("@", name, "", bits(fields[0], every) if fields else every)
        self._every = every
        self._found: dict[tuple[str, str | None], list[PackedEntry]] = {}

    def of(self, sign: str, text: str | None = None) -> Iterator[PackedEntry]:
        key = (sign, text)
        if key not in self._found:
            lines = self._at(f"\n{sign}{text or ''}", whole=text is not None)
            if not sign and text is None:
                lines = (found[0] for found in NAME.finditer(self._lines))
            self._found[key] = [parsed(line, self._every, self.releases) for line in lines]
        return iter(self._found[key])

    def _at(self, start: str, *, whole: bool) -> Iterator[str]:
        """The lines that begin so, with those that belong to each. whole: up to the end of the field."""
        place = self._lines.find(start)
        while place >= 0:
            after = place + len(start)
            if not whole or self._lines[after : after + 1] in ("", "\t", "\n"):
                end = self._lines.find("\n", after)
                while end >= 0 and self._lines[end + 1 : end + 2] in BELOW:
                    end = self._lines.find("\n", end + 1)
                yield self._lines[place + 1 : end if end >= 0 else None]
            place = self._lines.find(start, after)

    def spans(self) -> Iterator[tuple[str, int]]:
        """(Name, its releases) of each line of a name, without what belongs to it."""
        for name, span in HEAD.findall(self._lines):
            yield name, bits(span, self._every) if span else self.releases


def union(entries: Iterable[PackedEntry]) -> int:
    """The releases that have any of these."""
    found = 0
    for entry in entries:
        found |= entry.releases
    return found


LEVELS = {
    "@": 0,
    "*": 1,
    "%": 1,
    "!": 1,
    "~": 1,
    "": 1,
    ">": 2,
    "<": 2,
    "(": 2,
    "?": 2,
    ".": 2,
    ")": 3,
    ";": 3,
}
"""Sign -> how deep its line lies."""
BELOW = frozenset(sign for sign, level in LEVELS.items() if level > 1)
"""The signs of lines that belong to a name."""
NAME = re.compile(r"^\w.*(?:\n[^\w*%!~].*)*", re.MULTILINE)
HEAD = re.compile(r"^(\w+)\t[^\t\n]*(?:\t(\S+))?$", re.MULTILINE)
"""A name's line, with those that belong to it; its name and span."""


class PackageReleases:
    """A package's file, of which blocks are read as they are asked for; whole: all at once."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"{path} is not a history that this dsrun reads")
            import json
            import zlib

            length = int.from_bytes(file.read(LENGTH), "little")
            self._head: dict[str, Any] = json.loads(zlib.decompress(file.read(length)))
            self._start = file.tell()
        self.name: str = self._head["package"]
        self.releases: list[str] = self._head["releases"]
        self._firsts: list[str] = [first for first, _, _ in self._head["blocks"]]
        self._read: dict[int, str] = {}
        self._modules: dict[str, PackedModule | None] = {}
        if whole:
            for _, offset, length in (
                *self._head["blocks"],
                *(("", *place) for place in self._head["sections"].values()),
            ):
                self._text(offset, length)

    @property
    def every(self) -> int:
        """All releases, as bits."""
        return (1 << len(self.releases)) - 1

    @property
    def note(self) -> str:
        """Which releases were read, of what."""
        text: str = self._head["note"]
        return text

    @property
    def has_gaps(self) -> bool:
        """Whether only some releases were read, such as the last patch of each minor one."""
        return not self.note.startswith("every release")

    def section(self, name: str) -> str:
        """A text of its own beside the modules: "sources", "uses", "config"; empty where there is none."""
        place = self._head["sections"].get(name)
        return self._text(*place) if place else ""

    def module(self, name: str) -> PackedModule | None:
        """A module with all that it ever had; None for one that never was."""
        if name not in self._modules:
            self._modules[name] = self._module(name)
        return self._modules[name]

    def _module(self, name: str) -> PackedModule | None:
        place = bisect_right(self._firsts, name) - 1
        if place < 0:
            return None
        _, offset, length = self._head["blocks"][place]
        text = "\n" + self._text(offset, length)
        for end in ("\n", "\t"):
            start = text.find(f"\n@{name}{end}")
            if start >= 0:
                stop = text.find("\n@", start + 1)
                return PackedModule(text[start + 1 : stop if stop >= 0 else None], self.every)
        return None

    def modules(self) -> Iterator[PackedEntry]:
        """All of them: seconds for a large package."""
        for _, offset, length in self._head["blocks"]:
            for text in ("\n" + self._text(offset, length)).split("\n@")[1:]:
                yield parsed(f"@{text}", self.every)

    def _text(self, offset: int, length: int) -> str:
        if offset not in self._read:
            import lzma

            with self.path.open("rb") as file:
                file.seek(self._start + offset)
                self._read[offset] = lzma.decompress(
                    file.read(length), lzma.FORMAT_RAW, filters=filters()
                ).decode()
        return self._read[offset]


def parsed(text: str, every: int, around: int | None = None) -> PackedEntry:
    """A module of its lines; or a name of one, with the releases of the module around it."""
    stack: list[PackedEntry] = []
    outer = 0 if around is None else 1
    whole = every if around is None else around
    for line in text.rstrip("\n").split("\n"):
        sign = line[0] if line[0] in LEVELS else ""
        content, *fields = line[len(sign) :].split("\t")
        kind = fields.pop(0) if sign in ("", ".") else ""
        del stack[LEVELS[sign] - outer :]
        of_all = stack[-1].releases if stack else whole
        entry = PackedEntry(sign, content, kind, bits(fields[0], every) if fields else of_all)
        if stack:
            stack[-1].below.append(entry)
        stack.append(entry)
    return stack[0]


@cache
def bits(span: str, every: int) -> int:
    """The releases of a span."""
    found = 0
    for run in span.split(","):
        first, dash, last = run.partition("-")
        end = every.bit_length() - 1 if dash and not last else int(last or first)
        found |= (1 << end + 1) - (1 << int(first))
    return found


def span(releases: int, every: int) -> str:
    """The inverse of bits()."""
    runs, number, end = [], 0, every.bit_length()
    while number < end:
        if releases >> number & 1:
            first = number
            while number < end and releases >> number & 1:
                number += 1
            if number == end:
                runs.append(f"{first}-")
            else:
                runs.append(f"{first}" if number - first == 1 else f"{first}-{number - 1}")
        number += 1
    return ",".join(runs)


def filters() -> list[dict[str, int]]:
    """How a block is squeezed, for lzma: without a header of its own."""
    from lzma import FILTER_LZMA2

    return [{"id": FILTER_LZMA2, "preset": PRESET}]


def packages() -> list[str]:
    """The packages that there are data of."""
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


@cache
def package(name: str) -> PackageReleases:
    """The history of a package, by its name on the index."""
    return PackageReleases(FOLDER / f"{name}{SUFFIX}")


def package_of(path: str) -> PackageReleases | None:
    """The package that a dotted path begins with; None for one that there are no data of."""
    top = path.partition(".")[0]
    name = next((name for name in packages() if name.replace("-", "_") == top), "")
    return package(name) if name else None

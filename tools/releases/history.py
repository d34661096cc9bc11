"""Every name of a package with the releases that have it: one bit a release, the oldest the lowest."""

from __future__ import annotations

import ast
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.releases import names as reading
from tools.releases.fetch import Cache, Source
from tools.releases.modules import MORE_TEXTS, Module, Release, module_of
from tools.releases.names import Definition, FileNames, Member
from tools.releases.top_names import read_top

READER = hashlib.sha256(ast.dump(ast.parse(Path(reading.__file__).read_bytes())).encode()).hexdigest()
"""What was read with other code is read again."""

Spans = dict[str, int]
"""Text -> the releases that have it."""


@dataclass
class MemberHistory:
    """A member of a class, or what it shares with a name of a module."""

    releases: int = 0
    parameters: Spans = field(default_factory=dict)
    renamed: Spans = field(default_factory=dict)
    """`old>new`, of parameters that a decorator still takes."""

    def add(self, member: Member, releases: int) -> None:
        self.releases |= releases
        for name in member.parameters:
            put(self.parameters, name, releases)
        for old, new in member.renamed.items():
            put(self.renamed, f"{old}>{new}", releases)


@dataclass
class NameHistory(MemberHistory):
    """A name of a module, as one kind of thing."""

    bases: Spans = field(default_factory=dict)
    members: dict[tuple[str, str], MemberHistory] = field(default_factory=dict)
    """(Name, kind) ->"""

    def define(self, definition: Definition, releases: int) -> None:
        self.add(definition, releases)
        for base in definition.bases:
            put(self.bases, base, releases)
        for name, member in definition.members.items():
            self.members.setdefault((name, member.kind), MemberHistory()).add(member, releases)


@dataclass
class ModuleHistory:
    """A module, and what could be imported from it in which release."""

    releases: int = 0
    dynamic: int = 0
    names_only: int = 0
    names: dict[tuple[str, str], NameHistory] = field(default_factory=dict)
    """(Name, kind with a link's target) ->"""
    messages: Spans = field(default_factory=dict)

    def add(self, module: Module, releases: int) -> None:
        self.releases |= releases
        self.dynamic |= releases * module.dynamic
        self.names_only |= releases * module.names_only
        for text in module.messages:
            put(self.messages, text, releases)
        for name, definitions in module.names.items():
            for definition in definitions:
                key = (name, definition.kind + definition.target)
                self.names.setdefault(key, NameHistory()).define(definition, releases)

    def having(self, name: str) -> int:
        """The releases that have a name, whatever it is."""
        found = 0
        for (known, _), history in self.names.items():
            found |= history.releases if known == name else 0
        return found


@dataclass
class PackageHistory:
    """A package over all of its releases that were read."""

    name: str
    sources: list[Source]
    modules: dict[str, ModuleHistory] = field(default_factory=dict)
    uses: Spans = field(default_factory=dict)
    """What it imports from other packages that are read."""

    @property
    def every(self) -> int:
        return (1 << len(self.sources)) - 1


def put(spans: Spans, text: str, releases: int) -> None:
    spans[text] = spans.get(text, 0) | releases


def history(cache: Cache, others: frozenset[str] = frozenset(), only: Collection[str] = ()) -> PackageHistory:
    """The history of a package. others: the packages whose imports are kept; only: the releases that are read."""
    wanted = only or cache.package.chosen(source.release for source in cache.sources())
    sources = [source for source in cache.sources() if source.release in wanted]
    found = PackageHistory(cache.package.name, sources)
    waiting: dict[str, tuple[Module, int]] = {}
    for number, module, content in _contents(cache, found.sources):
        before, releases = waiting.get(module, (content, 0))
        if before == content:  # most modules are the same in the next release: they are added once
            waiting[module] = (before, releases | 1 << number)
        else:
            found.modules.setdefault(module, ModuleHistory()).add(before, releases)
            waiting[module] = (content, 1 << number)
        for use in content.uses:
            if use.partition(".")[0] in others:
                put(found.uses, use, 1 << number)
    for module, (content, releases) in waiting.items():
        found.modules.setdefault(module, ModuleHistory()).add(content, releases)
    return found


def _contents(cache: Cache, sources: list[Source]) -> Iterator[tuple[int, str, Module]]:
    """(Number of the release, module, what it has), release by release."""
    read: dict[str, FileNames] = {}
    resolved: dict[Any, Any] = {}
    for number, source in enumerate(sources):
        files = cache.files(source.release)
        read = {digest: read.get(digest) or file_names(cache, digest, path) for path, digest in files.items()}
        alive = {id(one) for one in read.values()}
        resolved = {key: both for key, both in resolved.items() if key[1] in alive}
        texts = {path: cache.text(files[path]) for path in MORE_TEXTS if path in files}
        release = Release({path: read[digest] for path, digest in files.items()}, texts, resolved)
        only = {module_of(path) for path in files if cache.package.reads_names_only(path)}
        for name, module in release.modules().items():
            module.names_only = name in only
            yield number, name, module


def file_names(cache: Cache, digest: str, path: str) -> FileNames:
    """What a file defines, read once; of files with names only, read each time, which is as fast."""
    if cache.package.reads_names_only(path):
        return read_top(cache.text(digest))
    row = cache.data.execute(
        "select packed from names where hash = ? and reader = ?", (digest, READER)
    ).fetchone()
    if row:
        return unpacked(json.loads(zlib.decompress(row[0])))
    found = reading.read(cache.text(digest), stub=path.endswith(".pyi"))
    packed = zlib.compress(json.dumps(found.as_json()).encode())
    cache.data.execute("insert or replace into names values (?, ?, ?)", (digest, READER, packed))
    return found


def unpacked(read: dict[str, Any]) -> FileNames:
    """The inverse of FileNames.as_json()."""
    read["names"] = {
        name: [
            Definition(**{**one, "members": {key: Member(**value) for key, value in one["members"].items()}})
            for one in definitions
        ]
        for name, definitions in read["names"].items()
    }
    return FileNames(**read)

"""A package's history in the packed form that ships (dsrun/releases/packed.py says what it is)."""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsrun.releases.packed import LENGTH, MAGIC, filters, span
from tools.releases.fetch import Source
from tools.releases.history import MemberHistory, NameHistory, PackageHistory, Spans
from tools.releases.names import CLASS, DATACLASS, FUNCTION
from tools.releases.packages import PACKAGES

BLOCK = 300_000
"""Characters of a block: what one look-up unpacks."""
COMMON_MOVES = 3
"""A name that more modules define is too common for one of them to be its new place."""


@dataclass
class Writer:
    """The lines of a package's modules."""

    history: PackageHistory
    moves: Mapping[tuple[str, str], str]
    moved_modules: Mapping[str, str]

    def module(self, name: str) -> Iterator[str]:
        module = self.history.modules[name]
        yield self.line(f"@{name}", module.releases, self.history.every)
        if name in self.moved_modules:
            yield f"~{self.moved_modules[name]}"
        if module.dynamic:
            yield self.line("*", module.dynamic, module.releases)
        if module.names_only:
            yield self.line("%", module.names_only, module.releases)
        for text, releases in sorted(module.messages.items()):
            yield self.line(f"!{text}", releases, module.releases)
        seen = set()
        for (own, kind), history in sorted(module.names.items()):
            yield self.line(f"{own}\t{kind}", history.releases, module.releases)
            if (name, own) in self.moves and own not in seen:
                yield f">{self.moves[name, own]}"
            seen.add(own)
            yield from self.definition(history)

    def definition(self, history: NameHistory) -> Iterator[str]:
        for base, releases in history.bases.items():
            yield self.line(f"<{base}", releases, history.releases)
        yield from self.parameters(history, "(", "?")
        for (name, kind), member in sorted(history.members.items()):
            yield self.line(f".{name}\t{kind}", member.releases, history.releases)
            yield from self.parameters(member, ")", ";")

    def parameters(self, member: MemberHistory, sign: str, renamed: str) -> Iterator[str]:
        by_span: dict[int, list[str]] = {}
        for name, releases in member.parameters.items():
            by_span.setdefault(releases, []).append(name)
        for releases, names in by_span.items():
            yield self.line(sign + ",".join(names), releases, member.releases)
        for text, releases in sorted(member.renamed.items()):
            yield self.line(f"{renamed}{text}", releases, member.releases)

    def line(self, text: str, releases: int, whole: int) -> str:
        return text if releases == whole else f"{text}\t{span(releases, self.history.every)}"


def packed(history: PackageHistory, sections: Mapping[str, str]) -> bytes:
    """The file's content."""
    moves = moved(history)
    writer = Writer(history, moves, moved_modules(history, moves))
    blocks: list[tuple[str, bytes]] = []
    lines: list[str] = []
    first, size = "", 0
    for name in sorted(history.modules):
        text = "\n".join(writer.module(name)) + "\n"
        if lines and size + len(text) > BLOCK:
            blocks.append((first, squeezed("".join(lines))))
            lines, size = [], 0
        first = first if lines else name
        lines.append(text)
        size += len(text)
    blocks.append((first, squeezed("".join(lines))))
    own = {name: squeezed(text) for name, text in sections.items() if text}
    offset, places, named = 0, [], {}
    for start, block in blocks:
        places.append((start, offset, len(block)))
        offset += len(block)
    for name, block in own.items():
        named[name] = (offset, len(block))
        offset += len(block)
    head = {
        "package": history.name,
        "note": note(history.name, history.sources),
        "releases": [source.release for source in history.sources],
        "blocks": places,
        "sections": named,
    }
    header = zlib.compress(json.dumps(head, separators=(",", ":")).encode(), 9)
    body = b"".join([*(block for _, block in blocks), *own.values()])
    return MAGIC + len(header).to_bytes(LENGTH, "little") + header + body


def with_section(content: bytes, name: str, text: str) -> bytes:
    """A file's content with another last section: the same bytes as packed() makes with it."""
    start = len(MAGIC) + LENGTH
    length = int.from_bytes(content[len(MAGIC) : start], "little")
    head = json.loads(zlib.decompress(content[start : start + length]))
    body = content[start + length :]
    if name in head["sections"]:
        offset, size = head["sections"].pop(name)
        if offset + size != len(body):
            raise ValueError(f"{name} is not the last section")
        body = body[:offset]
    block = squeezed(text)
    head["sections"][name] = (len(body), len(block))
    header = zlib.compress(json.dumps(head, separators=(",", ":")).encode(), 9)
    return MAGIC + len(header).to_bytes(LENGTH, "little") + header + body + block


def squeezed(text: str) -> bytes:
    return lzma.compress(text.encode(), lzma.FORMAT_RAW, filters=filters())


def note(name: str, sources: list[Source]) -> str:
    """Which releases were read, of what."""
    package = PACKAGES[name]
    which = "every release" if package.every_release else "the last patch of each minor release"
    told = f"{which} from {sources[0].release} to {sources[-1].release}"
    return f"{told} ({package.reason})" if package.reason else told


def sources_text(history: PackageHistory) -> str:
    """Release, archive, SHA-256 and what it requires of the other packages, a line each."""
    lines = []
    for source in history.sources:
        required = "; ".join(requirements(source.metadata))
        lines.append(f"{source.release}\t{source.archive}\t{source.sha256}\t{required}\n")
    return "".join(lines)


def requirements(metadata: str) -> list[str]:
    """What a release requires of the packages that are read, extras and markers left out."""
    found = re.findall(r"^Requires-Dist: *([\w.-]+) *\(?([^;)\n]*)\)?(.*)$", metadata, re.MULTILINE)
    return sorted(
        f"{name.replace('_', '-').lower()}{bounds.replace(' ', '')}"
        for name, bounds, marker in found
        if name.replace("_", "-").lower() in PACKAGES and "extra" not in marker
    )


def uses_text(uses: Spans, every: int) -> str:
    """What the package imports from others, a line each with its span."""
    return "".join(f"{name}\t{span(releases, every)}\n" for name, releases in sorted(uses.items()))


# What took the place of a name


def moved(history: PackageHistory) -> dict[tuple[str, str], str]:
    """(Module, name that is gone) -> where the next release defines that name."""
    places: dict[str, dict[str, int]] = {}
    for module, known in history.modules.items():
        for (name, kind), one in known.names.items():
            if kind in (CLASS, DATACLASS, FUNCTION):
                put = places.setdefault(name, {})
                put[module] = put.get(module, 0) | one.releases
    found = {}
    newest = history.every & ~(history.every >> 1)
    for module, known in history.modules.items():
        for name in {name for name, _ in known.names}:
            releases = known.having(name)
            if releases & newest:
                continue
            after = 1 << releases.bit_length()
            there = {
                other: had for other, had in places.get(name, {}).items() if had & after and other != module
            }
            came = [other for other, had in there.items() if not had & (after >> 1)]
            chosen = came if len(came) == 1 else list(there)
            if len(chosen) == 1 and len(there) <= COMMON_MOVES:
                found[module, name] = f"{chosen[0]}.{name}"
    return found


def moved_modules(history: PackageHistory, moves: Mapping[tuple[str, str], str]) -> dict[str, str]:
    """Module that is gone -> the one that has most of what moved out of it."""
    newest = history.every & ~(history.every >> 1)
    by_module: dict[str, Counter[str]] = {}
    for (module, _), place in moves.items():
        if not history.modules[module].releases & newest:
            by_module.setdefault(module, Counter())[place.rpartition(".")[0]] += 1
    return {module: min(count, key=lambda each: (-count[each], each)) for module, count in by_module.items()}

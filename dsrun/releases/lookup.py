"""Since when, until when, and what took its place: a name, member or parameter of a package over its releases.

A name may stand in one module and be defined in another: links are followed, and members and parameters are those of
the definition, with what it inherits. Releases are bits, so that "there is a link, and behind it a class, and in that
or its base the parameter" is a matter of `&` and `|`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dsrun.releases import packed
from dsrun.releases.packed import PackageReleases, PackedEntry, PackedModule

KINDS = {
    "c": "class",
    "d": "dataclass",
    "f": "function",
    "v": "value",
    "a": "field",
    "s": "attribute",
    "p": "property",
    "=": "name",
    "@": "module",
}
CLASSES = ("c", "d")
DEEPEST = 8
"""Links, or bases, that are followed one after the other."""
CLOSE = 0.75
"""How much alike a name has to be to be asked about."""
SHORTEST_WORD = 3
"""Letters with which one word shortens another, as eval does evaluation."""
INSTEAD = re.compile(
    r"(?:\buse|\busing|in favou?r of|renamed to|replaced (?:by|with)|moved to|switch to|set)\s+"
    r"(?:the\s+)?(?:new\s+)?(?:`{1,2}|['\"])?([A-Za-z_][\w.]*)",
    re.IGNORECASE,
)
"""What a deprecation says to take; the first letter's case is any."""
DOTTED = re.compile(
    r"\b(?:use|using|in favou?r of)\s[^`'\".]{0,40}?\b([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)", re.IGNORECASE
)
"""The same with words in between: "use the PyTorch implementation torch.optim.AdamW"."""
NO_NAMES = ("the", "a", "an", "it", "this", "that", "instead", "another", "one", "your", "any")


@dataclass(frozen=True)
class Definition:
    """Where a name is defined, for some releases."""

    module: PackedModule
    entry: PackedEntry
    releases: int

    @property
    def path(self) -> str:
        return f"{self.module.text}.{self.entry.text}"


@dataclass(frozen=True)
class Use:
    """A package that imports a name, from a release to another."""

    package: str
    first: str
    last: str
    until_now: bool


@dataclass(frozen=True)
class NameRecord:
    """What the releases say about a name."""

    package: PackageReleases
    path: str
    kind: str
    releases: int
    """The releases that have it, as bits; 0 where none ever had it."""
    defined: str = ""
    """Where it is defined, if that is elsewhere."""
    instead: str = ""
    """What took its place."""
    because: str = ""
    """How that is known: the deprecation's own text, or that it has the same words and came as this one went."""
    messages: tuple[str, ...] = ()
    """Texts in its module that tell of it."""
    taken_by_decorator: int = 0
    """Releases in which a decorator still takes a parameter under this old name."""
    any_keyword: bool = False
    """The newest release with the function takes any keyword (`**kwargs`)."""
    dynamic: bool = False
    """Its module answers some names at run time."""
    inherited_from: tuple[str, ...] = ()
    """Base classes in other packages, which may have it."""
    unread: bool = False
    """What its class or function takes was not read."""
    near: tuple[str, ...] = ()
    """Names like it, where none ever had it."""

    @property
    def first(self) -> str:
        """The first release that has it."""
        return (
            self.package.releases[(self.releases & -self.releases).bit_length() - 1] if self.releases else ""
        )

    @property
    def last(self) -> str:
        """The last release that has it."""
        return self.package.releases[self.releases.bit_length() - 1] if self.releases else ""

    @property
    def next(self) -> str:
        """The first release after the last; empty where the newest has it."""
        number = self.releases.bit_length()
        return self.package.releases[number] if number < len(self.package.releases) else ""

    @property
    def gone_between(self) -> bool:
        """Whether releases that were not read lie between the last with it and the first without."""
        return bool(self.next) and _is_gap(self.package, self.last, self.next)

    @property
    def came_between(self) -> bool:
        """Whether releases that were not read lie between the last without it and the first that has it."""
        if not self.releases or self.from_the_start:
            return False
        before = self.package.releases[self.package.releases.index(self.first) - 1]
        return _is_gap(self.package, before, self.first)

    @property
    def from_the_start(self) -> bool:
        """Whether the oldest release that was read has it."""
        return bool(self.releases & 1)

    def is_in(self, release: str) -> bool | None:
        """Whether a release has it; None for a release that was not read."""
        if release not in self.package.releases:
            return None
        return bool(self.releases >> self.package.releases.index(release) & 1)

    def runs(self) -> list[tuple[str, str]]:
        """The spans of releases that have it."""
        spans = packed.span(self.releases, self.package.every)
        ends = [part.partition("-") for part in spans.split(",") if part]
        names = self.package.releases
        return [
            (names[int(first)], names[int(last or (first if not dash else -1))]) for first, dash, last in ends
        ]


def _is_gap(package: PackageReleases, last: str, first: str) -> bool:
    """Whether releases that were not read may lie between two that follow one another in the data."""
    if not package.has_gaps:
        return False
    (major, minor, *_), here = _parts(last), _parts(first)
    # Of each minor release the last patch was read: only the next one's very first release follows without a gap.
    return here not in ((major, minor + 1, 0), (major + 1, 0, 0))


def _parts(release: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", release)[:3]]
    return (*numbers, *([0] * (3 - len(numbers))))


def look_up(path: str, parameter: str = "") -> NameRecord:
    """What the releases say of a module, name or member, or of a parameter of it. Raises LookupError where there are
    no data of the package."""
    package = packed.package_of(path)
    if package is None:
        raise LookupError(path)
    module, rest = longest_module(package, path)
    if module is None:
        return NameRecord(package, path, "name", 0)
    if parameter:
        return _parameter(package, module, rest, path, parameter)
    if not rest:
        after = 1 << module.releases.bit_length()
        moved = (entry.text for entry in module.of("~"))
        # What took its place may have gone with it, or since.
        there = (name for name in moved if (other := package.module(name)) and other.releases & after)
        instead = next(there, "")
        because = "most of its names are there" if instead else ""
        return NameRecord(package, path, "module", module.releases, instead=instead, because=because)
    return _name(package, module, path, rest[0]) if len(rest) == 1 else _member(package, module, rest, path)


def longest_module(package: PackageReleases, path: str) -> tuple[PackedModule | None, list[str]]:
    """The module that a path lies in, and the parts of the path below it."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if module := package.module(".".join(parts[:length])):
            return module, parts[length:]
    return None, parts


def has_own_init(record: NameRecord, release: str) -> bool:
    """Whether a class says by itself in a release what it takes, so that its bases don't count."""
    module, rest = longest_module(record.package, record.path)
    bit = 1 << record.package.releases.index(release)
    known = definitions(record.package, module, rest[0]) if module and rest else []
    return any(
        entry.releases & one.releases & bit for one in known for entry in one.entry.of(".", "__init__")
    )


# A name of a module


def _name(package: PackageReleases, module: PackedModule, path: str, name: str) -> NameRecord:
    entries = list(module.of("", name))
    releases = packed.union(entries)
    known = definitions(package, module, name)
    newest = max(known, key=lambda one: one.releases.bit_length(), default=None)
    record = NameRecord(
        package,
        path,
        KINDS[newest.entry.kind] if newest else "name",
        releases,
        defined=newest.path if newest and newest.path != path else _target(entries),
        dynamic=bool(list(module.of("*"))),
    )
    if not entries:
        return replace(record, near=tuple(closest(name, {other for other, _ in module.spans()})))
    places = [module, *(one.module for one in known)]
    moved = next((below.text for entry in entries for below in entry.of(">")), "")
    others: dict[str, int] = {}
    if record.next:  # a new name may have taken its place
        for other, had in module.spans():
            others[other] = others.get(other, 0) | had
    record = _with_replacement(record, name, places, moved, others)
    if not record.messages and not record.instead and newest and newest.path != path:
        # What a package exports is gone with its definition, whose own module knows where it went.
        at_home = _name(package, newest.module, newest.path, newest.entry.text)
        record = replace(record, instead=at_home.instead, because=at_home.because)
    return record


def _target(entries: list[PackedEntry]) -> str:
    """Where a link leads that no module here defines."""
    return next((entry.kind[1:] for entry in reversed(entries) if entry.kind.startswith("=")), "")


def definitions(
    package: PackageReleases, module: PackedModule, name: str, releases: int = -1, depth: int = 0
) -> list[Definition]:
    """The definitions behind a name, with the releases in which it leads there."""
    found: list[Definition] = []
    for entry in module.of("", name):
        had = entry.releases & releases
        if not had or depth > DEEPEST:
            continue
        if not entry.kind.startswith("="):
            found.append(Definition(module, entry, had))
            continue
        found += behind(package, entry.kind[1:], had, depth + 1)
    return found


def behind(package: PackageReleases, path: str, releases: int = -1, depth: int = 0) -> list[Definition]:
    """The definitions at a path of the same package."""
    holder, _, name = path.rpartition(".")
    module = package.module(holder) if packed.package_of(path) is package else None
    return definitions(package, module, name, releases, depth) if module else []


# Members and parameters


def _member(package: PackageReleases, module: PackedModule, parts: list[str], path: str) -> NameRecord:
    known = definitions(package, module, parts[0])
    found = [pair for one in known for pair in _members(package, one, parts[1])]
    releases = 0
    for _, had in found:
        releases |= had
    kind = KINDS[found[-1][0].kind] if found else "name"
    record = NameRecord(
        package,
        path,
        "method" if kind == "function" else kind,
        releases,
        inherited_from=foreign_bases(package, known),
    )
    others: dict[str, int] = {}
    for one in known:
        for entry in one.entry.of("."):
            others[entry.text] = others.get(entry.text, 0) | entry.releases & one.releases
    if not releases:
        return replace(record, unread=names_only(known), near=tuple(closest(parts[1], others)))
    return _with_replacement(record, parts[1], [one.module for one in known], "", others)


def _members(
    package: PackageReleases, one: Definition, name: str, depth: int = 0
) -> Iterator[tuple[PackedEntry, int]]:
    """A member's lines in a class and in its bases, with the releases of each."""
    for entry in one.entry.of(".", name):
        yield entry, entry.releases & one.releases
    for below in _bases(package, one, one.releases, depth):
        yield from _members(package, below, name, depth + 1)


def _bases(package: PackageReleases, one: Definition, releases: int, depth: int) -> Iterator[Definition]:
    """The base classes in the same package."""
    for base in one.entry.of("<"):
        if depth < DEEPEST and base.releases & releases:
            yield from behind(package, base.text, base.releases & releases)


def names_only(known: Iterable[Definition]) -> bool:
    """Whether of a definition no more was read than its name: what it takes is compiled, or was left out."""
    return any(one.entry.kind == "v" or list(one.module.of("%")) for one in known)


def foreign_bases(package: PackageReleases, known: Iterable[Definition]) -> tuple[str, ...]:
    """The base classes of other packages that there are data of."""
    found: dict[str, None] = {}
    waiting = [(one, 0) for one in known]
    while waiting:
        one, depth = waiting.pop()
        for base in one.entry.of("<"):
            path = base.text
            holder, _, name = path.rpartition(".")
            if module := package.module(holder) if packed.package_of(path) is package else None:
                path = _target(list(module.of("", name))) or path
            if packed.package_of(path) not in (None, package):
                found[path] = None
        waiting += [(below, depth + 1) for below in _bases(package, one, one.releases, depth)]
    return tuple(found)


def parameters(path: str) -> dict[str, int]:
    """What a function, method or class takes, each with the releases that take it as bits; empty where that wasn't
    read."""
    package = packed.package_of(path)
    module, rest = longest_module(package, path) if package else (None, [])
    if package is None or module is None or not rest:
        return {}
    found: dict[str, int] = {}
    for one in definitions(package, module, rest[0]):
        if len(rest) == 1:
            _add(found, _parameters(package, one, {}))
            continue
        for entry, had in _members(package, one, rest[1]):
            _add(found, _written(entry, ")", had))
    return found


def _parameter(
    package: PackageReleases, module: PackedModule, parts: list[str], path: str, parameter: str
) -> NameRecord:
    known = definitions(package, module, parts[0]) if parts else []
    takes: dict[str, int] = {}
    renamed: dict[str, int] = {}
    for one in known:
        if len(parts) == 1:
            _add(takes, _parameters(package, one, renamed))
            continue
        for entry, had in _members(package, one, parts[1]):
            _add(takes, _written(entry, ")", had))
            _add(renamed, _written(entry, ";", had))
    decorated, new_name = 0, ""
    for text, had in renamed.items():
        old, _, new = text.partition(">")
        if old == parameter:
            decorated |= had
            new_name = new or new_name
    whole = 0
    for one in known:
        whole |= one.releases
    any_keyword = any(
        had.bit_length() == whole.bit_length() for name, had in takes.items() if name[:2] == "**"
    )
    plain = {name: had for name, had in takes.items() if name[0] != "*"}
    record = NameRecord(
        package,
        path,
        f"parameter {parameter}",
        plain.get(parameter, 0) | decorated,
        taken_by_decorator=decorated & ~plain.get(parameter, 0),
        any_keyword=any_keyword,
        inherited_from=foreign_bases(package, known),
    )
    if not record.releases:
        return replace(record, unread=names_only(known), near=tuple(closest(parameter, plain)))
    if new_name:
        return replace(record, instead=new_name, because="its decorator says so")
    return _with_replacement(record, parameter, [one.module for one in known], "", plain)


def _parameters(
    package: PackageReleases, one: Definition, renamed: dict[str, int], depth: int = 0
) -> dict[str, int]:
    """What a function takes, or a class when it is made: by its own __init__, else as fields and by its bases'."""
    if one.entry.kind not in CLASSES:
        _add(renamed, _written(one.entry, "?", one.releases))
        return _written(one.entry, "(", one.releases)
    found: dict[str, int] = {}
    makers = [entry for name in ("__init__", "__new__") for entry in one.entry.of(".", name)]
    for entry in makers:
        _add(found, _written(entry, ")", one.releases))
        _add(renamed, _written(entry, ";", one.releases))
    others = one.releases & ~packed.union(makers)
    for entry in one.entry.of("."):
        if entry.kind == "a" and entry.releases & others:
            _add(found, {entry.text: entry.releases & others})
    for below in _bases(package, one, others, depth):
        _add(
            found, _parameters(package, replace(below, releases=below.releases & others), renamed, depth + 1)
        )
    return found


def _written(entry: PackedEntry, sign: str, releases: int) -> dict[str, int]:
    """The parameters that stand in a line's lines of a kind."""
    found: dict[str, int] = {}
    for line in entry.of(sign):
        if had := line.releases & releases:
            _add(found, dict.fromkeys(line.text.split(","), had))
    return found


def _add(found: dict[str, int], more: dict[str, int]) -> None:
    for name, releases in more.items():
        found[name] = found.get(name, 0) | releases


# What took its place


def _with_replacement(
    record: NameRecord, name: str, modules: Iterable[PackedEntry], moved: str, others: dict[str, int]
) -> NameRecord:
    """The record with the texts that tell of the name, and what they or the next release have in its place."""
    # A text of a release long before may be of another thing with the same name: only those near the end count.
    end = 1 << record.releases.bit_length() - 1
    near = end >> 1 | end | end << 1
    texts = {entry.text for module in modules for entry in module.of("!") if entry.releases & near}
    messages = tuple(sorted(text for text in texts if is_about(text, name)))
    record = replace(record, messages=messages)
    for text in messages:
        if advised := _advised(text, name):
            return replace(record, instead=advised, because="its deprecation says so")
    if not record.next:
        return record
    if moved:
        return replace(record, instead=moved, because=f"{record.next} has it there")
    new = {other for other, had in others.items() if had & end << 1 and not had & end}
    renamed = sorted(other for other in new if has_same_words(name, other))
    if len(renamed) == 1:
        return replace(
            record, instead=renamed[0], because=f"it has the same words, and came in {record.next}"
        )
    return record


def is_about(text: str, name: str) -> bool:
    """Whether a text tells that a name goes: it is what the text marks first, or what "is", "was" ... follows."""
    escaped = re.escape(name)
    marked = re.search(r"[`'\"]([\w.]+)", text)
    first = marked.group(1).rpartition(".")[2] if marked else ""
    return first == name or bool(
        re.search(rf"(?<![\w.=]){escaped}(?:\([^)]*\))?[`'\"]*\s+(?:is|are|was|were|has|have)\b", text)
        or re.match(rf"{escaped}\b", text)
    )


def _advised(text: str, name: str) -> str:
    """What a deprecation of a name says to take."""
    if (dotted := DOTTED.search(text)) and dotted[1] != name:
        return dotted[1]
    for found in INSTEAD.finditer(text):
        advised = found.group(1).rstrip(".")
        if advised != name and advised.lower() not in NO_NAMES and (_marked(text, found) or "_" in advised):
            return advised
    return ""


def _marked(text: str, found: re.Match[str]) -> bool:
    """Whether a word stands in quotation marks or has a dot: it is a name then."""
    return text[found.start(1) - 1] in "`'\"" or "." in found.group(1).rstrip(".")


WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def has_same_words(one: str, other: str) -> bool:
    """Whether two names have the same words, in any order and perhaps shortened: evaluation_strategy, eval_strategy."""
    first, second = (sorted(word.lower() for word in WORDS.findall(name)) for name in (one, other))
    return len(first) == len(second) and all(map(_is_same_word, first, second))


def _is_same_word(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return one == other or (len(short) >= SHORTEST_WORD and long.startswith(short))


def has_words_of(one: str, other: str, least: int) -> bool:
    """Whether a name has some words of another, one after the other, as OwnDataCollator of DataCollatorWithPadding."""
    first, second = ([word.lower() for word in WORDS.findall(name)] for name in (one, other))
    runs = (second[start : start + least] for start in range(len(second) - least + 1))
    return any(run == first[start : start + least] for run in runs for start in range(len(first)))


def closest(name: str, others: Iterable[str], least: float = CLOSE) -> list[str]:
    """The names most like one, the best first."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=name, autojunk=False)
    scored = []
    for other in others:
        matcher.set_seq1(other)
        if other != name and matcher.quick_ratio() >= least and (score := matcher.ratio()) >= least:
            scored.append((-score, other))
    return [other for _, other in sorted(scored)[:3]]


# Who asks for it


def uses(path: str) -> list[Use]:
    """The packages that import a name, by the modules that they name for it."""
    found = []
    for name in packed.packages():
        package = packed.package(name)
        for line in package.section("uses").splitlines():
            used, _, span = line.partition("\t")
            if used == path:
                releases = packed.bits(span, package.every)
                first, last = (releases & -releases).bit_length() - 1, releases.bit_length() - 1
                until_now = last == len(package.releases) - 1
                found.append(Use(name, package.releases[first], package.releases[last], until_now))
    return found

"""What each release of DeepSpeed says about its configuration, and what changed from one to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from dsrun.releases.packed import PackageReleases, bits, span

SECTION = "config"


@dataclass(frozen=True)
class ConfigFact:
    """Something that holds in some releases, read from their code."""

    kind: str
    """key (it is read), type, default, bound, values, deprecated, alias, checked (unknown keys below it are refused),
    refused (whatever its value), refusal or warning."""
    place: str
    """The key; of refusals, warnings, and values that a function tells apart, the file and function."""
    text: str
    """The value as JSON where it is a default or the like; the message of a refusal, with {} for what is put in."""
    when: str
    """The condition right before a refusal or warning, as it is written."""
    releases: int
    """One bit a release, the oldest the lowest."""


@dataclass(frozen=True)
class ConfigChange:
    """What differs in one key or function between two releases."""

    kind: str
    place: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@cache
def facts(package: PackageReleases) -> tuple[ConfigFact, ...]:
    """All of them, in order of kind and place."""
    rows = (line.split("\t") for line in package.section(SECTION).splitlines())
    return tuple(
        ConfigFact(kind, place, text, when, bits(span, package.every))
        for kind, place, text, when, span in rows
    )


def holding(package: PackageReleases, release: str) -> Iterator[ConfigFact]:
    """The facts of a release. Raises ValueError for one that was not read."""
    number = package.releases.index(release)
    return (fact for fact in facts(package) if fact.releases >> number & 1)


def changes(package: PackageReleases, before: str, after: str) -> list[ConfigChange]:
    """What holds in one release and not in the other, each key or function once."""
    old, new = (
        {(fact.kind, fact.place, shown(fact)) for fact in holding(package, release)}
        for release in (before, after)
    )
    gone, came = old - new, new - old
    found = []
    for kind, place in sorted({each[:2] for each in gone | came}):
        texts = (
            tuple(sorted(text for one, where, text in side if (one, where) == (kind, place)))
            for side in (gone, came)
        )
        found.append(ConfigChange(kind, place, *texts))
    return found


def shown(fact: ConfigFact) -> str:
    """A fact's text, with its condition."""
    return f"{fact.text} [if {fact.when}]" if fact.when else fact.text


def key_history(package: PackageReleases, key: str) -> list[tuple[str, str, str]]:
    """(Kind, text, span in words) of what a key was in which releases."""
    return [
        (fact.kind, fact.text, in_words(package, fact.releases))
        for fact in facts(package)
        if fact.place == key
    ]


OLDEST = "0.9.0"
"""The first release of DeepSpeed whose keys were read."""


@dataclass(frozen=True)
class KeyRecord:
    """What the releases say of one key."""

    since: str
    """The release that brought it; empty where the oldest one that was read has it."""
    until: str
    """The last release that takes it; empty where the newest does."""
    former: tuple[tuple[str, str], ...]
    """(Default as JSON, releases in words) of each default that it had and hasn't now."""
    alternating: str = ""
    """The releases in words, where it went and came again."""


@cache
def _by_key(package: PackageReleases) -> dict[str, list[ConfigFact]]:
    found: dict[str, list[ConfigFact]] = {}
    for fact in facts(package):
        if fact.kind in ("key", "default"):
            found.setdefault(fact.place, []).append(fact)
    return found


def key_record(package: PackageReleases, key: str) -> KeyRecord | None:
    """What the releases say of a key; None for one that none has."""
    of_key = _by_key(package).get(key, [])
    releases = next((fact.releases for fact in of_key if fact.kind == "key"), 0)
    if not releases:
        return None
    names = package.releases
    first, last = (releases & -releases).bit_length() - 1, releases.bit_length() - 1
    defaults = [fact for fact in of_key if fact.kind == "default" and not fact.releases >> last & 1]
    spans = span(releases, package.every)
    return KeyRecord(
        names[first] if first and names[first] != OLDEST else "",
        names[last] if last < len(names) - 1 else "",
        tuple((fact.text, in_words(package, fact.releases)) for fact in defaults),
        in_words(package, releases) if "," in spans else "",
    )


def in_words(package: PackageReleases, releases: int) -> str:
    """The releases as "0.9.0 to 0.16.4, 0.17.1 and newer"."""
    names, parts = package.releases, []
    for part in filter(None, span(releases, package.every).split(",")):
        first, dash, last = part.partition("-")
        if dash and not last:
            parts.append("every release" if first == "0" else f"{names[int(first)]} and newer")
        elif dash:
            parts.append(f"{names[int(first)]} to {names[int(last)]}")
        else:
            parts.append(names[int(first)])
    return ", ".join(parts)

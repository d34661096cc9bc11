"""What changed from one release to another, in words, and what of dsrun it touches."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from dsrun.releases.config_changes import ConfigChange, changes
from dsrun.releases.packed import PackageReleases, PackedEntry
from tools.schemas.refusals import known as known_refusals

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "signatures": "dsrun/jobs/diagnosis/signatures/*.toml",
    "presets": "presets/*.toml",
    "templates": "templates/*",
    "planner": "dsrun/planner/*.py",
    "docs": "docs/[eht]*/**/*.md",
}
"""Where a key may be named, beside the rules."""
MOST_NAMES = 200
WITHOUT_KEY = ("refused", "refusal", "warning")
"""Kinds of change that are told of a new or gone key, too."""
HEADS = {
    "key": "Keys",
    "refused": "Keys that stop DeepSpeed whatever their value",
    "default": "Defaults",
    "type": "Types",
    "bound": "Bounds",
    "values": "Values",
    "deprecated": "Deprecations",
    "alias": "Second names",
    "checked": "Sections that refuse unknown keys",
    "refusal": "Refusals",
    "warning": "Warnings",
}


def report(package: PackageReleases, before: str, after: str) -> str:
    """The report, as Markdown."""
    lines = [f"# {package.name} {before} -> {after}", ""]
    lines += _config(changes(package, before, after))
    lines += _names(package, before, after)
    return "\n".join(lines) + "\n"


# Configuration


def _config(found: list[ConfigChange]) -> Iterator[str]:
    """The changes by kind. Of a key that is new, the default stands beside it; of one that is gone, nothing more."""
    keys = {change.place: change for change in found if change.kind == "key"}
    defaults = {change.place: change.after for change in found if change.kind == "default"}
    told = [change for change in found if change.kind in WITHOUT_KEY or change.place not in keys]
    told += [change for change in keys.values() if not _below(change, keys)]
    for kind, head in HEADS.items():
        if of_kind := [change for change in told if change.kind == kind]:
            yield from (f"## {head}", "")
            for change in of_kind:
                default = defaults.get(change.place, ()) if kind == "key" and change.after else ()
                yield f"- {in_words(change)}" + (f"; left out, it is `{default[0]}`" if default else "")
                yield from (f"  - {touched}" for touched in touches(change))
            yield ""


def _below(change: ConfigChange, keys: Mapping[str, ConfigChange]) -> bool:
    """Whether a section around the key came or went with it."""
    place = change.place
    while place := place.rpartition(".")[0]:
        if place in keys and bool(keys[place].after) == bool(change.after):
            return True
    return False


def in_words(change: ConfigChange) -> str:
    """A change as a sentence."""
    before, after = (
        ", ".join(f"`{text}`" if text else "" for text in side) for side in (change.before, change.after)
    )
    place = f"`{change.place}`"
    match change.kind:
        case "key":
            return f"{place} is {'new' if change.after else 'no longer read'}"
        case "refused":
            return f"{place} {'stops DeepSpeed now' if change.after else 'is taken again'}"
        case "default":
            return f"{place}, left out, is {after or 'nothing'}; it was {before or 'nothing'}"
        case "deprecated" | "checked":
            word = "deprecated" if change.kind == "deprecated" else "closed to unknown keys"
            return f"{place} is {word if change.after else f'not {word} any more'}"
        case "refusal" | "warning":
            parts = [f"new: {text}" for text in change.after] + [f"gone: {text}" for text in change.before]
            return "\n  - ".join([place, *parts])
    return f"{place}: {after or 'none'}; it was {before or 'none'}"


def touches(change: ConfigChange) -> Iterator[str]:
    """What of dsrun names the key, or the refusal."""
    if change.kind in ("refusal", "warning"):
        file, _, function = change.place.partition(":")
        answers = known_refusals()
        for text in change.before:
            message = text.partition(" [if ")[0]
            answer = next(
                (
                    each
                    for one, each in answers.items()
                    if one[:2] == (file, function) and one.text == message
                ),
                None,
            )
            if answer:
                yield f"named by {', '.join(answer) if isinstance(answer, list) else f'no rule ({answer})'}"
        return
    # A key below a section is looked for with its section: "enabled" alone stands everywhere.
    name = re.escape(change.place.rpartition(".")[2])
    word = re.compile(rf"(?<![\w]){name}(?![\w])")
    parent = change.place.rpartition(".")[0].rpartition(".")[2]
    section = re.compile(rf"(?<![\w]){re.escape(parent)}(?![\w])") if parent else None
    if rules := [
        rule for rule, text in rule_texts() if word.search(text) and (not section or section.search(text))
    ]:
        yield f"rules: {', '.join(rules)}"
    for label, files in texts().items():
        named = [file for file, text in files if word.search(text) and (not section or section.search(text))]
        if named:
            yield f"{label}: {', '.join(named)}"


@cache
def rule_texts() -> list[tuple[str, str]]:
    """Each rule with its code, its words and its examples."""
    from dsrun.config.rules import find_rules

    found = []
    for rule in find_rules():
        try:
            code = inspect.getsource(inspect.unwrap(rule.function))
        except (OSError, TypeError):
            code = ""
        found.append((rule.id, f"{code}\n{rule.source}\n{rule.bad}\n{rule.good}"))
    return found


@cache
def texts() -> dict[str, list[tuple[str, str]]]:
    """The files of each place, with their texts."""
    return {
        label: [
            (path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
            for path in sorted(ROOT.glob(pattern))
            if path.is_file() and "Made by docs/generate.py" not in path.read_text(encoding="utf-8")[:200]
        ]
        for label, pattern in PLACES.items()
    }


# Names


def _names(package: PackageReleases, before: str, after: str) -> Iterator[str]:
    """Public names and parameters that came and went."""
    old, new = (1 << package.releases.index(release) for release in (before, after))
    gone, came = [], []
    for module in package.modules():
        if "._" in module.text:
            continue
        for path in _paths(module, old, new):
            gone.append(path)
        for path in _paths(module, new, old):
            came.append(path)
    for head, found in (("Names that are gone", gone), ("New names", came)):
        if found:
            yield from (f"## {head} ({len(found)})", "")
            yield from (f"- `{path}`" for path in found[:MOST_NAMES])
            if len(found) > MOST_NAMES:
                yield f"- ... and {len(found) - MOST_NAMES} more"
            yield ""


def _paths(module: PackedEntry, there: int, not_there: int) -> Iterator[str]:
    """What a module has in one release and not in the other; of what is gone whole, not its parts."""
    if not module.releases & not_there:
        if module.releases & there:
            yield module.text
        return
    both: dict[str, int] = {}
    parts: dict[str, int] = {}
    for entry in module.of(""):
        if not entry.text.startswith("_"):
            both[entry.text] = both.get(entry.text, 0) | entry.releases
            for line in entry.below:
                for name, releases in _part(line):
                    path = f"{entry.text}{name}"
                    parts[path] = parts.get(path, 0) | releases
    yield from (f"{module.text}.{name}" for name, had in both.items() if had & there and not had & not_there)
    for path, had in parts.items():
        holder = re.split(r"[.(]", path)[0]
        if had & there and not had & not_there and both[holder] & there and both[holder] & not_there:
            yield f"{module.text}.{path}"


def _part(line: PackedEntry) -> Iterator[tuple[str, int]]:
    """Parameters as "(name=)", public methods as ".name", and their parameters. Attributes are left to the look-up."""
    if line.sign == "(":
        yield from ((f"({name}=)", line.releases) for name in line.text.split(",") if name[0] != "*")
    elif line.sign == "." and line.kind == "f" and (line.text[0] != "_" or line.text == "__init__"):
        if line.text != "__init__":
            yield f".{line.text}", line.releases
        for below in line.of(")"):
            path = "" if line.text == "__init__" else f".{line.text}"
            yield from (
                (f"{path}({name}=)", below.releases) for name in below.text.split(",") if name[0] != "*"
            )
    elif line.sign == "." and line.kind == "a":
        yield f".{line.text}", line.releases

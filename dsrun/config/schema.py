"""The schema of deepspeed.json: what each key is in a version of DeepSpeed.

The schema files are generated and checked in (schemas/), one for each minor version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from dsrun.catalog import closest
from dsrun.config import names, tree
from dsrun.errors import DsrunError

AUTO = "auto"
HF = "hf"
FILLING = (HF, "accelerate")
"""Who fills in "auto": HF Trainer, and accelerate, which HF Trainer does it with."""

FEW = 200
"""Keys of a section up to which all of them are looked at for a second one that means the same."""

Node = dict[str, Any]
Version = tuple[int, int]


def versions() -> dict[Version, Path]:
    """The schema file of each version of DeepSpeed there is one for, oldest first."""
    found = {}
    for path in Path(__file__).with_name("schemas").glob("deepspeed-*.schema.json"):
        major, minor = path.name.split("-")[1].split(".")[:2]
        found[int(major), int(minor)] = path
    return dict(sorted(found.items()))


@lru_cache(maxsize=1)
def newest() -> Version:
    return max(versions())


def oldest() -> Version:
    return min(versions())


def version_of(text: str) -> Version:
    """The version that "0.14", "0.14.5" or "v0.14" means; DsrunError where there is no schema for it.

    A version above the newest known one is judged as the newest.
    """
    known = versions()
    parts = text.strip().removeprefix("v").split(".")
    if len(parts) >= 2 and all(part.isdigit() for part in parts[:2]):
        wanted = (int(parts[0]), int(parts[1]))
        if min(wanted, max(known)) in known:
            return min(wanted, max(known))
    first, last = (".".join(map(str, edge)) for edge in (min(known), max(known)))
    raise DsrunError(f"no schema for DeepSpeed {text!r}", hint=f"There is one for each of {first} to {last}.")


def release_of(text: str) -> tuple[int, ...] | None:
    """(0, 19, 8) of "0.19.8"; None where no patch is named."""
    parts = text.strip().removeprefix("v").split(".")
    return (
        tuple(map(int, parts[:3])) if len(parts) > 2 and all(part.isdigit() for part in parts[:3]) else None
    )


def load(version: Version | None = None) -> Schema:
    """The schema of a version; the newest if none is named."""
    return _load(version or newest())


@cache
def _load(version: Version) -> Schema:
    return Schema(json.loads(versions()[version].read_text(encoding="utf-8")), version)


def types(found: Node) -> set[str]:
    """The JSON types a node takes ("auto" aside); every type for a node that says nothing."""
    if "anyOf" in found:
        return {name for branch in found["anyOf"] if "const" not in branch for name in types(branch)}
    named = found.get("type", ["object", "array", "string", "number", "integer", "boolean", "null"])
    return {named} if isinstance(named, str) else set(named)


def expected(found: Node) -> str:
    """What a node takes, in words: `an integer, at least 1`, `one of none, cpu, nvme`."""
    if "anyOf" in found:
        return " or ".join(expected(branch) for branch in found["anyOf"] if branch.get("const") != AUTO)
    if "const" in found:
        return json.dumps(found["const"])
    if "enum" in found:
        return "one of " + ", ".join(
            value if isinstance(value, str) else json.dumps(value) for value in found["enum"]
        )
    names = {"object": "a section", "array": "a list", "boolean": "true or false", "string": "a text"}
    names |= {"integer": "a whole number", "number": "a number", "null": "null"}
    found_types = types(found) if "not" not in found else set()
    text = (
        " or ".join(name for key, name in names.items() if key in found_types)
        or "nothing: it can't be set here"
    )
    if isinstance(found.get("items"), Mapping) and "array" in found_types:
        count = f"{found['minItems']} times " if found.get("minItems") else ""
        text += f" of {count}{expected(found['items'])}"
    words = {"minimum": "at least", "exclusiveMinimum": "more than"}
    words |= {"maximum": "at most", "exclusiveMaximum": "less than"}
    return ", ".join([text, *(f"{word} {found[key]}" for key, word in words.items() if key in found)])


def as_whole(value: Any, found: Node) -> Any:
    """2e8 as 200000000 at a node that takes whole numbers and no others; any other value as it is."""
    takes = types(found)
    if isinstance(value, float) and value.is_integer() and "integer" in takes and "number" not in takes:
        return int(value)
    return value


def shorten(value: Any) -> str:
    """A value as JSON, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, eq=False)
class Schema:
    """One version's schema. `root` is the JSON Schema as it stands in the file."""

    root: Node
    version: Version

    def node(self, path: str) -> Node | None:
        """The schema of one key; None where there is no such key, {} below a section that takes any key."""
        found = self.root
        for key in path.split("."):
            properties = found.get("properties", {})
            if key in properties:
                found = properties[key]
            elif _open(found):
                return {}
            else:
                return None
        return found

    def describe(self, path: str) -> tuple[Any, str]:
        """DeepSpeed's default (tree.MISSING where it has none) and what a key does."""
        found = self.node(path) or {}
        return found.get("default", tree.MISSING), found.get("description", "")

    def is_auto(self, path: str) -> bool:
        """Whether HF Trainer fills in "auto" at this key."""
        return bool((self.node(path) or {}).get("x-auto"))

    def canonical(self, path: str) -> str:
        """A path in which each alias is replaced by the name it stands for."""
        keys: list[str] = []
        for key in path.split("."):
            alias = (self.node(".".join([*keys, key])) or {}).get("x-alias-of")
            keys.append(alias or key)
        return ".".join(keys)

    def removed(self, path: str) -> str | None:
        """What to do instead of a key (or below one) that DeepSpeed has removed; None for any other key."""
        gone: dict[str, str] = self.root.get("x-removed", {})
        return next((advice for key, advice in gone.items() if tree.under(path, key)), None)

    def later(self, path: str) -> str | None:
        """The version that a key (or the section around it) came with, if this one hasn't got it yet."""
        coming: dict[str, str] = self.root.get("x-added-later", {})
        return next((since for key, since in coming.items() if tree.under(path, key)), None)

    def nearest(self, path: str) -> str:
        """Where an unknown key was probably meant to be: the same key elsewhere, or the closest one."""
        return self.guess(path)[0]

    @lru_cache(maxsize=4096)  # noqa: B019 - schemas live as long as the program
    def guess(self, path: str) -> tuple[str, str | None]:
        """(what to say of an unknown key, the path it was probably meant to be or None).

        The path itself stands for a key that has no place here and none to go to.
        """
        section, _, key = path.rpartition(".")
        parent = self.node(section) if section else self.root
        beside = [name for name, child in properties_of(parent).items() if "x-alias-of" not in child]
        homes = [known for known in self._homes.get(key, ()) if not tree.under(path, known)]
        near = names.nearest(key, beside)
        if key == "$schema":
            return "Remove it: it stands at the top level only.", None
        if key == "offload" and section in ("", "zero_optimization"):
            return "Did you mean zero_optimization.offload_optimizer?", None
        if not section and (short := names.bare(key)) != key and short in beside:
            return f"Did you mean {short}?", short
        if near and (names.alike(key, near) > names.CLOSE or names.reordered(key, near)):
            return names.did_you_mean(key, near, beside, section)
        if not homes and (same := next((name for name in self._homes if names.reordered(key, name)), None)):
            homes = [known for known in self._homes[same] if not tree.under(path, known)]
            if len(homes) == 1:
                return f"Did you mean {homes[0]}?", homes[0]
        if len(homes) == 1 and names.alternatives(self.canonical(section), homes[0].rpartition(".")[0]):
            if self.canonical(section) == "bf16" and ("scale" in key or "hysteresis" in key):
                return "fp16 has it; bf16 needs no loss scale: remove it.", path
            return f"DeepSpeed has it at {homes[0]} only; take it out here.", path
        if homes:
            return f"It belongs at {' or '.join(homes[:3])}.", homes[0] if len(homes) == 1 else None
        if near:
            return names.did_you_mean(key, near, beside, section)
        elsewhere = None if key in self._homes else closest(key, self._homes)
        if elsewhere and names.alike(key, elsewhere) > names.CONFIDENT:
            home = self._homes[elsewhere][0].rpartition(".")[0]
            return names.did_you_mean(key, elsewhere, [elsewhere], home)
        if parent is None:
            return self.guess(section)[0], None
        if not section and (short := names.SHORT.get(names.bare(key), "")) in beside:
            return f"Did you mean {short}?", short
        if not section:
            return "Remove it; a comment's key starts with an underscore.", None
        shown = ", ".join(beside[:12]) + (f" and {len(beside) - 12} more" if len(beside) > 12 else "")
        return f"{section} takes: {shown}." if beside else f"{section} takes no keys of its own.", None

    def resembled(self, value: Any) -> str | None:
        """The one section at the top level that most keys of a section are known in, or None."""
        if not isinstance(value, dict) or not value:
            return None
        told = [key for key in list(value)[:FEW] if len(self._homes.get(key, ())) == 1]
        above = {self._homes[key][0].rpartition(".")[0] for key in told}
        meant = above.pop() if len(above) == 1 else ""
        known = properties_of(self.node(meant)) if meant else {}
        most = sum(key in known for key in value) * 2 > len(value)
        return meant if most and meant and "." not in meant else None

    def whole_numbers(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The same config with 2e8 as 200000000 where the schema wants a whole number."""

        def fix(value: Any, found: Node) -> Any:
            if isinstance(value, Mapping):
                properties = properties_of(found)
                return {key: fix(item, properties.get(key, {})) for key, item in value.items()}
            return as_whole(value, found)

        whole: dict[str, Any] = fix(config, self.root)
        return whole

    @cached_property
    def _homes(self) -> dict[str, list[str]]:
        """Every key name -> the paths where it stands, aliases left out."""
        index: dict[str, list[str]] = {}

        def walk(found: Node, prefix: str) -> None:
            for key, child in properties_of(found).items():
                if "x-alias-of" not in child:
                    path = f"{prefix}.{key}" if prefix else key
                    index.setdefault(key, []).append(path)
                    walk(child, path)

        walk(self.root, "")
        return index

    def paths(self) -> list[str]:
        """Every key's path, sections included, aliases left out."""
        return [path for homes in self._homes.values() for path in homes]

    def __hash__(self) -> int:
        return hash(self.version)


def properties_of(found: Node | None) -> dict[str, Node]:
    """The keys of a node that is a section, {} for any other."""
    properties: dict[str, Node] = (found or {}).get("properties", {})
    return properties


def _open(found: Node) -> bool:
    return found.get("additionalProperties", True) is not False and "object" in types(found)

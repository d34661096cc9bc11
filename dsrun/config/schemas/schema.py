"""The schema of deepspeed.json: what each key is in a release of DeepSpeed.

One generated file (schemas/deepspeed.json) holds the schemas of all releases: patch releases remove keys, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from dsrun.config import tree
from dsrun.errors import DsrunError

AUTO = "auto"
HF = "hf"
ACCELERATE = "accelerate"
FILLING = (HF, ACCELERATE)
"""Readers that fill in "auto": HF Trainer, and accelerate, which HF Trainer does it with."""

RELEASES = "x-releases"
"""The key of the file that lists the releases it holds."""

PYDANTIC_1 = "pydantic 1"
"""x-converts of a release whose models convert values as pydantic 1 does."""

KINDS_OF_VALUES: dict[str, tuple[Any, ...]] = {
    "null": (None,),
    "false": (False,),
    "true": (True,),
    "negative": (-1, -2.5),
    "zero": (0,),
    "positive": (1, 2, 7),
    "fraction": (0.5, 1.5),
    "empty text": ("",),
    "whole number as text": ("1", "3"),
    "number as text": ("2.5", "1e-3"),
    "auto": ("auto",),
    "text": ("x", "None"),
    "empty list": ([],),
    "list": ([1], ["x"]),
    "empty section": ({},),
    "section": ({"value": 1},),
}
"""Kinds of values that a reader tells apart, with some of each: those that are tried where a schema is made."""

Node = dict[str, Any]
Version = tuple[int, ...]
"""(0, 19, 4), or (0, 19) for the newest release of a minor version."""


@cache
def _file() -> Node:
    """The schemas of all releases in one."""
    text = Path(__file__).with_name("deepspeed.json").read_text(encoding="utf-8")
    schemas: Node = json.loads(text)
    return schemas


def as_of(entry: Any, version: Version) -> Any:
    """An entry of schemas/deepspeed.json in one release; tree.MISSING where that release hasn't got it.

    An object whose keys are spans holds the variants of one entry: {"until 0.19.2": 0, "since 0.19.3": 1.0}.
    """
    if not isinstance(entry, dict):
        return entry
    if next(iter(entry), "").startswith(("since ", "until ")):
        variants = (value for span, value in entry.items() if _covers(span, version))
        return as_of(next(variants, tree.MISSING), version)
    entries = {key: as_of(value, version) for key, value in entry.items()}
    return {key: value for key, value in entries.items() if value is not tree.MISSING}


@cache
def _covers(span: str, version: Version) -> bool:
    """Whether a release lies in "since 0.13.2 until 0.16", both of them included, with all patches of 0.16."""
    words = span.split()
    edges = {word: numbers(text) for word, text in zip(words[::2], words[1::2], strict=True)}
    since, until = edges.get("since", version), edges.get("until", version)
    return since <= version and version[: len(until)] <= until


def numbers(release: str) -> Version:
    """(0, 19, 4) of "0.19.4"."""
    return tuple(map(int, release.split(".")))


def name_of(version: Version) -> str:
    """The inverse of numbers()."""
    return ".".join(map(str, version))


def minor_of(release: str) -> Version:
    """(0, 19) of "0.19" or "0.19.8"."""
    return numbers(release)[:2]


@cache
def releases() -> tuple[Version, ...]:
    """Each release of DeepSpeed there is a schema for, oldest first."""
    return tuple(map(numbers, _file()[RELEASES]))


@cache
def versions() -> tuple[Version, ...]:
    """Each minor version of DeepSpeed there is a schema for, oldest first."""
    return tuple(dict.fromkeys(release[:2] for release in releases()))


def newest() -> Version:
    return releases()[-1]


def oldest() -> Version:
    """The last patch of the oldest minor version: what a config of no known version is taken for."""
    return nearest(versions()[0])


@cache
def nearest(version: Version) -> Version:
    """The release that a version is judged as: of a minor version the last patch, of an unknown patch the one before
    it, of anything newer than is known the newest.
    """
    of_minor = [release for release in releases() if release[:2] == version[:2]]
    before = [release for release in of_minor if len(version) == 2 or release <= version]
    return (before or of_minor[:1] or releases())[-1]


def version_of(text: str) -> Version:
    """The release that "0.14", "0.14.5", "v0.14" or "0.14.5+cu121" is judged as; DsrunError where there is no schema
    for it.
    """
    wanted = plain_version(text)
    if len(wanted) >= 2 and min(wanted[:2], versions()[-1]) in versions():
        return nearest(wanted)
    first, last = (name_of(edge) for edge in (versions()[0], versions()[-1]))
    raise DsrunError(f"no schema for DeepSpeed {text!r}", hint=f"There is one for each of {first} to {last}.")


def plain_version(text: str) -> Version:
    """(0, 14, 5) of "v0.14.5+cu121", (0, 14) of "0.14"; () of what is no version."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d*)|$)", text.strip())
    return tuple(int(part) for part in found.groups() if part) if found else ()


def load(version: Version | None = None) -> Schema:
    """The schema of a release, or of the newest one of a minor version; of the newest of all if none is named."""
    return _load(nearest(version) if version else newest())


@cache
def _load(release: Version) -> Schema:
    file = {key: entry for key, entry in _file().items() if key != RELEASES}
    root = as_of(file, release)
    names = {"version": name_of(release[:2]), "release": name_of(release)}
    named = {key: root[key].format(**names) for key in ("$id", "title", "x-deepspeed-version")}
    return Schema({**root, **named}, release)


def types(node: Node) -> set[str]:
    """The JSON types a node takes ("auto" aside); every type for a node that says nothing."""
    if "anyOf" in node:
        return {name for branch in node["anyOf"] if "const" not in branch for name in types(branch)}
    named = node.get("type", ["object", "array", "string", "number", "integer", "boolean", "null"])
    return {named} if isinstance(named, str) else set(named)


def expected(node: Node) -> str:
    """The values that a node takes, in words: `an integer, at least 1`, `one of none, cpu, nvme`."""
    if "anyOf" in node:
        return " or ".join(expected(branch) for branch in node["anyOf"] if branch.get("const") != AUTO)
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        return "one of " + ", ".join(
            value if isinstance(value, str) else json.dumps(value) for value in node["enum"]
        )
    names = {"object": "a section", "array": "a list", "boolean": "true or false", "string": "a string"}
    names |= {"integer": "a whole number", "number": "a number", "null": "null"}
    found_types = types(node) if "not" not in node else set()
    text = (
        " or ".join(name for key, name in names.items() if key in found_types)
        or "nothing: it can't be set here"
    )
    if isinstance(node.get("items"), Mapping) and "array" in found_types:
        count = f"{node['minItems']} times " if node.get("minItems") else ""
        text += f" of {count}{expected(node['items'])}"
    words = {"minimum": "at least", "exclusiveMinimum": "more than"}
    words |= {"maximum": "at most", "exclusiveMaximum": "less than"}
    return ", ".join([text, *(f"{word} {node[key]}" for key, word in words.items() if key in node)])


def kind_of(value: Any) -> str:
    """The kind of a value, of KINDS_OF_VALUES."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        if value == 0 or value < 0:
            return "negative" if value else "zero"
        return "positive" if isinstance(value, int) or value.is_integer() else "fraction"
    if isinstance(value, (list, dict)):
        name = "list" if isinstance(value, list) else "section"
        return name if value else f"empty {name}"
    if re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return "whole number as text"
    if value in ("", AUTO):
        return value or "empty text"
    return "number as text" if _is_number(value) else "text"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def as_whole(value: Any, node: Node) -> Any:
    """2e8 as 200000000 at a node that takes whole numbers and no others; any other value as it is."""
    takes = types(node)
    if isinstance(value, float) and value.is_integer() and "integer" in takes and "number" not in takes:
        return int(value)
    return value


def shorten(value: Any) -> str:
    """A value as JSON, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, eq=False)
class Schema:
    """One release's schema."""

    root: Node
    """The JSON Schema as `dsrun schema` prints it."""
    version: Version
    """The release: (0, 19, 8)."""

    @property
    def release(self) -> str:
        """0.19.8."""
        return name_of(self.version)

    @cached_property
    def nodes(self) -> dict[str, Node]:
        """The schema of every key, aliases among them, by its path."""
        nodes: dict[str, Node] = {}
        todo = [("", self.root)]
        while todo:
            section, node = todo.pop()
            inner = {tree.join(section, key): child for key, child in properties_of(node).items()}
            nodes.update(inner)
            todo += inner.items()
        return nodes

    def node(self, path: str) -> Node | None:
        """The schema of one key; None where there is no such key, {} below a section that takes any key."""
        known = self.nodes.get(path)
        return self._node(path) if known is None else known

    def _node(self, path: str) -> Node | None:
        node = self.root
        for key in path.split("."):
            properties = node.get("properties", {})
            if key in properties:
                node = properties[key]
            elif _open(node):
                return {}
            else:
                return None
        return node

    def describe(self, path: str) -> tuple[Any, str]:
        """DeepSpeed's default (tree.MISSING where it has none) and what a key does."""
        node = self.node(path) or {}
        return node.get("default", tree.MISSING), node.get("description", "")

    def is_auto(self, path: str) -> bool:
        """Whether HF Trainer fills in "auto" at this key."""
        return bool((self.node(path) or {}).get("x-auto"))

    @lru_cache(maxsize=4096)  # noqa: B019 - there are as many schemas as releases
    def canonical(self, path: str) -> str:
        """A path in which each alias is replaced by the name it stands for."""
        keys: list[str] = []
        for key in path.split("."):
            alias = (self.node(".".join([*keys, key])) or {}).get("x-alias-of")
            keys.append(alias or key)
        return ".".join(keys)

    def removed(self, path: str) -> str | None:
        """The advice for a key that DeepSpeed has removed, or that stands below one; None for any other key."""
        removed: dict[str, str] = self.root.get("x-removed", {})
        return next((advice for key, advice in removed.items() if tree.under(path, key)), None)

    def later(self, path: str) -> str | None:
        """The release that a key (or the section around it) came with, if this one hasn't got it yet."""
        coming: dict[str, str] = self.root.get("x-added-later", {})
        return next((since for key, since in coming.items() if tree.under(path, key)), None)

    def whole_numbers(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The same config with 2e8 as 200000000 where the schema wants a whole number."""

        def fix(value: Any, node: Node) -> Any:
            if isinstance(value, Mapping):
                properties = properties_of(node)
                return {key: fix(item, properties.get(key, {})) for key, item in value.items()}
            return as_whole(value, node)

        whole: dict[str, Any] = fix(config, self.root)
        return whole

    @cached_property
    def homes(self) -> dict[str, list[str]]:
        """Every key name -> the paths where it stands, aliases left out."""
        index: dict[str, list[str]] = {}

        def walk(node: Node, prefix: str) -> None:
            for key, child in properties_of(node).items():
                if "x-alias-of" not in child:
                    path = f"{prefix}.{key}" if prefix else key
                    index.setdefault(key, []).append(path)
                    walk(child, path)

        walk(self.root, "")
        return index

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every key's path, sections included, aliases left out."""
        return tuple(path for homes in self.homes.values() for path in homes)

    @cache  # noqa: B019 - there are as many schemas as releases
    def marked(self, keyword: str) -> tuple[str, ...]:
        """The paths of the keys whose schema has a keyword that isn't false."""
        return tuple(path for path in self.paths if self.nodes[path].get(keyword))

    def __hash__(self) -> int:
        return hash(self.version)


def properties_of(node: Node | None) -> dict[str, Node]:
    """The keys of a node that is a section, {} for any other."""
    properties: dict[str, Node] = (node or {}).get("properties", {})
    return properties


def _open(node: Node) -> bool:
    return node.get("additionalProperties", True) is not False and "object" in types(node)

"""The schema of deepspeed.json: what each key is in a version of DeepSpeed, and where a config departs from it.

The schema files are generated and checked in (schemas/), one for each minor version.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from dsrun.catalog import closest
from dsrun.config import fit, foreign, tree
from dsrun.config.convert import converted
from dsrun.config.edits import Edit, Fix
from dsrun.errors import DsrunError

AUTO = "auto"
HF = "hf"
FILLING = (HF, "accelerate")
"""Who fills in "auto": HF Trainer, and accelerate, which HF Trainer does it with."""

CONFIDENT = 0.8
"""How alike (difflib's ratio) a misspelt key must be for renaming it to be a safe fix."""

CLOSE = 0.85
"""How alike it must be to a key beside it to be meant for that rather than for one of the same name elsewhere."""

TIED = 0.05
"""How much less alike the second of two names may be for both to be named, and neither to be written."""

SAME = 0.9
"""How alike it must be to one beside it to be that, although another tool has it too: devices, not pp_size."""

OPPOSITES = (("pre", "post"), ("enable", "disable"), ("min", "max"), ("start", "end"), ("with", "no"))
NEGATIONS = frozenset({"no", "not", "non", "without", "disable", "skip"})

WORDS = {"optim": "optimizer", "params": "param", "parameters": "param", "parameter": "param"}
"""Words that are the same ones in a name: offload_params and offload_param."""

SHORT = {"zero": "zero_optimization", "optim": "optimizer"}
"""Sections by half their name; ds_ before it or _config after it is left out first."""

OPEN_TO = ("", "zero_optimization", "fp16", "bf16", "optimizer.params", "scheduler.params")
"""Sections that a key may be moved to though the config hasn't got them yet."""

FEW = 200
"""Keys of a section up to which all of them are looked at for a second one that means the same."""

ALTERNATIVES = 0.55
"""How alike the names of two sections are that do the same for two things: offload_param and offload_optimizer."""

MOST = 300
"""Departures after which a check ends: a file with more is no deepspeed.json."""

Node = dict[str, Any]
Version = tuple[int, int]


@dataclass(frozen=True)
class Violation:
    """Where a config departs from the schema.

    kind: unknown, dotted, foreign, removed, later, value, converted, flag, auto or alias.
    refused: DeepSpeed stops at it while it reads the config. fails: it stops later. Without either it goes on.
    """

    kind: str
    path: str
    value: Any
    message: str
    suggestion: str
    refused: bool = False
    fix: Fix | None = None
    fails: bool = False


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


@cache
def release_of(text: str) -> tuple[int, ...] | None:
    """(0, 19, 8) of "0.19.8"; None where no patch is named."""
    parts = text.strip().removeprefix("v").split(".")
    return (
        tuple(map(int, parts[:3])) if len(parts) > 2 and all(part.isdigit() for part in parts[:3]) else None
    )


def load(version: Version | None = None) -> Schema:
    """The schema of a version; the newest if none is named."""
    wanted = version or newest()
    return Schema(json.loads(versions()[wanted].read_text(encoding="utf-8")), wanted)


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
        beside = [name for name, child in _properties(parent).items() if "x-alias-of" not in child]
        homes = [known for known in self._homes.get(key, ()) if not tree.under(path, known)]
        near = _nearest(key, beside)
        if key == "$schema":
            return "Remove it: it stands at the top level only.", None
        if key == "offload" and section in ("", "zero_optimization"):
            return "Did you mean zero_optimization.offload_optimizer?", None
        if not section and (short := _bare(key)) != key and short in beside:
            return f"Did you mean {short}?", short
        if near and (_alike(key, near) > CLOSE or _reordered(key, near)):
            return _did_you_mean(key, near, beside, section)
        if not homes and (same := next((name for name in self._homes if _reordered(key, name)), None)):
            homes = [known for known in self._homes[same] if not tree.under(path, known)]
            if len(homes) == 1:
                return f"Did you mean {homes[0]}?", homes[0]
        if len(homes) == 1 and _alternatives(self.canonical(section), homes[0].rpartition(".")[0]):
            if self.canonical(section) == "bf16" and ("scale" in key or "hysteresis" in key):
                return "fp16 has it; bf16 needs no loss scale: remove it.", path
            return f"DeepSpeed has it at {homes[0]} only; take it out here.", path
        if homes:
            return f"It belongs at {' or '.join(homes[:3])}.", homes[0] if len(homes) == 1 else None
        if near:
            return _did_you_mean(key, near, beside, section)
        elsewhere = None if key in self._homes else closest(key, self._homes)
        if elsewhere and _alike(key, elsewhere) > CONFIDENT:
            home = self._homes[elsewhere][0].rpartition(".")[0]
            return _did_you_mean(key, elsewhere, [elsewhere], home)
        if parent is None:
            return self.guess(section)[0], None
        if not section and (short := SHORT.get(_bare(key), "")) in beside:
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
        known = _properties(self.node(meant)) if meant else {}
        most = sum(key in known for key in value) * 2 > len(value)
        return meant if most and meant and "." not in meant else None

    def whole_numbers(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The same config with 2e8 as 200000000 where the schema wants a whole number."""

        def fix(value: Any, found: Node) -> Any:
            if isinstance(value, Mapping):
                properties = _properties(found)
                return {key: fix(item, properties.get(key, {})) for key, item in value.items()}
            return as_whole(value, found)

        whole: dict[str, Any] = fix(config, self.root)
        return whole

    def check(self, config: Mapping[str, Any], target: str) -> list[Violation]:
        """Every departure of a config from the schema, unknown keys and stray "auto"s included."""
        found = []
        for violation in _Check(self, target, config).section(config, self.root, "", checked=False):
            found.append(violation)
            if len(found) == MOST:
                break
        return found

    @cached_property
    def _homes(self) -> dict[str, list[str]]:
        """Every key name -> the paths where it stands, aliases left out."""
        index: dict[str, list[str]] = {}

        def walk(found: Node, prefix: str) -> None:
            for key, child in _properties(found).items():
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


@dataclass(frozen=True)
class _Check:
    """The walk through one config, section by section."""

    schema: Schema
    target: str
    config: Mapping[str, Any]

    def section(
        self, value: Mapping[str, Any], found: Node, path: str, *, checked: bool
    ) -> Iterator[Violation]:
        """The departures inside one object. checked: DeepSpeed itself refuses unknown keys and wrong types."""
        properties = _properties(found)
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            if key in properties:
                doubles = list(self.double(key, properties[key], value, inner, checked=checked))
                # What stands under a second name beside the first is refused with it, or read by nobody.
                yield from doubles or self.key(item, properties[key], inner, checked=checked)
            elif fit.is_comment(found, key):
                continue
            elif isinstance(found.get("additionalProperties"), dict):
                yield from self.key(item, found["additionalProperties"], inner, checked=checked)
            elif found.get("additionalProperties") is False:
                yield self.unknown(key, value, path, checked=checked)
            elif item == AUTO:
                yield from self.auto(item, {}, inner, checked=checked)
        if missing := [key for key in found.get("required", ()) if key not in value]:
            text = f"lacks {', '.join(missing)}"
            yield Violation("value", path, dict(value), text, f"Add {path}.{missing[0]}." if path else "")

    def key(self, value: Any, found: Node, path: str, *, checked: bool) -> Iterator[Violation]:
        """The departures of one key's value, and of what lies below it."""
        if value == AUTO and not (
            fit.fits(found, value) and "x-auto" not in found and self.target not in FILLING
        ):
            yield from self.auto(value, found, path, checked=checked)
            return
        if "x-any-case" in found and isinstance(value, str):
            value = value.lower()
        branch = _branch(found, value)
        if isinstance(value, dict) and branch.keys() & {"properties", "additionalProperties"}:
            yield from self.section(value, branch, path, checked=bool(branch.get("x-checked")))
        elif (
            isinstance(value, list) and "array" in types(branch) and fit.fits({**branch, "items": {}}, value)
        ):
            for index, item in enumerate(value):
                # Models say "list" and look no further (runtime/config_utils.py).
                yield from self.key(item, branch.get("items", {}), f"{path}.{index}", checked=False)
        elif not fit.fits(found, value) or (checked and _too_large(value, found)):
            yield self.wrong(value, found, path, checked=checked)

    def auto(self, value: Any, found: Node, path: str, *, checked: bool) -> Iterator[Violation]:
        """HF fills in a fixed list and stops at any other "auto"; DeepSpeed itself fills in none.

        Source: transformers/integrations/deepspeed.py, accelerate/utils/dataclasses.py
        (deepspeed_config_process) and DeepSpeedConfigModel, which drops such keys in silence
        (runtime/config_utils.py).
        """
        filled = "x-auto" in found
        if self.target in FILLING:
            if not filled:
                who = "HF Trainer" if self.target == HF else "accelerate"
                text = f'is "auto", which {who} doesn\'t fill in here'
                yield Violation("auto", path, value, text, _wanted(found))
            return
        text = 'is "auto", which ' + ("only HF Trainer fills in" if filled else "nobody fills in")
        text += "; DeepSpeed drops the key" if checked else ""
        advice = _wanted(found) + (" Or let HF Trainer read it: --for hf." if filled else "")
        yield Violation("auto", path, value, text, advice)

    def unknown(self, key: str, beside: Mapping[str, Any], section: str, *, checked: bool) -> Violation:
        value = beside[key]
        path = f"{section}.{key}" if section else key
        # Checked sections drop "auto" before they look at the names (runtime/config_utils.py).
        checked = checked and value != AUTO
        if advice := self.schema.removed(path):
            refused = any(tree.under(path, above) for above in self.schema.root.get("x-refused", ()))
            text = f"was removed from DeepSpeed, which {_fate(refused or checked)}"
            text += " whatever its value" if refused else ""
            return Violation(
                "removed", path, value, text, advice, refused or checked, self._replaced(path, value)
            )
        if "." in key and self.schema.node(path):
            nested: dict[str, Any] = {}
            tree.put(nested, key, value)
            text = f"is one key with dots in its name: DeepSpeed {_fate(checked)}"
            advice = f"Write sections inside each other: {shorten(nested)}."
            return Violation("dotted", path, value, text, advice, checked)
        if since := self.schema.later(path):
            here = ".".join(map(str, self.schema.version))
            text = f"came with DeepSpeed {since}: {here} {_fate(checked)}"
            return Violation("later", path, value, text, f"Remove it, or use DeepSpeed {since}.", checked)
        advice, meant = self.schema.guess(path)
        text = f"is no key of DeepSpeed, which {_fate(checked)}"
        kind, safe = "unknown", True
        if (known := foreign.lookup(path)) and not self.misspelt(path, meant):
            text = f"is {known.whose}: DeepSpeed {_fate(checked)}"
            advice, meant, kind, safe = known.advice, known.to or None, "foreign", False
        elif meant is None and not section and (like := self.schema.resembled(value)):
            advice, meant, safe = f"Did you mean {like}?", like, False
        elif meant is None and not key.isascii() and not checked:
            advice = "If it is a comment, let its name start with an underscore."
        if meant and (other := self.rival(path, meant, beside)):
            return Violation(kind, path, value, text, f"{other} stands beside it.", checked)
        fix = self._moved(path, meant, value)
        return Violation(
            kind, path, value, text, advice, checked, fix and replace(fix, safe=fix.safe and safe)
        )

    def misspelt(self, path: str, meant: str | None) -> bool:
        """Whether a key is so like one beside it in a section that it is no other tool's by that name."""
        (section, _, key), (home, _, name) = path.rpartition("."), (meant or "").rpartition(".")
        beside = bool(section) and section == home and path != meant
        return beside and _alike(key, name) >= SAME and not foreign.is_path(path)

    def rival(self, path: str, meant: str, beside: Mapping[str, Any]) -> str | None:
        """What already stands at the place a key was meant for, or another key that was meant for it too."""
        home, _, name = meant.rpartition(".")
        section, _, key = path.rpartition(".")
        if path == meant:
            return None
        there = tree.get(self.config, home, {}) if home else self.config
        holder = _properties(self.schema.node(home) if home else self.schema.root)
        names = [name, *(alias for alias, found in holder.items() if found.get("x-alias-of") == name)]
        if isinstance(there, Mapping) and (taken := next((known for known in names if known in there), None)):
            return taken if section == home else f"{home}.{taken}" if home else taken
        others = beside if len(beside) <= FEW else ()
        return next((other for other in others if other != key and self.means(section, other) == meant), None)

    def means(self, section: str, key: str) -> str | None:
        """The path that a key was meant to be, if it is none of DeepSpeed's."""
        path = f"{section}.{key}" if section else key
        if key.startswith("_") or self.schema.node(path) is not None:
            return None
        known = foreign.lookup(path)
        return known.to if known else self.schema.guess(path)[1]

    def _replaced(self, path: str, value: Any) -> Fix | None:
        """Rename a removed key, or take it out: safely where it was off. One that moved stays, for its owner to move.

        Its parts go to several places: whoever moved the whole would have them refused there.
        """
        if new := self.schema.root.get("x-renamed", {}).get(path):
            home, _, name = new.rpartition(".")
            return Fix((Edit("rename", path, name),)) if home == path.rpartition(".")[0] else None
        off = value in (None, False, {}) or (isinstance(value, dict) and value.get("enabled") is False)
        return Fix((Edit("remove", path),), safe=off)

    def _moved(self, path: str, meant: str | None, value: Any) -> Fix | None:
        """Rename the key to what it was meant to be, or move it there; safe where only the spelling is off."""
        if path == meant:
            return Fix((Edit("remove", path),), safe=False)
        found = self.schema.node(meant) if meant else None
        # What is wrong inside a section is said once it has its name.
        inside = {"properties", "required", "additionalProperties"} if isinstance(value, dict) else set()
        if meant is None or not found or not fit.fits(_without(found, inside), value):
            return None
        section, _, key = path.rpartition(".")
        home, _, name = meant.rpartition(".")
        if section == home:
            return Fix((Edit("rename", path, name),), safe=_alike(key, name) >= CONFIDENT)
        if home in OPEN_TO or isinstance(tree.get(self.config, home), Mapping):
            return Fix((Edit("move", path, meant),), safe=False)
        return None

    def wrong(self, value: Any, found: Node, path: str, *, checked: bool) -> Violation:
        """A value that doesn't fit: some are converted by DeepSpeed, some mean something else, some stop it."""
        number = tree.MISSING if "object" in types(found) else converted(value, found)
        said = f"is {shorten(value)}"
        if number is not tree.MISSING and fit.fits(found, number):
            fix = Fix((Edit("replace", path, number),))
            advice = f"Write {json.dumps(number)}."
            if checked:
                text = f"{said}, a {_kind(value)} that DeepSpeed converts"
                return Violation("converted", path, value, text, advice, fix=fix)
            if types(found) & {"boolean"} and bool(value) != bool(number):
                text = f"{said}, a text, which counts as true here"
                return Violation("flag", path, value, text, advice, fix=fix)
            if types(found) & {"boolean"}:
                return Violation(
                    "converted", path, value, f"{said}, which counts as {json.dumps(number)}", advice, fix=fix
                )
            return Violation(
                "value", path, value, f"{said}, a {_kind(value)}", advice, *_stops(value, found, fix)
            )
        refused, _, fails = _stops(value, found)
        read = value if number is tree.MISSING else number
        refused = refused or (checked and (_too_large(value, found) or not fit.fits(_enforced(found), read)))
        return Violation(
            "value", path, value, f"can't be {shorten(value)}", _wanted(found), refused, None, fails
        )

    def double(
        self, key: str, found: Node, value: Mapping[str, Any], path: str, *, checked: bool
    ) -> Iterator[Violation]:
        """A second name of a key beside the first."""
        name: str = found.get("x-alias-of", key)
        if name != key and name in value:
            text = f"stands beside {name}, which is the same"
            fix = Fix((Edit("remove", path),), safe=fit.same(value[key], value[name]))
            yield Violation("alias", path, value[key], text, f"Keep {name} only.", checked, fix)


def _properties(found: Node | None) -> dict[str, Node]:
    properties: dict[str, Node] = (found or {}).get("properties", {})
    return properties


def _branch(found: Node, value: Any) -> Node:
    """The alternative of an anyOf that a value is meant for, by its type; the node itself without anyOf."""
    for branch in found.get("anyOf", ()):
        kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
        if kind and kind in types(branch) and "const" not in branch:
            return dict(branch)
    return found


def _enforced(found: Node) -> Node:
    """A node without what this project adds to the limits of DeepSpeed's own models ("x-own")."""
    if "anyOf" in found and "x-own" not in found:
        return {**found, "anyOf": [_enforced(branch) for branch in found["anyOf"]]}
    return _without(found, found.get("x-own", ()))


def _without(found: Node, keywords: Collection[str]) -> Node:
    return {keyword: value for keyword, value in found.items() if keyword not in keywords}


def _stops(value: Any, found: Node, fix: Fix | None = None) -> tuple[bool, Fix | None, bool]:
    """(refused, fix, fails) of a value of a wrong type: a section is looked into at once, other keys by their nature.

    A fraction or a number out of range goes on to whoever computes with it.
    """
    inner = found["anyOf"][-1] if "anyOf" in found else found
    number = isinstance(value, float) or (
        isinstance(value, bool) and bool(types(inner) & {"number", "integer"})
    )
    section = "refused" if "properties" in inner and not isinstance(value, dict) else None
    wrong = None if number and not section else inner.get("x-wrong", section)
    return wrong == "refused", fix, wrong == "fails"


def _too_large(value: Any, found: Node) -> bool:
    """A float past 64 bits where a model takes whole numbers only: pydantic refuses it, though it has no fraction."""
    return (
        isinstance(value, float)
        and abs(value) >= 2.0**63
        and types(found) & {"number", "integer"} == {"integer"}
    )


def _open(found: Node) -> bool:
    return found.get("additionalProperties", True) is not False and "object" in types(found)


def _fate(checked: bool) -> str:
    return "stops at it" if checked else "ignores it in silence"


def _kind(value: Any) -> str:
    names = {str: "text", bool: "flag", float: "fraction", int: "number"}
    return names.get(type(value), "value")


def _alike(one: str, other: str) -> float:
    import difflib

    return difflib.SequenceMatcher(None, one.casefold(), other.casefold()).ratio()


def _alternatives(one: str, other: str) -> bool:
    """Whether two sections stand side by side under like names, as bf16 and fp16: a key of one has no place there."""
    (above, _, first), (beside, _, second) = one.rpartition("."), other.rpartition(".")
    return above == beside and bool(first and second) and _alike(first, second) > ALTERNATIVES


def _words(name: str) -> list[str]:
    """The words of a name, in order of the alphabet."""
    return sorted(WORDS.get(word, word) for word in name.casefold().replace("-", "_").split("_"))


def _reordered(one: str, other: str) -> bool:
    """Whether two names are of the same words: comm_overlap and overlap_comm."""
    return _words(one) == _words(other)


def _opposite(one: str, other: str) -> bool:
    """Whether two names differ in a word that turns the meaning round: postscale and prescale."""
    mine, yours = set(_words(one)), set(_words(other))
    first, second = mine - yours, yours - mine
    pairs = [pair for there in OPPOSITES for pair in (there, there[::-1])]
    for before, after in pairs:
        rests = {word.removeprefix(before) for word in first if word.startswith(before)}
        if rests & {word.removeprefix(after) for word in second if word.startswith(after)}:
            return True
    longer = first if len(first) > len(second) else second if len(second) > len(first) else set()
    return bool(longer & NEGATIONS)


def _nearest(key: str, names: Collection[str]) -> str | None:
    """The name of the same words, or else the one that is most alike."""
    return next((name for name in names if _reordered(key, name)), None) or closest(key, names)


def _tied(key: str, near: str, names: Collection[str]) -> list[str]:
    """The names that may be meant as well as the nearest one: about as much alike, or with all of the key's words."""
    if _reordered(key, near):
        return []
    best, words = _alike(key, near), set(_words(key))
    # One letter more or less is a slip: enable is enabled, not enable_cuda_graph.
    slip = abs(len(key) - len(near)) <= 1
    return [
        name
        for name in names
        if name != near and (_alike(key, name) > best - TIED or (not slip and words < set(_words(name))))
    ]


def _did_you_mean(key: str, near: str, names: Collection[str], section: str) -> tuple[str, str | None]:
    """What schema.guess answers for a key whose nearest name is known."""
    ahead = f"{section}." if section else ""
    if _opposite(key, near):
        return f"There is {ahead}{near}, which is the opposite.", None
    if tied := _tied(key, near, names):
        return f"Did you mean {' or '.join(ahead + name for name in [near, *tied][:3])}?", None
    return f"Did you mean {ahead}{near}?", ahead + near


def _bare(key: str) -> str:
    """A section's name without the words around it that say only that it is a section of DeepSpeed's."""
    name = key.casefold()
    for ahead in ("deepspeed_", "ds_"):
        name = name.removeprefix(ahead)
    for after in ("_config", "_cfg", "_settings", "_options"):
        name = name.removesuffix(after)
    return name


def _wanted(known: Node | None) -> str:
    return f"Write {expected(known)}." if known else "Write the value itself."

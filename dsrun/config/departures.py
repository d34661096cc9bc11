"""Where a config departs from its schema: the walk through it, key by key."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from dsrun.config import fit, foreign, names, tree
from dsrun.config.convert import converted
from dsrun.config.edits import Edit, Fix
from dsrun.config.schema import AUTO, FEW, FILLING, HF, Node, Schema, expected, properties_of, shorten, types

SAME = 0.9
"""How alike it must be to one beside it to be that, although another tool has it too: devices, not pp_size."""

OPEN_TO = ("", "zero_optimization", "fp16", "bf16", "optimizer.params", "scheduler.params")
"""Sections that a key may be moved to though the config hasn't got them yet."""

MOST = 300
"""Departures after which a check ends: a file with more is no deepspeed.json."""


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


def check(known: Schema, config: Mapping[str, Any], target: str) -> list[Violation]:
    """Every departure of a config from its schema, unknown keys and stray "auto"s included; at most MOST."""
    return list(islice(_Walk(known, target, config).section(config, known.root, "", checked=False), MOST))


@dataclass(frozen=True)
class _Walk:
    """The walk through one config, section by section."""

    schema: Schema
    target: str
    config: Mapping[str, Any]

    def section(
        self, value: Mapping[str, Any], found: Node, path: str, *, checked: bool
    ) -> Iterator[Violation]:
        """The departures inside one object. checked: DeepSpeed itself refuses unknown keys and wrong types."""
        properties = properties_of(found)
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
        return beside and names.alike(key, name) >= SAME and not foreign.is_path(path)

    def rival(self, path: str, meant: str, beside: Mapping[str, Any]) -> str | None:
        """What already stands at the place a key was meant for, or another key that was meant for it too."""
        home, _, name = meant.rpartition(".")
        section, _, key = path.rpartition(".")
        if path == meant:
            return None
        there = tree.get(self.config, home, {}) if home else self.config
        holder = properties_of(self.schema.node(home) if home else self.schema.root)
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
            return Fix((Edit("rename", path, name),), safe=names.alike(key, name) >= names.CONFIDENT)
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


def _fate(checked: bool) -> str:
    return "stops at it" if checked else "ignores it in silence"


def _kind(value: Any) -> str:
    names = {str: "text", bool: "flag", float: "fraction", int: "number"}
    return names.get(type(value), "value")


def _wanted(known: Node | None) -> str:
    return f"Write {expected(known)}." if known else "Write the value itself."

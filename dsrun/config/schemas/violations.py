"""Violations: the places where a config violates its schema, and what to do about them.

jsonschema judges the whole config once (`check`); the tree of its errors then goes along on a walk through the config,
which adds what a schema can't tell:

1. `_Walk.section` takes each key of an object. A known one goes to `key`, unless it is a second name of a key that is
   there (`duplicate`). An unknown one goes to `unknown`: removed, with dots in its name, new in a later version,
   another tool's, or misspelt, with the key that was meant.
2. `_Walk.key` looks at one value. "auto" depends on who reads the config (`auto`); an object goes back to step 1 with
   the branch of the schema that fits it; a list's elements come here one by one; any other value that is wrong goes to
   `wrong`.
3. `_Walk.wrong` tells what DeepSpeed does with such a value: converts it, takes it for something else, or stops.

`node` is a part of the schema (JSON Schema with keywords of this project, "x-..."; schema.py). `checked`
says whether DeepSpeed itself refuses unknown keys and wrong types in the section (a pydantic model reads it), or would
go on without a word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.schemas import foreign, names
from dsrun.config.schemas.convert import converted, converted_by_1
from dsrun.config.schemas.guess import MOST_COMPARED, guess, has_keys_of, section_like
from dsrun.config.schemas.schema import (
    AUTO,
    FILLING,
    HF,
    PYDANTIC_1,
    Node,
    Schema,
    expected,
    kind_of,
    properties_of,
    shorten,
    types,
)

if TYPE_CHECKING:
    from jsonschema.exceptions import ErrorTree, ValidationError
    from jsonschema.protocols import Validator

MISSPELT = 0.9
"""Likeness to a key beside it from which on a key is a slip of that, although another tool has it too (devices)."""

OPEN_TO = ("", "zero_optimization", "fp16", "bf16", "optimizer.params", "scheduler.params")
"""Sections that a key may be moved to though the config hasn't got them yet."""

MOST = 300
"""Violations after which a check ends: a file with more is no deepspeed.json."""

PLACEHOLDER = re.compile(
    r"(?!TRUE|FALSE|NONE|NULL|AUTO)[A-Z][A-Z0-9_]{2,},?|\$\{?\w+\}?,?|\{\{.*\}\},?|<[^<>]+>,?"
)
"""A template's placeholder, where another type belongs. Hjson reads the comma after it, too."""

MEMORY_CHARACTERS, MEMORY_SIZE = 40, 20_000
_FITTING: dict[tuple[int, type, Any], bool] = {}
"""(a node's id, a value's type, the value) -> whether the value fits the node: MEMORY_SIZE of them, with texts of up to
MEMORY_CHARACTERS. Nodes of a schema are never thrown away, so that their ids stay."""

LIMITS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


@dataclass(frozen=True)
class Violation:
    """One place where a config violates its schema."""

    kind: str
    """The kind of a wrong key: unknown, dotted (one key with dots, where sections were meant), foreign (another
    tool's), removed or later (in another version), alias (a second name of one that is there). Or of a wrong value:
    value, converted (DeepSpeed makes a right one of it), flag (a string that counts as true), auto (that nobody fills
    in), placeholder (that a tool was meant to fill in)."""
    path: str
    """The dotted path from the config's root."""
    value: Any
    message: str
    suggestion: str
    refused: bool = False
    """Whether DeepSpeed stops at it while it reads the config."""
    fix: Fix | None = None
    fails: bool = False
    """Whether DeepSpeed reads it, and stops later. With neither, it goes on."""


def check(known: Schema, config: Mapping[str, Any], target: str) -> list[Violation]:
    """Every place where a config violates its schema, unknown keys and stray "auto"s included; at most MOST."""
    errors = _tree(_validator(known).iter_errors(config))
    return list(
        islice(_Walk(known, target, config).section(config, known.root, errors, "", checked=False), MOST)
    )


def unfilled(value: Any) -> bool:
    """Whether a value is a template's: GBSIZE, ${STAGE}, {{ stage }} or <stage>."""
    return isinstance(value, str) and PLACEHOLDER.fullmatch(value) is not None


def fits(node: Node, value: Any) -> bool:
    """Whether a value is valid against one node of a schema."""
    return bool(_draft()(node).is_valid(value))


@cache
def _validator(known: Schema) -> Validator:
    return _draft()(known.root)


@cache
def _draft() -> Callable[[Node], Validator]:
    """JSON Schema 2020-12 with two changes: NaN is within no limit (no comparison with it holds, so jsonschema lets it
    pass), and a list has at most MOST wrong items.

    Imported here, as it takes a third of the time that `dsrun preset` may take. For jsonschema, too, true is no number
    and 1.0 is an integer.
    """
    from jsonschema import Draft202012Validator, ValidationError
    from jsonschema.validators import extend

    def limit(name: str) -> Any:
        def judge(validator: Validator, edge: Any, value: Any, node: Node) -> Iterator[ValidationError]:
            if isinstance(value, float) and math.isnan(value):
                yield ValidationError("NaN is within no limit")
            yield from Draft202012Validator.VALIDATORS[name](validator, edge, value, node) or ()

        return judge

    def items(validator: Validator, node: Any, value: Any, around: Node) -> Iterator[ValidationError]:
        """The wrong items of a list, up to the number that is ever shown: tens of thousands take seconds."""
        errors = Draft202012Validator.VALIDATORS["items"](validator, node, value, around)
        yield from islice(errors or (), MOST)

    def properties(
        validator: Validator, nodes: Mapping[str, Node], value: Any, _node: Node
    ) -> Iterator[ValidationError]:
        """The errors of a section's keys. Values that are known to be right are passed over: the files of a folder
        have many in common.
        """
        for key in value if isinstance(value, dict) else ():
            if key in nodes and not _known_to_fit(validator, nodes[key], value[key]):
                yield from validator.descend(value[key], nodes[key], path=key, schema_path=key)  # type: ignore[attr-defined]

    draft: Callable[[Node], Validator] = extend(  # type: ignore[no-untyped-call]
        Draft202012Validator,
        {**{name: limit(name) for name in LIMITS}, "items": items, "properties": properties},
    )
    return draft


def _known_to_fit(validator: Validator, node: Node, value: Any) -> bool:
    """Whether a single value is right, from memory where it can be kept."""
    if isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > MEMORY_CHARACTERS):
        return False
    key = (id(node), type(value), value)
    if key not in _FITTING and len(_FITTING) < MEMORY_SIZE:
        _FITTING[key] = bool(validator.evolve(schema=node).is_valid(value))
    return _FITTING.get(key, False)


def _tree(errors: Iterable[ValidationError]) -> ErrorTree:
    from jsonschema.exceptions import ErrorTree

    return ErrorTree(errors)


@cache
def _none() -> ErrorTree:
    """The tree of no errors, which most values have."""
    return _tree(())


def _below(errors: ErrorTree, key: str | int) -> ErrorTree:
    """The errors in one key's value, or in one item."""
    return errors[key] if key in errors else _none()


@dataclass(frozen=True)
class _Walk:
    """The walk through one config, section by section."""

    schema: Schema
    target: str
    config: Mapping[str, Any]

    def section(
        self, value: Mapping[str, Any], node: Node, errors: ErrorTree, path: str, *, checked: bool
    ) -> Iterator[Violation]:
        """The violations inside one object. checked: DeepSpeed itself refuses unknown keys and wrong types."""
        properties = properties_of(node)
        for key, item in value.items():
            inner = f"{path}.{key}" if path else key
            if key in properties:
                duplicates = list(self.duplicate(key, properties[key], value, inner, checked=checked))
                # A second name beside the first is refused with it, or nobody reads it: what is below doesn't matter.
                yield from duplicates or self.key(
                    item, properties[key], _below(errors, key), inner, checked=checked
                )
            elif any(re.search(pattern, key) for pattern in node.get("patternProperties", ())):
                continue  # a comment
            elif isinstance(node.get("additionalProperties"), dict):
                yield from self.key(
                    item, node["additionalProperties"], _below(errors, key), inner, checked=checked
                )
            elif "additionalProperties" in errors.errors:
                yield self.unknown(key, value, path, checked=checked)
            elif item == AUTO:
                yield from self.auto(item, {}, inner, checked=checked)
        yield from self.needed(value, node, path)
        if "required" in errors.errors:
            missing = [key for key in node["required"] if key not in value]
            text = f"lacks {', '.join(missing)}"
            # What is asked for without a default stops DeepSpeed (a KeyError), where the schema says so.
            refused = node.get("x-wrong") == "refused"
            yield Violation(
                "value", path, dict(value), text, f"Add {path}.{missing[0]}." if path else "", refused
            )

    def needed(self, value: Mapping[str, Any], node: Node, path: str) -> Iterator[Violation]:
        """The keys that a section lacks, though the release's reader stops without them once it is on."""
        missing = [key for key in node.get("x-needs", ()) if key not in value]
        if missing and value.get("enabled") and value["enabled"] != AUTO:
            text = f"is on, but lacks {' and '.join(missing)}"
            yield Violation("value", path, dict(value), text, f"Add {path}.{missing[0]}.", refused=True)

    def key(
        self, value: Any, node: Node, errors: ErrorTree, path: str, *, checked: bool
    ) -> Iterator[Violation]:
        """The violations of one key's value, and of what lies below it."""
        right = (
            errors is _none() or not errors.total_errors
        )  # total_errors walks the tree, and most values have none
        if value == AUTO and not (right and "x-auto" not in node and self.target not in FILLING):
            yield from self.auto(value, node, path, checked=checked)
            return
        if "x-any-case" in node and isinstance(value, str):
            value = value.lower()
            right = value in node["enum"]
        # The errors of an anyOf are its own and say little: those of the alternative that was meant are looked at.
        branch, inside = _branch(node, value, errors)
        if isinstance(value, dict) and branch.keys() & {"properties", "additionalProperties"}:
            yield from self.section(value, branch, inside, path, checked=bool(branch.get("x-checked")))
        elif isinstance(value, list) and "array" in types(branch) and not inside.errors:
            for index, item in enumerate(value):
                # Models say "list" and look no further (runtime/config_utils.py).
                yield from self.key(
                    item, branch.get("items", {}), _below(inside, index), f"{path}.{index}", checked=False
                )
        elif not right or (checked and self.too_large(value, node)) or _of_no_type(value, node):
            yield self.wrong(value, node, path, checked=checked)

    def auto(self, value: Any, node: Node, path: str, *, checked: bool) -> Iterator[Violation]:
        """HF fills in a fixed list and stops at any other "auto"; DeepSpeed itself fills in none.

        Source: transformers/integrations/deepspeed.py, accelerate/utils/dataclasses.py
        (deepspeed_config_process) and DeepSpeedConfigModel, which drops such keys silently
        (runtime/config_utils.py).
        """
        filled = "x-auto" in node
        if self.target in FILLING:
            if not filled:
                who = "HF Trainer" if self.target == HF else "accelerate"
                text = f'is "auto", which {who} doesn\'t fill in here'
                yield Violation("auto", path, value, text, _wanted(node))
            return
        text = 'is "auto", which ' + ("only HF Trainer fills in" if filled else "nothing fills in")
        text += "; DeepSpeed drops the key" if checked else ""
        advice = _wanted(node) + (" Or let HF Trainer read it: --for hf." if filled else "")
        refused = not checked and "x-drops-auto" not in node and _stops(value, node)[0]
        yield Violation("auto", path, value, text, advice, refused)

    def unknown(self, key: str, beside: Mapping[str, Any], section: str, *, checked: bool) -> Violation:
        """A key that this version hasn't got: removed, dotted, later, another tool's or no one's."""
        value = beside[key]
        path = f"{section}.{key}" if section else key
        # Checked sections drop "auto" before they look at the names (runtime/config_utils.py).
        checked = checked and value != AUTO
        if advice := self.schema.removed(path):
            refused = any(tree.under(path, above) for above in self.schema.root.get("x-refused", ()))
            text = f"was removed: DeepSpeed {_fate(refused or checked)}"
            text += " whatever its value" if refused else ""
            fix = self._replaced(path, value)
            return Violation("removed", path, value, text, advice, refused or checked, fix)
        if "." in key and self.schema.node(path):
            nested: dict[str, Any] = {}
            tree.put(nested, key, value)
            text = f"is one key with dots in its name: DeepSpeed {_fate(checked)}"
            advice = f"Nest the sections: {shorten(nested)}."
            return Violation("dotted", path, value, text, advice, checked)
        if since := self.schema.later(path):
            text = f"is new in DeepSpeed {since}: {self.schema.release} {_fate(checked)}"
            return Violation("later", path, value, text, f"Remove it, or use DeepSpeed {since}.", checked)
        return self._of_no_version(path, value, beside, checked=checked)

    def _of_no_version(self, path: str, value: Any, beside: Mapping[str, Any], *, checked: bool) -> Violation:
        """A key of another tool, or a slip; fixed where it is clear what was meant and nothing else means it too."""
        section, _, key = path.rpartition(".")
        advice, meant, idle, stray = guess(self.schema, path)
        text = f"unknown key: DeepSpeed {_fate(checked)}"
        kind, safe = "unknown", True
        # The guess by likeness gives way to what is known for sure: another tool's key by that name, or a whole section
        # recognised by its content. A fix is made last, and only where its place is free.
        if (known := foreign.lookup(path)) and not self.misspelt(path, meant):
            text = f"is {known.whose}: DeepSpeed {_fate(checked)}"
            advice, meant, kind, safe, stray = known.advice, known.to or None, "foreign", False, False
            if known.idle:
                meant, idle = path, True
        elif meant is None and not section and (like := section_like(self.schema, value)):
            advice, meant, safe = f"Did you mean {like}?", like, False
        elif meant is None and not key.isascii() and not checked:
            advice = "If it is a comment, let its name start with an underscore."
        if meant and (other := self.competing_key(path, meant, beside)):
            return Violation(kind, path, value, text, f"{other} is there too.", checked)
        fix = self._moved(path, meant, value)
        if checked and stray:
            fix, safe = Fix((Edit("remove", path),)), False  # refused as it is
        fix = fix and replace(fix, safe=idle or (fix.safe and safe))
        return Violation(kind, path, value, text, advice, checked, fix)

    def misspelt(self, path: str, meant: str | None) -> bool:
        """Whether a key is so like one beside it in a section that it is no other tool's by that name."""
        (section, _, key), (home, _, name) = path.rpartition("."), (meant or "").rpartition(".")
        beside = bool(section) and section == home and path != meant
        return beside and names.alike(key, name) >= MISSPELT and not foreign.is_path(path)

    def competing_key(self, path: str, meant: str, beside: Mapping[str, Any]) -> str | None:
        """The key that is at the place that one was meant for, or another that was meant for it too."""
        home, _, name = meant.rpartition(".")
        section, _, key = path.rpartition(".")
        if path == meant:
            return None
        there = tree.get(self.config, home, {}) if home else self.config
        holder = properties_of(self.schema.node(home) if home else self.schema.root)
        names = [name, *(alias for alias, node in holder.items() if node.get("x-alias-of") == name)]
        if isinstance(there, Mapping) and (taken := next((known for known in names if known in there), None)):
            return taken if section == home else f"{home}.{taken}" if home else taken
        others = beside if len(beside) <= MOST_COMPARED else ()
        return next(
            (other for other in others if other != key and self.meant_path(section, other) == meant), None
        )

    def meant_path(self, section: str, key: str) -> str | None:
        """The path that a key was meant to be, if it is none of DeepSpeed's."""
        path = f"{section}.{key}" if section else key
        if key.startswith("_") or self.schema.node(path) is not None:
            return None
        known = foreign.lookup(path)
        return known.to if known else guess(self.schema, path).path

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
        node = self.schema.node(meant) if meant else None
        # What is wrong inside a section is reported once it has its name.
        inside = {"properties", "required", "additionalProperties"} if isinstance(value, dict) else set()
        if (
            meant is None
            or not node
            or not fits(_without(node, inside), value)
            or not has_keys_of(node, value)
        ):
            return None
        section, _, key = path.rpartition(".")
        home, _, name = meant.rpartition(".")
        if section == home:
            return Fix((Edit("rename", path, name),), safe=names.alike(key, name) >= names.CONFIDENT)
        if home in OPEN_TO or isinstance(tree.get(self.config, home), Mapping):
            return Fix((Edit("move", path, meant),), safe=False)
        return None

    def wrong(self, value: Any, node: Node, path: str, *, checked: bool) -> Violation:
        """A value that doesn't fit: some are converted by DeepSpeed, some mean something else, some stop it."""
        # From the surest reading to the least: a placeholder, a value of another type that DeepSpeed or a reader can
        # convert, and last a value that is simply wrong.
        # Where DeepSpeed takes any string, "CPU" is a wrong one and not a name that was to be replaced.
        takes_any = fits(_enforced(node), value) if checked else "string" in types(node)
        if unfilled(value) and not fits(node, value.lower()) and not takes_any:
            refused, fails = _stops(value, node)
            return Violation("placeholder", path, value, "", "", refused or checked, fails=fails)
        converted_value = self.converted(value, node, checked=checked)
        given = f"is {shorten(value)}"
        if converted_value is not tree.MISSING and fits(node, converted_value):
            fix = Fix((Edit("replace", path, converted_value),))
            advice = f"Write {json.dumps(converted_value)}."
            # A validator may look at it before it is converted.
            if checked and not isinstance(converted_value, dict) and _stops(value, node)[0]:
                fix = replace(fix, safe=isinstance(value, str))
                return Violation("value", path, value, f"{given}, a {_kind(value)}", advice, True, fix)
            if checked or isinstance(converted_value, dict):
                text = f"{given}, a {_kind(value)} that DeepSpeed converts"
                return Violation("converted", path, value, text, advice, fix=fix)
            if types(node) & {"boolean"} and bool(value) != bool(converted_value):
                text = f"{given}, a string, which counts as true here"
                return Violation("flag", path, value, text, advice, fix=fix)
            if types(node) & {"boolean"}:
                return Violation(
                    "converted",
                    path,
                    value,
                    f"{given}, which counts as {json.dumps(converted_value)}",
                    advice,
                    fix=fix,
                )
            refused, fails = _stops(value, node)
            return Violation(
                "value", path, value, f"{given}, a {_kind(value)}", advice, refused, fix=fix, fails=fails
            )
        refused, fails = _stops(value, node)
        read = value if converted_value is tree.MISSING else converted_value
        refused = refused or (checked and (self.too_large(value, node) or not fits(_enforced(node), read)))
        return Violation(
            "value", path, value, f"can't be {shorten(value)}", _wanted(node), refused, fails=fails
        )

    @property
    def by_1(self) -> bool:
        """Whether the release's models are those of pydantic 1."""
        return self.schema.root.get("x-converts") == PYDANTIC_1

    def converted(self, value: Any, node: Node, *, checked: bool) -> Any:
        """What DeepSpeed, or a reader, makes of a value; tree.MISSING where that is nothing."""
        if self.by_1 and checked:
            return converted_by_1(value, _enforced(node))
        if "x-empty" in node and "x-checked" in node and value in ([], ""):
            return {}
        return tree.MISSING if "object" in types(node) else converted(value, node)

    def too_large(self, value: Any, node: Node) -> bool:
        """A float past 64 bits where a model takes whole numbers only: pydantic 2 refuses it, though it has no
        fraction.
        """
        takes = types(node) & {"number", "integer"}
        return not self.by_1 and isinstance(value, float) and abs(value) >= 2.0**63 and takes == {"integer"}

    def duplicate(
        self, key: str, node: Node, value: Mapping[str, Any], path: str, *, checked: bool
    ) -> Iterator[Violation]:
        """A second name of a key beside the first."""
        name: str = node.get("x-alias-of", key)
        if name != key and name in value:
            text = f"is another name of {name}, which is there too"
            fix = Fix((Edit("remove", path),), safe=tree.same(value[key], value[name]))
            yield Violation("alias", path, value[key], text, f"Keep {name} only.", checked, fix)


def _branch(node: Node, value: Any, errors: ErrorTree) -> tuple[Node, ErrorTree]:
    """The alternative of an anyOf that a value is meant for, by its type, and the errors in it.

    The node itself without anyOf.
    """
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    for index, branch in enumerate(node.get("anyOf", ())):
        if kind and kind in types(branch) and "const" not in branch:
            failed = errors.errors.get("anyOf")
            context = failed.context if failed else ()
            return branch, _tree(error for error in context if error.schema_path[0] == index)
    return node, errors


def _enforced(node: Node) -> Node:
    """A node without what this project adds to the limits of DeepSpeed's own models ("x-own")."""
    if "anyOf" in node and "x-own" not in node:
        return {**node, "anyOf": [_enforced(branch) for branch in node["anyOf"]]}
    return _without(node, node.get("x-own", ()))


def _without(node: Node, keywords: Collection[str]) -> Node:
    return {keyword: value for keyword, value in node.items() if keyword not in keywords}


def _of_no_type(value: Any, node: Node) -> bool:
    """Whether a release stops at a value of a key about which no more than that is known."""
    return "x-refuses" in node and not node.keys() & {"type", "anyOf"} and _stops(value, node)[0]


def _stops(value: Any, node: Node) -> tuple[bool, bool]:
    """Whether DeepSpeed stops at a wrong value while it reads the config, or later: `refused` and `fails` of Violation.

    A section is looked into at once, so anything else in its place is refused; of other keys the schema says which
    kinds of values the release's reader stops at ("x-refuses"), and what becomes of a wrong type later ("x-wrong"). A
    fraction or a number out of range goes on to whoever computes with it.
    """
    inner = node["anyOf"][-1] if "anyOf" in node else node
    if kind_of(value) in (*node.get("x-refuses", ()), *inner.get("x-refuses", ())):
        return True, False
    number = isinstance(value, (float, bool)) and bool(types(inner) & {"number", "integer"})
    section = "refused" if "properties" in inner and not isinstance(value, dict) else None
    wrong = None if number and not section else inner.get("x-wrong", section)
    return wrong == "refused", wrong == "fails"


def _fate(checked: bool) -> str:
    return "stops at it" if checked else "ignores it silently"


def _kind(value: Any) -> str:
    names = {str: "string", bool: "flag", float: "float", int: "number"}
    return names.get(type(value), "value")


def _wanted(known: Node | None) -> str:
    return f"Write {expected(known)}." if known else "Write the value itself."

"""Make the JSON Schema of the DeepSpeed configuration file from the installed DeepSpeed.

    python -m dsrun.config.schemas.generate            write the schema file
    python -m dsrun.config.schemas.generate --check    exit 1 with a diff if the file is not current

Three sources, joined by key:

* pydantic models: names, aliases, types, ranges, defaults, deprecated fields;
* blocks that DeepSpeed reads key by key: its own parser is run on an empty configuration that writes down
  which keys it is asked for, and with which default;
* overlay-0.19.json, written by hand: order, descriptions, and everything the code doesn't state.

A key that DeepSpeed knows and the overlay doesn't, or the other way round, stops the generation, so a new
version shows what it brought. In the overlay, JSON Schema keywords are taken over as they are (a type given
there wins over the generated one); these are instructions instead:

model, signatures, types_from
    "module:Class" that an object's keys come from: a pydantic model, constructors' arguments (a list), or a
    dataclass with the types of keys that are read one by one.
enum_from, known_from
    "module:name" of a collection: the only values there are, or those worth suggesting.
any_case
    The values may also be written in lower or upper case.
auto
    HF Trainer fills this key in when it is "auto": true from its arguments, "accelerate" through accelerate's
    own defaults, which know nothing of the arguments.
alias_of
    A second name of another key of the same object.
read_by
    Who reads a key that the parser doesn't; without it such a key is an error.

In the schema these say what JSON Schema has no words for:

x-checked
    DeepSpeed rejects unknown keys of this object; in all others it passes over them in silence.
x-own
    Keywords that the overlay adds to what a pydantic model enforces.
x-wrong
    What a value of another type comes to where no model looks: "refused", "fails" or "differs".
x-any-case
    DeepSpeed takes the text in any mixture of cases.
x-removed, x-renamed, x-refused
    What to do instead of a key that went; its new name; which of them stop DeepSpeed whatever their value.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.files import write_atomic

Node = dict[str, Any]

HERE = Path(__file__).resolve().parent
OVERLAY = HERE / "overlay-0.19.json"
SCHEMA = HERE / "deepspeed-0.19.schema.json"

COMMENTS: Node = {"^(_|//|#|x-|[Cc]omments?$)": {}}
"""Keys that people write comments under, wherever DeepSpeed passes over what it doesn't know."""

NO_DEFAULT: Any = object()
"""Stands for "this key has no default", as None is a default of its own."""

INSTRUCTIONS = frozenset(
    (
        "model",
        "signatures",
        "types_from",
        "enum_from",
        "known_from",
        "any_case",
        "auto",
        "alias_of",
        "read_by",
    )
)
# Keywords that say which values a key takes.
OWN = (
    "type",
    "const",
    "enum",
    "anyOf",
    "items",
    "minimum",
    "exclusiveMinimum",
    "maximum",
    "exclusiveMaximum",
)
FIRST = (
    "description",
    "deprecated",
    "x-deprecated-types",
    "x-alias-of",
    "x-no-effect",
    "x-auto",
    "x-checked",
    "type",
)
LAST = ("default", "additionalProperties", "patternProperties", "required", "properties")
BELOW = (("items", "[]"), ("additionalProperties", ".*"))

# Arguments of constructors that are not settings: what the engine passes itself, or refuses.
NOT_SETTINGS = frozenset(("self", "params", "model_params", "optimizer", "adamw_mode", "max_grad_norm"))

RANGES = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    list: "array",
    dict: "object",
}


@dataclass
class Known:
    """What DeepSpeed's code says about one key."""

    keywords: Node = field(default_factory=dict)
    default: Any = NO_DEFAULT
    model: Any = None
    alias: str = ""


class Recorder(dict[str, Any]):
    """A block that writes down each key it is asked for, with the default of the question.

    Where a key is read twice, the first default counts.
    """

    def __init__(self, reads: dict[str, Any], given: dict[str, Any]) -> None:
        super().__init__(given)
        self.reads = reads

    def get(self, key: str, default: Any = None) -> Any:
        if self.reads.get(key, NO_DEFAULT) is NO_DEFAULT:
            self.reads[key] = default
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.reads.setdefault(key, NO_DEFAULT)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.reads.setdefault(str(key), NO_DEFAULT)
        return super().__contains__(key)

    def keys(self) -> Any:  # so that `in block.keys()` is noticed too
        return self

    def __bool__(self) -> bool:  # `if not block` would end the reading early
        return True


def keys_read(overlay: Node) -> dict[str, dict[str, Any]]:
    """Dotted path of each block that is read key by key -> {key: default}; the top level is "".

    The items of a list are at "path[]".
    """
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.runtime.config import DeepSpeedConfig, get_pipeline_config

    reads: dict[str, dict[str, Any]] = {}

    def block(path: str, entries: Node) -> Recorder:
        inner = {
            name: block(join(path, name), entry["properties"])
            for name, entry in entries.items()
            if "properties" in entry and not entry.keys() & {"model", "signatures"}
        }
        # The parser looks for the params of an optimizer or a scheduler only beside a type.
        given = {"type": "adam"} if path in ("optimizer", "scheduler") else {}
        return Recorder(reads.setdefault(path, {}), {**inner, **given})

    parser: Any = DeepSpeedConfig.__new__(DeepSpeedConfig)
    parser._initialize_params(block("", overlay["properties"]))
    reads["pipeline"] = dict(get_pipeline_config({}))

    path = "tensor_parallel.partition_config"
    rule = Recorder(reads.setdefault(f"{path}.layer_specs[]", {}), {})
    AutoTPConfig.from_dict(Recorder(reads.setdefault(path, {}), {"layer_specs": [rule]}))
    return reads


def model_fields(model: Any) -> dict[str, Known]:
    """The fields of a pydantic model."""
    found = {}
    for name, info in model.model_fields.items():
        keywords, inner = type_keywords(info.annotation)
        for constraint in info.metadata:
            for attribute, keyword in RANGES.items():
                if hasattr(constraint, attribute):
                    keywords[keyword] = plain(getattr(constraint, attribute))
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("deprecated"):
            keywords["deprecated"] = True
        default = plain(info.get_default(call_default_factory=True))
        found[name] = Known(keywords, default, inner, info.alias or "")
    return found


def argument_defaults(targets: list[str]) -> dict[str, Known]:
    """The settings of some constructors; where defaults differ, the first one counts."""
    found: dict[str, Known] = {}
    for target in targets:
        for name, parameter in inspect.signature(load(target).__init__).parameters.items():
            if name not in NOT_SETTINGS:
                known = found.setdefault(name, Known())
                if known.default is NO_DEFAULT and parameter.default is not inspect.Parameter.empty:
                    known.default = plain(parameter.default)
    return found


def type_keywords(annotation: Any) -> tuple[Node, Any]:
    """JSON Schema keywords of a Python type, and the pydantic model if it is one (or None).

    A type that JSON doesn't have gives no keywords: the overlay has to.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        others = [argument for argument in arguments if argument is not type(None)]
        if len(others) > 1:
            return {}, None
        keywords, model = type_keywords(others[0])
        return nullable(keywords), model
    if origin is typing.Literal:
        return {"type": "string", "enum": list(arguments)}, None
    if origin is list:
        return {"type": "array", "items": type_keywords(arguments[0])[0]}, None
    if hasattr(annotation, "model_fields"):
        return {"type": "object"}, annotation
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        members = values(annotation)
        return {"type": TYPES[type(members[0])], "enum": members}, None
    known = TYPES.get(origin or annotation)
    return ({"type": known} if known else {}), None


def nullable(keywords: Node) -> Node:
    """The same keywords with null allowed."""
    widened = dict(keywords)
    kinds = [widened["type"]] if isinstance(widened.get("type"), str) else widened.get("type", ["null"])
    if "null" not in kinds:
        widened["type"] = [*kinds, "null"]
    if None not in widened.get("enum", [None]):
        widened["enum"] = [*widened["enum"], None]
    return widened


def plain(value: Any) -> Any:
    """A default as JSON: enum members by value, integers without their pretty printing."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, float):
        return value
    return values(value) if isinstance(value, (list, tuple)) else NO_DEFAULT


def values(collection: Iterable[Any]) -> list[Any]:
    return [plain(value) for value in collection]


def load(target: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Builder:
    """Joins the overlay with what DeepSpeed says; collects every disagreement in `problems`."""

    def __init__(self, overlay: Node) -> None:
        self.overlay = overlay
        self.reads = keys_read(overlay)
        self.problems: list[Problem] = []

    def schema(self) -> Node:
        """The whole schema. Raises DsrunError with everything that doesn't fit."""
        import deepspeed
        from deepspeed.runtime import config

        removed = [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
        removed += [f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS]
        for path in removed:
            if path not in self.overlay["removed"]:
                self.problems.append(Problem("removed by DeepSpeed, but not in the overlay's list", path))
        properties = self.properties(self.overlay, None, "")
        if self.problems:
            raise DsrunError(self.problems)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"https://dsrun.invalid/schemas/{SCHEMA.name}",
            "title": self.overlay["title"],
            "description": self.overlay["description"],
            "x-deepspeed-version": deepspeed.__version__,
            "type": "object",
            "additionalProperties": False,
            "patternProperties": COMMENTS,
            "properties": {
                **properties,
                "$schema": {"description": "Where an editor finds this schema.", "type": "string"},
            },
            "x-removed": self.overlay["removed"],
            "x-renamed": self.overlay["renamed"],
            "x-refused": removed,
        }

    def known_keys(self, entry: Node, model: Any, path: str) -> dict[str, Known]:
        """What DeepSpeed's code says about the keys of the object at `path`."""
        if model is not None:
            return model_fields(model)
        if "signatures" in entry:
            return argument_defaults(entry["signatures"])
        hints = typing.get_type_hints(load(entry["types_from"])) if "types_from" in entry else {}
        return {
            name: Known(
                type_keywords(hints[name])[0] if name in hints else {},
                default if default is NO_DEFAULT else plain(default),
            )
            for name, default in self.reads.get(path, {}).items()
        }

    def properties(self, entry: Node, model: Any, path: str) -> Node:
        """The "properties" of an object: those of the overlay in their order, then second names."""
        known = {
            info.alias or name: (name, info) for name, info in self.known_keys(entry, model, path).items()
        }
        entries: Node = entry["properties"]
        found: Node = {}
        second = {name: child["alias_of"] for name, child in entries.items() if "alias_of" in child}
        for name, child in entries.items():
            if name not in second:
                if name not in known and "read_by" not in child:
                    self.problems.append(Problem("not a key that DeepSpeed reads", join(path, name)))
                _, info = known.get(name, ("", Known()))
                found[name] = self.node(child, info, join(path, name))
                if model is not None:
                    mark_own(found[name], info)
        for name, (bare, _) in known.items():
            if name not in entries:
                self.problems.append(Problem("missing in the overlay", join(path, name)))
            elif bare != name:
                found[bare] = second_name(found[name], name)
        for name, canonical in second.items():
            other = {keyword: value for keyword, value in entries[name].items() if keyword != "alias_of"}
            found[name] = {**second_name(found[canonical], canonical), **other, "deprecated": True}
        return {name: ordered(node) for name, node in found.items()}

    def node(self, entry: Node, known: Known, path: str) -> Node:
        """The schema of one key."""
        given = {keyword: value for keyword, value in entry.items() if keyword not in INSTRUCTIONS}
        # These say all there is to say about the value, whatever its Python type is.
        node = given if given.keys() & {"anyOf", "const", "not"} else {**known.keywords, **given}
        if "enum_from" in entry:
            node["enum"] = self.collection(entry["enum_from"])
        if "known_from" in entry:
            node["x-known-values"] = self.collection(entry["known_from"])
        if entry.get("any_case"):
            spelled = [
                spell(value) for spell in (str, str.lower, str.upper) for value in node["enum"] if value
            ]
            node["x-any-case"] = True
            node["enum"] = [*dict.fromkeys(spelled), *([None] if None in node["enum"] else [])]
        if known.default is not NO_DEFAULT:
            node.setdefault("default", known.default)
        if node.get("default", "") is None or ("enum" in node and "null" in node["type"]):
            node = nullable(node)
        self.nest(node, entry, known, path)
        if not node.get("description"):
            self.problems.append(Problem("no description", path))
        if not node.keys() & {"type", "const", "anyOf", "not"}:
            self.problems.append(Problem("no type", path))
        return auto(node, entry["auto"]) if entry.get("auto") else node

    def model(self, entry: Node) -> Any:
        """The pydantic model that an overlay's entry names; None where it names none."""
        return load(entry["model"]) if "model" in entry else None

    def rejects_unknown(self, model: Any) -> bool:
        return bool(model.model_config.get("extra") == "forbid")

    def collection(self, target: str) -> list[Any]:
        """The values of the collection behind "module:name"."""
        return values(load(target))

    def nest(self, node: Node, entry: Node, known: Known, path: str) -> None:
        """Fill in what lies below a node: keys, list items, values under free names."""
        if "properties" in entry:
            model = known.model or self.model(entry)
            if model is not None and self.rejects_unknown(model):
                node["x-checked"] = True
            elif not entry.get("additionalProperties"):
                node["patternProperties"] = COMMENTS
            node.setdefault("type", "object")
            node.setdefault("additionalProperties", False)
            node["properties"] = self.properties(entry, model, path)
        for keyword, mark in BELOW:
            below = entry.get(keyword)
            if isinstance(below, dict) and "properties" in below:
                node[keyword] = ordered(self.node(below, Known(), path + mark))


def mark_own(node: Node, known: Known) -> None:
    """List the keywords that the overlay adds to what a pydantic model enforces, as "x-own": past these
    DeepSpeed goes on.
    """
    inner = node["anyOf"][1] if "x-auto" in node else node
    own = [key for key in OWN if key in inner and inner[key] != known.keywords.get(key)]
    if own and not known.model:
        inner["x-own"] = own


def auto(node: Node, who: bool | str) -> Node:
    """The node of a key that is filled in when it is "auto": by HF Trainer (true), or by accelerate below it."""
    outside: Node = {keyword: node.pop(keyword) for keyword in ("description", "default") if keyword in node}
    return {**outside, "x-auto": who, "anyOf": [{"const": "auto"}, ordered(node)]}


def second_name(node: Node, canonical: str) -> Node:
    """The node of another name of a key, under which HF Trainer fills in nothing."""
    description = f"Another name of {canonical}: {node['description']}"
    return {**without_auto(node), "description": description, "x-alias-of": canonical}


def without_auto(node: Node) -> Node:
    found = {keyword: value for keyword, value in node.items() if keyword != "x-auto"}
    if "x-auto" in node:
        found.update(found.pop("anyOf")[1])
    if "properties" in node:
        found["properties"] = {name: without_auto(child) for name, child in node["properties"].items()}
    return ordered(found)


def ordered(node: Node) -> Node:
    """The same node with its keywords in reading order."""
    middle = [keyword for keyword in node if keyword not in FIRST and keyword not in LAST]
    return {keyword: node[keyword] for keyword in (*FIRST, *middle, *LAST) if keyword in node}


def nodes(schema: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every key's dotted path and node, outer ones first; list items are "path[]", free names "path.*"."""
    for name, node in schema.get("properties", {}).items():
        yield join(path, name), node
        yield from nodes(node, join(path, name))
    for keyword, mark in BELOW:
        if isinstance(schema.get(keyword), dict):
            yield from nodes(schema[keyword], path + mark)


def render() -> str:
    """The text of the schema file. Raises DsrunError where DeepSpeed and the overlay disagree."""
    overlay = json.loads(OVERLAY.read_text(encoding="utf-8"))
    return json.dumps(Builder(overlay).schema(), indent=2, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None) -> int:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m dsrun.config.schemas.generate",
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the file is out of date"
    )
    check = parser.parse_args(arguments).check
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks while it is imported
            text = render()
    except (ModuleNotFoundError, DsrunError) as error:
        print(error, file=sys.stderr)
        return 1
    if not check:
        write_atomic(SCHEMA, text)
        print(f"{SCHEMA}: {sum(1 for _ in nodes(json.loads(text)))} keys")
        return 0
    old = SCHEMA.read_text(encoding="utf-8") if SCHEMA.exists() else ""
    sys.stdout.writelines(
        difflib.unified_diff(old.splitlines(True), text.splitlines(True), SCHEMA.name, "generated")
    )
    return int(old != text)


if __name__ == "__main__":
    sys.exit(main())

"""Whether a value fits a JSON Schema node, for the keywords that the schemas here use.

A full validator takes 60 ms to import, half of what `dsrun preset` may take, and says where a value departs
from a schema in its own terms. So the few keywords are judged here; tests compare every answer with
jsonschema's, and see to it that a schema brings no other keyword.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Node = Mapping[str, Any]

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: TYPES["number"](value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "null": lambda value: value is None,
}
LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: bool(value >= limit),
    "exclusiveMinimum": lambda value, limit: bool(value > limit),
    "maximum": lambda value, limit: bool(value <= limit),
    "exclusiveMaximum": lambda value, limit: bool(value < limit),
}
SIZES: dict[str, Callable[[Any, Any], bool]] = {
    "minItems": lambda value, limit: len(value) >= limit,
    "maxItems": lambda value, limit: len(value) <= limit,
    "minLength": lambda value, limit: len(value) >= limit,
}
ANNOTATIONS = {"$schema", "$id", "title", "description", "default", "deprecated"}
JUDGED = {"type", "enum", "const", "anyOf", "not", "items", "properties", "additionalProperties", "required"}
KNOWN = ANNOTATIONS | JUDGED | {"patternProperties"} | set(LIMITS) | set(SIZES)
"""Every keyword that may stand in a schema here; x-... are annotations too."""


def fits(node: Node | bool, value: Any) -> bool:
    """Whether `value` is valid against `node`, as JSON Schema 2020-12 has it."""
    if isinstance(node, bool):
        return node
    return (
        _typed(node, value)
        and ("anyOf" not in node or any(fits(branch, value) for branch in node["anyOf"]))
        and ("not" not in node or not fits(node["not"], value))
        and ("enum" not in node or any(same(value, choice) for choice in node["enum"]))
        and ("const" not in node or same(value, node["const"]))
        and _within(node, value)
    )


def is_comment(node: Node, key: str) -> bool:
    """Whether a key that is no property falls under the node's patternProperties: here these are comments."""
    return any(re.search(pattern, key) for pattern in node.get("patternProperties", ()))


def same(one: Any, other: Any) -> bool:
    """Equality as JSON has it: true is not 1, and 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def _typed(node: Node, value: Any) -> bool:
    named = node.get("type")
    names = [named] if isinstance(named, str) else named
    return names is None or any(TYPES[name](value) for name in names)


def _within(node: Node, value: Any) -> bool:
    if isinstance(value, dict):
        return _members(node, value)
    if isinstance(value, list):
        sized = all(SIZES[key](value, node[key]) for key in ("minItems", "maxItems") if key in node)
        return sized and all(fits(node.get("items", {}), item) for item in value)
    if isinstance(value, str):
        return SIZES["minLength"](value, node.get("minLength", 0))
    if TYPES["number"](value):
        return all(holds(value, node[key]) for key, holds in LIMITS.items() if key in node)
    return True


def _members(node: Node, value: dict[str, Any]) -> bool:
    properties = node.get("properties", {})
    if any(key not in value for key in node.get("required", ())):
        return False
    for key, item in value.items():
        if key in properties:
            if not fits(properties[key], item):
                return False
        elif not is_comment(node, key) and not fits(node.get("additionalProperties", True), item):
            return False
    return True

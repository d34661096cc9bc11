"""A quick yes: whether a value fits its schema, for the keywords that the schemas here use.

jsonschema takes 60 ms to import, half of what `dsrun preset` may take. So a config that plainly fits is
accepted here; whatever is doubtful goes to jsonschema, which has the last word and knows what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Node = Mapping[str, Any]

TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
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
# An absent key needs no patternProperties; a present one that is not in properties is doubtful anyway.
HANDLED = {"type", "enum", "const", "anyOf", "items", "properties", "additionalProperties", "required"}
KNOWN = ANNOTATIONS | HANDLED | {"patternProperties"} | set(LIMITS) | set(SIZES)


def accepts(node: Node, value: Any) -> bool:
    """True where `value` surely fits; False where it doesn't, or where a full validator has to say."""
    if any(key not in KNOWN and not key.startswith("x-") for key in node):
        return False
    named = node.get("type")
    names = [named] if isinstance(named, str) else named
    if names is not None and not any(TYPES[name](value) for name in names):
        return False
    if "anyOf" in node and not any(accepts(branch, value) for branch in node["anyOf"]):
        return False
    if "enum" in node and not any(_same(value, choice) for choice in node["enum"]):
        return False
    if "const" in node and not _same(value, node["const"]):
        return False
    return _within(node, value)


def _within(node: Node, value: Any) -> bool:
    if isinstance(value, dict):
        return _members(node, value)
    if isinstance(value, list):
        sized = all(SIZES[key](value, node[key]) for key in ("minItems", "maxItems") if key in node)
        return sized and all(accepts(node.get("items", {}), item) for item in value)
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
            if not accepts(properties[key], item):
                return False
        elif node.get("additionalProperties", True) is not True or "patternProperties" in node:
            return False
    return True


def _same(one: Any, other: Any) -> bool:
    """Equality as JSON has it: true is not 1."""
    return type(one) is type(other) and bool(one == other)

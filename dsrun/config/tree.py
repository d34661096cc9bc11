"""Nested dicts by dotted path. A leaf is anything but a non-empty dict: lists are values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MISSING: Any = object()


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of each leaf, in order."""
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def everything(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of all that `get` finds: sections, and what is in them."""
    for key, value in data.items():
        if "." not in key:
            path = f"{prefix}.{key}" if prefix else key
            yield path, value
            if isinstance(value, dict):
                yield from everything(value, path)


def get(data: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or `default` where the path leads nowhere."""
    value: Any = data
    for key in path.split("."):
        if not isinstance(value, (dict, Mapping)) or key not in value:
            return default
        value = value[key]
    return value


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path, making (or replacing by) the sections on the way."""
    *sections, last = path.split(".")
    for key in sections:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[last] = value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new dict: sections are merged, everything else in `over` replaces what `base` has."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def join(section: str, key: str) -> str:
    """The dotted path of a key in a section; "" is the root."""
    return f"{section}.{key}" if section else key


def under(path: str, parent: str) -> bool:
    """Whether a path is `parent` itself or lies below it."""
    return path == parent or path.startswith(parent + ".")


def same(left: Any, right: Any) -> bool:
    """Equality as in JSON: true is not 1, and 1.0 is."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return bool(left == right)

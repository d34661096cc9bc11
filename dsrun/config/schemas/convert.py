"""Values of another type as DeepSpeed's checked sections convert them: "3" -> 3, "yes" -> true, 2e8 -> 200000000.

These sections are pydantic models (runtime/config_utils.py), whose rules for conversion these are.
"""

from __future__ import annotations

import math
from typing import Any

from dsrun.config import tree

TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def converted(value: Any, node: dict[str, Any]) -> Any:
    """The value as a type that the node takes; tree.MISSING where nothing can be made of it.

    Gives the value a reader would see in it, whether or not it is in the node's range.
    """
    from dsrun.config.schemas.schema import types

    takes = types(node)
    for name, convert in (("boolean", flag), ("integer", whole), ("number", number)):
        if name in takes and (result := convert(value)) is not tree.MISSING:
            return result
    return tree.MISSING


def flag(value: Any) -> Any:
    """A flag written as a text or as 0 or 1."""
    if isinstance(value, (bool, int, float)):
        return bool(value) if value in (0, 1) else tree.MISSING
    if isinstance(value, str) and value.lower() in TRUE | FALSE:
        return value.lower() in TRUE
    return tree.MISSING


def whole(value: Any) -> Any:
    """A whole number written as a text, or as a flag. "5e8" is not one for pydantic, "50000" and "8.0" are."""
    if isinstance(value, bool):
        return int(value)
    text = value.strip() if isinstance(value, str) else ""
    text = text[:-2] if text.endswith(".0") else text
    digits = text.removeprefix("-").removeprefix("+")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 300 else tree.MISSING


def number(value: Any) -> Any:
    """A number written as a text, or as a flag."""
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str) or not value.isascii():  # float() takes the digits of every script
        return tree.MISSING
    try:
        result = float(value)
    except ValueError:
        return tree.MISSING
    return result if math.isfinite(result) else tree.MISSING

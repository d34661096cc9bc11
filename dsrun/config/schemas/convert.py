"""Values of another type as DeepSpeed's checked sections convert them: "3" -> 3, "yes" -> true, 2e8 -> 200000000.

These sections are pydantic models (runtime/config_utils.py), whose rules for conversion these are: `converted` those of
pydantic 2, `converted_by_1` those of pydantic 1, which DeepSpeed used before 0.15. That one applies int(), float() and
str(), so that 1.5 becomes 1 and 7 becomes "7".
"""

from __future__ import annotations

import math
from typing import Any

from dsrun.config import tree

TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE = frozenset(("0", "off", "f", "false", "n", "no"))
MOST_DIGITS = 300


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
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < MOST_DIGITS else tree.MISSING


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


def converted_by_1(value: Any, node: dict[str, Any]) -> Any:
    """The same by the rules of pydantic 1."""
    from dsrun.config.schemas.schema import types

    node = node["anyOf"][-1] if "anyOf" in node else node
    if "enum" in node:  # a member is looked up by equality, and a text is no number there
        same = (item for item in node["enum"] if isinstance(value, (bool, float)) and item == value)
        return next(same, tree.MISSING)
    takes = types(node)
    for name, convert in (("boolean", flag), ("integer", cut), ("number", number), ("string", text)):
        if name in takes and (result := convert(value)) is not tree.MISSING:
            return result
    return {} if "object" in takes and value in ([], "") else tree.MISSING


def cut(value: Any) -> Any:
    """int() of a number or a text: fractions are cut off, and "2.0" is none."""
    if not isinstance(value, (int, float, str)) or (isinstance(value, str) and len(value) > MOST_DIGITS):
        return tree.MISSING
    try:
        return int(value)
    except (ValueError, OverflowError):  # NaN, infinity
        return tree.MISSING


def text(value: Any) -> Any:
    """str() of a number or a flag."""
    return str(value) if isinstance(value, (int, float)) else tree.MISSING

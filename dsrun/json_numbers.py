"""Numbers in values that came from JSON, TOML or YAML: which of them can be computed with."""

from __future__ import annotations

import sys
from math import isfinite
from typing import TypeGuard

LARGEST = int(sys.float_info.max)
"""The largest whole number that a float can hold. JSON may have larger ones."""


def is_number(value: object, *, largest: int = LARGEST) -> TypeGuard[float]:
    """Whether a value is a number: not a boolean, nor a whole number beyond `largest`. NaN and infinity are numbers."""
    if isinstance(value, bool):  # Python's booleans are integers
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= largest)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number that a float can hold."""
    return is_number(value) and isfinite(value)

"""Sizes and counts as people write them. GB is 10^9 bytes and GiB is 2^30: the two are never mixed up silently."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dsrun.errors import DsrunError

BYTES = {
    "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
COUNTS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
NUMBER = r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)"

DIGITS = 12
"""Digits of a planned number that are the same on every machine: the rest depends on its C library's exp and erf."""


def size(text: str, where: str) -> float:
    """Bytes: "32GiB", "256 GB", "1.8TB". Raises DsrunError without a unit: 32 alone could mean either."""
    match = re.fullmatch(rf"\s*{NUMBER}\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise DsrunError(f"{text!r} is not a size", where=where, hint="As in 32GiB, or 256GB.")
    value, unit = _number(match[1]), match[2].upper()
    if unit in ("K", "M", "G", "T", ""):
        message = f"{unit} in {text!r} can mean two things" if unit else f"{text!r} lacks a unit"
        raise DsrunError(message, where=where, hint=_two_readings(match[1], unit))
    if unit not in BYTES:
        raise DsrunError(
            f"{match[2]!r} is not a unit of memory", where=where, hint="One of MiB, GiB, TiB, MB, GB, TB."
        )
    if not 0 < value * BYTES[unit] < math.inf:
        raise DsrunError(f"can't be {text}", where=where, hint="A size above 0.")
    return value * BYTES[unit]


def _two_readings(number: str, unit: str) -> str:
    binary, decimal = f"{number}{unit or 'G'}iB", f"{number}{unit or 'G'}B"
    terabytes = "" if unit else f", or {number}TB"
    return (
        f"Write {binary} (powers of 2, as nvidia-smi and free count) or {decimal} (powers of 10){terabytes}."
    )


def count(text: str, where: str) -> float:
    """A number of things: "6.2e9", "6.2B", "350M", "6_243_584_000". Raises DsrunError for anything else."""
    match = re.fullmatch(rf"\s*{NUMBER}\s*([KkMmBbTt]?)\s*", text)
    if match is None:
        raise DsrunError(f"{text!r} is not a number", where=where, hint="As in 6.2e9, or 6.2B.")
    value = _number(match[1]) * COUNTS[match[2].upper()]
    if not 0 < value < math.inf:
        raise DsrunError(f"can't be {text}", where=where, hint="A number above 0.")
    return value


def _number(text: str) -> float:
    return float(text.replace("_", ""))


def significant(values: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's values for machines, with the DIGITS of their numbers that are the same everywhere."""
    return {key: _shortened(value) for key, value in values.items()}


def _shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return significant(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_shortened(item) for item in value]
    return value

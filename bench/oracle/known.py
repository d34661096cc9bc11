"""Disagreements that are as they should be, each with its reason. A new entry needs a good one: keep it short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oracle.reading import Outcome


@dataclass(frozen=True)
class Known:
    """holds: of (kind, cause, config, outcome), whether this is the disagreement that the reason explains."""

    reason: str
    holds: Callable[[str, str, dict[str, Any], Outcome], bool]


KNOWN: tuple[Known, ...] = ()

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


def _needs_a_package(kind: str, _cause: str, config: dict[str, Any], outcome: Outcome) -> bool:
    return kind == "missed" and "datastates_ckpt" in config and "Please install" in outcome.text


def _writer_at_the_first_save(kind: str, cause: str, config: dict[str, Any], _outcome: Outcome) -> bool:
    return kind == "false alarm" and "DS702" in cause and "writer" in config.get("checkpoint", {})


KNOWN: tuple[Known, ...] = (
    Known("needs a package that isn't installed here, which a note says (DS708)", _needs_a_package),
    Known(
        "at stage 3 the writer is made when the first checkpoint is saved, after these steps",
        _writer_at_the_first_save,
    ),
)

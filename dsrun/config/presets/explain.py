"""Explanations of a ds_config: the origin and the effect of each value."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsrun.config import tree
from dsrun.config.presets.build import BuiltConfig
from dsrun.config.presets.json_text import ordered
from dsrun.config.schemas import schema


@dataclass(frozen=True)
class ExplainedKey:
    """One key of a ds_config."""

    path: str
    value: Any
    origin: str
    """The preset, template or option that gave the value."""
    default: Any
    """DeepSpeed's own default; None also where it has none."""
    has_default: bool
    does: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain(built: BuiltConfig) -> list[ExplainedKey]:
    """A row for each leaf, in the order of the file."""
    rows = []
    for path, value in tree.leaves(ordered(built.ds_config)):
        default, does = schema.load().describe(path)
        known = default is not tree.MISSING
        rows.append(ExplainedKey(path, value, built.origins[path], default if known else None, known, does))
    return rows

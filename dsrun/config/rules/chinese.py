"""Explanations of rules in Chinese: chinese.toml, which has the rules that real configs meet most often."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dsrun.catalog import read_toml

FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class ChineseExplanation:
    """A rule in Chinese."""

    title: str
    means: str
    """The consequence."""
    next: str
    """The next step."""


@cache
def explanations() -> dict[str, ChineseExplanation]:
    """A rule's id -> its explanation, in the order of ids."""
    return {rule_id: ChineseExplanation(**table) for rule_id, table in read_toml(FILE).items()}

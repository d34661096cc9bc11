"""A model's config, read with care: each size, switch and share that it hands out is of its type and in its range.

Faults and missing sizes are collected while reading goes on, so that all of them are reported together; see
`ModelConfig.check`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.json_numbers import is_finite

MOST = 1e15
"""Parameters: no network has more, nor more of anything else."""
LONGEST = 60
"""Characters of a value that are quoted."""


class UnknownShapeError(DsrunError):
    """A network that the planner doesn't describe, or whose config leaves sizes to transformers: it may be trained."""


@dataclass
class ModelConfig:
    """A transformers config.json as a dict, and the faults of the values that were read. where: the file, for
    messages."""

    values: Mapping[str, Any]
    where: str
    wrong: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)

    def size(self, *names: str, least: int = 1) -> int | None:
        """The whole number under the first of the names that has a value; None where none has, or where it can't be."""
        name, value = next(self._given(names), ("", None))
        if value is None:
            return None
        if not is_finite(value) or not (least <= value <= MOST and value == int(value)):
            self.refuse(name, value, f"A whole number, at least {least}.")
            return None
        return int(value)

    def needed(self, *names: str, least: int = 1) -> int:
        """The whole number that a config must have under one of the names; `least` stands in where it lacks them
        all."""
        value = self.size(*names, least=least)
        if value is None and not next(self._given(names), None):
            self.lack(*names)
        return least if value is None else value

    def switch(self, name: str, default: bool) -> bool:
        """The switch under a name, true or false; null is false."""
        value = self.values.get(name, default)
        if value not in (None, True, False) or isinstance(value, float):
            self.refuse(name, value, "true or false.")
            return default
        return bool(value)

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1; null is 0."""
        value = self.values.get(name, default)
        if value is not None and not (is_finite(value) and 0 <= value <= 1):
            self.refuse(name, value, "A number from 0 to 1.")
            return default
        return float(value or 0)

    def refuse(self, name: str, value: object, hint: str = "") -> None:
        """Collect a value that can't be."""
        self.wrong.append(Problem(f"{name} is {quoted(value)}", self.where, hint))

    def lack(self, *names: str) -> None:
        """Collect a size that is under none of the names."""
        self.missing.append(Problem(f"lacks {' or '.join(names)}", self.where, "Is it a whole config.json?"))

    def check(self) -> None:
        """Raise DsrunError with everything that was wrong, or UnknownShapeError where something is merely missing."""
        if self.wrong:
            raise DsrunError([*self.wrong, *self.missing])
        if self.missing:
            raise UnknownShapeError(self.missing)

    def _given(self, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name in names if (value := self.values.get(name)) is not None)


def quoted(value: object) -> str:
    """A value for a message; of one that is long its beginning."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

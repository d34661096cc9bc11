"""The keys of a table of TOML as a dataclass's fields: type, default and what each takes stand in one place.

The docstring below a field says what the key does; docs/generate.py reads it from there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from dsrun import catalog
from dsrun.cluster.hostnames import shown
from dsrun.errors import Problem

LINE = r"[^\0\n\r]+"
LARGEST = 10**6


@dataclass(frozen=True)
class Key:
    """A key of a table."""

    type: str
    """The annotation of the field."""
    default: Any
    """MISSING: the key is required."""
    takes: str
    """The values that it takes, in words."""
    pattern: str
    """The regular expression of a text, or of each text in a list."""
    least: float
    most: int

    def accepts(self, value: Any) -> bool:
        """Whether the value, as TOML gives it, is of the key's type and within its limits."""
        kind, _, entries = self.type.removesuffix(" | None").partition("[")
        match kind:
            case "bool":
                return isinstance(value, bool)
            case "int" | "float":
                numbers = int if kind == "int" else (int, float)
                return (
                    isinstance(value, numbers)
                    and not isinstance(value, bool)
                    and self.least <= value <= self.most
                )
            case "str":
                return self._fits(value)
            case "tuple":
                fits = self._fits if entries.startswith("str") else lambda entry: isinstance(entry, dict)
                return isinstance(value, list) and all(map(fits, value))
            case _:
                return isinstance(value, dict)

    def _fits(self, text: Any) -> bool:
        return isinstance(text, str) and re.fullmatch(self.pattern, text, re.ASCII) is not None

    def problems(self, value: Any, where: str) -> Iterator[Problem]:
        """Problems of a value."""
        if not self.accepts(value):
            given = shown(value) if isinstance(value, str) else repr(value)
            yield Problem(f"can't be {given}", where, f"Expected: {self.takes}.")
        elif self.type == "Mapping[str, str]":
            for name, text in value.items():
                if not isinstance(text, str):
                    yield Problem(f"can't be {text!r}", f"{where}.{name}", f'Expected: a text, as "{text}".')


def key(
    takes: str, *, default: Any = None, pattern: str = LINE, least: float = 1, most: int = LARGEST
) -> Any:
    """A dataclass's field that is a key. default: MISSING where the table has to have it."""
    metadata = {"takes": takes, "pattern": pattern, "least": least, "most": most}
    if default == {}:
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def keys_of(table: type) -> dict[str, Key]:
    """The keys of a table, by name."""
    return {
        field.name: Key(
            str(field.type), field.default if field.default_factory is MISSING else {}, **field.metadata
        )
        for field in dataclasses.fields(table)
        if field.metadata
    }


def problems(table: type, values: Mapping[str, Any], where: str, sign: str = ".") -> Iterator[Problem]:
    """Unknown keys, wrong values and keys that are missing. where: the table; sign: what stands before a key."""
    known = keys_of(table)
    for name, value in values.items():
        if name in known:
            yield from known[name].problems(value, f"{where}{sign}{name}")
        else:
            hint = catalog.suggestion(name, known, f"There are {', '.join(known)}.")
            yield Problem(f"unknown key {name!r}", where, hint)
    if missing := [
        name for name, key_of_table in known.items() if key_of_table.default is MISSING and name not in values
    ]:
        yield Problem(f"lacks {', '.join(missing)}", where)


def value_of(table: type, values: Mapping[str, Any], **more: Any) -> Any:
    """The dataclass of a table without problems."""
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return table(**frozen, **more)

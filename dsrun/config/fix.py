"""A fix of a finding, as a value: rules propose it, edits.py makes it in the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Edit(NamedTuple):
    """One change at a dotted path.

    op: "replace" (by `value`), "remove", "rename" (the key, to `value`), "move" (to the path `value`) or
    "add" (`value` at a path that isn't there yet). Two leave the config as it is: "plain" writes its text as
    JSON, "once" takes out a key that is there a second time, with the same value.
    """

    op: str
    path: str
    value: Any = None


@dataclass(frozen=True)
class Fix:
    """Edits that belong together. safe: afterwards DeepSpeed does what it was certainly asked for."""

    edits: tuple[Edit, ...]
    safe: bool = True

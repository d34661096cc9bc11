"""Changes to a config, as values: what a rule proposes, and what is later done to the file's text."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsrun.config import tree


class Edit(NamedTuple):
    """One change at a dotted path.

    op: "replace" (by `value`), "remove", "rename" (the key, to `value`), "move" (to the path `value`) or
    "add" (`value` at a path that isn't there yet). "plain" changes nothing of the config: its whole text is
    written as JSON.
    """

    op: str
    path: str
    value: Any = None


@dataclass(frozen=True)
class Fix:
    """Edits that belong together. safe: DeepSpeed does after them what it surely was asked for."""

    edits: tuple[Edit, ...]
    safe: bool = True


def apply(config: Mapping[str, Any], edits: tuple[Edit, ...]) -> dict[str, Any]:
    """The config after the edits. An edit whose path is gone changes nothing."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    for edit in edits:
        old = tree.get(result, edit.path, tree.MISSING)
        if edit.op == "add":
            tree.put(result, edit.path, edit.value)
        elif old is tree.MISSING or edit.op == "plain":
            continue
        elif edit.op == "replace":
            tree.put(result, edit.path, edit.value)
        else:
            section, _, _ = edit.path.rpartition(".")
            _drop(result, edit.path)
            if edit.op == "rename":
                tree.put(result, f"{section}.{edit.value}" if section else edit.value, old)
            elif edit.op == "move":
                tree.put(result, edit.value, old)
    return result


def _drop(config: dict[str, Any], path: str) -> None:
    section, _, key = path.rpartition(".")
    holder = tree.get(config, section) if section else config
    if isinstance(holder, dict):
        holder.pop(key, None)

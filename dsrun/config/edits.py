"""Changes to a config, as values: what a rule proposes, and what is later done to the file's text."""

from __future__ import annotations

import copy
import re
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
    """The config after the edits. An edit whose path is gone changes nothing; "replace" reaches into lists, too."""
    result: dict[str, Any] = copy.deepcopy(dict(config))
    for edit in edits:
        old = tree.get(result, edit.path, tree.MISSING)
        listed = through_list(result, edit.path) if edit.op == "replace" else None
        if listed is not None:
            box, key = listed
            box[key] = edit.value
        elif edit.op == "add":
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


def through_list(value: Any, path: str) -> tuple[Any, Any] | None:
    """The dict or list that holds a path through a list, and the key in it; None for any other path."""
    *sections, last = path.split(".")
    listed = False
    for part in sections:
        key: Any = part
        if isinstance(value, list):
            listed, key = True, _index(value, part)
        if (
            not isinstance(value, (dict, list))
            or (isinstance(value, dict) and key not in value)
            or key is None
        ):
            return None
        value = value[key]
    if isinstance(value, list):
        index = _index(value, last)
        return None if index is None else (value, index)
    return (value, last) if listed and isinstance(value, dict) else None


def _index(box: list[Any], key: str) -> int | None:
    """The index that a part of a path is, if the list is that long."""
    found = re.fullmatch(r"0|[1-9][0-9]{0,8}", key, re.ASCII)
    return int(key) if found and int(key) < len(box) else None

"""Keys that belong to other tools' files: accelerate, HF's TrainingArguments, FairScale, Megatron, Lightning.

The list is data (schemas/foreign.toml): whose key it is, and which key of DeepSpeed means the same.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.catalog import read_toml


class Foreign(NamedTuple):
    """A key of another tool."""

    whose: str
    """Its owner, as in "a setting of HF's TrainingArguments"."""
    advice: str
    """A sentence."""
    file: str = ""
    """The file that such keys belong to, as in "HF's TrainingArguments"."""
    to: str = ""
    """The path at which DeepSpeed takes the same value, "" where it takes none or another one."""
    idle: bool = False
    """Whether nothing is lost without it."""


def lookup(path: str) -> Foreign | None:
    """The entry of a key that DeepSpeed doesn't have. Its whole path is looked up before its name alone."""
    key = path.rpartition(".")[2].replace("-", "_")
    paths, names = _known()
    return paths.get(path) or names.get(key)


def is_path(path: str) -> bool:
    """Whether the list has a key by its whole path, not by its name alone."""
    return path in _known()[0]


def names(tool: str) -> frozenset[str]:
    """Every name that a tool's table has: the keys that are its own, and those that DeepSpeed has too."""
    table = _tables()[tool]
    return frozenset(table.get("keys", {})) | frozenset(table.get("paths", {}))


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("foreign.toml"))


@lru_cache(maxsize=1)
def _known() -> tuple[dict[str, Foreign], dict[str, Foreign]]:
    """(those that are meant at one path only, those that are meant by their name anywhere)."""
    paths: dict[str, Foreign] = {}
    names: dict[str, Foreign] = {}
    for tool in _tables().values():
        for entries, table in ((names, tool.get("keys", {})), (paths, tool.get("paths", {}))):
            for key, entry in table.items():
                entries.setdefault(key, _entry(tool, entry))
    return paths, names


def _entry(tool: dict[str, Any], entry: str | dict[str, str]) -> Foreign:
    """The key that an entry of the file describes.

    A text is the advice. A table names the place (`to`), and may `say` more than "Write it there."; or it has the
    advice for a key that nothing is lost without (`idle`).
    """
    if isinstance(entry, str):
        return Foreign(tool["whose"], entry, tool["file"])
    if "idle" in entry:
        return Foreign(tool["whose"], entry["idle"], tool["file"], idle=True)
    return Foreign(tool["whose"], entry.get("say", f"Write {entry['to']}."), tool["file"], entry["to"])

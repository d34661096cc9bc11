"""The arguments that each trainer's own classes declare, and their defaults (arguments.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("arguments.json")
UNKNOWN = {"unknown": True}
"""The default of an argument that is worked out, or that its class doesn't write as a plain value."""


@cache
def _data() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return made


@cache
def declared(trainer: str) -> Mapping[str, Any]:
    """The arguments of a trainer with their defaults, those of the classes that it builds on among them; empty for one
    that isn't in the data."""
    entry = _data().get(trainer, {"base": "", "arguments": {}})
    return {**(declared(entry["base"]) if entry["base"] else {}), **entry["arguments"]}


def version(trainer: str) -> str:
    """The release that the data are of."""
    return str(_data()[trainer]["version"]) if trainer in _data() else ""


def default(trainer: str, name: str) -> Any:
    """The default of an argument; None where it is unknown."""
    value = declared(trainer).get(name)
    return None if value == UNKNOWN else value

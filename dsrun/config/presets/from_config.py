"""A DeepSpeed config as a preset: what of its file counts in a job, and the TOML file that says the same.

"auto" is HF Trainer's word for a value that it fills in itself. A job of dsrun's fills it in, too, so such a key is
left out of the config and stays in what HF Trainer gets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsrun.config import tree
from dsrun.config.schemas import schema
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.options.declare import FILE_SUFFIXES
from dsrun.words import counted

SUFFIXES = tuple(suffix for suffix in FILE_SUFFIXES if suffix != ".toml")
BASE = "ddp"
"""The preset that a config without an optimizer extends, for the optimizer: HF Trainer brings one, a job of dsrun's has
what its config says."""
BARE = re.compile(r"[A-Za-z0-9_-]+")


def is_config(path: Path) -> bool:
    """Whether a preset's file is a DeepSpeed config, by its name."""
    return path.suffix.lower() in SUFFIXES


def read(path: Path) -> dict[str, Any]:
    """A config's file as the tables of a preset's. Raises DsrunError where it is none."""
    from dsrun.config.rules.file.text import DUPLICATE
    from dsrun.config.rules.frame import read_config
    from dsrun.config.validation.sources import read as read_bytes

    document = read_config(read_bytes(path), str(path), "json")
    config: dict[str, Any] = document.value
    if not isinstance(config, dict):
        raise DsrunError("is not a DeepSpeed config: it has no keys", where=str(path))
    twice = [issue for issue in document.issues if issue.kind == DUPLICATE and not issue.equal]
    hint = "Keep one: DeepSpeed itself stops there."
    raise_all(Problem(issue.message, f"{path}:{issue.place.line} {issue.path}", hint) for issue in twice)
    return tables(config, path.name)


def tables(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tables of a preset that trains as a config says. name: the config's, for the summary."""
    own = {key: value for key, value in config.items() if not key.startswith("_dsrun")}
    scheduler = own.get("scheduler")
    filled_in = dict(_parts(own, autos=True))
    stated = dict(_parts(own, autos=False))
    if isinstance(scheduler, Mapping) and _has_auto(scheduler):  # it can't be made of the other arguments
        stated.pop("scheduler", None)
        filled_in["scheduler"] = dict(scheduler)
    made: dict[str, Any] = {"summary": f"The DeepSpeed config {name}"}
    if not own.get("optimizer"):
        made["extends"] = BASE
    return {**made, "config": stated, **({"hf": filled_in} if filled_in else {})}


def _parts(section: Mapping[str, Any], *, autos: bool) -> Iterator[tuple[str, Any]]:
    """The keys of a section that are "auto", or those that are not. null is no value: DeepSpeed's default holds."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            inner = dict(_parts(value, autos=autos))
            if inner or (not autos and not value):
                yield key, inner
        elif value is not None and (value == schema.AUTO) == autos:
            yield key, value


def _has_auto(section: Mapping[str, Any]) -> bool:
    return any(value == schema.AUTO for _, value in tree.leaves(section))


def text(path: Path) -> str:
    """The preset file that a config's file comes to. Raises DsrunError where that is none."""
    made = read(path)
    autos = [where for where, _ in tree.leaves(made.get("hf", {}))]
    lines = [f"# Made of {path.name}: dsrun preset --from {path.name}", "#"]
    if autos:
        lines.append(
            f'# {counted(len(autos), "value")} "auto" there: a job fills them in, and HF Trainer does ([hf]).'
        )
    lines += [
        "# A value that stands here holds for every job with this preset, batch sizes and learning rate among them;",
        "# without its line it is an option again (--micro-batch, --lr ...). Not for other GPUs' numbers.",
        "", f"summary = {json.dumps(made['summary'], ensure_ascii=False)}",
    ]  # fmt: skip
    if base := made.get("extends"):
        lines += [f'extends = "{base}"']
    for table in ("config", "hf"):
        lines += _table(table, made[table]) if table in made else ()
    return "\n".join(lines) + "\n"


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A table's lines, and those of the tables in it."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if plain or not values:
        yield from ("", f"[{name}]", *(f"{_key(key)} = {_toml(value)}" for key, value in plain.items()))
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _table(f"{name}.{_key(key)}", value)


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _toml(value: Any) -> str:
    """A value that JSON can hold, as TOML writes it: a table in a list stands in one line."""
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value if item is not None)}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

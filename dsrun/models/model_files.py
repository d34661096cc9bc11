"""The catalogue: presets/models/*.toml, each one model, or a family with a table [sizes.NAME] for each of its models.

A family's model is called FILE-NAME. Its table comes before the keys that the file has for all; [architecture] and
[defaults] are put together key by key, and so are the tables in them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem, raise_all

KIND = "presets/models"
TYPES: dict[str, tuple[type, str]] = {
    "summary": (str, "a text"),
    "parameters": (int, "a whole number, such as 6_243_584_000"),
    "repository": (str, "a text"),
    "prompt_format": (str, "a text"),
    "licence": (str, "a text"),
    "source": (str, "a text"),
    "architecture": (dict, "a table"),
    "random": (dict, "a table"),
    "tokenizer": (dict, "a table"),
    "defaults": (dict, "a table"),
}
"""The keys of a model and what they hold."""
SIZES = "sizes"
MERGED = ("architecture", "defaults")
"""Tables of a family that a size's own are added to."""


@dataclass(frozen=True)
class ModelFile:
    """A model that a file describes."""

    name: str
    path: Path
    summary: str
    parameters: int
    """Number of parameters."""
    prompt_format: str
    architecture: dict[str, Any]
    """The transformers config."""
    repository: str | None = None
    """Its repository on the Hugging Face hub."""
    licence: str = ""
    """The name of its weights' licence."""
    source: str = ""
    """Where its sizes were read: repositories and paths."""
    random: dict[str, Any] | None = None
    """Settings of drawn weights, where there are none to download."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """Settings of its tokenizer's training."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Options of finetune, by name."""


def names() -> dict[str, Path]:
    """Every model's name -> its file, sorted; the nearest folder wins. A file that is no TOML stands for itself."""
    files: dict[str, Path] = {}
    for folder in catalog.folders(KIND):
        for path in sorted(folder.glob("*.toml")):
            for name in _names_in(path):
                files.setdefault(name, path)
    return dict(sorted(files.items()))


def find(name: str) -> Path | None:
    """The file of a model; None where none describes it. Only files that its name begins like are read."""
    for folder in catalog.folders(KIND):
        for path in sorted(folder.glob("*.toml")):
            if f"{name}-".startswith(f"{path.stem}-") and name in _names_in(path):
                return path
    return None


def list_models(refused: list[Problem] | None = None) -> list[ModelFile]:
    """Every model that a file describes, smallest first.

    refused: receives the problems of files that can't be used; without it, the first such file raises DsrunError.
    """
    models = []
    for name, path in names().items():
        try:
            models.append(_read(name, path))
        except DsrunError as error:
            if refused is None:
                raise
            refused += [problem for problem in error.problems if problem not in refused]
    return sorted(models, key=lambda model: model.parameters)


def _files_here() -> list[str]:
    """Files of the folder that the command is given in."""
    try:
        return [entry.name for entry in os.scandir() if entry.is_file()]
    except OSError:
        return []


def load_model_file(name: str) -> ModelFile:
    """The model of that name. Raises DsrunError for an unknown name or a bad file."""
    path = find(name)
    if path is None:
        near = catalog.closest(name, _files_here()) if "." in name else None
        hint = f"Did you mean the file {near}?" if near else ""
        hint = hint or catalog.suggestion(name, names(), "See them all: dsrun models")
        raise DsrunError(f"unknown model {name!r}", hint=hint)
    return _read(name, path)


def by_repository(repository: str) -> ModelFile | None:
    """The model whose weights lie in that repository; None where no file names it. Files with faults are passed by."""
    wanted = repository.casefold()
    return next((model for model in list_models([]) if (model.repository or "").casefold() == wanted), None)


def file_label(name: str) -> str:
    """The model's file as --explain names it; empty where the model has none."""
    path = find(name)
    shipped = catalog.shipped_root()
    return "" if path is None else str(path.relative_to(shipped) if path.is_relative_to(shipped) else path)


def _names_in(path: Path) -> list[str]:
    try:
        sizes = _sizes_in(path, path.stat().st_mtime_ns)
    except (DsrunError, OSError):
        sizes = None
    return [f"{path.stem}-{size}" for size in sizes] if isinstance(sizes, dict) else [path.stem]


@functools.cache
def _sizes_in(path: Path, _changed_ns: int) -> Any:
    """Read once: parsing all files takes longer than anything else that comes of a model's name."""
    return catalog.read_toml(path).get(SIZES)


def _read(name: str, path: Path) -> ModelFile:
    table = catalog.read_toml(path)
    if SIZES in table:
        table = _of_size(table, name.removeprefix(f"{path.stem}-"), path)
    _check(table, path)
    return ModelFile(name, path, **table)


def _of_size(family: Mapping[str, Any], size: str, path: Path) -> dict[str, Any]:
    """A size's table with what the family says for all."""
    sizes = family[SIZES]
    own = sizes.get(size) if isinstance(sizes, dict) else None
    if not isinstance(own, dict):
        raise DsrunError(
            f"{SIZES} is {sizes!r}", where=str(path), hint="Expected: a table [sizes.NAME] for each."
        )
    shared = {key: value for key, value in family.items() if key != SIZES}
    table = dict(own)
    if isinstance(family.get("summary"), str):
        table.setdefault("summary", f"{family['summary']} {size.upper()}")
    for key in MERGED:
        if isinstance(shared.get(key), dict) and isinstance(own.get(key, {}), dict):
            table[key] = _merged(shared[key], own.get(key, {}))
    return {**shared, **table}


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A table with another's values before its own; tables in both are merged likewise: a config's parts."""
    both = {
        key: _merged(shared[key], own[key])
        for key in shared.keys() & own.keys()
        if _tables(shared[key], own[key])
    }
    return {**shared, **own, **both}


def _tables(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _check(table: Mapping[str, Any], path: Path) -> None:
    for key in table:
        if key not in TYPES:
            raise DsrunError(f"unknown key {key!r}", where=str(path), hint=catalog.suggestion(key, TYPES, ""))
    missing = [key for key in ("summary", "parameters", "prompt_format", "architecture") if key not in table]
    if missing or not ("repository" in table or "random" in table):
        wanted = ", ".join(missing) or "repository (or [random])"
        raise DsrunError(f"lacks {wanted}", where=str(path))
    wrong = [
        Problem(f"{key} is {table[key]!r}", str(path), f"Expected: {words}.")
        for key, (kind, words) in TYPES.items()
        if key in table and (not isinstance(table[key], kind) or isinstance(table[key], bool))
    ]
    raise_all(wrong)

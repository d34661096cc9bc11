"""Presets: TOML files in presets/ that name a strategy and extend one another.

A file holds `summary`, `extends` (a preset's name, or a file beside it), `requires` (options that the user
has to give), [config] (sections and keys as in deepspeed.json) and [hf] (the same, where HF Trainer differs). One that
is trained with FSDP, and not with DeepSpeed, has [fsdp] instead of these two. [defaults] holds options of finetune's
that it is meant to be used with, with underscores. A DeepSpeed config's file stands for a preset, too (from_config.py).
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsrun import catalog
from dsrun.config import tree
from dsrun.config.presets import from_config, fsdp
from dsrun.ds_config import rounding
from dsrun.errors import DsrunError, Problem, raise_all

COMMAND = "dsrun preset"
SECOND_COPY = "zero_optimization.zero_hpz_partition_size"
"""A preset may say HOST there: the ranks of each host."""
KEYS = ("summary", "extends", "requires", "config", "hf", "fsdp", "defaults")
REQUIRABLE = ("nvme_path",)


def second_copy_notes(ds_config: Mapping[str, Any], ranks: int) -> list[str]:
    """A note where the second copy of the weights (ZeRO++'s hpZ) that a config asks for saves no gathers."""
    size = tree.get(ds_config, SECOND_COPY)
    if tree.get(ds_config, "zero_optimization.stage") != 3 or not isinstance(size, int):
        return []
    if size == 1:
        return [
            "this is plain ZeRO-3: with the ranks of one host there is no second copy of the weights (hpZ)"
        ]
    if size >= ranks > 1:
        return [
            f"the second copy of the weights (hpZ) is shared by all {ranks} ranks: plain ZeRO-3 needs less memory"
        ]
    return []


@dataclass(frozen=True)
class PresetFile:
    """One file of a chain, as it stands. `label` is its name in messages and in --explain."""

    path: Path
    label: str
    summary: str
    extends: str | None
    requires: tuple[str, ...]
    config: dict[str, Any]
    hf: dict[str, Any]
    fsdp: dict[str, Any] | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    """Options of finetune's."""


@dataclass(frozen=True)
class Preset:
    """A preset with all it extends: `chain` runs from the base to the preset's own file."""

    name: str
    chain: tuple[PresetFile, ...]

    @property
    def file(self) -> PresetFile:
        return self.chain[-1]

    @property
    def shipped(self) -> bool:
        """Whether it is dsrun's own, and so is all that it extends: the tests have judged it."""
        return all(file.path.is_relative_to(catalog.shipped_root() / "presets") for file in self.chain)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(name for file in self.chain for name in file.requires)

    @property
    def fsdp(self) -> fsdp.FsdpPreset | None:
        """The [fsdp] of its files; None where DeepSpeed is the engine."""
        tables = [file.fsdp for file in self.chain if file.fsdp is not None]
        merged: dict[str, Any] = {}
        for table in tables:
            merged = tree.merge(merged, table)
        return fsdp.FsdpPreset(**merged) if tables else None

    @property
    def defaults(self) -> dict[str, Any]:
        """The [defaults] of its files: options of finetune."""
        return {name: value for file in self.chain for name, value in file.defaults.items()}

    @property
    def for_hosts(self) -> bool:
        """Whether it depends on each host's ranks, so that on one host it is the preset that it extends."""
        return bool(tree.get(self.merged("deepspeed")[0], SECOND_COPY) == fsdp.HOST)

    @property
    def rounds(self) -> bool:
        """Whether its ranks send one another rounded weights or gradients: nobody gets it without naming it."""
        return bool(rounding(self.merged("deepspeed")[0]))

    def merged(self, target: str) -> tuple[dict[str, Any], dict[str, str]]:
        """The chain's values and, for each leaf, the label of the file that gave it.

        A file's [hf] lies directly above its own [config]: a preset that extends another and sets a key
        keeps its value for HF Trainer too, where the base says "auto". accelerate fills in what stands outside of
        sections for any script; inside of them it needs a Hugging Face model, or a DummyOptim (`_prepare_deepspeed` in
        accelerate/accelerator.py).
        """
        config: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for file in self.chain:
            # accelerate gets of [hf] only what stands outside of sections.
            filled = {
                key: value for key, value in file.hf.items() if target == "hf" or not isinstance(value, dict)
            }
            for layer in (file.config,) if target == "deepspeed" else (file.config, filled):
                config = tree.merge(config, layer)
                origins.update((path, file.label) for path, _ in tree.leaves(layer))
        return config, origins


def is_path(name: str) -> bool:
    """Whether a preset is named by its file, or a DeepSpeed config's, instead of its name."""
    return "/" in name or os.sep in name or Path(name).suffix.lower() in (".toml", *from_config.SUFFIXES)


def names() -> list[str]:
    """Every preset that can be found by name."""
    return list(catalog.files("presets"))


def read(path: Path) -> PresetFile:
    """One preset file. Raises DsrunError with every problem of the file."""
    try:
        status = path.stat()
    except OSError:  # which reading it says
        return _read(path, None)
    return _read(path, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=64)
def _read(path: Path, _state: tuple[int, int] | None) -> PresetFile:
    """The file in its present state: a plan asks for each several times, and most extend the same one."""
    data = from_config.read(path) if from_config.is_config(path) else catalog.read_toml(path)
    label = _label(path)
    problems = list(_problems(data, label))
    raise_all(problems)
    return PresetFile(
        path=path,
        label=label,
        summary=data["summary"],
        extends=data.get("extends"),
        requires=tuple(data.get("requires", ())),
        config=data.get("config", {}),
        hf=data.get("hf", {}),
        fsdp=data.get("fsdp"),
        defaults=data.get("defaults", {}),
    )


def load(name: str) -> Preset:
    """The preset of that name (or path), with all it extends.

    Raises DsrunError for an unknown name, a faulty file, or files that extend each other in a circle.
    """
    path = Path(name).expanduser() if is_path(name) else catalog.find("presets", name, "preset", COMMAND)
    chain = [read(path)]
    while (base := chain[0].extends) is not None:
        path = _base_path(base, chain[0])
        if any(_same(path, file.path) for file in chain):
            circle = " -> ".join([*(file.label for file in reversed(chain)), _label(path)])
            raise DsrunError(
                f"extends itself: {circle}", where=chain[0].label, hint="Let one of them extend nothing."
            )
        chain.insert(0, read(path))
    both = [file for file in chain if file.config or file.hf or file.requires]
    if any(file.fsdp is not None for file in chain) and both:
        raise DsrunError(
            "FSDP has no use for DeepSpeed's keys, and DeepSpeed none for [fsdp]",
            where=both[-1].label,
            hint='Extend a preset of the same engine: "zero3", or "fsdp".',
        )
    return Preset(path.stem if is_path(name) else name, tuple(chain))


def _base_path(base: str, file: PresetFile) -> Path:
    """The file that `extends = base` names: one beside this file, or the nearest preset of that name.

    A lab's zero2.toml that extends "zero2" means the next one behind it, so that a lab can change a shipped preset
    under its own name.
    """
    if is_path(base):
        path = file.path.parent / Path(base).expanduser()
        if not path.is_file():
            raise DsrunError(f"no such file: {path}", where=f"{file.label}: extends")
        return path
    candidates = [
        path for folder in catalog.folders("presets") if (path := folder / f"{base}.toml").is_file()
    ]
    if file.path.stem == base and any(_same(path, file.path) for path in candidates[:-1]):
        position = next(index for index, path in enumerate(candidates) if _same(path, file.path))
        return candidates[position + 1]
    if not candidates:
        hint = catalog.suggestion(base, names(), f"See them all: {COMMAND}")
        raise DsrunError(f"unknown preset {base!r}", where=f"{file.label}: extends", hint=hint)
    return candidates[0]


def _same(left: Path, right: Path) -> bool:
    return left == right or _real(left) == _real(right)


@lru_cache(maxsize=256)
def _real(path: Path) -> str:
    """The path without links, kept: a plan for several machines asks for each file many times."""
    return os.path.realpath(path)


def _label(path: Path) -> str:
    """presets/NAME.toml for what ships with dsrun, the whole path for everything else."""
    root = catalog.shipped_root() / "presets"
    full = Path(_real(path))
    return f"presets/{full.relative_to(root)}" if full.is_relative_to(root) else str(path)


def _problems(data: dict[str, Any], label: str) -> Iterator[Problem]:
    for key in data:
        if key not in KEYS:
            hint = catalog.suggestion(
                key, KEYS, f"A preset holds {', '.join(KEYS)}; DeepSpeed's keys go below [config]."
            )
            yield Problem(f"unknown key {key!r}", label, hint)
    if not isinstance(data.get("summary"), str) or not data["summary"].strip():
        yield Problem("has no summary", label, 'Say in a line what it is for: summary = "..."')
    if not isinstance(data.get("extends", ""), str):
        yield Problem(f"extends is not a name: {data['extends']!r}", label, 'extends = "zero2"')
    requires = data.get("requires", [])
    if not isinstance(requires, list) or any(name not in REQUIRABLE for name in requires):
        yield Problem(f"requires can't be {requires!r}", label, f"It is a list of: {', '.join(REQUIRABLE)}.")
    if "fsdp" in data:
        yield from fsdp.problems(data["fsdp"], label)
    if not isinstance(data.get("defaults", {}), dict):
        yield Problem("defaults is not a table", label, "Options of finetune's go below [defaults].")
    for section in ("config", "hf"):
        if not isinstance(data.get(section, {}), dict):
            yield Problem(f"{section} is not a table", label, f"[{section}.zero_optimization], for one.")
            continue
        for path, value in tree.leaves(data.get(section, {})):
            if isinstance(value, (datetime.date, datetime.time)):
                yield Problem(
                    f"a date is nothing for JSON: {value}", f"{label}: {section}.{path}", "Put it in quotes."
                )
            elif isinstance(value, float) and not math.isfinite(value):
                yield Problem(f"can't be {value}", f"{label}: {section}.{path}", "JSON has no such number.")

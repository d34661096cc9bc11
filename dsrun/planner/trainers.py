"""What other trainers do by default: the files in presets/trainers, as fields of a Setup.

A file has the trainer's name in words, the release that was read, the repositories whose published runs are its own,
and a table for each assumption: what it says, its source, and the fields that it sets. dsrun's own values follow from
the options of `dsrun finetune`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.setup import METHODS, Setup

KIND = "presets/trainers"
OWN = "dsrun"
STOCK = "hf"
"""The trainer that dsrun's own is compared with."""
WORTH_SAYING = 0.02
"""Share of a GPU's memory from which on an assumption is worth a line."""
UNDER_FSDP = ("fused_adam", "precision")
"""Fields that a preset has for DeepSpeed, and that the trainer decides under FSDP."""
OPTION_FIELDS: Mapping[str, tuple[str, ...]] = {
    "liger": ("fused_loss", "logits_bytes", "loss_tokens"), "tile_tokens": ("tile", "loss_tokens"),
    "packing": ("variable_lengths",), "activation_checkpointing": ("checkpointing", "activations_device"),
    "recompute_every": ("checkpointing",), "lora_dropout": ("lora_dropout",),
}  # fmt: skip
"""Option of `dsrun plan` -> the fields that it decides, so that a trainer's default doesn't."""
TEXTS = ("title", "release", "engine")
FIELDS = {field.name for field in dataclasses.fields(Setup)} - {"shape", "gpus", "nodes"}


@dataclass(frozen=True, slots=True)
class Assumption:
    """One thing that a trainer does by default."""

    name: str
    says: str
    """The thing in words, without a verb."""
    source: str
    fields: Mapping[str, Any]
    """Fields of a Setup and their values."""
    only: str = ""
    """The method that it is for; empty: each."""

    def holds(self, setup: Setup) -> bool:
        """Whether it is about such a set-up."""
        return self.only in ("", setup.method)


@dataclass(frozen=True, slots=True)
class TrainerDefaults:
    """Who trains."""

    name: str
    title: str
    release: str
    repositories: tuple[str, ...]
    assumptions: tuple[Assumption, ...]
    engine: str = ""
    """The one engine that it has; empty: DeepSpeed and FSDP."""

    @property
    def own(self) -> bool:
        return self.name == OWN

    def fields(self, setup: Setup, *, given: Collection[str] = ()) -> dict[str, Any]:
        """Its defaults as fields of a set-up like this one, without those that the user gave."""
        values: dict[str, Any] = {"engine": self.engine} if self.engine else {}
        for assumption in self.assumptions:
            if assumption.holds(setup):
                values |= {name: value for name, value in assumption.fields.items() if name not in given}
        return {name: value for name, value in values.items() if name not in UNDER_FSDP}

    def value(self, field: str) -> Any:
        """Its default for a field; None where it has none."""
        return next((one.fields[field] for one in self.assumptions if field in one.fields), None)

    def runs(self, division: Mapping[str, Any]) -> bool:
        """Whether it has the engine of a preset's fields."""
        return self.engine in ("", division.get("engine", "deepspeed"))

    def divided(self, division: Mapping[str, Any]) -> dict[str, Any]:
        """A preset's fields of a Setup (setup.zero_fields, fsdp_fields) with what the trainer decides there."""
        values = dict(division)
        if values.get("engine") == "fsdp":
            values |= {name: value for name in UNDER_FSDP if (value := self.value(name)) is not None}
        return values


@cache
def load(name: str) -> TrainerDefaults:
    """The trainer of that name. Raises DsrunError for one that there isn't, and for a file with faults."""
    path = catalog.find(KIND, name, "trainer", "dsrun plan --help")
    values = catalog.read_toml(path)
    problems = []
    assumptions = []
    for key, value in values.items():
        if isinstance(value, dict):
            fields = {field: value[field] for field in value.keys() - {"says", "source", "only"}}
            assumptions.append(
                Assumption(
                    key, str(value.get("says")), str(value.get("source")), fields, value.get("only", "")
                )
            )
            wrong = sorted(fields.keys() - FIELDS) + [
                part for part in ("says", "source") if not value.get(part)
            ]
            wrong += [] if value.get("only", "qlora") in METHODS else ["only"]
            problems += [
                Problem(f"{key}.{field} is missing or not a key of it", str(path)) for field in wrong
            ]
        elif key not in (*TEXTS, "repositories"):
            problems.append(Problem(f"{key} is not a key of a trainer", str(path)))
    problems += [Problem(f"{key} is missing", str(path)) for key in TEXTS[:2] if key not in values]
    if problems:
        raise DsrunError(problems)
    repositories = tuple(map(str, values.get("repositories", ())))
    texts = {key: str(values[key]) for key in TEXTS if key in values}
    return TrainerDefaults(name, repositories=repositories, assumptions=tuple(assumptions), **texts)


def fields_of(options: Collection[str]) -> set[str]:
    """The fields of a Setup that these options of `dsrun plan` decide."""
    return {field for option in options for field in OPTION_FIELDS.get(option, ())}


def of_source(source: str) -> TrainerDefaults | None:
    """The trainer whose repository a published run comes from; None where none is known."""
    lower = source.lower()
    trainers = (load(name) for name in catalog.files(KIND))
    return next(
        (one for one in trainers if any(lower.startswith(text.lower()) for text in one.repositories)), None
    )


@dataclass(frozen=True, slots=True)
class Consequence:
    """An assumption that changes a plan's figure."""

    assumption: Assumption
    more_bytes: float
    """Bytes that a GPU needs more with it than without; negative: less."""


def differences(
    setup: Setup, trainer: TrainerDefaults, other: Setup, *, given: Collection[str] = ()
) -> list[Consequence]:
    """The assumptions of a trainer that change a GPU's memory by WORTH_SAYING or more, the largest first.

    setup: a plan's, with or without them. other: the values without them. given: fields that the user gave.
    """
    found = []
    for assumption in trainer.assumptions:
        fields = {name: value for name, value in assumption.fields.items() if name not in given}
        if not fields or not assumption.holds(setup):
            continue
        if setup.engine != "fsdp":
            fields = {name: value for name, value in fields.items() if name not in UNDER_FSDP}
        without = {name: getattr(other, name) for name in fields}
        if "checkpointing" in fields and fields["checkpointing"] == without["checkpointing"]:
            without["checkpointing"] = int(not fields["checkpointing"])
        sizes = [gpu_memory(setup.changed(**values)).needed for values in (fields, without)]
        if abs(sizes[0] - sizes[1]) >= WORTH_SAYING * sizes[1]:
            found.append(Consequence(assumption, sizes[0] - sizes[1]))
    return sorted(found, key=lambda difference: -abs(difference.more_bytes))

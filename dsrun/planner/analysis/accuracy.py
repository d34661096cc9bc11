"""How far the planner was off, by class: presets/accuracy/published.toml, which bench/planner.py writes.

A class is what is trained and on how many ranks, for memory, and the kind of network, for seconds. Where no published
run stands behind one, a plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dsrun import catalog
from dsrun.planner.setup import Setup

KIND = "presets/accuracy"
NAME = "published"
FEW = 3
"""Published runs below which a class counts as not measured."""
METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of a class of runs."""

    runs: int
    median: float
    """The median error: for memory its relative size, for seconds the factor, up or down."""
    p90: float
    """Nine of ten runs are nearer."""


def memory_class(setup: Setup) -> str:
    """The class of a set-up's memory."""
    ranks = "one GPU" if setup.gpus == 1 else "several GPUs"
    network = ", mixture of experts" if setup.shape.experts is not None else ""
    return f"{METHODS[setup.method]}, {ranks}{network}"


def seconds_class(setup: Setup) -> str:
    """The class of a set-up's seconds."""
    if setup.shape.experts is None:
        return "dense networks, several hosts" if setup.nodes > 1 else "dense networks, one host"
    loop = "experts in a loop" if setup.looped_experts else "experts in grouped products"
    return f"mixtures, {loop}"


@cache
def table() -> dict[str, dict[str, Accuracy]]:
    """ "memory" and "seconds" -> class -> its errors; empty without the file."""
    path = catalog.files(KIND).get(NAME)
    values = catalog.read_toml(path) if path else {}
    return {
        part: {name: Accuracy(**row) for name, row in values.get(part, {}).items()}
        for part in ("memory", "seconds")
    }


def known(part: str, name: str) -> Accuracy | None:
    """The errors of a class; None where too few published runs stand behind it."""
    found = table()[part].get(name)
    return found if found is not None and found.runs >= FEW else None

"""Other trainers: what each of their arguments is here, and runs made of their files.

A trainer is a module with a `Trainer`: a table of its arguments with their counterparts, and how its files are told.
From these tables come the run files of `dsrun import`, the answers to unknown options, and the pages for those who
change over. `arguments.json` has the names and defaults that each trainer's own classes declare (tools/trainers).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsrun.trainers.counterparts import ForeignTrainer

NAMES = ("llama_factory", "axolotl", "ms_swift", "trl", "hf_trainer", "torchtune", "accelerate", "launchers")
"""Modules of trainers, in the order in which a name that several have is looked up."""


@cache
def trainers() -> dict[str, ForeignTrainer]:
    """Every trainer by its name."""
    made = (import_module(f"dsrun.trainers.tables.{name}").TRAINER for name in NAMES)
    return {trainer.name: trainer for trainer in made}

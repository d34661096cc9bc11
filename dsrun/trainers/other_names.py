"""Other trainers' and launchers' names for options of dsrun: an unknown option is answered with ours, or with why there
is none. The names are those of the trainers' tables, and some of nobody's in particular."""

from __future__ import annotations

from collections.abc import Iterable

from dsrun.trainers import trainers
from dsrun.trainers.counterparts import DIFFERS, REFUSED

OTHER_NAMES = {
    "batch_size": "global_batch",
    "bf16": "precision",
    "data": "train_file",
    "data_path": "train_file",
    "dataset": "train_file",
    "fp16": "precision",
    "main_process_port": "master_port",
    "mixed_precision": "precision",
    "model_name_or_path": "model_path",
    "nnodes": "nodes",
    "num_machines": "nodes",
    "num_nodes": "nodes",
    "num_processes": "gpus",
    "resume_from_checkpoint": "resume",
    "tensor_parallel_size": "tp",
    "tensorboard": "log",
    "train_batch_size": "global_batch",
    "wandb": "log",
}
"""A name, with underscores -> the name of a field in dsrun/options: names that no table has, or has for a file only."""


def ours(option: str, fields: Iterable[str]) -> str | None:
    """The field of a command that an unknown option means; None where no tool has an option of that name."""
    name, known = _name(option), set(fields)
    candidates = [OTHER_NAMES.get(name), name, *_in_tables(name)]
    return next((field for field in candidates if field in known), None)


def _name(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _in_tables(name: str) -> Iterable[str | None]:
    for trainer in trainers().values():
        row = next((row for row in trainer.rows if name in row.keys), None)
        if row is not None:
            yield row.option_of(name)


def why_none(option: str) -> str:
    """Why dsrun has no counterpart of another trainer's option; empty where nobody has an option of that name."""
    name = _name(option)
    for trainer in trainers().values():
        row = trainer.row(name) if name in trainer.known else None
        if row is not None and row.text and not row.options:
            says = "has no counterpart" if row.kind in (DIFFERS, REFUSED) else "needs none here"
            return f"{trainer.title}'s {name} {says}: {row.text}."
    return ""

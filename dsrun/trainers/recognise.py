"""What a file is, by its keys: a trainer's, or something else that people have lying about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dsrun.trainers import arguments, trainers
from dsrun.trainers.counterparts import ForeignTrainer


class Other(NamedTuple):
    """A kind of file that is no trainer's."""

    title: str
    keys: tuple[str, ...]
    """Keys of which all are there."""
    without: tuple[str, ...] = ()
    """Keys of which none is there."""


TRAINING = ("stage", "do_train", "dataset", "learning_rate", "per_device_train_batch_size")
"""Keys of LLaMA-Factory's of which a training has one at least."""
OTHERS = (
    Other("a Kubernetes manifest", ("apiVersion", "kind")),
    Other("mkdocs' site", ("site_name",)),
    Other("a tsconfig", ("compilerOptions",)),
    Other("a package.json", ("name", "version", "dependencies")),
    Other("a model's config.json", ("architectures", "model_type")),
    Other("a model's config.json", ("model_type", "hidden_size")),
    Other("a tokenizer's config", ("tokenizer_class",)),
    Other("an adapter's config", ("peft_type",)),
    Other("a generation config", ("eos_token_id", "transformers_version")),
    Other("a docker compose file", ("services",)),
    Other("a GitHub workflow", ("jobs", "on")),
    Other("a GitHub workflow", ("jobs", "True")),
    Other("a conda environment", ("channels", "dependencies")),
    Other("a pre-commit config", ("repos",)),
    Other("a dataset_info.json of LLaMA-Factory's", ("identity",)),
    Other("LLaMA-Factory's config of its second form (v1)", ("model", "model_class")),
    Other("LLaMA-Factory's config of its second form (v1)", ("dist_config", "kernel_config")),
    Other(
        "a config of LLaMA-Factory's chat, not of a training", ("template", "model_name_or_path"), TRAINING
    ),
    Other("a job of a cloud for axolotl", ("provider",)),
    Other("a job of a cloud for axolotl", ("secrets", "gpu")),
)
LEAST = 2
"""Telling arguments by which a file is known without a doubt."""
MOSTLY = 0.5
"""Share of a file's keys that a trainer has, at least, where fewer arguments tell it."""


def recognised(values: Mapping[str, Any]) -> ForeignTrainer | None:
    """The trainer whose arguments these are, None for nobody's: the one that has most of them, and of equals the one
    that more of them tell of."""
    best: tuple[tuple[float, int], ForeignTrainer] | None = None
    for trainer in trainers().values():
        given = trainer.prepare(dict(values))
        telling = sum(key in given for key in trainer.telling)
        known = arguments.declared(trainer.name)
        share = sum(key in known or _written_out(trainer, key) for key in given) / max(1, len(given))
        if telling >= LEAST or (telling and share >= MOSTLY):
            score = share, telling  # the Trainer's own arguments are in all that are built on it
            if best is None or score > best[0]:
                best = (score, trainer)
    return best[1] if best else None


def _written_out(trainer: ForeignTrainer, key: str) -> bool:
    return any(key in row.keys for row in trainer.rows)


def other(values: Mapping[str, Any]) -> str:
    """What such a file is, in words, where it is no trainer's; empty where nobody knows."""
    return next(
        (
            kind.title
            for kind in OTHERS
            if set(kind.keys) <= set(values) and not set(kind.without) & set(values)
        ),
        "",
    )

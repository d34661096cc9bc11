"""The models that a trained text part is written as: together with the rest of its checkpoint, or by itself.

The rest is read from the checkpoint once more, in its files' own type: so it comes out bit by bit as it went in,
whatever the run computed with.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsrun.job.job import Job
from dsrun.training.engines import backend_of
from dsrun.training.models.load import whole_checkpoint
from dsrun.training.models.text_part import class_of, ignored, text_names, towers, whole_class
from dsrun.training.models.weights import Reader, Skeleton, listed

PROCESSORS = re.compile(r".*processor.*\.json|chat_template\.json")
"""The files of a checkpoint that turn images, videos and sound into a model's inputs."""
Weights = Callable[[Sequence[str]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Composed:
    """A model to write. Its own values don't matter, only its config, its class and its names."""

    model: Any
    shards: list[list[str]]
    """Names of its weights, shard by shard; those that are trained in the order in which they are asked for."""
    weights: Weights
    """The weights of a shard, whole, on the CPU."""


def has_more(job: Job) -> bool:
    """Whether a job's checkpoint has more than its text part."""
    if job.model.source == "chatglm":
        return False
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.prepared.model_dir)
    return config.get_text_config() is not config and whole_class(config) is not None


def with_the_rest(
    module: Any, weights: Weights, job: Job, shards: Callable[[Any], list[list[str]]]
) -> Composed:
    """The whole checkpoint with a trained text part. shards: `export.shards`, of this module or of towers alone.

    module: as it was trained, with its towers or without any; weights: of its text part.
    """
    with backend_of(job).unaware():  # this rank reads it alone
        whole = whole_checkpoint(Path(job.prepared.model_dir))
    whole.generation_config = module.generation_config
    beside = towers(whole)
    state = whole.state_dict()
    names = {name: name for name in state} if type(module) is type(whole) else text_names(whole, module)
    inverse: dict[str, str] = {}
    for name, trained in names.items():
        inverse.setdefault(trained, name)
    text = [[inverse[name] for name in part] for part in shards(module)]
    there = {name for part in text for name in part} | names.keys() - beside.keys()
    rest = [name for name in state if name in beside or name not in there]

    def wanted(part: Sequence[str]) -> dict[str, torch.Tensor]:
        if part[0] not in names or part[0] in beside:
            return {name: state[name] for name in part}
        trained = weights([names[name] for name in part])
        return {name: trained[names[name]] for name in part if names[name] in trained}

    return Composed(whole, [*text, *([rest] if rest else [])], wanted)


def by_itself(module: Any, weights: Weights, job: Job, shards: Callable[[Any], list[list[str]]]) -> Composed:
    """The text part of a trained module as a model of its own class. Raises DsrunError where the two don't agree."""
    config = module.config.get_text_config()
    if config is module.config:
        return Composed(module, shards(module), weights)
    config = copy.deepcopy(config)
    config.tie_word_embeddings = module.get_output_embeddings().weight is module.get_input_embeddings().weight
    kind, config = class_of(config)
    with backend_of(job).unaware():
        text = Skeleton(config, module.dtype, kind=kind).model
    text.generation_config = module.generation_config
    names = text_names(module, text)

    def renamed(part: Sequence[str]) -> dict[str, torch.Tensor]:
        inverse = {names[name]: name for name in shards_of[tuple(part)]}
        trained = weights(list(inverse.values()))
        return {name: trained[inverse[name]] for name in part if inverse[name] in trained}

    parts = shards(module)
    own = [[names[name] for name in part] for part in parts]
    shards_of = {tuple(mine): part for mine, part in zip(own, parts, strict=True)}
    return Composed(text, own, renamed)


def copy_rest(source: Path, whole: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Copy the files of processors that a folder lacks; returns the stored weights that the class leaves aside."""
    for path in sorted(source.iterdir()):
        if PROCESSORS.fullmatch(path.name) and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    stored, reader = listed(source), Reader()
    aside: Mapping[str, Any] = {name: stored[name] for name in ignored(type(whole), stored)}
    return {name: reader.view(place).clone() for name, place in aside.items()}

"""The planner's shape of what is trained: a model of text alone, or the text part of a checkpoint with more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import DAMAGE
from dsrun.models import model_files, multimodal, resolve, transformers_code
from dsrun.planner.shape import Shape, from_config

if TYPE_CHECKING:
    from dsrun.job.job import ModelSpec

TIED = "tie_word_embeddings"


def shape_of(
    config: Mapping[str, Any], where: str, parameters: int | None = None, folder: Path | None = None
) -> Shape:
    """The shape of a config's network, with the towers that are loaded beside it among its parameters.

    parameters: those of the whole checkpoint, where they are known; else folder's weights are counted, by their
    headers. Towers that neither says are left out. Raises as `from_config`.
    """
    whole = multimodal.completed(config)
    text = multimodal.text_config(whole)
    if text is whole:
        return from_config(whole, where, parameters)
    way = multimodal.way(whole)
    shape = from_config(text if way == multimodal.UNLOADED else {**text, TIED: tied(whole, text)}, where)
    if way != multimodal.FROZEN:
        return shape
    elements = parameters or (stored_elements(folder) if folder else 0)
    towers = max(0, elements - shape.parameters)
    return replace(shape, parameters=shape.parameters + towers, frozen=towers)


def shape_of_model(spec: ModelSpec) -> Shape:
    """The shape of a fine-tune's model. Raises as `from_config`."""
    named = model_files.find(spec.name)
    parameters = model_files.load_model_file(spec.name).parameters if named else None
    folder = resolve.folder_of(spec)
    config = resolve.architecture(spec)
    if multimodal.way(config) is None:
        return from_config(config, spec.name)
    return shape_of(config, spec.name, parameters if folder is None else None, folder)


def tied(whole: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's own class has one weight for embedding and output: by its outer config, where that or its
    class says so."""
    if TIED in whole:
        return bool(whole[TIED])
    default = transformers_code.config_defaults(str(whole.get("model_type"))).get(TIED)
    return bool(text.get(TIED) if default is None else default or text.get(TIED))


def stored_elements(folder: Path) -> int:
    """Elements of all weights in a folder's safetensors files; 0 where there is none, or one that can't be read."""
    try:
        headers = [resolve.header_of(file) for file in sorted(folder.glob("*.safetensors"))]
        return sum(math.prod(entry["shape"]) for header in headers for _, entry in header)
    except (OSError, *DAMAGE):
        return 0

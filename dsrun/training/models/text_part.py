"""The text part of a model that reads images, videos or sound, too: the class that computes it, its weights, its loss.

No family is named here: `class_of` asks transformers' tables, and transformers' own accessors say which of a model's
modules are its decoder, embedding and output layer. What is in none of them are its towers.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dsrun.errors import DsrunError
from dsrun.training.loss import routers_weight

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Inputs that mark the tokens which stand for images: 0 is text."""
REQUIRED = "`{name}` is required"
"""transformers' words where a class wants such an input in training."""


def class_of(config: Any) -> tuple[Any, Any]:
    """transformers' class that computes a config's text, and the config that it is made with.

    The class of causal language models where there is one. It may be that of the text part alone, made with that
    part's config. Else the checkpoint's own class, which computes text beside the rest. Raises DsrunError for neither.
    """
    kind = _named(config, "MODEL_FOR_CAUSAL_LM_MAPPING") or whole_class(config)
    if kind is None:
        what = f"transformers has no language model for model_type {config.model_type!r}"
        raise DsrunError(what, where="config.json")
    text = config.get_text_config()
    return kind, text if text is not config and kind.config_class is type(text) else config


def whole_class(config: Any) -> Any:
    """transformers' class for all of a checkpoint that has more than text; None for a model of text alone."""
    names = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING")
    return next(filter(None, (_named(config, name) for name in names)), None)


def _named(config: Any, table: str) -> Any:
    """The class that one of transformers' tables has for a config; None where it has none."""
    from transformers.models.auto import modeling_auto

    kind = getattr(modeling_auto, table, {}).get(type(config), None)
    return kind[0] if isinstance(kind, tuple) else kind


def ignored(kind: Any, names: Iterable[str]) -> list[str]:
    """The stored weights that a class leaves aside without a word, such as layers that only predict further ahead."""
    patterns = [*(getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def towers(model: Any) -> dict[str, torch.nn.Parameter]:
    """The weights of a model that are no part of its text part, by their names; empty for a model of text alone."""
    if model.config.get_text_config() is model.config:
        return {}
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    text = {id(weight) for part in parts if part is not None for weight in part.parameters()}
    return {name: weight for name, weight in model.named_parameters() if id(weight) not in text}


def text_path(model: Any) -> str:
    """The path of a model's decoder."""
    return _path(model, model.get_decoder())


def take_text(model: Any) -> None:
    """Have a model with towers trained on text: its towers stay as they are, and its loss is that of text models.

    A class's own loss may count the targets otherwise than a causal language model's, and know no shifted labels.
    """
    if model.config.get_text_config() is model.config:
        return
    for weight in towers(model).values():
        weight.requires_grad_(False)
    forward, vocabulary = model.forward, model.config.get_text_config().vocab_size
    required = _required_types(model)

    @functools.wraps(forward)
    def with_text_loss(
        *args: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **rest: Any,
    ) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss

        tokens = rest.get("input_ids", args[0] if args else None)
        if model.training and torch.is_tensor(tokens):
            rest |= {name: torch.zeros_like(tokens) for name in required if rest.get(name) is None}
        output = forward(*args, **rest)
        if labels is not None:
            output.loss = ForCausalLMLoss(
                output.logits,
                labels,
                vocabulary,
                num_items_in_batch=num_items_in_batch,
                shift_labels=shift_labels,
            )
            routers: torch.Tensor | None = getattr(output, "aux_loss", None)
            if routers is not None:
                output.loss = output.loss + routers_weight(model.config) * routers
        return output

    model.forward = with_text_loss


def _required_types(model: Any) -> list[str]:
    """The marks of tokens without which a model's class refuses to be trained, by its source."""
    source = inspect.getsource(sys.modules[type(model).__module__])
    taken = inspect.signature(model.forward).parameters
    return [name for name in TOKEN_TYPES if name in taken and REQUIRED.format(name=name) in source]


def text_names(whole: Any, text: Any) -> dict[str, str]:
    """The name of each weight of a text part in the whole model -> its name in a model of that part alone.

    whole, text: models, of shapes alone if need be. The whole one's decoder is looked for in the other by its class
    (a text model's own accessor may name the model itself). Raises
    DsrunError where a weight of one has no counterpart of its shape in the other.
    """
    pairs: dict[str, str] = {}
    decoder = whole.get_decoder()
    alike = next((part for part in text.modules() if type(part) is type(decoder)), None)
    for one, other in ((decoder, alike), (whole.get_output_embeddings(), text.get_output_embeddings())):
        if one is None or other is None:
            continue
        before, after = (f"{path}." if path else "" for path in (_path(whole, one), _path(text, other)))
        names = (name for name in _shapes(whole) if name.startswith(before))
        pairs |= {name: after + name.removeprefix(before) for name in names}
    wanted, stored = _shapes(text), _shapes(whole)
    odd = sorted(
        {name for name in wanted if name not in pairs.values()}
        | {name for name, other in pairs.items() if wanted.get(other) != stored.get(name)}
    )
    if odd:
        what = f"{type(text).__name__} is not the text part of {type(whole).__name__}: {', '.join(odd[:3])}"
        raise DsrunError(what, where="config.json")
    return pairs


def _path(model: Any, module: Any) -> str:
    return str(next(name for name, part in model.named_modules() if part is module))


def _shapes(model: Any) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a model's weights, whole also where ZeRO-3 has taken them apart."""
    weights = model.state_dict(keep_vars=True).items()
    return {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in weights}

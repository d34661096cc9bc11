"""The text part of a checkpoint that reads images, videos or sound, too: whether it can be trained by itself, and how.

Nothing here knows a family. The installed transformers says which class a checkpoint is loaded with:

- Its table of causal language models may name a class of the text part alone for the whole checkpoint's model_type
  (Qwen3.5): the rest is then not loaded (UNLOADED).
- Else the checkpoint's own class is taken (Gemma 3, Qwen3-VL): it computes on text where its forward needs nothing
  else. The rest, its towers, is loaded and stays as it is (FROZEN).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsrun.models import transformers_code
from dsrun.models.transformers_code import TEXT_CONFIG

UNLOADED, FROZEN = "unloaded", "frozen"
PARTS = ("_config", "_encoder", "_tower")
"""Endings of the keys of a config's other parts."""
NO_PARTS = {TEXT_CONFIG, "quantization_config", "compression_config"}
"""Keys with such an ending that are no tower's."""
SIZE = "hidden_size"
"""A size that every text part has; where it stands says which dictionary is the text part's."""


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's config with a whole text part: in a dictionary of its own, and with the defaults of transformers.

    Older files have the text part's sizes beside the other parts (Qwen2.5-VL's), and most leave out what transformers
    has as a default (Gemma 3's). The config of a model of text alone is returned as it is.
    """
    model_type = config.get("model_type")
    own = config.get(TEXT_CONFIG)
    if not isinstance(model_type, str) or not _has_towers(config):
        return dict(config)
    kind = transformers_code.text_type(model_type)
    if not isinstance(own, Mapping):
        if kind is None or SIZE not in config:
            return dict(config)
        own = {key: value for key, value in config.items() if not key.endswith(PARTS)}
        own["model_type"] = kind
    kind = own.get("model_type") or kind
    if not isinstance(kind, str):
        return dict(config)
    # A default under one name must not stand beside a value under another name of the same thing.
    aliases = [names for names in transformers_code.config_aliases(kind) if names & own.keys()]
    given = {name for names in aliases for name in names}
    defaults = {
        key: value for key, value in transformers_code.config_defaults(kind).items() if key not in given
    }
    return {**config, TEXT_CONFIG: {**defaults, "model_type": kind, **own}}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of what is trained: a checkpoint's text part, or all of a model of text alone."""
    whole = completed(config)
    part = whole.get(TEXT_CONFIG)
    return part if isinstance(part, Mapping) and _has_towers(whole) else whole


def way(config: Mapping[str, Any]) -> str | None:
    """The way in which a checkpoint's text part is trained, UNLOADED or FROZEN; None where it can't be, or where there
    is nothing beside it."""
    model_type = str(config.get("model_type"))
    text = text_config(config)
    if (
        text is config
        or SIZE not in text
        or text.get("model_type") == model_type
        or text.get("is_encoder_decoder")
    ):
        return None
    causal, whole = transformers_code.causal_class(model_type), transformers_code.multimodal_class(model_type)
    if causal and whole and causal != whole:
        return UNLOADED
    name = causal or whole
    return FROZEN if name and not transformers_code.required_inputs(model_type, name) else None


def no_text_model(config: Mapping[str, Any]) -> str:
    """Why a checkpoint's text part can't be written as a model by itself, in words; empty where it can."""
    kind = str(text_config(config).get("model_type"))
    if way(config) is None:
        return "is a model of text alone"
    if transformers_code.causal_class(kind):
        return ""
    return f"has a text part ({kind}) that the installed transformers has no class of its own for"


def _has_towers(config: Mapping[str, Any]) -> bool:
    """Whether a config has a dictionary for a part beside the text's."""
    return any(
        key.endswith(PARTS) and key not in NO_PARTS and isinstance(value, Mapping)
        for key, value in config.items()
    )

"""P-Tuning v2 (arXiv:2110.07602) as ChatGLM2 does it: trained keys and values that every token sees, in every layer.

PEFT's prefix tuning is not used: it counts the text's positions from the prefix's end, so its logits are not
ChatGLM2's, and no official checkpoint could be trained further. Here the prefix joins the keys and values where
attention is computed, and not through the cache of past ones. So positions stay those of the text, it survives gradient
checkpointing (which drops caches), and each packed example sees it as it would in a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsrun.errors import DsrunError
from dsrun.models.transformers_code import CAPPED
from dsrun.training import finite
from dsrun.training.models.weights import open_shard

ATTENTION = "dsrun_prefix"
"""The name under which transformers knows this attention."""
PUBLISHED = "transformer.prefix_encoder."
EMBEDDING = "embedding.weight"
PROJECTION = ("trans.0.weight", "trans.0.bias", "trans.2.weight", "trans.2.bias")
FILE = "pytorch_model.bin"


class Prefix(nn.Module):  # type: ignore[misc]
    """One layer's keys and values: weight is [positions, 2 * groups * head size], the keys first, not rotated."""

    def __init__(self, positions: int, groups: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.groups, self.head_dim, self.dropout = groups, head_dim, dropout
        # Drawn as torch draws an embedding: in ChatGLM2 the prefix is one.
        self.weight = nn.Parameter(torch.randn(positions, 2 * groups * head_dim))

    def forward(self, rows: int) -> torch.Tensor:
        """Keys and values for a batch of `rows`: [2, rows, groups, positions, head size]."""
        split = self.weight.view(-1, 2, self.groups, self.head_dim).permute(1, 2, 0, 3)
        return nn.functional.dropout(
            split[:, None].expand(-1, rows, -1, -1, -1), self.dropout, training=self.training
        )


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """torch's attention with the layer's prefix before its keys and values; as transformers calls attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    before = module.prefix(len(query)).to(key.dtype)
    key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
    length, total, positions = query.shape[2], key.shape[2], before.shape[3]
    if attention_mask is not None:  # booleans, or numbers that are added to the scores
        seen = True if attention_mask.dtype == torch.bool else 0.0
        attention_mask = nn.functional.pad(attention_mask, (positions, 0), value=seen)
    elif length > 1:
        whole = torch.ones(length, total, dtype=torch.bool, device=key.device)
        attention_mask = whole.tril(total - length)[None, None]
    options["is_causal"] = False  # the mask says it
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def add(model: Any, positions: int, dropout: float) -> None:
    """Freeze the model, and give every layer a prefix to be trained.

    Raises DsrunError for a model whose attention can't be replaced.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    layers = layers_of(model)
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model.set_attn_implementation(ATTENTION)
    model.requires_grad_(False)
    groups, head_dim = sizes(model.config)
    for layer in layers:
        weight = next(layer.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else torch.float32
        layer.prefix = Prefix(positions, groups, head_dim, dropout).to(weight.device, dtype)
        layer.prefix.train(layer.training)


def layers_of(model: Any) -> list[Any]:
    """The model's attention modules, first to last. Raises DsrunError where they aren't found."""
    layers = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "is_causal")
    ]
    layers.sort(key=lambda module: module.layer_idx)
    numbers = [module.layer_idx for module in layers]
    text = model.config.get_text_config()
    known = getattr(model, "_supports_attention_backend", False) and text.model_type not in CAPPED
    if not known or numbers != list(range(text.num_hidden_layers)):
        what = f"{type(model).__name__} has no attention that a prefix can be put before"
        raise DsrunError(what, where="--method ptuning", hint="Use --method lora.")
    return layers


def sizes(config: Any) -> tuple[int, int]:
    """The number of key-value groups, and the size of a head."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    return (
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def fill(model: Any, whole: torch.Tensor, where: Path) -> None:
    """Set every layer's prefix from a whole one. Raises DsrunError where that has another shape."""
    parts = [layer.prefix.weight for layer in layers_of(model)]
    positions, width = parts[0].shape
    if tuple(whole.shape) != (positions, width * len(parts)):
        what = f"has shape {list(whole.shape)}, and this model's is {[positions, width * len(parts)]}"
        hint = "Was it trained on this model? The first number is --pre-seq-len."
        raise DsrunError(what, where=str(where), hint=hint)
    with torch.no_grad():
        for part, values in zip(parts, whole.split(width, dim=1), strict=True):
            part.copy_(values)


def joined(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The whole prefix, [positions, layers * 2 * groups * head size], of the layers' by their names in the model."""
    import re

    layers = ((re.search(r"\.(\d+)\.\w+\.prefix\.weight$", name), tensor) for name, tensor in weights.items())
    numbered = {int(layer[1]): tensor for layer, tensor in layers if layer}
    return torch.cat([numbered[number] for number in sorted(numbered)], dim=1)


def read(path: Path) -> torch.Tensor:
    """The whole prefix in a P-Tuning checkpoint of ChatGLM2's script, or of ours: [positions, ...], fp32 or as it is.

    A projection is computed here, so that what the layers would have got from it is left. No code in the file
    runs. Raises DsrunError where there is no prefix.
    """
    tensors = open_shard(path)
    known = {
        name.removeprefix(PUBLISHED).removeprefix("prefix_encoder."): tensor
        for name, tensor in tensors.items()
        if name.startswith((PUBLISHED, "prefix_encoder.")) or name in (EMBEDDING, *PROJECTION)
    }
    unknown = sorted(known.keys() - {EMBEDDING, *PROJECTION})
    if EMBEDDING not in known or unknown:
        hint = f"ChatGLM2's script writes {PUBLISHED}{EMBEDDING} into {FILE}."
        what = f"holds {unknown[0]}, which no prefix has" if unknown else "holds no P-Tuning prefix"
        raise DsrunError(what, where=str(path), hint=hint)
    for name, tensor in known.items():
        finite.check(tensor, name, str(path))
    whole = known[EMBEDDING].clone()
    projection = [name for name in PROJECTION if name in known]
    if not projection:
        return whole
    if len(projection) < len(PROJECTION):
        missing = sorted(set(PROJECTION) - set(projection))
        raise DsrunError(f"lacks a part of its projection: {', '.join(missing)}", where=str(path))
    into, into_bias, out, out_bias = (known[name].float() for name in PROJECTION)
    hidden = torch.tanh(nn.functional.linear(whole.float(), into, into_bias))
    return nn.functional.linear(hidden, out, out_bias)


def write(weights: Mapping[str, torch.Tensor], folder: Path) -> int:
    """Write a trained prefix as ChatGLM2's own script does; returns its positions."""
    whole = joined(weights).contiguous()
    torch.save({PUBLISHED + EMBEDDING: whole}, folder / FILE)
    return len(whole)

"""Attention over packed examples one after the other: no mask, no work across their borders, and no package to install.

On GPUs from Ampere on, in 16 bits, it is the kernel for sequences of unequal length that comes with torch
(`torch.nn.attention.varlen`, flash-attn's inside). Everywhere else each example goes through torch's SDPA by itself,
which computes the same; that is slow for many short examples, and for CPUs and older GPUs a mask is the default.

transformers calls it by its name once `register` has run. `packing.borders` makes the arguments that keep examples
apart.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import nn

from dsrun.models.transformers_code import SDPA
from dsrun.training.models.text_part import class_of

ATTENTION = "dsrun_varlen"
"""The name under which transformers knows this attention."""
AMPERE = (8, 0)
"""The first GPUs that torch's kernel, like flash-attn 2, is written for: not V100 and T4."""
HALF = (torch.float16, torch.bfloat16)
HEAD_DIM = 256
"""The kernel's largest head."""


def register() -> str:
    """Make transformers know the attention; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask)
    return ATTENTION


@functools.cache
def kernel() -> Any:
    """torch's `varlen_attn`; None for a torch without it (before 2.10)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    """The names that a kernel takes. torch 2.10 has is_causal; 2.11 scale and window_size in its place; 2.12 more."""
    return frozenset(inspect.signature(function).parameters)


def _computes(query: torch.Tensor, scaling: float | None, window: int | None) -> bool:
    """Whether the kernel has this scale and window: that of torch 2.10 takes neither."""
    if {"scale", "window_size"} <= _parameters(kernel()):
        return True
    return window is None and (scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5))


def has_kernel(dtype: torch.dtype) -> bool:
    """Whether this process's GPU computes with the kernel in a type."""
    if dtype not in HALF or not torch.cuda.is_available() or kernel() is None:
        return False
    return bool(torch.cuda.get_device_capability() >= AMPERE)


def refuses(config: Any) -> str:
    """Why a network can't be computed with it, by its transformers config; empty where it can."""
    (kind, _), text = class_of(config), config.get_text_config()
    # Before the next: some versions of transformers hand the cap over to an attention from outside.
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return f"{text.model_type} caps its attention's scores"
    if not getattr(kind, "_supports_attention_backend", False) or not getattr(kind, SDPA, False):
        return f"transformers' {text.model_type} takes no attention from outside"
    if getattr(text, "attention_chunk_size", None) is not None:
        return f"{text.model_type} attends in chunks"
    return ""


def mask(batch_size: int, kv_length: int, **options: Any) -> torch.Tensor | None:
    """transformers' `sdpa_mask`; None for one sequence without padding, whose borders `attend` gets as arguments."""
    from transformers.masking_utils import sdpa_mask

    # transformers before 5.4 hands on the queries' positions, later ones their number.
    queries = options["q_length"] if "q_length" in options else len(options["cache_position"])
    if batch_size == 1 and queries == kv_length and options.get("attention_mask") is None:
        return None
    return sdpa_mask(batch_size=batch_size, kv_length=kv_length, **options)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    example_lengths: tuple[int, ...] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, as transformers calls it: query [rows, heads, tokens, head], the answer [rows, tokens, ...].

    cu_seq_lens_q, max_length_q, example_lengths: of `packing.borders`; without them a row is one example.
    """
    if unknown := [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]:
        raise ValueError(f"this attention doesn't take {unknown[0]}")
    rows, _, tokens, head = query.shape
    # With a mask, with several rows, or with keys from a cache (answers) there are no borders: torch's SDPA, as always.
    if attention_mask is not None or rows > 1 or key.shape[2] != tokens:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options.pop("is_causal", None)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    lengths = example_lengths or (tokens,)
    window = sliding_window if sliding_window and sliding_window < (max_length_q or tokens) else None
    on_gpu = not dropout and query.is_cuda and head <= HEAD_DIM and has_kernel(query.dtype)
    if on_gpu and _computes(query, scaling, window):
        if cu_seq_lens_q is None:
            cu_seq_lens_q = torch.tensor([0, tokens], dtype=torch.int32, device=query.device)
        return _in_one((query, key, value), cu_seq_lens_q, max_length_q or tokens, scaling, window), None
    split = (tensor.split(lengths, dim=2) for tensor in (query, key, value))
    parts = [_alone(example, scaling, dropout, window) for example in zip(*split, strict=True)]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


Three = tuple[torch.Tensor, ...]
"""Query, key and value: each [1, heads, tokens, head]."""


def _in_one(
    three: Three, borders: torch.Tensor, longest: int, scaling: float | None, window: int | None
) -> torch.Tensor:
    """All examples by torch's kernel, which takes [tokens, heads, head]: [1, tokens, heads, head]."""
    query, key, value = three
    width, head = value.shape[-1], query.shape[-1]
    if width < head:  # in multi-head latent attention; the kernel wants values as wide as keys
        value = nn.functional.pad(value, (0, head - width))
    takes = _parameters(kernel())
    more: dict[str, Any] = {"is_causal": True}
    if "window_size" in takes:
        more = {"scale": scaling, "window_size": (window - 1 if window else -1, 0)}
    if "enable_gqa" in takes:  # the kernels before it take fewer heads of keys and values unasked
        more["enable_gqa"] = query.shape[1] != key.shape[1]
    output = kernel()(
        *(part[0].transpose(0, 1) for part in (query, key, value)), borders, borders, longest, longest, **more
    )
    return output[None, ..., :width]


def _alone(three: Three, scaling: float | None, dropout: float, window: int | None) -> torch.Tensor:
    """One example by torch's SDPA: [1, heads, tokens, head]."""
    query, key, _ = three
    tokens, seen = query.shape[2], None
    if window and tokens > window:
        whole = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        seen = whole.tril().triu(1 - window)
    return nn.functional.scaled_dot_product_attention(
        *three, attn_mask=seen, dropout_p=dropout, scale=scaling,
        is_causal=seen is None, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip

"""What answering needs: weights in some width, and the cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.planner.gpu_memory import GIB, untracked_gib
from dsrun.planner.setup import QUANTIZED
from dsrun.planner.shape import Shape

WIDTHS: dict[str, float] = {"fp32": 4, "16-bit": 2, "int8": QUANTIZED["int8"], "int4": QUANTIZED["nf4"]}
"""Bytes of a weight. The embedding and the output weights stay in 16 bits where the others are quantized."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Bytes on each GPU."""

    width: str
    """A key of WIDTHS."""
    terms: dict[str, float]
    """weights, cache (keys and values), working (memory)."""
    total: float
    """With CUDA's context."""


def inference(shape: Shape, width: str, *, seq_len: int, batch: int = 1, gpus: int = 1) -> Inference:
    """The memory of answering: `batch` conversations of seq_len tokens each, the model sharded among the GPUs.

    The cache is 2 x layers x kv_heads x head_dim elements a token, in 16 bits (fp32: in 32); of latent attention the
    narrow vector that keys and values come from. Working memory is one
    block's activations of a whole prompt and the logits of its last token (transformers asks for those only).
    """
    element = 4 if width == "fp32" else 2
    # Embedding and output weights, for quantized weights in 16 bits.
    ends = min(shape.ends, shape.parameters) if width in ("int8", "int4") else 0
    tokens = seq_len * batch
    cache = float(shape.layers * shape.cached_width * element * tokens)
    working = float(element * tokens * (4 * shape.hidden + 2 * shape.intermediate) + 4 * batch * shape.vocab)
    weights = WIDTHS[width] * (shape.parameters - ends) + 2 * ends
    terms = {"weights": weights / gpus, "cache": cache / gpus, "working": working}
    return Inference(width, terms, sum(terms.values()) + untracked_gib(gpus) * GIB)


def longest_context(shape: Shape, width: str, *, gpu_bytes: float, batch: int = 1, gpus: int = 1) -> int:
    """The most tokens a conversation may have in this much memory; 0 where the weights alone don't fit."""
    one, two = (inference(shape, width, seq_len=tokens, batch=batch, gpus=gpus).total for tokens in (1, 2))
    return max(0, int((gpu_bytes - one) // (two - one)) + 1) if gpu_bytes >= one else 0

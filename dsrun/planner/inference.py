"""The memory of answering: weights in some width, and the cache of keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsrun.planner.gpu_memory import untracked_gib
from dsrun.planner.setup import QUANTIZED
from dsrun.planner.shape import Shape
from dsrun.words import GIB

WIDTHS: dict[str, float] = {"fp32": 4, "16-bit": 2, "int8": QUANTIZED["int8"], "int4": QUANTIZED["nf4"]}
"""Bytes of a weight. The embedding and the output weights stay in 16 bits where the others are quantized."""
UNQUANTIZED = ("fp32", "16-bit")
"""Widths that can wait in host memory: transformers offloads no quantized weights
(quantizers/quantizer_bnb_4bit.py)."""
BEAM_LOGITS = 3
"""fp32 values of a row's vocabulary in a beam search, for one without: the logits, their log-softmax, and the sums with
each beam's own (transformers' generation/utils.py: _beam_search)."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Bytes on each GPU."""

    width: str
    """A key of WIDTHS."""
    terms: dict[str, float]
    """weights, cache (keys and values), working (memory); with beams reordered."""
    total: float
    """Bytes in all, with CUDA's context."""
    host: float = 0.0
    """Bytes of offloaded weights in host memory, all of which every token brings to the GPU."""


def inference(
    shape: Shape,
    width: str,
    *,
    seq_len: int,
    batch: int = 1,
    beams: int = 1,
    gpus: int = 1,
    offloaded: bool = False,
) -> Inference:
    """The memory of answering: `batch` conversations of seq_len tokens each, the model sharded among the GPUs.

    The cache is 2 x layers x kv_heads x head_dim elements a token, in 16 bits (fp32: in 32); of latent attention the
    narrow vector that keys and values come from. Working memory is one block's activations of a whole prompt and the
    logits of its last token (transformers asks for those only). Each beam is a row of its own from the prompt on, and
    after each token a layer's keys are laid out in the beams' new order (cache_utils.py: reorder_cache). offloaded:
    weights wait in host memory; on the GPU is a block, the embedding or the output weights (accelerate's hooks).
    """
    element = 4 if width == "fp32" else 2
    # Embedding and output weights, for quantized weights in 16 bits.
    ends = 0 if width in UNQUANTIZED else min(shape.ends, shape.parameters)
    rows = batch * beams
    tokens = seq_len * rows
    cache = float(shape.attention_layers * shape.cached_width * element * tokens)
    if (
        recurrent := shape.recurrent
    ) is not None:  # a state doesn't grow with the sequence; kernels hold it in fp32
        cache += 4.0 * rows * recurrent.layers * recurrent.state
    values = BEAM_LOGITS if beams > 1 else 1
    working = float(
        element * tokens * (4 * shape.hidden + 2 * shape.intermediate) + 4 * values * rows * shape.vocab
    )
    weights = WIDTHS[width] * (shape.parameters - ends) + 2 * ends
    on_gpu = WIDTHS[width] * max(shape.layer_parameters, shape.embedding) if offloaded else weights / gpus
    terms = {"weights": on_gpu, "cache": cache / gpus, "working": working}
    if beams > 1:
        terms["reordered"] = cache / shape.layers / 2
    total = math.fsum(terms.values()) + untracked_gib(gpus) * GIB
    return Inference(width, terms, total, host=weights if offloaded else 0.0)


def longest_context(
    shape: Shape,
    width: str,
    *,
    gpu_bytes: float,
    batch: int = 1,
    beams: int = 1,
    gpus: int = 1,
    offloaded: bool = False,
) -> int:
    """The most tokens a conversation may have in this much memory; 0 where the weights alone don't fit."""
    first, second = (
        inference(
            shape, width, seq_len=tokens, batch=batch, beams=beams, gpus=gpus, offloaded=offloaded
        ).total
        for tokens in (1, 2)
    )
    return max(0, int((gpu_bytes - first) // (second - first)) + 1) if gpu_bytes >= first else 0

"""Tensors of the forward pass that backward needs: activations of the blocks, attention's scores, logits.

Widths in bytes a token and block. h: hidden size, q and k: elements of the queries and of the keys, f: feed-forward
width. Each coefficient is what transformers 5 saves, counted with torch's saved-tensor hooks
(tests/planner/test_activations.py does so for every family).
"""

from __future__ import annotations

import math

from dsrun.planner import lora
from dsrun.planner.setup import Setup

SCORES = {"fp32": 4.0, "16 bits": 6.0}
"""Bytes a score and head that backward needs where attention makes a matrix of them: the softmax in fp32, and its
16-bit copy for the product with the values."""
CAPPED = 2.0
"""A soft cap (Gemma 2 has one on the scores, and one on the logits) keeps its tanh, too."""
SCORES_ONCE = {"fp32": 8.0, "16 bits": 12.0}
"""Bytes a score of the one block that is computed again, at its peak: the gradient beside what is kept."""


def activations(setup: Setup) -> dict[str, float]:
    """The terms of a micro batch, in bytes: all blocks'; of those that are computed again their inputs, and one's.

    Inputs that wait on the host leave one on the GPU, which is on its way.
    """
    inside, tile = _inside(setup), min(setup.tile or setup.tokens, setup.tokens)
    each, kept = _token(setup) * setup.tokens + _unpacked(setup), setup.shape.layers - setup.recomputed
    in_tiles = each - inside * (setup.tokens if setup.tile else 0)
    layer = in_tiles + inside * (tile if setup.tile else 0)
    whole = kept * (in_tiles + _scores(setup, SCORES)) if kept else 0.0
    inputs = setup.block_inputs
    if setup.activations_device == "cpu" and inputs:
        inputs /= setup.recomputed
    terms = {"activations": whole + inputs, "layer": layer}
    again = _scores(setup, SCORES_ONCE) if setup.checkpointing else 0.0
    return {**terms, "scores": again} if again else terms


def logits(setup: Setup) -> float:
    """Bytes at the loss.

    transformers makes all logits at once. A fused linear cross-entropy (liger-kernel's
    ops/fused_linear_cross_entropy.py) goes through the tokens in pieces of 2^n, about T h / v of them: a piece's
    logits, the gradient of the last block's output, and the output weights' gradient, which it makes at once. dsrun
    names the size of a piece in its jobs (training/models/kernels.py: chunk_budget). A loss in
    tiles, as TRL's chunked_nll is one, does the same with pieces of a given size, in torch: it holds a piece as long as
    the whole one otherwise, and
    sums the weights' gradient in fp32 (training/models/tiling.py).
    """
    shape, tokens = setup.shape, setup.tokens
    each = setup.logits_bytes + (CAPPED if shape.block.capped and setup.logits_bytes else 0.0)
    if not setup.logits_bytes or not (setup.fused_loss or setup.tile or setup.loss_tokens):
        return each * tokens * shape.vocab
    width = 4 if setup.precision == "fp32" else 2
    head = shape.embedding if setup.method == "full" else 0
    if not setup.fused_loss:
        piece = each * min(tokens, setup.tile or setup.loss_tokens) * shape.vocab
        return float(piece + width * tokens * shape.hidden + (4 + width) * head)
    rows = min(tokens, setup.fused_tokens) or min(
        tokens, 2 ** math.ceil(math.log2(max(1.0, tokens / math.ceil(shape.vocab / max(1, shape.hidden)))))
    )
    return float(width * (shape.vocab * rows + tokens * shape.hidden + head))


def _inside(setup: Setup) -> float:
    """Bytes a token of the inside of a dense MLP, which tiles don't keep: mixtures of experts have none."""
    shape, width = setup.shape, 4 if setup.precision == "fp32" else 2
    if shape.experts is not None:
        return 0.0
    into_down = shape.block.into_down and (setup.method == "full" or "down" in _targets(setup))
    return _feed_forward(setup) + width * shape.intermediate * bool(into_down)


def _token(setup: Setup) -> float:
    """Bytes a token of one block, without attention's scores."""
    return _norms(setup) + _attention(setup) + _feed_forward(setup) + _inputs(setup)


def _unpacked(setup: Setup) -> float:
    """Bytes of one block's quantized matrices in 16 bits, where they are kept for backward.

    GPTQ's layers hand them to torch.matmul, which keeps them (auto_gptq: qlinear_cuda_old.py). bitsandbytes makes them
    again (autograd/_functions.py: MatMul4Bit).
    """
    return 2.0 * setup.shape.layer_parameters if setup.quantized == "gptq4" else 0.0


def _norms(setup: Setup) -> float:
    """Bytes a token of the norms: their input (transformers computes RMSNorm in fp32) and, for the gradient of their
    own
    weight, the normed input."""
    shape, block = setup.shape, setup.shape.block
    fp32, trained = setup.precision == "fp32", setup.method == "full"
    input_bytes, normed_bytes = (
        (4, 4 if block.norm == "gemma" or fp32 else 2) if block.norm != "layer" else (setup.stream_bytes, 0)
    )
    each = input_bytes + (normed_bytes if trained else 0)
    width = float(each * block.norms * shape.hidden)
    if block.qk_norm:
        share = shape.attention_layers / shape.layers
        width += share * each * (shape.query_width + shape.kv_width)
    if (latent := shape.latent) is not None:
        width += each * (latent.queries + latent.keys)
    return width + (1.0 + 3 * fp32) * block.dropouts * shape.hidden


def _attention(setup: Setup) -> float:
    """Bytes a token of attention, or of what stands in its place: a mean over the blocks."""
    shape = setup.shape
    if (recurrent := shape.recurrent) is None:
        return _own_attention(setup)
    width = 4 if setup.precision == "fp32" else 2
    mixed = width * recurrent.kept + 4 * recurrent.kept_fp32
    return (shape.attention_layers * _own_attention(setup) + recurrent.layers * mixed) / shape.layers


def _own_attention(setup: Setup) -> float:
    """Bytes a token of queries, keys, values and the output.

    Grouped keys and values are repeated for every query head where a mask of padding is given
    (integrations/sdpa_attention.py) or the scores are made; the mask of a row is s elements for each of its tokens.
    """
    shape, block = setup.shape, setup.shape.block
    query, kv = shape.query_width, shape.kv_width
    if (latent := shape.latent) is not None:
        # Queries and keys are put together from what is rotated and what isn't, values are slices of what keys come
        # from; the output is laid out anew.
        each = 3 * (shape.head_dim - latent.rotary) + 2 * latent.rotary + 3 * latent.value_dim
        return float((4 if setup.precision == "fp32" else 2) * shape.heads * each)
    repeated = setup.keeps_scores or setup.variable_lengths
    keys = 2 * query if repeated else query + 2 * kv if block.fused_qkv else 2 * kv
    elements = 2.0 * query + keys + (kv if block.fused_qkv and not repeated else 0)
    if block.copied and (setup.method == "full" or ("o" in _targets(setup) and not _casts(setup))):
        elements += query
    elements += 3 * query * block.gated_output  # the gate, its sigmoid and their product
    width = 4 if setup.precision == "fp32" else 2
    mask = setup.seq_len if setup.variable_lengths and not setup.keeps_scores else 0
    return width * (elements + mask)


def _feed_forward(setup: Setup) -> float:
    """Bytes a token between the matrices of the feed-forward block."""
    shape = setup.shape
    width = 4 if setup.precision == "fp32" else 2
    inside = shape.block.inside or (3 if shape.gated else 1)
    dense = inside * shape.intermediate
    if (experts := shape.experts) is None:
        return float(width * dense)
    mixed = experts.chosen * (inside * experts.width + shape.hidden) + inside * experts.shared
    mixed += shape.hidden * experts.gated
    share = experts.dense / shape.layers  # of the blocks, a mean of both kinds
    return width * (share * dense + (1 - share) * mixed)


def _inputs(setup: Setup) -> float:
    """Bytes a token of the inputs of matrices that are trained, or that have LoRA.

    A full fine-tune keeps each input once: both norms' outputs and the feed-forward block's inside (attention's output
    is counted there already). LoRA's own, if in 16 bits, are the same tensors, where it has a matrix; in fp32 (PEFT
    without DeepSpeed) each target casts its input for itself, and dropout makes a copy and a mask of its own.
    """
    shape, block = setup.shape, setup.shape.block
    width = 4 if setup.precision == "fp32" else 2
    if setup.method == "full":
        inner: float = shape.intermediate * block.into_down
        if (experts := shape.experts) is not None:
            share = experts.dense / shape.layers
            mixed: float = experts.chosen * (experts.width + shape.hidden) + experts.shared
            mixed += 4 / width * shape.hidden * experts.wide_router  # its own copy of the input
            inner = share * inner + (1 - share) * mixed
        narrow = shape.latent.queries + shape.latent.keys if shape.latent else 0
        return float(width * (block.outputs * shape.hidden + inner + narrow))
    targets = _targets(setup)
    rank = setup.adapters / max(1, lora.lora_weights(shape, 1, setup.targets))
    adapters_bytes = setup.adapter_bytes * rank * len(targets)
    inputs = float(width * (block.outputs * shape.hidden + shape.intermediate)) if setup.keeps_inputs else 0.0
    # Three cases: each target with an input of its own; inputs that quantized matrices keep anyway; or inputs shared by
    # the targets of attention and by those of the feed-forward block.
    if _casts(setup):
        each = setup.adapter_bytes + (1 if setup.lora_dropout else 0)
        return each * sum(into for into, _ in targets.values()) + adapters_bytes + inputs
    if inputs:
        return inputs + adapters_bytes
    inside = {"gate", "up", lora.GATE_UP}
    shared = shape.hidden * (bool(lora.FROM_HIDDEN & targets.keys()) + bool(inside & targets.keys()))
    shared += sum(targets[name][0] for name in (lora.Q_OUT, lora.KV_OUT) if name in targets)
    return (
        width * (shared + (targets["down"][0] if "down" in targets and block.into_down else 0))
        + adapters_bytes
    )


def _targets(setup: Setup) -> dict[str, tuple[int, int]]:
    return lora.sizes(setup.shape, setup.targets)


def _casts(setup: Setup) -> bool:
    """Whether each of LoRA's targets makes a tensor of its own from its input."""
    return bool(setup.lora_dropout) or setup.adapter_bytes > (4 if setup.precision == "fp32" else 2)


def _scores(setup: Setup, bytes_each: dict[str, float]) -> float:
    """Bytes of one block's scores; none with flash attention or torch's SDPA."""
    if not setup.keeps_scores:
        return 0.0
    block, fp32 = setup.shape.block, setup.precision == "fp32"
    each = bytes_each["fp32" if fp32 else "16 bits"]
    if block.scores is not None and not fp32:
        each = block.scores[bytes_each is SCORES_ONCE]
    if setup.scores_bytes is not None and bytes_each is SCORES_ONCE:
        each = setup.scores_bytes
    each += CAPPED if block.capped else 0.0
    # Dropout's mask and the dropped scores, which are multiplied with the values in place of the softmax.
    each += 1.0 + (4 if fp32 else 2) if block.attention_dropout else 0.0
    share = setup.shape.attention_layers / setup.shape.layers
    return share * each * setup.shape.heads * setup.seq_len * setup.tokens

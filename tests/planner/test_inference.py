"""The memory of answering: the cache to the byte, weights in every width, and the longest context that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsrun.planner.gpu_memory import CONTEXT_GIB, GIB, NCCL_GIB
from dsrun.planner.inference import WIDTHS, inference, longest_context
from dsrun.planner.setup import QUANTIZED
from dsrun.planner.shape import Shape

LLAMA_2_7B = Shape(6_738_415_616, 32, 4096, 11008, 32, 32, 128, 32000)
LLAMA_3_8B = Shape(8_030_261_248, 32, 4096, 14336, 32, 8, 128, 128256)
CHATGLM = Shape(6_243_584_000, 28, 4096, 13696, 32, 2, 128, 65024)


@pytest.mark.parametrize(
    ("shape", "tokens", "gib"),
    [
        (LLAMA_2_7B, 2048, 1),
        (LLAMA_2_7B, 4096, 2),
        (LLAMA_3_8B, 8192, 1),
        (CHATGLM, 32768, 28 * 2 * 2 * 128 * 2 * 32768 / GIB),
    ],
)
def test_the_cache(shape, tokens, gib):
    assert inference(shape, "16-bit", seq_len=tokens).terms["cache"] == gib * GIB
    assert inference(shape, "16-bit", seq_len=tokens // 8, batch=8).terms["cache"] == gib * GIB
    assert inference(shape, "fp32", seq_len=tokens).terms["cache"] == 2 * gib * GIB
    # Quantized weights leave the cache as it is.
    assert inference(shape, "int4", seq_len=tokens).terms["cache"] == gib * GIB


def test_weights():
    psi, ends = LLAMA_2_7B.parameters, 2 * 32000 * 4096
    weights = {width: inference(LLAMA_2_7B, width, seq_len=1).terms["weights"] for width in WIDTHS}
    assert weights["fp32"] == 4 * psi
    assert weights["16-bit"] == 2 * psi
    assert weights["int8"] == psi - ends + 2 * ends
    assert weights["int4"] == pytest.approx(QUANTIZED["nf4"] * (psi - ends) + 2 * ends)
    # Tied, there is one of the two that stay in 16 bits.
    tied = inference(replace(LLAMA_2_7B, tied=True), "int8", seq_len=1).terms["weights"]
    assert tied == psi - ends / 2 + ends


def test_a_known_card():
    """Llama-2-7B in 16 bits answers on a 16 GiB card, and not on a 12 GiB one; in 4 bits on 6 GiB."""
    assert inference(LLAMA_2_7B, "16-bit", seq_len=512).total < 16 * GIB
    assert inference(LLAMA_2_7B, "16-bit", seq_len=512).total > 12 * GIB
    assert inference(LLAMA_2_7B, "int4", seq_len=512).total < 6 * GIB


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_total(width, gpus):
    found = inference(LLAMA_3_8B, width, seq_len=1000, batch=3, gpus=gpus)
    around = CONTEXT_GIB + (NCCL_GIB if gpus > 1 else 0)
    assert found.total == pytest.approx(sum(found.terms.values()) + around * GIB)
    assert found.width == width
    one = inference(LLAMA_3_8B, width, seq_len=1000, batch=3).terms
    # Each GPU has its share of weights and cache, and works on whole layers.
    assert found.terms["weights"] == one["weights"] / gpus
    assert found.terms["cache"] == one["cache"] / gpus
    assert found.terms["working"] == one["working"]


def test_offloaded_weights_leave_their_largest_part():
    """A block, or the embedding of a model whose vocabulary is larger than its blocks."""
    found = inference(LLAMA_2_7B, "16-bit", seq_len=128, offloaded=True)
    assert found.terms["weights"] == 2 * LLAMA_2_7B.layer_parameters
    assert found.host == 2 * LLAMA_2_7B.parameters
    assert inference(LLAMA_3_8B, "16-bit", seq_len=128, offloaded=True).terms["weights"] == 2 * 128256 * 4096


def test_the_last_tokens_logits_only():
    def working(seq_len, batch):
        return inference(LLAMA_3_8B, "16-bit", seq_len=seq_len, batch=batch).terms["working"]

    token = 2 * (4 * 4096 + 2 * 14336)
    assert working(1, 1) == token + 4 * 128256
    assert working(101, 1) - working(1, 1) == 100 * token
    assert working(1, 5) == 5 * working(1, 1)


@settings(deadline=None)
@given(
    st.sampled_from([LLAMA_2_7B, LLAMA_3_8B, CHATGLM]),
    st.sampled_from(list(WIDTHS)),
    st.floats(1, 200),
    st.integers(1, 64),
    st.integers(1, 8),
)
def test_the_longest_context(shape, width, gib, batch, gpus):
    longest = longest_context(shape, width, gpu_bytes=gib * GIB, batch=batch, gpus=gpus)

    def fits(tokens):
        return inference(shape, width, seq_len=tokens, batch=batch, gpus=gpus).total <= gib * GIB

    if longest == 0:
        assert not fits(1)
    else:
        assert fits(longest)
        assert not fits(longest + 1)


def test_not_even_the_weights():
    assert longest_context(LLAMA_2_7B, "16-bit", gpu_bytes=12 * GIB) == 0
    assert longest_context(LLAMA_2_7B, "int4", gpu_bytes=12 * GIB) > 4096


def test_grouped_heads_reach_further():
    card = {"gpu_bytes": 24 * GIB}
    assert longest_context(LLAMA_3_8B, "int8", **card) > 1.5 * longest_context(LLAMA_2_7B, "int8", **card)

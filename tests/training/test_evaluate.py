"""How held-out examples are answered and judged."""

from __future__ import annotations

import math

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

from types import SimpleNamespace

from dsrun.training.evaluate import cache_bytes, perplexity


def tiny_llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=6, vocab_size=40, **more,
    ))  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"num_key_value_heads": 2}, {"num_key_value_heads": 3, "head_dim": 8}])
def test_a_tokens_cache_is_what_transformers_keeps(more):
    model = tiny_llama(**more)
    cache = model(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), use_cache=True).past_key_values
    kept = sum(
        one.numel() * one.element_size() for layer in cache.layers for one in (layer.keys, layer.values)
    )
    assert cache_bytes(model) * 5 == kept
    assert cache_bytes(model.half()) * 10 == kept


def test_a_model_without_heads_counts_as_the_widest():
    config = SimpleNamespace(hidden_size=10, num_hidden_layers=2)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config), dtype=torch.float32)
    assert cache_bytes(model) == 2 * 2 * 10 * 4


def test_perplexity_is_a_number_or_none():
    assert perplexity(0.0) == 1.0
    assert perplexity(3.0) == pytest.approx(math.exp(3))
    assert [perplexity(loss) for loss in (1e4, math.inf, math.nan)] == [None] * 3

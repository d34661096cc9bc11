"""How held-out examples are answered and judged."""

from __future__ import annotations

import math

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

from contextlib import nullcontext
from types import SimpleNamespace

from dsrun.training.evaluate import cache_bytes, evaluation_loss, perplexity
from dsrun.training.models import varlen


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


class Numbered:
    """Examples of these lengths, whose first token is no target."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def length(self, example: int) -> int:
        return self.lengths[example]

    def target_tokens(self, example: int) -> int:
        return self.lengths[example] - 1

    def ids(self, example: int) -> list[int]:
        return [(7 * token + example) % 37 + 1 for token in range(self.lengths[example])]

    def labels(self, example: int) -> list[int]:
        return [-100, *self.ids(example)[1:]]


@pytest.mark.usefixtures("alone")
def test_a_kernel_is_told_the_borders_of_an_example_by_itself():
    """It would look for them, and wait for the GPU in every layer; of several rows it never does."""
    torch.manual_seed(0)
    model, calls = tiny_llama(attn_implementation=varlen.register()), []

    class Engine:
        module, device = model, torch.device("cpu")
        eval, train, whole = model.eval, model.train, staticmethod(lambda: nullcontext(True))

        def __call__(self, **batch):
            calls.append((len(batch["input_ids"]), "cu_seq_lens_q" in batch and "max_length_q" in batch))
            return model(**batch)

    examples = Numbered(3, 4, 30)
    job = SimpleNamespace(
        micro_batch=1, dp_size=1, dp_index=lambda rank: rank, parallel=SimpleNamespace(sp=1)
    )
    evaluation = evaluation_loss(Engine(), job, examples, 0)
    assert sorted(calls) == [(1, True), (2, False)]
    losses = []
    for example in range(3):
        ids, labels = (torch.tensor([of(example)]) for of in (examples.ids, examples.labels))
        with torch.no_grad():
            mean = float(model(input_ids=ids, labels=labels).loss)
        losses.append(mean * examples.target_tokens(example))
    assert evaluation == pytest.approx(sum(losses) / 34, abs=1e-5)

"""Packing of models with layers that carry a state: none without kernels that take borders, exact with them."""

from __future__ import annotations

import itertools

import pytest
from needed import needs, since

torch = pytest.importorskip("torch")
needs("transformers")

from tiny_checkpoints import tiny_config

from dsrun.training.data.packing import borders, probe, takes_borders
from dsrun.training.models import varlen

pytestmark = since(transformers="5.23")
IDS = torch.arange(3, 24)[None]
LENGTHS = [5, 9, 7]


def segments(borders_of, length):
    ends = [0, length] if borders_of is None else borders_of.tolist()
    return list(itertools.pairwise(ends))


def delta_rule(q, k, v, g, beta, *, cu_seqlens=None, **_):
    """flash-linear-attention's chunk_gated_delta_rule by its interface: token by token, a new state at each border."""
    groups = v.shape[2] // k.shape[2]
    q, k = (
        x.repeat_interleave(groups, 2) * ((x * x).sum(-1, True) + 1e-6).rsqrt().repeat_interleave(groups, 2)
        for x in (q, k)
    )
    answers = []
    for start, end in segments(cu_seqlens, q.shape[1]):
        state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
        for token in range(start, end):
            state = state * g[:, token].exp()[..., None, None]
            seen = (state * k[:, token][..., None]).sum(-2)
            step = (v[:, token] - seen) * beta[:, token][..., None]
            state = state + k[:, token][..., None] * step[..., None, :]
            answers.append((state * q[:, token][..., None]).sum(-2) * q.shape[3] ** -0.5)
    return torch.stack(answers, 1), None


def convolution(x, weight, bias=None, *, seq_idx=None, activation=None, **_):
    """causal-conv1d's causal_conv1d_fn by its interface: it stops where the number of the example changes."""
    numbers = torch.zeros(x.shape[-1], dtype=torch.int32) if seq_idx is None else seq_idx[0]
    parts = [
        torch.nn.functional.conv1d(
            part, weight[:, None], bias, padding=weight.shape[1] - 1, groups=len(weight)
        )[..., : part.shape[-1]]
        for part in x.split(torch.unique_consecutive(numbers, return_counts=True)[1].tolist(), -1)
    ]
    return torch.nn.functional.silu(torch.cat(parts, -1))


def model(attention):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = tiny_config("qwen3_5").get_text_config()
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture
def kernels(monkeypatch):
    """Put kernels into the model's module; `kernels("conv")` the convolution's alone."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    def put(*names):
        for name, function in {
            "causal_conv1d_fn": convolution,
            "torch_chunk_gated_delta_rule": delta_rule,
        }.items():
            if name in names:
                monkeypatch.setattr(modeling, name, function)

    return put


BOTH = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


def test_the_kernels_here_compute_what_transformers_does(kernels):
    """Else what follows would say nothing of a real model."""
    plain = model("sdpa")
    wanted = plain(input_ids=IDS, use_cache=False).logits
    kernels(*BOTH)
    assert torch.allclose(plain(input_ids=IDS, use_cache=False).logits, wanted, atol=1e-5)


def test_kernels_that_take_borders_and_numbers_keep_examples_apart(kernels):
    packed = model(varlen.register())
    assert takes_borders(packed)
    kernels(*BOTH)
    assert not probe(packed)[0], "without numbers the convolution sees three tokens of another example"
    assert probe(packed, numbered=True)[0]
    where = borders(LENGTHS, "cpu", unmasked=True, numbered=True)
    logits = packed(input_ids=IDS, **where, use_cache=False).logits.split(LENGTHS, 1)
    for example, together in zip(IDS.split(LENGTHS, 1), logits, strict=True):
        assert torch.allclose(packed(input_ids=example, use_cache=False).logits, together, atol=1e-5)


@pytest.mark.parametrize("there", [(), BOTH[:1], BOTH[1:]], ids=["none", "convolution", "delta rule"])
def test_no_packing_without_both_kernels(kernels, there):
    packed = model(varlen.register())
    kernels(*there)
    assert not probe(packed)[0]
    assert not probe(packed, numbered=True)[0]


def test_no_packing_under_a_mask(kernels):
    """torch's SDPA tells the examples by their positions, which no layer with a state looks at."""
    packed = model("sdpa")
    kernels(*BOTH)
    assert probe(packed) == (False, False)


def test_a_state_that_is_nearly_forgotten_is_seen(kernels, monkeypatch):
    """A leak far below a 16-bit model's tolerance."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    packed = model(varlen.register())
    kernels(*BOTH)

    def leaking(*inputs, cu_seqlens=None, **named):
        apart, _ = delta_rule(*inputs, cu_seqlens=cu_seqlens, **named)
        together, _ = delta_rule(*inputs, **named)
        return apart + 0.002 * (together - apart), None

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", leaking)
    assert not probe(packed, numbered=True)[0]
    monkeypatch.setattr("dsrun.training.data.packing.EXACT", 1.0)
    assert probe(packed, numbered=True)[0], "the leak is too large to show anything"

"""Attention without a mask: what it computes, what it never looks at, and which models may have it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dsrun.training.data.packing import PROBE, borders, probe
from dsrun.training.models import varlen

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip
KINDS = {
    "llama": {}, "glm": {"pad_token_id": 0}, "qwen3": {}, "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "pad_token_id": 0},
}  # fmt: skip
LENGTHS = (3, 9, 1, 6)


def model_of(kind, attention):
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def ids_of(count):
    return torch.randint(3, 96, (1, count), generator=torch.Generator().manual_seed(7))


def one_by_one(model, ids):
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_one_by_one(kind):
    plain, ours = model_of(kind, "sdpa"), model_of(kind, varlen.register())
    ids = ids_of(sum(LENGTHS))
    wanted = one_by_one(plain, ids)
    packed_logits = ours(input_ids=ids, **borders(LENGTHS, "cpu", unmasked=True), use_cache=False).logits
    torch.testing.assert_close(packed_logits, wanted, atol=1e-5, rtol=1e-5)
    packed_logits.square().mean().backward()
    wanted.square().mean().backward()
    for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_of_its_own_and_padded_rows_are_as_under_sdpa(kind):
    plain, ours = model_of(kind, "sdpa").eval(), model_of(kind, varlen.register()).eval()
    one = ids_of(20)
    rows = one.view(2, 10)
    padding = torch.ones_like(rows)
    padding[0, :4] = 0
    for given in ({"input_ids": one}, {"input_ids": rows}, {"input_ids": rows, "attention_mask": padding}):
        with torch.no_grad():
            wanted, own_logits = plain(**given).logits, ours(**given).logits
        seen = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
        torch.testing.assert_close(own_logits[seen], wanted[seen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_it_answers_prompts(kind):
    plain, ours = model_of(kind, "sdpa").eval(), model_of(kind, varlen.register()).eval()
    rows = ids_of(16).view(2, 8)
    padding = torch.ones_like(rows)
    padding[0, :3] = 0
    for given in ({"input_ids": rows[1:]}, {"input_ids": rows, "attention_mask": padding}):
        wanted, answers = (
            model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)
            for model in (plain, ours)
        )
        assert answers.tolist() == wanted.tolist()


def test_no_mask_is_made_and_the_probe_finds_examples_apart(monkeypatch):
    from transformers import masking_utils

    ours = model_of("llama", varlen.register())
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **_: pytest.fail("a mask was made"))
    ours(input_ids=ids_of(PROBE * 4), **borders([PROBE] * 4, "cpu", unmasked=True), use_cache=False)
    assert probe(ours) == (True, True)


def computed(query, key, value, ends, scale, window):
    """What torch's kernel computes, by SDPA."""
    sizes = ends.diff().tolist()
    split = (part.transpose(0, 1)[None].split(sizes, dim=2) for part in (query, key, value))
    parts = [varlen._alone(three, scale, 0.0, window) for three in zip(*split, strict=True)]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def of_torch_2_10(query, key, value, ends, ends_k, longest, longest_k, is_causal=False, return_aux=None):
    assert is_causal
    return computed(query, key, value, ends, None, None)


def of_torch_2_11(
    query, key, value, ends, ends_k, longest, longest_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    assert window_size[1] == 0, "causal"
    return computed(query, key, value, ends, scale, window_size[0] + 1 or None)


def of_torch_2_12(
    query, key, value, ends, ends_k, longest, longest_k, *,
    return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0, "causal"
    return computed(query, key, value, ends, scale, window_size[0] + 1 or None)


@pytest.mark.parametrize("kernel", [of_torch_2_10, of_torch_2_11, of_torch_2_12])
@pytest.mark.parametrize("heads", [2, 4])
def test_each_torchs_kernel_gets_what_it_takes(monkeypatch, kernel, heads):
    """Stand-ins for torch's CUDA kernel, with the signatures of its releases."""
    monkeypatch.setattr(varlen, "kernel", lambda: kernel)
    three = tuple(torch.randn(1, number, 19, 8) for number in (4, heads, heads))
    ends = torch.tensor([0, 3, 12, 13, 19], dtype=torch.int32)
    for scale, window in ((None, None), (8**-0.5, None), (0.3, None), (None, 5)):
        if not varlen._computes(three[0], scale, window):
            assert kernel is of_torch_2_10
            continue
        split = zip(*(part.split(LENGTHS, 2) for part in three), strict=True)
        alone = [varlen._alone(part, scale, 0.0, window) for part in split]
        output = varlen._in_one(three, ends, 9, scale, window)
        torch.testing.assert_close(output, torch.cat(alone, 2).transpose(1, 2))


def test_a_fault_of_the_kernel_is_no_word_about_packing(monkeypatch):
    """Only a model without one of the probe's own arguments can't be packed."""
    ours = model_of("llama", varlen.register())

    def kernel_of_another_release(*_, **__):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'")

    monkeypatch.setattr(varlen, "_alone", kernel_of_another_release)
    with pytest.raises(TypeError, match="enable_gqa"):
        probe(ours)


def test_a_model_without_the_probes_arguments_is_not_packed():
    class Plain(torch.nn.Module):
        device = torch.device("cpu")
        config = AutoConfig.for_model("llama", **SIZES)

        def forward(self, input_ids, use_cache=False):
            raise AssertionError("not reached")

    Plain.config._attn_implementation = "sdpa"
    assert probe(Plain()) == (False, False)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("llama", ""), ("qwen3", ""), ("gemma2", "caps its attention's scores"),
        ("bloom", "no attention from outside"), ("gpt_oss", "no attention from outside"),
    ],
)  # fmt: skip
def test_models_that_may_have_it(kind, why):
    reason = varlen.refuses(AutoConfig.for_model(kind))
    assert why in reason
    assert bool(why) == bool(reason)


def test_a_cpu_and_an_older_gpu_have_no_kernel(monkeypatch):
    assert not varlen.has_kernel(torch.bfloat16) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(varlen, "kernel", lambda: print)  # torch has it from 2.10 on
    for capability, dtype, expected in (
        ((8, 0), torch.bfloat16, True), ((9, 0), torch.float32, False), ((7, 0), torch.float16, False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert varlen.has_kernel(dtype) == expected

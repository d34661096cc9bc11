"""Activations, beside the tensors that transformers' own blocks save for backward (tests/planner/saved.py)."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial

import pytest
from needed import since

from dsrun.planner.activations import activations, logits
from dsrun.planner.host_memory import host_memory
from dsrun.planner.lora import lora_weights, roles
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_config
from dsrun.planner.speed import computed_a_token, flops_a_token

TOKENS = 64
WIDE = {
    "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 48,
    "vocab_size": 64, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
PLAIN = {"vocab_size": 64, "hidden_size": 256, "num_attention_heads": 8, "bos_token_id": 1, "eos_token_id": 2}
MIXED = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
DEEPSEEK = {
    **WIDE, **MIXED, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
"""The first block is dense: what is measured is the difference between three blocks and two."""
LATENT = {
    "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 48,
}  # fmt: skip
ROUTER = {"glm4_moe": 8, "deepseek_v2": 8, "deepseek_v3": 8}
"""Experts whose router's weights are made fp32: once a block, whatever its tokens."""
LIKE_OTHERS = ("mistral", "qwen2", "glm4", "deepseek_v2")
"""Their blocks are those of llama, glm and deepseek_v3."""
EAGER = ("gemma2", "bloom", "mpt", "gpt_oss")
"""SDPA doesn't compute them: attention makes its scores."""
CONFIGS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"), WIDE),
    "glm": {**WIDE, "attention_bias": True},
    "glm4": {**WIDE, "attention_bias": True},
    "gpt2": {**PLAIN, "n_embd": 256, "n_head": 8, "n_inner": 704, "n_positions": 512, "n_layer": 2, "attn_pdrop": 0.0},
    "gpt_neox": {**PLAIN, "intermediate_size": 704, "num_hidden_layers": 2},
    "opt": {**PLAIN, "ffn_dim": 704, "num_hidden_layers": 2, "dropout": 0.0, "max_position_embeddings": 512},
    "bloom": {**PLAIN, "n_head": 8, "n_layer": 2},
    "mpt": {**PLAIN, "d_model": 256, "n_heads": 8, "n_layers": 2, "max_seq_len": 512},
    "mixtral": {**WIDE, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**WIDE, **MIXED, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "phi": {**PLAIN, "intermediate_size": 704, "num_hidden_layers": 2, "resid_pdrop": 0.0, "pad_token_id": None},
    "qwen2_moe": {
        **WIDE, **MIXED, "num_experts": 8, "shared_expert_intermediate_size": 128, "decoder_sparse_step": 1,
        "mlp_only_layers": []},
    "gpt_oss": {**WIDE, "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": DEEPSEEK,
    "deepseek_v2": {**DEEPSEEK, **LATENT, "head_dim": 16},
    "deepseek_v3": {**DEEPSEEK, **LATENT, "head_dim": 16},
}  # fmt: skip
LAYERS = {"gpt2": "n_layer", "bloom": "n_layer", "mpt": "n_layers"}
GROUPED = since(torch="2.11")
"""Here, where grouped heads are measured on a CPU: torch 2.6 computes them there with its math kernel, which keeps the
scores. Of the releases between, none was tried."""
BESIDE = 300
"""Bytes a token of what a real block has little of: log-sum-exp of each head, each norm's scale."""


def config(family):
    return {"model_type": family, **CONFIGS[family]}


def setup(family, **changes):
    shape = from_config(config(family), family)
    flash = family not in EAGER
    return Setup(shape, engine="torch", stage=0, precision="pure", seq_len=TOKENS, flash=flash, **changes)


@functools.cache
def saved(family, **how):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from saved import bytes_a_token

    if family in EAGER:  # transformers before 5.23 takes SDPA for gemma2, dsrun doesn't
        how.setdefault("attention", "eager")
    changes = {name: how.pop(name) for name in [*how] if name in CONFIGS[family]}
    return bytes_a_token(
        {**config(family), **changes}, TOKENS, layers=LAYERS.get(family, "num_hidden_layers"), **how
    )


def predicted(asked):
    """Bytes a token of a block: of the last one, where they differ."""
    fewer = replace(asked, shape=replace(asked.shape, layers=asked.shape.layers - 1))
    return (activations(asked)["activations"] - activations(fewer)["activations"]) / asked.tokens


def assert_near(said, measured):
    assert said == pytest.approx(measured, rel=0.015, abs=BESIDE)


@GROUPED
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.full] if name in LIKE_OTHERS else []) for name in CONFIGS],
)
def test_a_block_of_every_family(family):
    # A mask of dropout is a byte an element on GPUs; CPUs keep it as wide as the numbers.
    asked = setup(family)
    masks = asked.shape.block.dropouts * asked.shape.hidden
    router = 4 * ROUTER.get(family, 0) * asked.shape.hidden / TOKENS
    assert_near(predicted(asked) + masks + router, saved(family))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_padding_repeats_grouped_keys_and_adds_a_mask(family):
    assert_near(predicted(setup(family, variable_lengths=True)), saved(family, masked=True))


def test_scores():
    assert_near(predicted(replace(setup("llama"), flash=False)), saved("llama", attention="eager"))


def test_attentions_dropout_keeps_its_mask_and_the_dropped_scores():
    # As above, a CPU keeps the mask as wide as the numbers: one byte a score more than a GPU.
    asked = setup("gpt2")
    shape = from_config({**config("gpt2"), "attn_pdrop": 0.1}, "gpt2")
    assert shape.block.attention_dropout and not asked.shape.block.attention_dropout
    dropped = replace(asked, shape=shape, flash=False)
    plain = replace(asked, flash=False)
    measured = [saved("gpt2", attention="eager", **more) for more in ({}, {"attn_pdrop": 0.1})]
    wide = TOKENS * shape.heads
    assert predicted(dropped) - predicted(plain) + wide == pytest.approx(measured[1] - measured[0], rel=0.02)


@GROUPED
def test_fp32():
    assert_near(predicted(replace(setup("llama"), precision="fp32")), saved("llama", dtype="float32"))


def with_lora(names, *, fp32=False):
    def prepare(model):
        peft = pytest.importorskip("peft")
        wanted = peft.LoraConfig(r=4, target_modules=names.split(","))
        return peft.get_peft_model(model, wanted, autocast_adapter_dtype=fp32)

    return prepare


EVERY = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@GROUPED
@pytest.mark.parametrize("fp32", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("family", "names"),
    [("llama", "q_proj,v_proj"), ("llama", EVERY), ("llama", "up_proj,down_proj"), ("qwen3", "q_proj,v_proj"),
     ("gemma3_text", "q_proj,v_proj"), ("phi3", "qkv_proj,o_proj,gate_up_proj,down_proj")],
)  # fmt: skip
def test_lora_keeps_what_its_targets_need(family, names, fp32):
    targets, _ = roles(names)
    asked = setup(family)
    adapters = lora_weights(asked.shape, 4, targets)
    asked = replace(asked, method="lora", adapters=adapters, targets=targets, fp32_adapters=fp32)
    from saved import bytes_a_token

    pytest.importorskip("peft")
    measured = bytes_a_token(config(family), TOKENS, prepare=with_lora(names, fp32=fp32))
    assert_near(predicted(asked), measured)


def quantized(kind, **how):
    asked = setup("llama")
    targets = ("q", "v")
    adapters = lora_weights(asked.shape, 4, targets)
    return replace(asked, method="qlora", adapters=adapters, targets=targets, quantized=kind, **how)


def test_gptq_keeps_its_matrices_in_16_bits():
    """torch.matmul saves the weight that was made for it: of all blocks, or of the one that is computed again."""
    of_a_block = 2.0 * setup("llama").shape.layer_parameters
    for again, blocks in ((0, 2), (1, 0)):
        nf4, gptq = (activations(quantized(kind, checkpointing=again)) for kind in ("nf4", "gptq4"))
        assert gptq["activations"] - nf4["activations"] == pytest.approx(blocks * of_a_block)
        assert gptq["layer"] - nf4["layer"] == pytest.approx(of_a_block)


def test_older_bitsandbytes_keeps_every_input():
    """Both norms' outputs and what enters the last matrix; LoRA's own are among them, unless it makes copies."""
    shape = setup("llama").shape
    every = 2 * (2 * shape.hidden + shape.intermediate)
    for how, shared in ({}, 2 * shape.hidden), ({"lora_dropout": 0.1}, 0):
        asked = {"fp32_adapters": False, **how}
        more = predicted(quantized("nf4", keeps_inputs=True, **asked)) - predicted(quantized("nf4", **asked))
        assert more == pytest.approx(every - shared)


def test_checkpointing_keeps_a_blocks_input():
    asked = replace(setup("llama"), checkpointing=1)
    found = activations(asked)
    assert found["activations"] == 2 * asked.shape.hidden * asked.shape.layers * asked.tokens
    assert found["layer"] == pytest.approx(predicted(setup("llama")) * asked.tokens)


def test_every_second_block_is_computed_again():
    """The first, the third ...: of three blocks one is kept whole, and the inputs of two."""
    plain, whole = setup("llama"), predicted(setup("llama"))
    three = replace(plain, shape=replace(plain.shape, layers=3), checkpointing=2)
    assert (three.recomputed, three.recomputed_share) == (2, pytest.approx(2 / 3))
    assert activations(three)["activations"] == pytest.approx((whole + 2 * 2 * plain.shape.hidden) * TOKENS)
    assert activations(replace(three, checkpointing=9))["activations"] > activations(three)["activations"]


def test_inputs_on_the_host_leave_one_on_the_gpu():
    asked = replace(setup("llama"), checkpointing=1)
    away = replace(asked, activations_device="cpu", gpus=2)
    one = activations(asked)["activations"] / asked.shape.layers
    assert activations(away)["activations"] == one
    assert host_memory(away).terms["block_inputs"] == 2 * activations(asked)["activations"]


def test_logits_at_once_and_fused():
    """liger-kernel's chunks: 8192 tokens of Llama-3-8B in pieces of 2^9, next power of two of 8192 / ceil(v / h)."""
    llama = from_config({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
                         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}, "")  # fmt: skip
    whole = Setup(llama, seq_len=8192)
    assert logits(whole) == 12 * 8192 * 128256
    fused = replace(whole, fused_loss=True, method="lora", adapters=1)
    assert logits(fused) == 2 * (128256 * 256 + 8192 * 4096)
    assert logits(replace(whole, fused_loss=True)) - logits(fused) == 2 * 128256 * 4096
    # dsrun's own jobs have it take more at once.
    assert logits(replace(fused, fused_tokens=2048)) == 2 * (128256 * 2048 + 8192 * 4096)
    assert logits(replace(fused, fused_tokens=2048, seq_len=500)) == 2 * (128256 * 500 + 500 * 4096)


def test_roles():
    assert roles("q_proj, v_proj") == (("q", "v"), ())
    assert roles("all")[0] is roles(["all-linear"])[0] is None
    assert roles("c_attn,c_proj,w1,w2")[0] == ("q+k+v", "o", "down", "gate", "up")
    assert roles("left_proj,q_proj") == (("q",), ("left_proj",))


@GROUPED
@pytest.mark.parametrize("family", ["llama", "glm"])
def test_tiles_keep_nothing_of_an_mlps_inside(family):
    def in_tiles(model):
        for mlp in dense_mlps(model):
            mlp.forward = partial(_in_tiles, mlp.forward, Tiles(4))
        return model

    pytest.importorskip("torch")
    from saved import bytes_a_token

    from dsrun.training.models.tiling import Tiles, _in_tiles, dense_mlps

    measured = bytes_a_token(config(family), TOKENS, prepare=in_tiles)
    asked = replace(setup(family), tile=TOKENS // 4)
    assert_near(predicted(asked), measured)
    inside = predicted(setup(family)) - predicted(asked)
    assert activations(asked)["layer"] == pytest.approx((predicted(asked) + inside / 4) * TOKENS)


@GROUPED
@pytest.mark.parametrize("family", ["llama", "glm4", "gpt_neox"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_operations_are_those_that_torch_counts(family, reentrant):
    """What is computed again leaves out the last matrix, but where a norm is behind it and in the reentrant kind."""
    pytest.importorskip("torch")
    from saved import operations_a_token

    asked = setup(family, reentrant=reentrant)
    said = flops_a_token(asked, again=0.0 if reentrant is None else 1.0, attention=0.0)
    assert said == pytest.approx(operations_a_token(config(family), TOKENS, reentrant=reentrant), rel=0.01)


def test_logits_in_tiles():
    """Of a tile; the last block's gradient; and, where they are trained, the output weights' gradient in fp32 and in
    16 bits."""
    llama = from_config({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
                         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}, "")  # fmt: skip
    tiled = Setup(llama, seq_len=131072, tile=4096)
    assert logits(tiled) == 12 * 4096 * 128256 + 2 * 131072 * 4096 + 6 * 128256 * 4096
    assert logits(replace(tiled, seq_len=1024)) < logits(tiled)
    assert 19 * logits(tiled) < logits(replace(tiled, tile=0))
    assert computed_a_token(tiled) > computed_a_token(replace(tiled, tile=0))


# Layers with a state


DELTA = {
    **WIDE, "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch):
    """The two kernels' interface, with what backward needs of theirs: flash-linear-attention's ChunkGatedDeltaRule
    saves q, k and v, g, beta and A (fla/ops/gated_delta_rule/chunk.py), causal-conv1d its input."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

    class Conv(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1.0

    class Delta(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, g, beta):
            system = torch.zeros(*g.shape, 64, dtype=q.dtype)
            ctx.save_for_backward(q * 1.0, k * 1.0, v.contiguous() * 1.0, g.float().cumsum(1), beta, system)
            return v * 1.0

    def rule(q, k, v, g, beta, **_):
        return Delta.apply(q, k, v, g, beta), None

    monkeypatch.setattr(modeling, "causal_conv1d_fn", lambda x, *_, **__: Conv.apply(x))
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)


@since(transformers="5.23")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_linear_layers_keep_what_their_kernels_need(kernels, dtype):
    """The blocks beside the last: with full attention first, the third is linear as the second is."""
    from saved import bytes_of, model_of

    sizes, said = [], []
    for count in (2, 3):
        types = ["full_attention", *["linear_attention"] * (count - 1)]
        values = {"model_type": "qwen3_5_text", **DELTA, "num_hidden_layers": count, "layer_types": types}
        sizes.append(bytes_of(model_of(values, dtype=dtype), TOKENS) / TOKENS)
        precision = "pure" if dtype == "bfloat16" else "fp32"
        asked = Setup(from_config(values, ""), engine="torch", stage=0, precision=precision, seq_len=TOKENS)
        said.append(activations(asked)["activations"] / TOKENS)
    assert_near(said[1] - said[0], sizes[1] - sizes[0])


@since(transformers="5.23")
def test_gated_attention_keeps_its_gate():
    from saved import bytes_of, model_of

    sizes, said = [], []
    for count in (2, 3):
        values = {"model_type": "qwen3_5_text", **DELTA, "num_hidden_layers": count}
        values["layer_types"] = ["full_attention"] * count
        sizes.append(bytes_of(model_of(values), TOKENS) / TOKENS)
        asked = Setup(from_config(values, ""), engine="torch", stage=0, precision="pure", seq_len=TOKENS)
        said.append(activations(asked)["activations"] / TOKENS)
    assert_near(said[1] - said[0], sizes[1] - sizes[0])

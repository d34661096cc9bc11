"""A model's shape: counts to the last weight, configs that say too little, and numbers that no network has."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from needed import since

from dsrun.errors import DsrunError
from dsrun.models import model_files, multimodal, transformers_code
from dsrun.models.text_shape import shape_of
from dsrun.planner.families import FAMILIES, Family
from dsrun.planner.shape import EXPERTS, SIZES, Shape, from_config, from_numbers

PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
GLM = {**GROUPED, "head_dim": 16, "pad_token_id": 0, "attention_bias": True}
OPT = {
    "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
    "max_position_embeddings": 40, "word_embed_proj_dim": 64,
}  # fmt: skip
FALCON = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100, "multi_query": True,
    "parallel_attn": True, "bias": False, "new_decoder_architecture": False,
}  # fmt: skip
MIXED = {
    **GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARED = {
    **GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    **SHARED, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 12,
}  # fmt: skip
DELTA = {
    **GROUPED, "head_dim": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
DELTA_MIXED = {
    **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EVERY_SECOND = ["linear_attention", "full_attention"] * 2
VISION_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
BASE = {
    "llama": GROUPED,
    "granite": {**GROUPED, **ENDS},
    "internlm3": {**GROUPED, "head_dim": 32},
    "smollm3": {**GROUPED, **ENDS},
    "ministral3": {**GROUPED, **ENDS, "head_dim": 32},
    "olmo2": {**GROUPED, **ENDS},
    "olmo3": {**GROUPED, **ENDS},
    "exaone4": {**GROUPED, **ENDS, "head_dim": 32, "sliding_window_pattern": 4},
    "qwen2_vl_text": {**GROUPED, **VISION_ROPE},
    "qwen2_5_vl_text": {**GROUPED, **VISION_ROPE},
    "qwen3_vl_text": {**GROUPED, "head_dim": 32},
    "qwen3_vl_moe_text": {**MIXED, "num_experts": 4, "head_dim": 32, "tie_word_embeddings": False},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {key: value for key, value in DELTA_MIXED.items() if key != "intermediate_size"},
    "qwen3_next": {**DELTA_MIXED, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "llama4_text": {
        **GROUPED,
        **ENDS,
        "head_dim": 16,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2,
    },
    "glm4v_text": {**GROUPED, **ENDS, **VISION_ROPE},
    "glm4v_moe_text": {**SHARED, "head_dim": 32, **VISION_ROPE},
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "glm": GLM,
    "glm4": GLM,
    "gemma": {**GROUPED, "head_dim": 32},
    "gemma2": {**GROUPED, "head_dim": 32},
    "gemma3_text": {**GROUPED, "head_dim": 32},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 40},
    "gpt_neox": PLAIN,
    "opt": OPT,
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100},
    "falcon": FALCON,
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 100, "max_seq_len": 40},
    "phi": {**PLAIN, "pad_token_id": None},  # transformers 5.0 asks for it
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MIXED, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**MIXED, "num_experts": 4, "head_dim": 32},
    "gpt_oss": {**GROUPED, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe": {**SHARED, "head_dim": 32, "attention_bias": True, "use_qk_norm": True},
}
# Family, what differs from its BASE, and the weights of transformers' class: test_transformers_counts_the_same.
COUNTS = [
    ("llama", {}, 105408),
    ("llama", {"attention_bias": True}, 105984),
    ("llama", {"mlp_bias": True}, 106176),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, 100352),
    ("llama", {"head_dim": 24}, 123840),
    ("mistral", {}, 105408),
    ("mistral", {"head_dim": 24}, 123840),
    ("mistral", {"tie_word_embeddings": True}, 99008),
    ("qwen2", {}, 105792),
    ("qwen2", {"tie_word_embeddings": True}, 99392),
    ("qwen3", {}, 142464),
    ("qwen3", {"attention_bias": True}, 143424),
    ("qwen3", {"tie_word_embeddings": True}, 136064),
    ("glm", {}, 105792),
    ("glm", {"attention_bias": False}, 105408),
    ("glm", {"tie_word_embeddings": True}, 99392),
    ("glm4", {}, 106176),
    ("glm4", {"attention_bias": False}, 105792),
    ("glm4", {"tie_word_embeddings": True}, 99776),
    ("gemma", {}, 135872),
    ("gemma", {"attention_bias": True}, 136832),
    ("gemma", {"tie_word_embeddings": False}, 142272),
    ("gemma2", {}, 136256),
    ("gemma2", {"attention_bias": True}, 137216),
    ("gemma2", {"tie_word_embeddings": False}, 142656),
    ("gemma3_text", {}, 136448),
    ("gemma3_text", {"attention_bias": True}, 137408),
    ("gemma3_text", {"tie_word_embeddings": False}, 142848),
    ("phi3", {}, 105408),
    ("phi3", {"tie_word_embeddings": True}, 99008),
    ("gpt2", {}, 159040),
    ("gpt2", {"n_inner": 80}, 90928),
    ("gpt2", {"n_inner": None}, 159040),
    ("gpt2", {"tie_word_embeddings": False}, 165440),
    ("gpt_neox", {}, 100960),
    ("gpt_neox", {"attention_bias": False}, 100192),
    ("gpt_neox", {"tie_word_embeddings": True}, 94560),
    ("opt", {}, 97248),
    ("opt", {"tie_word_embeddings": False}, 103648),
    ("bloom", {}, 156608),
    ("bloom", {"tie_word_embeddings": False}, 163008),
    ("falcon", {}, 135936),
    ("falcon", {"multi_query": False}, 154368),
    ("falcon", {"tie_word_embeddings": False}, 142336),
    ("falcon", {"ffn_hidden_size": 128}, 86784),
    ("mpt", {}, 154304),
    ("mpt", {"tie_word_embeddings": False}, 160704),
    ("phi", {}, 100676),
    ("phi", {"num_key_value_heads": 2}, 88196),
    ("phi", {"tie_word_embeddings": True}, 94276),
    ("mixtral", {}, 272064),
    ("qwen2_moe", {}, 152832),
    ("qwen3_moe", {}, 161664),
    ("gpt_oss", {}, 312984),
    ("deepseek_v2", {}, 180664),
    ("deepseek_v2", {"q_lora_rank": None}, 181744),
    ("deepseek_v3", {}, 180664),
    ("glm4_moe", {"n_shared_experts": 1}, 217984),
    ("glm4_moe", {"n_shared_experts": 1, "use_qk_norm": False}, 217792),
    ("granite", {}, 105408),
    ("granite", {"attention_bias": True}, 105984),
    ("internlm3", {}, 142272),
    ("internlm3", {"attention_bias": True, "mlp_bias": True}, 144000),
    ("smollm3", {}, 99008),
    ("smollm3", {"attention_bias": True}, 99584),
    ("ministral3", {}, 142272),
    ("ministral3", {"tie_word_embeddings": True}, 135872),
    ("olmo2", {}, 105696),
    ("olmo2", {"attention_bias": True}, 106272),
    ("olmo3", {}, 105696),
    ("olmo3", {"tie_word_embeddings": True}, 99296),
    ("exaone4", {}, 142464),
    ("exaone4", {"tie_word_embeddings": True}, 136064),
    ("qwen2_vl_text", {}, 105792),
    ("qwen2_5_vl_text", {}, 105792),
    ("qwen2_5_vl_text", {"tie_word_embeddings": True}, 99392),
    ("qwen3_vl_text", {}, 142464),
    ("qwen3_vl_text", {"attention_bias": True}, 143424),
    ("qwen3_vl_moe_text", {}, 161664),
    ("qwen3_vl_moe_text", {"attention_bias": True}, 162624),
    ("qwen3_5_text", {}, 156284),
    ("qwen3_5_text", {"tie_word_embeddings": True}, 149884),
    ("qwen3_5_text", {"attention_bias": True}, 156732),
    ("qwen3_5_text", {"layer_types": EVERY_SECOND}, 177000),
    ("qwen3_5_moe_text", {}, 219004),
    ("qwen3_5_moe_text", {"layer_types": EVERY_SECOND}, 239720),
    ("qwen3_next", {}, 219004),
    ("qwen3_next", {"attention_bias": True}, 219452),
    ("llama4_text", {}, 278080),
    ("llama4_text", {"attention_bias": True}, 278848),
    ("llama4_text", {"interleave_moe_layer_step": 1}, 432192),
    ("glm4v_text", {}, 106176),
    ("glm4v_text", {"tie_word_embeddings": True}, 99776),
    ("glm4v_moe_text", {}, 230080),
    ("glm4v_moe_text", {"tie_word_embeddings": True}, 223680),
    ("glm4v_moe_text", {"head_dim": 16}, 192832),
]
# The same, for released variants of a family that its entry does not describe.
VARIANTS = [
    ("opt", {"do_layer_norm_before": False}, 97120),  # opt-350m has this one and the next
    ("opt", {"word_embed_proj_dim": 32}, 98144),
    ("opt", {"enable_bias": False}, 96000),  # Galactica
    ("falcon", {"parallel_attn": False}, 136320),  # falcon-rw-1b has this one and the next
    ("falcon", {"bias": True}, 137376),
    ("phi", {"qk_layernorm": True}, 100868),
    ("mpt", {"expansion_ratio": 2}, 154304),  # transformers takes 4, whatever is said
]
# And where a config is silent and transformers' class has a value of its own.
SILENT = [("qwen3", "head_dim", 364224), ("gemma", "head_dim", 651968), ("glm", "attention_bias", 105792)]
NAMED = [
    model
    for model in model_files.list_models()
    if multimodal.text_config(model.architecture)["model_type"] in FAMILIES
]
"""The catalogue's models that are counted by formula; tests/models/test_resolve.py counts all of them."""
NEEDED = {name for name in Family.SIZES if name not in (*Family.OPTIONAL, "num_key_value_heads")}
LLAMA = {"model_type": "llama", **GROUPED}
SEVEN = 7e9


def config(family, **changes):
    return {"model_type": family, **BASE[family], **changes}


def refusal(values):
    with pytest.raises(DsrunError) as raised:
        from_config(values, "there/config.json")
    assert {problem.where for problem in raised.value.problems} == {"there/config.json"}
    return raised.value


def no_numbers(parameters, **given):
    """Message of from_numbers about numbers that no network has."""
    with pytest.raises(DsrunError) as raised:
        from_numbers(parameters, **given)
    return raised.value


def ids(value):
    return (
        ",".join(f"{name}={setting}" for name, setting in value.items()) if isinstance(value, dict) else None
    )


# --- counts ---


@pytest.mark.parametrize(("family", "changes", "weights"), COUNTS, ids=ids)
def test_counts(family, changes, weights):
    assert from_config(config(family, **changes), "").parameters == weights


@pytest.mark.parametrize(("family", "changes", "weights"), VARIANTS, ids=ids)
def test_a_variant_is_counted_or_refused(family, changes, weights):
    try:
        assert from_config(config(family, **changes), "").parameters == weights
    except DsrunError as error:
        assert next(iter(changes)) in str(error)


@pytest.mark.parametrize(("family", "silent_on", "weights"), SILENT)
def test_a_familys_own_defaults(family, silent_on, weights):
    values = {key: value for key, value in config(family).items() if key != silent_on}
    assert from_config(values, "").parameters == weights


def test_every_family_is_counted():
    assert {family for family, *_ in COUNTS} == set(BASE) == set(FAMILIES) - {"chatglm"}


def transformers_count(values):
    """(Weights of transformers' own class, made without memory; its config, whole; its config, as it is saved)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if values["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip("the installed transformers doesn't have it")
    made = transformers.AutoConfig.for_model(**values)
    causal = type(made) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        # Some text parts have no class with an output layer of their own: it is their whole model's.
        model = (transformers.AutoModelForCausalLM if causal else transformers.AutoModel).from_config(made)
    model.tie_weights()  # transformers 5.0 leaves that out on this device
    whole, saved = (json.loads(made.to_json_string(use_diff=short)) for short in (False, True))
    head = 0 if causal or values.get("tie_word_embeddings") else made.vocab_size * made.hidden_size
    return head + sum(weight.numel() for weight in model.parameters()), whole, saved


@pytest.mark.parametrize(("family", "changes", "weights"), COUNTS, ids=ids)
def test_transformers_counts_the_same(family, changes, weights):
    found, whole, saved = transformers_count(config(family, **changes))
    assert found == weights
    assert from_config(whole, "").parameters == from_config(saved, "").parameters == weights


@pytest.mark.parametrize(("family", "changes", "weights"), VARIANTS, ids=ids)
def test_transformers_counts_the_variants(family, changes, weights):
    assert transformers_count(config(family, **changes))[0] == weights


@pytest.mark.parametrize(("family", "silent_on", "weights"), SILENT)
def test_transformers_has_defaults(family, silent_on, weights):
    values = {key: value for key, value in config(family).items() if key != silent_on}
    assert transformers_count(values)[0] == weights


@pytest.mark.parametrize("model", NAMED, ids=lambda model: model.name)
def test_model_files_say_the_count(model):
    shape = shape_of(model.architecture, str(model.path), parameters=model.parameters)
    unloaded = multimodal.way(model.architecture) == multimodal.UNLOADED
    assert (shape.parameters < model.parameters) if unloaded else (shape.parameters == model.parameters)
    assert bool(shape.frozen) == (multimodal.way(model.architecture) == multimodal.FROZEN)
    assert shape.positions == multimodal.text_config(model.architecture)["max_position_embeddings"]
    assert not shape.assumed


def test_a_known_count_is_taken():
    assert from_config(LLAMA, "", 123456).parameters == 123456


# --- what a config says ---

CHATGLM2 = {
    # The config.json of zai-org/chatglm2-6b, what counts of it.
    "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "ffn_hidden_size": 13696,
    "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
    "num_attention_heads": 32, "num_layers": 28, "padded_vocab_size": 65024, "rmsnorm": True, "seq_length": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_chatglms_own_names_give_the_same_shape():
    found = model_files.load_model_file("chatglm2-6b")
    values, path = found.architecture, found.path
    assert values["model_type"] == "glm"
    assert from_config(CHATGLM2, "") == from_config(values, str(path))
    without_bias = from_config({**CHATGLM2, "add_qkv_bias": False}, "")
    assert from_config(CHATGLM2, "").parameters - without_bias.parameters == 28 * (32 + 2 * 2) * 128


def test_every_field():
    shape = from_config({**LLAMA, "head_dim": 24, "max_position_embeddings": 512}, "")
    assert shape == Shape(
        123840,
        layers=3,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=24,
        vocab=100,
        positions=512,
        block=FAMILIES["llama"].block,
    )
    assert (shape.query_width, shape.kv_width, shape.embedding) == (96, 48, 6400)
    assert shape.layer_parameters == (123840 - 2 * 6400) // 3
    assert replace(shape, tied=True).layer_parameters == (123840 - 6400) // 3


@pytest.mark.parametrize(
    ("values", "kv_heads", "intermediate"),
    [
        ({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}, 4, 96),
        ({**LLAMA, "num_key_value_heads": None, "head_dim": None}, 4, 96),
        (config("falcon"), 1, 256),
        (config("falcon", multi_query=False), 4, 256),
        (config("gpt2"), 4, 256),
        (config("bloom"), 4, 256),
    ],
    ids=["llama", "null", "multi-query", "falcon", "gpt2", "bloom"],
)
def test_defaults(values, kv_heads, intermediate):
    shape = from_config(values, "")
    assert (shape.kv_heads, shape.head_dim, shape.intermediate) == (kv_heads, 16, intermediate)


# --- what is refused ---


@pytest.mark.parametrize("key", EXPERTS)
def test_experts_in_a_known_family(key):
    said = str(refusal({**LLAMA, key: 8}))
    assert f"{key} is 8" in said
    assert "mixtures of experts" in said
    assert (
        from_config({**LLAMA, key: 1}, "") == from_config({**LLAMA, key: None}, "") == from_config(LLAMA, "")
    )


@pytest.mark.parametrize("part", ["vision", "audio"])
def test_images_and_sound(part):
    assert f"{part} part" in str(refusal({**LLAMA, f"{part}_config": {"hidden_size": 8}}))
    assert from_config({**LLAMA, f"{part}_config": None}, "") == from_config(LLAMA, "")


def test_encoder_decoders():
    assert "encoder-decoder" in str(refusal({"model_type": "t5", "is_encoder_decoder": True, "d_model": 512}))
    assert "encoder-decoder" in str(refusal({**LLAMA, "is_encoder_decoder": True}))


@pytest.mark.parametrize("model_type", ["mamba", None, ["llama"], "Llama", 7])
def test_an_unknown_model_type(model_type):
    said = str(refusal({**LLAMA, "model_type": model_type}))
    assert repr(model_type) in said
    assert all(family in said for family in FAMILIES)
    assert "--params" in said


def test_falcons_newer_architecture():
    assert "new_decoder_architecture is True" in str(refusal(config("falcon", new_decoder_architecture=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_is_missing_is_named_at_once(family):
    known = FAMILIES[family]
    problems = [problem.what for problem in refusal({"model_type": family}).problems]
    # Nothing says how wide the feed-forward block is where the hidden size is missing too.
    assert [what for what in problems if what.startswith("lacks ")] == problems
    for size in NEEDED:
        assert any(name in what for what in problems for name in known.names(size)), size
    one = {
        key: value
        for key, value in BASE.get(family, CHATGLM2).items()
        if key not in known.names("vocab_size")
    }
    (problem,) = refusal({"model_type": family, **one}).problems
    assert problem.what == f"lacks {' or '.join(known.names('vocab_size'))}"


@pytest.mark.parametrize("value", ["64", True, [64], {}])
def test_what_is_no_number_is_quoted(value):
    (problem,) = refusal({**LLAMA, "hidden_size": value}).problems
    assert problem.what == f"hidden_size is {value!r}"


@pytest.mark.parametrize("value", [0, -1, -(10**30)])
@pytest.mark.parametrize("key", [*GROUPED, "head_dim"])
def test_sizes_below_one(key, value):
    (problem,) = refusal({**LLAMA, key: value}).problems
    assert problem.what == f"{key} is {value}"


def test_all_sizes_below_one_at_once():
    wrong = dict.fromkeys(GROUPED, -3)
    assert len(refusal({**LLAMA, **wrong}).problems) == len(GROUPED)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_json_may_hold_infinity(value):
    assert json.loads(json.dumps(value)) != 0
    assert "hidden_size" in str(refusal({**LLAMA, "hidden_size": value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 8},
        {"num_attention_heads": 128},
        {"hidden_size": 64.7},
        {"max_position_embeddings": -5},
    ],
    ids=ids,
)
def test_sizes_that_contradict_one_another(changes):
    assert next(iter(changes)) in str(refusal({**LLAMA, **changes}))


# --- a shape from numbers ---


def test_assumptions_are_listed():
    shape = from_numbers(SEVEN)
    assert (shape.layers, shape.hidden, shape.vocab, shape.heads, shape.kv_heads) == (32, 4096, 32000, 32, 32)
    assert shape.assumed == (
        "layers 32", "hidden 4096", "vocab 32000", "heads 32", "kv-heads 32", f"intermediate {shape.intermediate}",
    )  # fmt: skip


NUMBERS = {"layers": 28, "hidden": 4096, "intermediate": 13696, "heads": 32, "kv_heads": 2, "vocab": 65024}


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_given_is_not_assumed(name):
    shape = from_numbers(6.2e9, **{name: NUMBERS[name]})
    assert getattr(shape, name) == NUMBERS[name]
    assert name.replace("_", "-") not in [said.rpartition(" ")[0] for said in shape.assumed]
    assert len(shape.assumed) == len(NUMBERS) - 1


def test_all_given():
    shape = from_numbers(6.2e9, **NUMBERS)
    assert shape == Shape(6_200_000_000, 28, 4096, 13696, 32, 2, 128, 65024)


@pytest.mark.parametrize(("parameters", "layers", "hidden"), SIZES)
def test_usual_sizes_hold_what_they_are_said_to(parameters, layers, hidden):
    shape = from_numbers(parameters)
    assert (shape.layers, shape.hidden, shape.parameters) == (layers, hidden, round(parameters))
    blocks = 4 * hidden * shape.query_width + 3 * hidden * shape.intermediate
    assert shape.layers * blocks + 2 * shape.embedding == pytest.approx(parameters, rel=0.12)


@pytest.mark.parametrize("value", [0, -1, math.nan, 0.5, -math.inf])
@pytest.mark.parametrize("name", ["parameters", *NUMBERS])
def test_numbers_below_one(name, value):
    given_ = {"parameters": SEVEN, name: value}
    (problem,) = no_numbers(**given_).problems
    assert problem.where == ("--params" if name == "parameters" else f"--{name.replace('_', '-')}")
    assert problem.what == f"can't be {value:g}"


def test_all_wrong_numbers_at_once():
    assert len(no_numbers(-1, layers=0, hidden=-5, vocab=0).problems) == 4


def test_infinitely_many():
    assert "infinite" in str(no_numbers(math.inf))


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 5), (32, 64), (None, 3)])
def test_kv_heads_divide_the_heads(heads, kv_heads):
    assert f"{kv_heads} doesn't divide" in str(no_numbers(SEVEN, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 32, "hidden": 4096, "intermediate": 10**9},
        {"layers": 2, "hidden": 512, "intermediate": 1024},
        {"layers": 3200, "hidden": 4096},
        {"layers": 32, "hidden": 4096, "intermediate": 60000},
        {"layers": 32, "hidden": 2048, "intermediate": 5504},
        {"hidden": 65536},
    ],
    ids=ids,
)
def test_contradictions(changes):
    assert "don't agree with the shape" in str(no_numbers(SEVEN, **changes))


@pytest.mark.parametrize("parameters", [1, 1000, 1e6])
def test_too_few_for_any_network(parameters):
    assert "don't agree" in str(no_numbers(parameters))


@pytest.mark.parametrize(
    ("parameters", "changes"),
    [(SEVEN, {"vocab": 10**9}), (SEVEN, {"heads": 10_000}), (SEVEN, {"hidden": 5}), (1e300, {})],
    ids=str,
)
def test_numbers_that_no_network_has(parameters, changes):
    no_numbers(parameters, **changes)


# --- whatever comes ---

NUMBER = st.one_of(st.integers(-2, 10**5), st.floats(-1e6, 1e6), st.sampled_from([None, True, "12", [], {}]))
KEYS = sorted(
    {key for family in FAMILIES.values() for size in Family.SIZES for key in family.names(size)}
    | {
        "max_position_embeddings",
        "n_positions",
        "tie_word_embeddings",
        "attention_bias",
        "multi_query",
        *EXPERTS,
    }
)


def described(values):
    """The shape, or None where it is refused; every other exception goes through."""
    try:
        return from_config(values, "x")
    except DsrunError as error:
        assert error.problems
        return None


@settings(deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), values=st.dictionaries(st.sampled_from(KEYS), NUMBER))
def test_any_config_gives_a_shape_or_a_reason(family, values):
    shape = described({"model_type": family, **BASE.get(family, CHATGLM2), **values})
    if shape is not None:
        assert (
            min(shape.layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads, shape.vocab) >= 1
        )


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["model_type", "vision_config", *KEYS]), NUMBER | st.text()))
def test_any_dictionary_gives_a_shape_or_a_reason(values):
    described(values)


@settings(deadline=None)
@given(key=st.sampled_from(sorted({*GROUPED, "expansion_ratio"})), value=st.floats())
@example("expansion_ratio", math.inf)
@example("hidden_size", math.nan)
def test_any_float_gives_a_shape_or_a_reason(key, value):
    described({**LLAMA, key: value})
    described(config("mpt", **{key: value}))


SOME = st.none() | st.integers(-2, 10**6)


@settings(deadline=None)
@given(
    st.floats(max_value=1e300) | st.just(math.inf) | st.just(math.nan),
    st.fixed_dictionaries({}, optional=dict.fromkeys(NUMBERS, SOME)),
)
def test_any_numbers_give_a_shape_or_a_reason(parameters, numbers):
    try:
        shape = from_numbers(parameters, **numbers)
    except DsrunError as error:
        assert error.problems
        return
    assert shape.heads % shape.kv_heads == 0
    assert len(shape.assumed) == sum(numbers.get(name) is None for name in NUMBERS)
    assert min(shape.layers, shape.hidden, shape.intermediate, shape.head_dim, shape.vocab) >= 1


@pytest.mark.parametrize("name", ["hidden", "vocab"])
def test_infinite_sizes(name):
    no_numbers(SEVEN, **{name: math.inf})


@pytest.mark.parametrize("parameters", [10**400, sys.float_info.max], ids=["whole", "float"])
def test_more_than_a_float_holds(parameters):
    no_numbers(parameters)


@since(transformers="5.23")
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_a_heads_width_where_a_config_has_none_is_transformers(model_type):
    """A width of its own, or an equal share of the hidden size."""
    assert FAMILIES[model_type].head == (
        transformers_code.config_defaults(model_type).get("head_dim") or None
    )

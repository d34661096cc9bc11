"""ChatGLM's original checkpoints: a tiny one is written here and must compute what the published formulas say."""

import base64
import json
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

from chatglm_checkpoint import (
    CONFIG,
    HEAD_DIM,
    HIDDEN,
    IDS,
    LAYERS,
    VOCAB,
    loaded,
    logits,
    piece_model,
    plain_angle,
    prepared,
    random_weights,
    reference_logits,
    write_checkpoint,
)

from dsrun.errors import DsrunError
from dsrun.models import chatglm, resolve
from dsrun.training.models.chatglm import renamed, write_original
from dsrun.training.models.weights import open_shard, weight_files


@pytest.mark.parametrize("style", ["chatglm2", "chatglm3"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_logits_are_those_of_the_formulas(kind, style, tmp_path):
    weights = random_weights()
    folder = write_checkpoint(tmp_path / "original", weights, kind, style)
    assert resolve.resolve(str(folder), None)[0].prompt_format == style
    model = loaded(folder, tmp_path / "glm")
    assert type(model).__name__ == "GlmForCausalLM"
    wanted = reference_logits(weights, IDS, plain_angle)
    assert wanted.abs().max() > 0.5
    assert torch.allclose(logits(model, IDS), wanted, atol=1e-5, rtol=0)


def test_no_copy_of_the_weights_is_made(tmp_path):
    prepared(write_checkpoint(tmp_path / "original", random_weights(), "bin"), tmp_path / "glm")
    names = {path.name for path in (tmp_path / "glm").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".safetensors", ".bin"))]


@pytest.mark.parametrize(
    ("fields", "code", "angle"),
    [
        ({}, "t = t / self.rope_ratio", lambda p, j: p / 4 * 10000 ** (-2 * j / (HEAD_DIM / 2))),
        ({}, "base = base * self.rope_ratio", lambda p, j: p * 40000 ** (-2 * j / (HEAD_DIM / 2))),
        (
            {"_name_or_path": "THUDM/chatglm2-6b-32k"},
            "",
            lambda p, j: p / 4 * 10000 ** (-2 * j / (HEAD_DIM / 2)),
        ),
        ({"_name_or_path": "THUDM/chatglm3-6b-32k"}, "", lambda p, j: p * 40000 ** (-2 * j / (HEAD_DIM / 2))),
    ],
)
def test_a_rope_ratio_means_what_the_folder_says(fields, code, angle, tmp_path):
    weights = random_weights()
    folder = write_checkpoint(tmp_path / "original", weights, "safetensors", rope_ratio=4)
    with pytest.raises(DsrunError, match="rope_ratio 4"):
        resolve.resolve(str(folder), None)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_ratio": 4} | fields))
    if code:
        (folder / "modeling_chatglm.py").write_text(code)
    ids = list(range(3, 40))
    found = logits(loaded(folder, tmp_path / "glm"), ids)
    assert torch.allclose(found, reference_logits(weights, ids, angle), atol=1e-5, rtol=0)


def test_the_tokenizer_is_sentencepieces(tmp_path):
    import sentencepiece
    from transformers import AutoTokenizer

    folder = write_checkpoint(tmp_path / "original", random_weights(), "safetensors")
    prepared(folder, tmp_path / "glm3", name="chatglm3-6b")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "glm3")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("你好，世界", " two  spaces", "tab\tnewline\n", "😀"):
        assert tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text)
    assert tokenizer.convert_tokens_to_ids("<|assistant|>") == 1200 + 7
    assert tokenizer.encode("", add_special_tokens=True) == [1201, 1203]


def test_the_mapping_covers_the_real_model():
    from transformers import AutoConfig, GlmForCausalLM

    fields = chatglm.glm_fields(BIG, Path("/nowhere"))
    with torch.device("meta"):
        model = GlmForCausalLM(AutoConfig.for_model(**fields))
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_243_584_000
    named = [
        name.replace("layers.0.", f"layers.{n}.")
        for n in range(28)
        for name in random_weights()
        if "layers.0." in name
    ]
    named += [name for name in random_weights() if ".layers." not in name]
    assert len(named) == 200
    found = [new for name in named for new in renamed(name, [4096, 256, 256])]
    assert sorted(found) == sorted(model.state_dict())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position_encoding_2d": True}, "ChatGLM-6B"),
        ({"vision_config": {}}, "GLM-4V"),
        ({"quantization_bit": 4}, "quantization_bit is 4"),
        ({"rmsnorm": False}, "rmsnorm is False"),
        ({"multi_query_group_num": None}, "multi_query_group_num"),
        ({"pre_seq_len": 128}, "pre_seq_len is 128"),
        ({"multi_query_attention": False}, "multi_query_attention is False"),
        ({"multi_query_attention": None}, "multi_query_attention is None"),
        ({"multi_query_group_num": 3}, "3 groups"),
        ({"add_bias_linear": True}, "add_bias_linear is True"),
        ({"post_layer_norm": False}, "post_layer_norm is False"),
        ({"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({"original_rope": False}, "original_rope is False"),
        ({"rotary_percent": 1.0}, "rotary_percent is 1.0"),
        ({"fp32_residual_connection": True}, "fp32_residual_connection"),
        ({"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"inner_hidden_size": 16384}, "ChatGLM-6B"),
        ({"boi_token_id": 1}, "GLM-4V"),
        ({"quantization_bit": 8}, "quantization_bit is 8"),
        ({"interleaved_qkv": True}, "interleaved_qkv is True"),
        ({"num_hidden_layers": LAYERS + 1}, f"num_hidden_layers is {LAYERS + 1} and num_layers {LAYERS}"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_experts": 8}, "has a field 'num_experts'"),
        ({"rope_ratio": "4"}, "rope_ratio is '4'"),
        ({"rope_ratio": -1}, "rope_ratio is -1"),
    ],
)
def test_another_network_is_refused(change, says, folder_of_text):
    (folder_of_text / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(DsrunError, match=says) as caught:
        resolve.resolve(str(folder_of_text), None)
    assert caught.value.problems[0].where == str(folder_of_text / "config.json")


@pytest.fixture
def folder_of_text(tmp_path):
    """A folder whose config and kinds of files are looked at, and whose weights are not."""
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "use"),
    [
        ({"position_encoding_2d": True, "inner_hidden_size": 16384}, "ChatGLM2-6B"),
        ({"vision_config": {"hidden_size": 1792}}, "GLM-4-9B, which reads text only"),
        ({"quantization_bit": 4}, "-int4 or -int8"),
        ({"pre_seq_len": 128}, "the prefix was trained on"),
        ({"num_experts": 8}, "remove it from config.json"),
    ],
)
def test_a_refusal_says_what_to_use(change, use, folder_of_text):
    (folder_of_text / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(DsrunError) as caught:
        resolve.resolve(str(folder_of_text), None)
    assert use in caught.value.problems[0].hint


BIG = {
    "model_type": "chatglm", "num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696,
    "num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 128,
    "padded_vocab_size": 65024, "seq_length": 32768, "layernorm_epsilon": 1e-5, "add_qkv_bias": True,
    "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True, "hidden_dropout": 0.0,
    "apply_residual_connection_post_layernorm": False, "apply_query_key_layer_scaling": True, "original_rope": True,
    "attention_softmax_in_fp32": True, "attention_dropout": 0.0, "fp32_residual_connection": False,
    "bias_dropout_fusion": True, "torch_dtype": "float16", "tie_word_embeddings": False, "eos_token_id": 2,
    "pad_token_id": 0, "architectures": ["ChatGLMModel"], "use_cache": True, "transformers_version": "4.27.1",
    "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
}  # fmt: skip
"""What the released checkpoints of 6B have in common."""
NINE = BIG | {
    "num_layers": 40, "num_hidden_layers": 40, "padded_vocab_size": 151552, "vocab_size": 151552,
    "seq_length": 131072, "layernorm_epsilon": 1.5625e-07, "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329, "torch_dtype": "bfloat16", "rope_ratio": 500, "classifier_dropout": None,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
RELEASED = {
    "ChatGLM2-6B": (BIG, "", {"rope_parameters": PLAIN, "max_position_embeddings": 32768}),
    "ChatGLM2-6B-32k": (
        BIG | {"rope_ratio": 16}, "t = torch.arange(n) / self.rope_ratio",
        {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 16.0}},
    ),
    "ChatGLM3-6B": (
        BIG | {"seq_length": 8192, "classifier_dropout": None, "pre_seq_len": None, "prefix_projection": False},
        "", {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    ),
    "ChatGLM3-6B-base": (BIG | {"_name_or_path": "THUDM/chatglm3-6b-base"}, "", {"rope_parameters": PLAIN}),
    "ChatGLM3-6B-32k": (
        BIG | {"rope_ratio": 50}, "base = base * self.rope_ratio",
        {"rope_parameters": PLAIN | {"rope_theta": 5e5}},
    ),
    "CodeGeeX2-6B": (
        {name: value for name, value in BIG.items() if name != "pad_token_id"}
        | {"seq_length": 8192, "rotary_percent": 0.5, "torch_dtype": "bfloat16", "interleaved_qkv": False},
        "", {"pad_token_id": 0, "eos_token_id": 2, "rope_parameters": PLAIN},
    ),
    "GLM-4-9B": (
        NINE, "base = base * self.rope_ratio",
        {"rope_parameters": PLAIN | {"rope_theta": 5e6}, "rms_norm_eps": 1.5625e-07, "num_hidden_layers": 40,
         "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "vocab_size": 151552},
    ),
    "GLM-4-9B-1M": (
        NINE | {"rope_ratio": 10000, "multi_query_group_num": 4, "seq_length": 1048576},
        "base = base * self.rope_ratio",
        {"rope_parameters": PLAIN | {"rope_theta": 1e8}, "num_key_value_heads": 4},
    ),
}  # fmt: skip
"""The configs of released checkpoints, what their code says of rope_ratio, and fields of GlmConfig that follow."""


@pytest.mark.parametrize("name", RELEASED)
def test_what_was_released_is_understood(name, folder_of_text):
    from transformers import AutoConfig

    raw, code, expected = RELEASED[name]
    (folder_of_text / "config.json").write_text(json.dumps(raw))
    (folder_of_text / "modeling_chatglm.py").write_text(code)
    spec, _ = resolve.resolve(str(folder_of_text), None)
    config = AutoConfig.for_model(**spec.architecture)
    assert {field: getattr(config, field) for field in expected} == expected
    sizes = (config.hidden_size, config.intermediate_size, config.head_dim, config.num_attention_heads)
    assert (*sizes, config.attention_bias) == (4096, 13696, 128, 32, True)


def test_the_model_that_the_user_names_says_what_its_ratio_means(folder_of_text):
    (folder_of_text / "config.json").write_text(json.dumps(CONFIG | {"rope_ratio": 4}))
    with pytest.raises(DsrunError, match="nothing here says which") as caught:
        resolve.resolve(str(folder_of_text), None)
    assert f"dsrun finetune chatglm3-6b (or chatglm2-6b) --model-path {folder_of_text}" in str(caught.value)
    found = [
        resolve.resolve(name, folder_of_text)[0].architecture["rope_parameters"]
        for name in ("chatglm2-6b", "chatglm3-6b")
    ]
    assert found == [PLAIN | {"rope_type": "linear", "factor": 4.0}, PLAIN | {"rope_theta": 4e4}]
    (folder_of_text / "modeling_chatglm.py").write_text("base = base * self.rope_ratio")
    assert resolve.resolve("chatglm2-6b", folder_of_text)[0].architecture["rope_parameters"] == found[1]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "a", random_weights(), "bin", "chatglm3")
    (folder / "tokenizer.model").write_bytes(piece_model(1275))
    with pytest.raises(
        DsrunError, match="has 1284 tokens with the special ones, the model only 1280"
    ) as caught:
        prepared(folder, tmp_path / "glm")
    assert caught.value.problems[0].where == str(folder / "tokenizer.model")


def test_every_fault_of_the_weights_is_named(tmp_path):
    weights = random_weights()
    weights.pop("transformer.encoder.final_layernorm.weight")
    weights["transformer.output_layer.weight"] = torch.zeros(VOCAB, HIDDEN + 1)
    folder = write_checkpoint(tmp_path / "a", weights, "safetensors")
    with pytest.raises(DsrunError) as caught:
        prepared(folder, tmp_path / "glm-a")
    said = " ".join(problem.what for problem in caught.value.problems)
    assert "lacks 1 of" in said
    assert "model.norm.weight" in said
    assert f"transformer.output_layer.weight has shape [{VOCAB}, {HIDDEN + 1}]" in said


def test_a_foreign_weight_is_named(tmp_path):
    weights = random_weights() | {"transformer.prefix_encoder.x": torch.zeros(3)}
    with pytest.raises(DsrunError, match="prefix_encoder") as caught:
        prepared(write_checkpoint(tmp_path / "b", weights, "bin"), tmp_path / "glm-b")
    assert "P-Tuning" in caught.value.problems[0].hint


def test_a_fused_matrix_of_another_size_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "a", random_weights(), "safetensors", multi_query_group_num=4)
    with pytest.raises(DsrunError, match=r"query_key_value\.weight has shape"):
        prepared(folder, tmp_path / "glm-a")


def test_a_damaged_shard_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "a", random_weights(), "bin")
    path = folder / "pytorch_model-00002-of-00002.bin"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DsrunError) as caught:
        prepared(folder, tmp_path / "glm-a")
    assert caught.value.problems[0].where == str(path)


def test_code_in_a_shard_never_runs(tmp_path):
    folder = write_checkpoint(tmp_path / "a", random_weights(), "bin")

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"x": Evil()}, folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(DsrunError, match="asks for code"):
        prepared(folder, tmp_path / "glm-a")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [True, False])
def test_files_of_an_old_torch_load_too(legacy, tmp_path):
    weights = random_weights()
    folder = write_checkpoint(tmp_path / "a", weights, "bin")
    for path in folder.glob("*.bin"):
        torch.save(open_shard(path), path.with_suffix(".new"), _use_new_zipfile_serialization=not legacy)
        path.with_suffix(".new").replace(path)
    found = logits(loaded(folder, tmp_path / "glm"), IDS)
    assert torch.allclose(found, reference_logits(weights, IDS, plain_angle), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_original_format_is_written_back_byte_for_byte(kind, tmp_path):
    weights = {name: tensor.half() for name, tensor in random_weights().items()}
    folder = write_checkpoint(tmp_path / "a user's 模型", weights, kind)
    (folder / "modeling_chatglm.py").write_text("raise SystemExit('never run')")
    (folder / "quantization.py").write_text("raise SystemExit('never run')")
    model = loaded(folder, tmp_path / "glm", torch.float16)
    target = tmp_path / "back"
    target.mkdir()
    write_original(model.state_dict(), model.config, folder, target)
    assert {path.name for path in target.iterdir()} == {path.name for path in folder.iterdir()}
    for path in weight_files(folder):
        was, now = open_shard(path), open_shard(target / path.name)
        assert list(was) == list(now)
        for name, tensor in was.items():
            assert tensor.dtype == now[name].dtype
            assert tensor.numpy().tobytes() == now[name].numpy().tobytes()
        assert (
            abs((target / path.name).stat().st_size - path.stat().st_size) < 3000
        )  # no whole file behind a view
    for name in ("config.json", "tokenizer.model", "modeling_chatglm.py", "quantization.py"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    again = logits(loaded(target, tmp_path / "glm2"), IDS)
    assert torch.equal(again, logits(loaded(folder, tmp_path / "glm3"), IDS))


def test_the_format_says_another_type_that_it_was_trained_in(tmp_path):
    weights = {name: tensor.half() for name, tensor in random_weights().items()}
    folder = write_checkpoint(tmp_path / "a", weights, "safetensors")
    model = loaded(folder, tmp_path / "glm", torch.bfloat16)
    (tmp_path / "back").mkdir()
    write_original(model.state_dict(), model.config, folder, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG | {"torch_dtype": "bfloat16"}
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())


RANK_WORDS = ["hello", " world", "你好", "一", "ing", "    ", "\n\n", "123", "🙂"]


def ranks_file(path):
    """A tokenizer.model of ranks: the bytes, then tokens by pairs up to the words."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in RANK_WORDS:
        whole = word.encode()
        tokens += [whole[:end] for end in range(2, len(whole) + 1) if whole[:end] not in tokens]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")
    return len(tokens)


def test_glm_4_in_its_own_format(tmp_path):
    from transformers import AutoTokenizer

    weights = random_weights()
    fields = {"eos_token_id": [300, 307], "pad_token_id": 300, "layernorm_epsilon": 1e-5, "rope_ratio": 4}
    folder = write_checkpoint(tmp_path / "original", weights, "safetensors", **fields)
    size = ranks_file(folder / "tokenizer.model")
    spec = prepared(folder, tmp_path / "glm")
    assert spec.prompt_format == "glm-4"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "glm")
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == size
    assert tokenizer.encode("hello world")[:2] == [size + 2, size + 4]
    found = logits(loaded(folder, tmp_path / "glm2"), IDS)
    wanted = reference_logits(weights, IDS, lambda p, j: p * 40000 ** (-2 * j / (HEAD_DIM / 2)))
    assert torch.allclose(found, wanted, atol=1e-5, rtol=0)
    # The model file of the -hf repository speaks of a chat template, which this tokenizer has none of.
    assert resolve.resolve("glm-4-9b", folder)[0].prompt_format == "glm-4"


@pytest.mark.parametrize("content", [b"", b"\x00\x01", b"hello\n", b"{}"])
def test_another_tokenizer_model_is_refused(content, tmp_path):
    folder = write_checkpoint(tmp_path / "original", random_weights(), "safetensors")
    (folder / "tokenizer.model").write_bytes(content)
    with pytest.raises(DsrunError, match="SentencePiece"):
        resolve.resolve(str(folder), None)

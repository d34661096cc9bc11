"""ChatGLM's original checkpoints: a tiny one is written here and must compute what the published formulas say."""

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file

from dsrun.errors import DsrunError
from dsrun.jobs import chatglm, models
from dsrun.jobs.finetune import dataset_folder
from dsrun.training.chatglm import convert, renamed
from dsrun.training.tiny import _texts
from dsrun.training.tokenizer import train_sentencepiece

LAYERS, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCAB = 3, 64, 4, 2, 16, 112, 1280
CONFIG = {
    "model_type": "chatglm",
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "multi_query_attention": True,
    "multi_query_group_num": GROUPS,
    "kv_channels": HEAD_DIM,
    "padded_vocab_size": VOCAB,
    "seq_length": 256,
    "layernorm_epsilon": 1e-5,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "original_rope": True,
    "torch_dtype": "float16",
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def random_weights():
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, around=0.0):
        return torch.randn(*shape, generator=generator) * 0.15 + around

    rows = (HEADS + 2 * GROUPS) * HEAD_DIM
    weights = {
        "transformer.embedding.word_embeddings.weight": draw(VOCAB, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": draw(HEAD_DIM // 4),
        "transformer.encoder.final_layernorm.weight": draw(HIDDEN, around=1.0),
        "transformer.output_layer.weight": draw(VOCAB, HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"transformer.encoder.layers.{number}."
        weights |= {
            f"{layer}input_layernorm.weight": draw(HIDDEN, around=1.0),
            f"{layer}post_attention_layernorm.weight": draw(HIDDEN, around=1.0),
            f"{layer}self_attention.query_key_value.weight": draw(rows, HIDDEN),
            f"{layer}self_attention.query_key_value.bias": draw(rows),
            f"{layer}self_attention.dense.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}mlp.dense_h_to_4h.weight": draw(2 * FFN, HIDDEN),
            f"{layer}mlp.dense_4h_to_h.weight": draw(HIDDEN, FFN),
        }
    return weights


def reference_logits(weights, ids, angle):
    """ChatGLM2's forward pass from its formulas, one sequence. angle(position, pair) is the rotary angle."""

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + CONFIG["layernorm_epsilon"]) * weight

    length = len(ids)
    angles = torch.tensor([[angle(p, j) for j in range(HEAD_DIM // 4)] for p in range(length)])[:, None, :]

    def rotate(x):  # [length, heads, head_dim]: the first half in neighbouring pairs, the rest as it is
        even, odd, rest = (
            x[..., 0 : HEAD_DIM // 2 : 2],
            x[..., 1 : HEAD_DIM // 2 : 2],
            x[..., HEAD_DIM // 2 :],
        )
        turned = torch.stack(
            [even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1
        )
        return torch.cat([turned.flatten(-2), rest], -1)

    h = weights["transformer.embedding.word_embeddings.weight"][torch.tensor(ids)]
    for number in range(LAYERS):
        layer = f"transformer.encoder.layers.{number}."
        w = {name.removeprefix(layer): tensor for name, tensor in weights.items() if name.startswith(layer)}
        x = norm(h, w["input_layernorm.weight"])
        mixed = x @ w["self_attention.query_key_value.weight"].T + w["self_attention.query_key_value.bias"]
        q, k, v = mixed.split([HEADS * HEAD_DIM, GROUPS * HEAD_DIM, GROUPS * HEAD_DIM], dim=-1)
        q = rotate(q.view(length, HEADS, HEAD_DIM))
        k = rotate(k.view(length, GROUPS, HEAD_DIM))
        v = v.view(length, GROUPS, HEAD_DIM)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = q[:, head] @ k[:, group].T / math.sqrt(HEAD_DIM)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        h = h + torch.cat(heads, -1) @ w["self_attention.dense.weight"].T
        gate, up = (norm(h, w["post_attention_layernorm.weight"]) @ w["mlp.dense_h_to_4h.weight"].T).chunk(
            2, -1
        )
        h = h + (torch.nn.functional.silu(gate) * up) @ w["mlp.dense_4h_to_h.weight"].T
    h = norm(h, weights["transformer.encoder.final_layernorm.weight"])
    return h @ weights["transformer.output_layer.weight"].T


def write_checkpoint(folder, weights, kind, **fields):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    names = sorted(weights)
    shards = [names[:9], names[9:]]
    files = []
    for number, part in enumerate(shards, 1):
        shard = {name: weights[name] for name in part}
        if kind == "safetensors":
            files.append(f"model-{number:05}-of-00002.safetensors")
            save_file(shard, folder / files[-1])
        else:
            files.append(f"pytorch_model-{number:05}-of-00002.bin")
            torch.save(shard, folder / files[-1])
    index = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    weight_map = {name: file for file, part in zip(files, shards, strict=True) for name in part}
    (folder / index).write_text(json.dumps({"weight_map": weight_map}))
    train_sentencepiece(_texts(dataset_folder("advertise")), 1200, 3, folder / "tokenizer.model")
    return folder


def converted(folder, target, name=None):
    target.mkdir()
    spec, _ = models.resolve(str(folder), None) if name is None else models.resolve(name, folder)
    assert spec.source == "chatglm"
    convert(spec, target, lambda text: None)
    return spec


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_logits_are_those_of_the_formulas(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    weights = random_weights()
    converted(write_checkpoint(tmp_path / "original", weights, kind), tmp_path / "glm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "glm")
    assert type(model).__name__ == "GlmForCausalLM"
    ids = [5, 700, 31, 31, 2, 999, 64, 3, 1100, 17]
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0]
    wanted = reference_logits(
        weights, ids, lambda position, pair: position * 10000 ** (-2 * pair / (HEAD_DIM / 2))
    )
    assert wanted.abs().max() > 0.5
    assert torch.allclose(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("code", "angle"),
    [
        ("t = t / self.rope_ratio", lambda p, j: p / 4 * 10000 ** (-2 * j / (HEAD_DIM / 2))),
        ("base = base * self.rope_ratio", lambda p, j: p * 40000 ** (-2 * j / (HEAD_DIM / 2))),
    ],
)
def test_a_rope_ratio_means_what_the_folders_code_says(code, angle, tmp_path):
    from transformers import AutoModelForCausalLM

    weights = random_weights()
    folder = write_checkpoint(tmp_path / "original", weights, "safetensors", rope_ratio=4)
    with pytest.raises(DsrunError, match="rope_ratio 4"):
        models.resolve(str(folder), None)
    (folder / "modeling_chatglm.py").write_text(code)
    converted(folder, tmp_path / "glm")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "glm")
    ids = list(range(3, 40))
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(found, reference_logits(weights, ids, angle), atol=2e-5, rtol=0)


def test_the_tokenizer_is_sentencepieces(tmp_path):
    import sentencepiece
    from transformers import AutoTokenizer

    folder = write_checkpoint(tmp_path / "original", random_weights(), "safetensors")
    converted(folder, tmp_path / "glm3", name="chatglm3-6b")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "glm3")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("你好，世界", " two  spaces", "tab\tnewline\n", "😀"):
        assert tokenizer.encode(text, add_special_tokens=False) == pieces.encode(text)
    assert tokenizer.convert_tokens_to_ids("<|assistant|>") == 1200 + 7
    assert tokenizer.encode("", add_special_tokens=True) == [1201, 1203]


def test_the_mapping_covers_the_real_model():
    from transformers import AutoConfig, GlmForCausalLM

    real = CONFIG | {
        "num_layers": 28, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32,
        "kv_channels": 128, "padded_vocab_size": 65024, "seq_length": 32768,
    }  # fmt: skip
    fields = chatglm.glm_fields(real, __import__("pathlib").Path("/nowhere"))
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
    rows = torch.empty(4608, 1, device="meta")
    found = {new for name in named for new in renamed(name, rows, [4096, 256, 256])}
    assert found == set(model.state_dict())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position_encoding_2d": True}, "ChatGLM-6B"),
        ({"vision_config": {}}, "GLM-4V"),
        ({"quantization_bit": 4}, "quantization_bit is 4"),
        ({"rmsnorm": False}, "rmsnorm is False"),
        ({"multi_query_group_num": None}, "multi_query_group_num"),
        ({"pre_seq_len": 128}, "pre_seq_len is 128"),
    ],
)
def test_another_network_is_refused(change, says, tmp_path):
    folder = write_checkpoint(tmp_path / "original", random_weights(), "safetensors", **change)
    with pytest.raises(DsrunError, match=says):
        models.resolve(str(folder), None)


def test_a_missing_or_foreign_weight_is_named(tmp_path):
    weights = random_weights()
    lost = weights.pop("transformer.encoder.final_layernorm.weight")
    with pytest.raises(DsrunError, match=r"model\.norm\.weight"):
        converted(write_checkpoint(tmp_path / "a", weights, "safetensors"), tmp_path / "glm-a")
    weights |= {
        "transformer.encoder.final_layernorm.weight": lost,
        "transformer.prefix_encoder.x": lost.clone(),
    }
    with pytest.raises(DsrunError, match="prefix_encoder"):
        converted(write_checkpoint(tmp_path / "b", weights, "safetensors"), tmp_path / "glm-b")


def test_glm_4s_tokenizer_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "original", random_weights(), "safetensors")
    (folder / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(DsrunError, match="SentencePiece"):
        models.resolve(str(folder), None)

"""A tiny checkpoint in ChatGLM's own format, what the published formulas make of it, and its model as a rank has it."""

import functools
import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.models import resolve
from dsrun.training.models.chatglm import glm_weights, prepare_folder
from dsrun.training.models.tiny import _texts
from dsrun.training.models.tokenizer import train_sentencepiece
from dsrun.training.models.weights import Skeleton

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


ROLE_TOKENS = 'role_special_tokens = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]'


def write_checkpoint(folder, weights, kind, style="chatglm2", **fields):
    folder.mkdir(parents=True)
    if style == "chatglm3":  # what tells it from ChatGLM2: its tokenizer's code knows roles
        (folder / "tokenization_chatglm.py").write_text(ROLE_TOKENS)
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
    (folder / "tokenizer.model").write_bytes(piece_model())
    return folder


@functools.cache
def piece_model(size=1200):
    with tempfile.TemporaryDirectory() as folder:
        train_sentencepiece(_texts(dataset_folder("advertise")), size, 3, Path(folder) / "tokenizer.model")
        return (Path(folder) / "tokenizer.model").read_bytes()


def prepared(folder, target, name=None):
    target.mkdir()
    spec, _ = resolve.resolve(str(folder), None) if name is None else resolve.resolve(name, folder)
    assert spec.source == "chatglm"
    prepare_folder(spec, target)
    return spec


def loaded(folder, target, dtype=torch.float32, name=None):
    """The model as a rank without ZeRO loads it."""
    from transformers import AutoConfig

    prepared(folder, target, name)
    config = AutoConfig.from_pretrained(target)
    skeleton = Skeleton(config, dtype, attn_implementation="sdpa")
    skeleton.fill(glm_weights(folder, config), torch.device("cpu"))
    return skeleton.model


def logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def plain_angle(position, pair):
    return position * 10000 ** (-2 * pair / (HEAD_DIM / 2))


IDS = [5, 700, 31, 31, 2, 999, 64, 3, 1100, 17]

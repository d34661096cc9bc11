"""ChatGLM's original weights under GlmForCausalLM's names, and back.

Only names change, and the rows of the fused query-key-value matrices are parted; no number does.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.job.job import ModelSpec
from dsrun.training.models.weights import (
    COMPUTED,
    INDEXES,
    Skeleton,
    Stored,
    listed,
    open_shard,
    problems,
    weight_files,
)

LAYER = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)")
OUTER = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
}
INNER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.dense.weight": "self_attn.o_proj.weight",
    "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
    "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
}
FUSED = "self_attention.query_key_value."
PREFIX = "transformer.prefix_encoder."
KEPT = ("*.json", "*.py", "*.txt", "*.model", "*.jinja", "LICENSE*", "MODEL_LICENSE*", "README*", "NOTICE*")
"""Files of the user's folder that go beside weights which are written in its own format."""


def renamed(name: str, sizes: Sequence[int]) -> dict[str, tuple[int, int] | None]:
    """The new names of an original weight, and which rows of it each gets (first, count); None: all of them.

    Empty for the rotary table, which is computed. sizes: rows of query, key and value in the fused matrix.
    Raises KeyError for an unknown name.
    """
    if COMPUTED.fullmatch(name):
        return {}
    if name in OUTER:
        return {OUTER[name]: None}
    match = LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, inner = f"model.layers.{match[1]}.", match[2]
    if inner in (FUSED + "weight", FUSED + "bias"):
        kind = inner.removeprefix(FUSED)
        starts = (0, sizes[0], sizes[0] + sizes[1])
        return {
            f"{layer}self_attn.{part}_proj.{kind}": (start, size)
            for part, start, size in zip("qkv", starts, sizes, strict=True)
        }
    return {layer + INNER[inner]: None}


def fused_sizes(config: Any) -> list[int]:
    """Rows of query, key and value in the fused matrix of a GlmConfig's network."""
    groups = config.num_key_value_heads * config.head_dim
    return [config.num_attention_heads * config.head_dim, groups, groups]


def glm_weights(folder: Path, config: Any) -> dict[str, Stored]:
    """The places of GlmForCausalLM's weights in an original checkpoint.

    Raises DsrunError for a weight that is not ChatGLM2's, 3's or GLM-4's, or a fused matrix of another size.
    """
    sizes = fused_sizes(config)
    places: dict[str, Stored] = {}
    wrong: list[Problem] = []
    for name, stored in listed(folder).items():
        try:
            parts = renamed(name, sizes)
        except KeyError:
            hint = "Is config.json the checkpoint's own?"
            if name.startswith(PREFIX):
                hint = "It is a P-Tuning prefix: keep it apart from the model that it was trained on."
            what = f"holds {name}, which is no weight of ChatGLM2, ChatGLM3 or GLM-4"
            wrong.append(Problem(what, str(stored.path), hint))
            continue
        if len(parts) > 1 and stored.shape[:1] != (sum(sizes),):
            what = f"{name} has shape {list(stored.shape)}, the config wants {sum(sizes)} rows"
            wrong.append(Problem(what, str(stored.path), "Is config.json the checkpoint's own?"))
            continue
        places |= {new: stored.part(*rows) if rows else stored for new, rows in parts.items()}
    if wrong:
        raise DsrunError(wrong[:10])
    return places


def checked_weights(folder: Path, skeleton: Skeleton, config: Any) -> dict[str, Stored]:
    """`glm_weights` of a whole checkpoint. Raises DsrunError with all weights that are missing or have another
    shape."""
    stored = glm_weights(folder, config)
    raise_all(problems(stored, skeleton.wanted, skeleton.aliases, str(folder)))
    return stored


def prepare_folder(spec: ModelSpec, folder: Path) -> None:
    """Write config, generation config and tokenizer of the checkpoint at spec.location in transformers' own form.

    The weights stay where they are: they are read from there whenever the model is loaded. spec.architecture:
    GlmConfig's fields. Raises DsrunError if a weight is missing, unknown or has another shape, or if the tokenizer has
    ids that the model has no place for.
    """
    from transformers import AutoConfig, GenerationConfig

    from dsrun.training.models.tokenizer import folder_tokenizer

    source = Path(spec.location)
    config = AutoConfig.for_model(**spec.architecture)
    config.architectures = ["GlmForCausalLM"]
    stored = checked_weights(source, Skeleton(config, torch.float32), config)
    config.dtype = next(iter(stored.values())).dtype
    config.save_pretrained(folder)
    end = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    end.save_pretrained(folder)
    tokenizer = folder_tokenizer(source, spec.tokenizer["style"])
    if len(tokenizer) > config.vocab_size:
        what = f"has {len(tokenizer)} tokens with the special ones, the model only {config.vocab_size}"
        hint = "Are tokenizer.model and config.json from one repository?"
        raise DsrunError(what, where=str(source / "tokenizer.model"), hint=hint)
    tokenizer.save_pretrained(folder)


def original_weights(
    weights: Mapping[str, torch.Tensor], names: Sequence[str], sizes: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Weights under their original names; names that hold no weight of the model (the rotary table) are left out."""
    originals = {}
    for name in names:
        parts = [weights[new] for new in renamed(name, sizes)]
        if parts:
            originals[name] = parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)
    return originals


def write_original(weights: Mapping[str, torch.Tensor], config: Any, original: Path, folder: Path) -> None:
    """Write a trained model in the format that it came in, into an existing, empty folder.

    original: the user's checkpoint folder. The shards have its names, kind and division, one is held at a time; the
    rotary table is written as it was. Config, tokenizer and code files are copied (the code is never run).
    """
    sizes = fused_sizes(config)
    dtype = None
    for path in weight_files(original):
        views = open_shard(path)
        trained = original_weights(weights, list(views), sizes)
        shard = {name: trained.get(name, view) for name, view in views.items()}
        dtype = next((tensor.dtype for tensor in trained.values()), dtype)
        _write_shard(shard, folder / path.name)
    for pattern in KEPT:
        for path in sorted(original.glob(pattern)):
            if path.is_file() and path.name not in {index for index, _ in INDEXES}:
                shutil.copyfile(path, folder / path.name)
    _write_index(original, folder)
    _say_dtype(folder / "config.json", dtype)


def _write_shard(shard: Mapping[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, path, {"format": "pt"})
    else:
        # A view of a mapped shard would be saved with the whole file behind it.
        torch.save({name: tensor.clone() for name, tensor in shard.items()}, path)


def _write_index(original: Path, folder: Path) -> None:
    for index, _ in INDEXES:
        if (original / index).is_file():
            content = json.loads((original / index).read_text(encoding="utf-8"))
            files = sorted(set(content["weight_map"].values()))
            total = sum(tensor.nbytes for name in files for tensor in open_shard(folder / name).values())
            content["metadata"] = {**content.get("metadata", {}), "total_size": total}
            (folder / index).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            return


def _say_dtype(path: Path, dtype: torch.dtype | None) -> None:
    """Correct the type in config.json where the model was trained in another one; else the file stays as it is."""
    config = json.loads(path.read_text(encoding="utf-8"))
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and config.get("torch_dtype") not in (None, name):
        config["torch_dtype"] = name
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""ChatGLM's original weights under GlmForCausalLM's names, as a Hugging Face folder.

Only names change, and the rows of the fused query-key-value matrices are parted; no number does. Shards are mapped into
memory and written one after the other, so that never more than one shard is held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import DsrunError
from dsrun.jobs.job import ModelSpec

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
COMPUTED = "transformer.rotary_pos_emb.inv_freq"


def renamed(name: str, tensor: torch.Tensor, sizes: list[int]) -> dict[str, torch.Tensor]:
    """One original weight under its new names; empty for the rotary table, which is computed.

    sizes: rows of query, key and value in the fused matrix. Raises KeyError for an unknown name.
    """
    if name == COMPUTED:
        return {}
    if name in OUTER:
        return {OUTER[name]: tensor}
    match = LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, inner = f"model.layers.{match[1]}.", match[2]
    if inner.startswith(FUSED):
        kind = inner.removeprefix(FUSED)
        if tensor.shape[0] != sum(sizes):
            raise ValueError(f"{name} has {tensor.shape[0]} rows, and {sum(sizes)} are wanted")
        parts = tensor.split(sizes, dim=0)
        return {f"{layer}self_attn.{part}_proj.{kind}": rows for part, rows in zip("qkv", parts, strict=True)}
    return {layer + INNER[inner]: tensor}


def convert(spec: ModelSpec, folder: Path, say: Callable[[str], None]) -> None:
    """Write the checkpoint at spec.location as a GLM folder: weights, config, tokenizer.

    spec.architecture: GlmConfig's fields. Raises DsrunError if a weight is missing, unknown or has another shape.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, GlmForCausalLM

    from dsrun.training.tokenizer import fast_tokenizer

    source = Path(spec.location)
    config = AutoConfig.for_model(**spec.architecture)
    config.architectures = ["GlmForCausalLM"]
    with torch.device("meta"):
        wanted = {name: list(tensor.shape) for name, tensor in GlmForCausalLM(config).state_dict().items()}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    sizes = [heads * config.head_dim, groups * config.head_dim, groups * config.head_dim]
    files = weight_files(source)
    weight_map: dict[str, str] = {}
    total = 0
    for number, path in enumerate(files, 1):
        say(f"converting {path.name} ({number} of {len(files)})")
        shard = _converted_shard(path, sizes, wanted)
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
        config.dtype = next((tensor.dtype for tensor in shard.values()), None)
        save_file(shard, folder / name, metadata={"format": "pt"})
    missing = sorted(wanted.keys() - weight_map.keys())
    if missing:
        raise DsrunError(
            f"lacks {len(missing)} of {len(wanted)} weights: {', '.join(missing[:4])}", where=spec.location
        )
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    config.save_pretrained(folder)
    fast_tokenizer(source / "tokenizer.model", spec.tokenizer["style"]).save_pretrained(folder)


def _converted_shard(
    path: Path, sizes: list[int], wanted: Mapping[str, list[int]]
) -> dict[str, torch.Tensor]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in read_weights(path):
        try:
            found = renamed(name, tensor, sizes)
        except (KeyError, ValueError) as error:
            raise DsrunError(
                f"holds a weight that is not ChatGLM2's or 3's: {error}", where=str(path)
            ) from error
        for new, rows in found.items():
            if list(rows.shape) != wanted.get(new):
                raise DsrunError(
                    f"{name} has shape {list(rows.shape)}, the config wants {wanted.get(new)}",
                    where=str(path),
                )
            shard[new] = rows.clone() if len(found) > 1 else rows.contiguous()
    return shard


def weight_files(folder: Path) -> list[Path]:
    """The shards of a checkpoint folder, safetensors before .bin; what an index names, else what lies there."""
    for index, pattern in (
        ("model.safetensors.index.json", "*.safetensors"),
        ("pytorch_model.bin.index.json", "pytorch_model*.bin"),
    ):
        if (folder / index).is_file():
            names = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        if found := sorted(folder.glob(pattern)):
            return found
    raise DsrunError("holds no weights", where=str(folder))


def read_weights(path: Path) -> Iterator[tuple[str, Any]]:
    """Names and tensors of a shard, mapped into memory. A .bin file is read as weights only: no code in it runs."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                yield name, file.get_tensor(name)
    else:
        yield from torch.load(path, map_location="cpu", mmap=True, weights_only=True).items()

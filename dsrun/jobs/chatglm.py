"""Checkpoints in ChatGLM's original format: what their config says in the fields of transformers' own GLM class.

ChatGLM2, ChatGLM3 and CodeGeeX2 are the same network as GlmForCausalLM under other names, so that they can be trained
without running the code that comes with them. Here the config is read and judged, without torch; the weights are
renamed by dsrun/training/chatglm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem

MODEL_TYPE = "chatglm"
REQUIRED = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "multi_query_group_num", "kv_channels",
    "padded_vocab_size", "seq_length", "layernorm_epsilon",
}  # fmt: skip
NEUTRAL = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "multi_query_attention": True,
    "original_rope": True,
    "fp32_residual_connection": False,
    "hidden_dropout": 0,
    "quantization_bit": 0,
    "pre_seq_len": None,
}
"""Fields that must have this value, where they are present: with another one it is another network."""

PROMPT_FORMATS = ("chatglm2", "chatglm3")
INSTEAD = "Use a ChatGLM2-6B, ChatGLM3-6B or GLM-4-9B (-hf) folder."


def refuse_others(config: Mapping[str, Any], where: str) -> None:
    """Raise DsrunError for a ChatGLM that is not this network, by name."""
    if config.get("position_encoding_2d") or "inner_hidden_size" in config or "gmask_token_id" in config:
        raise DsrunError(
            "is ChatGLM-6B (the first): two-dimensional positions and another mask, in no transformers class",
            where=where,
            hint=INSTEAD,
        )
    if "vision_config" in config or "boi_token_id" in config:
        raise DsrunError("is GLM-4V: its image tower is not supported", where=where, hint=INSTEAD)


def glm_fields(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """GlmConfig's fields for an original config.json.

    Raises DsrunError for another network (the first ChatGLM, the vision models), for fields that change the
    computation, and where a rope_ratio could mean two things.
    """
    where = str(folder / "config.json")
    refuse_others(config, where)
    problems = [
        Problem(f"has no field {name!r}", where)
        for name in sorted(REQUIRED)
        if not _is_number(config.get(name))
    ]
    problems += [
        Problem(f"{name} is {config[name]!r}; the network here has {wanted!r}", where, INSTEAD)
        for name, wanted in NEUTRAL.items()
        if name in config and (config[name] or None) != (wanted or None)
    ]
    if problems:
        raise DsrunError(problems)
    end = config.get("eos_token_id")
    pad = config.get("pad_token_id")
    return {
        "model_type": "glm",
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["multi_query_group_num"],
        "head_dim": config["kv_channels"],
        "vocab_size": config["padded_vocab_size"],
        "max_position_embeddings": config["seq_length"],
        "rms_norm_eps": config["layernorm_epsilon"],
        "attention_bias": bool(config.get("add_qkv_bias", False)),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        # GlmConfig's own defaults belong to GLM-4, whose ids lie outside of this vocabulary.
        "eos_token_id": 2 if end is None else end,
        "pad_token_id": 0 if pad is None else pad,
        "tie_word_embeddings": False,
        "rope_parameters": rope_parameters(config, folder),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def rope_parameters(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Rotary positions: half of each head, base 10000, stretched by rope_ratio.

    ChatGLM2-6B-32k divides the positions by the ratio, ChatGLM3 and GLM-4 multiply the base with it, and their
    configs have the same fields: the modelling code that lies in the folder decides (it is read as text, not run).
    """
    ratio = float(config.get("rope_ratio") or 1)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if ratio == 1:
        return parameters
    code = folder / "modeling_chatglm.py"
    text = code.read_text(encoding="utf-8", errors="replace") if code.is_file() else ""
    name = str(config.get("_name_or_path", "")).lower()
    if "/ self.rope_ratio" in text or ("base * self.rope_ratio" not in text and "chatglm2" in name):
        return {**parameters, "rope_type": "linear", "factor": ratio}
    if "base * self.rope_ratio" in text or "chatglm3" in name or "glm-4" in name:
        return {**parameters, "rope_theta": 10000.0 * ratio}
    raise DsrunError(
        f"rope_ratio {ratio:g} stretches the positions in ChatGLM2 and the base in ChatGLM3; nothing here says which",
        where=str(folder / "config.json"),
        hint=f"Put the repository's modeling_chatglm.py into {folder}; it is read, never run.",
    )


def prompt_format(folder: Path) -> str:
    """ "chatglm3" where the folder's tokenizer knows roles, else "chatglm2"."""
    for name in ("tokenization_chatglm.py", "tokenizer_config.json"):
        path = folder / name
        if path.is_file() and "<|assistant|>" in path.read_text(encoding="utf-8", errors="replace"):
            return "chatglm3"
    return "chatglm2"


def check_tokenizer(folder: Path) -> None:
    """Raise DsrunError unless tokenizer.model is a SentencePiece model (GLM-4's is a list of byte tokens)."""
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise DsrunError("holds no tokenizer.model", where=str(folder), hint="The download is incomplete.")
    with path.open("rb") as file:
        first = file.read(1)
    if first != b"\n":
        raise DsrunError(
            "is not a SentencePiece model (GLM-4 in its original format?)",
            where=str(path),
            hint="For GLM-4-9B use the repository in Hugging Face form, whose name ends in -hf.",
        )

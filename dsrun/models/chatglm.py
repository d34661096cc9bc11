"""Checkpoints in ChatGLM's original format: their config as the fields of transformers' GlmConfig.

ChatGLM2, ChatGLM3, CodeGeeX2 and GLM-4 are the same network as GlmForCausalLM under other names, so that they can be
trained without running the code that comes with them. The config is read and checked here, without torch;
dsrun/training/models/chatglm.py renames the weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.json_numbers import is_finite
from dsrun.planner.model_config import ModelConfig, quoted

MODEL_TYPE = "chatglm"
NETWORK = "glm"
"""transformers' model_type of the same network."""


def network_of(config: Mapping[str, Any]) -> str | None:
    """The network of a config by transformers' model_type; None where it says none.

    A repository that is not downloaded yet says what it calls itself.
    """
    kind = config.get("model_type")
    return NETWORK if kind == MODEL_TYPE else kind


EPSILON = "layernorm_epsilon"
REQUIRED = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "multi_query_group_num", "kv_channels",
    "padded_vocab_size", "seq_length", EPSILON,
}  # fmt: skip
NEUTRAL = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "add_bias_linear": False,
    "original_rope": True,
    "rotary_percent": 0.5,
    "interleaved_qkv": False,
    "fp32_residual_connection": False,
    "hidden_dropout": 0,
    "tie_word_embeddings": False,
}
"""Fields that must have this value if present: with another one it is another network."""
UNQUANTISED = (
    "Quantized weights can't be trained. Use the same model in 16 bits: a repository without -int4 or -int8."
)
ANOTHER_FOLDER = {
    "quantization_bit": UNQUANTISED,
    "quantization_config": UNQUANTISED,
    "pre_seq_len": "It is the config of a P-Tuning prefix. Use the folder of the model that the prefix was trained on.",
}
"""Fields that must be absent, null or 0 -> what to do otherwise."""
UNUSED = {
    "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion", "classifier_dropout",
    "vocab_size", "prefix_projection", "use_flash_attn", "use_cache", "torch_dtype", "dtype", "architectures",
    "auto_map", "_name_or_path", "_commit_hash", "_attn_implementation_autoset", "transformers_version",
    "tokenizer_class", "bos_token_id", "sep_token_id", "decoder_start_token_id", "task_specific_params",
    "problem_type", "finetuning_task", "id2label", "label2id", "return_dict", "output_attentions",
    "output_hidden_states", "torchscript", "is_decoder", "is_encoder_decoder", "use_bfloat16",
    "chunk_size_feed_forward", "pruned_heads", "gradient_checkpointing", "max_length", "max_new_tokens",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "prefix", "tf_legacy_loss",
    "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder",
}  # fmt: skip
"""Fields that don't change the logits: speed, generation, other kinds of model. The vocabulary's size is
padded_vocab_size."""
READ = {
    "model_type", "multi_query_attention", "add_qkv_bias", "attention_dropout", "eos_token_id", "pad_token_id",
    "rope_ratio", "num_hidden_layers", "vision_config", "boi_token_id", "position_encoding_2d",
}  # fmt: skip
"""The other fields that are read."""

INSTEAD = "Use a folder of ChatGLM2-6B, ChatGLM3-6B, CodeGeeX2-6B or GLM-4-9B."
GMASK = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
"""ChatGLM2 and 3 call the last two sop and eop; the angle brackets keep them apart from the letters in "philosophy"."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
SPECIALS = {
    "chatglm2": GMASK,
    "chatglm3": (*GMASK, *ROLES),
    "glm-4": (
        "<|endoftext|>", *GMASK, *ROLES,
        "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    ),
}  # fmt: skip
"""Prompt format -> the tokens after the vocabulary of its tokenizers, in order."""
SENTENCEPIECE, RANKS = "sentencepiece", "ranks"
KINDS = {"chatglm2": SENTENCEPIECE, "chatglm3": SENTENCEPIECE, "glm-4": RANKS}
"""Prompt format -> its kind of tokenizer.model: a SentencePiece model, or lines of a base64 token and its rank."""


def refuse_others(config: Mapping[str, Any], where: str) -> None:
    """Raise DsrunError for a ChatGLM that is not this network, by name."""
    if config.get("position_encoding_2d") or "inner_hidden_size" in config or "gmask_token_id" in config:
        raise DsrunError(
            "is ChatGLM-6B, the first: transformers has no class with its two-dimensional positions and its mask",
            where=where,
            hint=INSTEAD,
        )
    if "vision_config" in config or "boi_token_id" in config:
        raise DsrunError(
            "is GLM-4V: its image tower is not supported",
            where=where,
            hint="Use GLM-4-9B, which reads text only.",
        )


def glm_fields(config: Mapping[str, Any], folder: Path, named: str | None = None) -> dict[str, Any]:
    """GlmConfig's fields for an original config.json.

    named: the prompt format of the model file that the user named, if any.
    Raises DsrunError for another network (the first ChatGLM, the vision models), for fields that change or may
    change the computation, and where rope_ratio could mean two things.
    """
    where = str(folder / "config.json")
    refuse_others(config, where)
    raise_all([*_missing(config, where), *_of_another_network(config, where)])
    end = config.get("eos_token_id")
    pad = config.get("pad_token_id")
    return {
        "model_type": NETWORK,
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["ffn_hidden_size"],
        "num_hidden_layers": config["num_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["multi_query_group_num"],
        "head_dim": config["kv_channels"],
        "vocab_size": config["padded_vocab_size"],
        "max_position_embeddings": config["seq_length"],
        "rms_norm_eps": config[EPSILON],
        "attention_bias": bool(config.get("add_qkv_bias", False)),
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        # GlmConfig's own defaults belong to GLM-4, whose ids lie outside of this vocabulary.
        "eos_token_id": 2 if end is None else end,
        "pad_token_id": 0 if pad is None else pad,
        "tie_word_embeddings": False,
        "rope_parameters": rope_parameters(config, folder, named),
    }


def _missing(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    reader = ModelConfig(config, where)
    for name in sorted(REQUIRED):
        if config.get(name) is None:
            yield Problem(f"has no field {name!r}", where, "Is it the checkpoint's own config.json?")
        elif name != EPSILON:
            reader.size(name)
        elif not _is_positive(config[name]):
            yield Problem(f"{name} is {quoted(config[name])}, not a number above 0", where)
    yield from reader.wrong


def _of_another_network(config: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for name, wanted in NEUTRAL.items():
        if (config.get(name, wanted) or None) != (wanted or None):
            yield Problem(f"{name} is {config[name]!r}; the network here has {wanted!r}", where, INSTEAD)
    for name, instead in ANOTHER_FOLDER.items():
        if config.get(name):
            yield Problem(f"{name} is {config[name]!r}", where, instead)
    if config.get("multi_query_attention") is not True:
        # Without it queries, keys and values lie head by head in the fused matrix, and its size may be the same.
        message = (
            f"multi_query_attention is {config.get('multi_query_attention')!r}; the network here has True"
        )
        yield Problem(message, where, INSTEAD)
    heads, groups = config.get("num_attention_heads"), config.get("multi_query_group_num")
    if _is_positive(heads) and _is_positive(groups) and heads % groups:
        yield Problem(f"{groups} groups don't divide {heads} heads", where)
    if config.get("num_hidden_layers", config.get("num_layers")) != config.get("num_layers"):
        message = f"num_hidden_layers is {config['num_hidden_layers']!r} and num_layers {config.get('num_layers')!r}"
        yield Problem(message, where, "Is it the checkpoint's own config.json?")
    if not _is_positive(config.get("rope_ratio") or 1):
        yield Problem(f"rope_ratio is {config['rope_ratio']!r}, not a number above 0", where)
    reader = ModelConfig(config, where)
    reader.switch("add_qkv_bias", default=False)
    reader.share("attention_dropout", 0.0)
    yield from reader.wrong
    # A field that nobody knows may be a new kind of attention: such a network would train, and learn nonsense.
    known = REQUIRED | NEUTRAL.keys() | ANOTHER_FOLDER.keys() | UNUSED | READ
    for name in sorted(config.keys() - known):
        message = f"has a field {name!r}, unknown in ChatGLM2, 3 and GLM-4: it may change the computation"
        yield Problem(message, where, f"{INSTEAD} If it changes nothing, remove it from config.json.")


def _is_positive(value: object) -> TypeGuard[float]:
    return is_finite(value) and value > 0


LINEAR = re.compile(r"/\s*self\.rope_ratio")
BASE = re.compile(r"(base|10000)\s*\*\s*self\.rope_ratio")
"""The two meanings of rope_ratio, as the modeling code in the folder spells them."""


def rope_parameters(config: Mapping[str, Any], folder: Path, named: str | None = None) -> dict[str, Any]:
    """Rotary positions: half of each head, base 10000, stretched by rope_ratio.

    ChatGLM2-6B-32k divides the positions by the ratio, ChatGLM3 and GLM-4 multiply the base with it, and their
    configs have the same fields: the modelling code that lies in the folder decides (it is read as text, not run),
    else the name that the config gives, else the kind of the tokenizer, else the model that the user named.
    """
    ratio = float(config.get("rope_ratio") or 1)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if ratio == 1:
        return parameters
    if (divides := _divides(config, folder, named)) is not None:
        stretched = {"rope_type": "linear", "factor": ratio} if divides else {"rope_theta": 10000.0 * ratio}
        return {**parameters, **stretched}
    raise DsrunError(
        f"rope_ratio {ratio:g} stretches the positions in ChatGLM2 and the base in ChatGLM3; nothing here says which",
        where=str(folder / "config.json"),
        hint=f"Name the model: dsrun finetune chatglm3-6b (or chatglm2-6b) --model-path {folder}. "
        "Or put the repository's modeling_chatglm.py into the folder; it is read, never run.",
    )


def _divides(config: Mapping[str, Any], folder: Path, named: str | None) -> bool | None:
    """Whether rope_ratio divides the positions (else it multiplies the base); None if unknown."""
    # The surest first: the code says what is computed; names and tokenizers only say which model it probably is.
    text = _text(folder / "modeling_chatglm.py")
    linear, base = bool(LINEAR.search(text)), bool(BASE.search(text))
    if linear != base:
        return linear
    name = str(config.get("_name_or_path", "")).lower()
    for part, divides in (("chatglm2", True), ("chatglm3", False), ("glm-4", False)):
        if part in name:
            return divides
    if _kind(folder) == RANKS:
        return False
    return {"chatglm2": True, "chatglm3": False}.get(named or "")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _kind(folder: Path) -> str | None:
    """The kind of tokenizer.model; None for neither of the two."""
    path = folder / "tokenizer.model"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        line = file.readline(4096)
    if RANK_LINE.fullmatch(line):
        return RANKS
    return SENTENCEPIECE if line.startswith(b"\n") else None


RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n?")


def prompt_format(folder: Path, named: str | None) -> str:
    """The prompt format of a folder whose tokenizer has been checked, a key of SPECIALS.

    named: the model file's; it is used where it matches the tokenizer. Else "glm-4" for a tokenizer of ranks,
    "chatglm3" where the folder's tokenizer knows roles, and "chatglm2".
    """
    kind = _kind(folder)
    if named in KINDS and KINDS[named] == kind:
        return named
    if kind == RANKS:
        return "glm-4"
    texts = [_text(folder / name) for name in ("tokenization_chatglm.py", "tokenizer_config.json")]
    known = any("<|assistant|>" in text for text in texts)
    return "chatglm3" if known or "chatglm3" in _text(folder / "config.json").lower() else "chatglm2"


def check_tokenizer(folder: Path) -> None:
    """Raise DsrunError unless tokenizer.model is a SentencePiece model or GLM-4's list of byte tokens and ranks."""
    path = folder / "tokenizer.model"
    if not path.is_file():
        raise DsrunError("holds no tokenizer.model", where=str(folder), hint="The download is incomplete.")
    if _kind(folder) is None:
        raise DsrunError(
            "is neither a SentencePiece model nor a list of byte tokens and their ranks",
            where=str(path),
            hint="Is the download complete?",
        )

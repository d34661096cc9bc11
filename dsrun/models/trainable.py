"""The check that a model can be trained here at all: by its config.json, before anybody waits for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsrun import packages
from dsrun.errors import DsrunError
from dsrun.models import chatglm, multimodal, transformers_code

TEXT_ONLY = (
    "dsrun trains text models, and the text part of a model of more where transformers computes it alone: take a "
    "text-only model, such as Qwen/Qwen3-4B."
)
SENSES = {
    "vision": "images", "image": "images", "video": "images", "visual": "images", "audio": "sound", "speech": "sound",
}  # fmt: skip
"""Words in the names of a config's parts -> what such a part reads."""
OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "RewardModel")
"""Ends of the names of classes without an output over the vocabulary."""
METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4", "hqq": "HQQ", "aqlm": "AQLM", "eetq": "EETQ",
}  # fmt: skip
"""quant_method -> its name, where that is written otherwise."""


def check(config: Mapping[str, Any], where: str, *, training: bool = True) -> None:
    """Raise DsrunError, with what it is and what to do, unless the config is that of a causal language model.

    config: of config.json, with a model_type; where: the file, for the message. training: quantised weights are
    refused, too: they can answer, and not be trained. Without transformers installed nothing is known of other types.
    """
    model_type = str(config["model_type"])
    if model_type == chatglm.MODEL_TYPE:
        chatglm.refuse_others(config, where)
    elif other_kind := _other_kind(config, model_type):
        raise DsrunError(other_kind[0], where=where, hint=other_kind[1])
    if training and (method := quantisation(config)):
        raise DsrunError(
            f"is quantised ({method}): such weights can be asked, not trained",
            where=where,
            hint=f"{_original(config)} To hold it in 4 bits while adapters are trained: --method qlora.",
        )


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The quantisation of the weights, in words; None where there is none, or where ChatGLM's own check reports it."""
    quantized = config.get("quantization_config") or config.get("compression_config")
    if not quantized or config.get("model_type") == chatglm.MODEL_TYPE:
        return None
    fields = quantized if isinstance(quantized, Mapping) else {}
    method = str(fields.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in fields else "unknown"))
    bits = fields.get("bits") or fields.get("w_bit")
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        bits = 4 if fields.get("load_in_4bit") else 8
    name = METHODS.get(method.lower(), method)
    return f"{name}, {bits} bits" if bits else name


def _original(config: Mapping[str, Any]) -> str:
    named = str(config.get("_name_or_path") or "")
    return f"Use the model in 16 bits that it was made from{f' ({named})' if named.count('/') == 1 else ''}."


def _other_kind(config: Mapping[str, Any], model_type: str) -> tuple[str, str] | None:
    """The kind of a model that is no causal language model of transformers', and a hint."""
    reads = sorted({medium for key, value in config.items() if (medium := _sense(key, value))})
    if multimodal.way(config):  # its text part is trained
        return None
    # The config's own words before transformers' tables: a new family isn't in them, but says "vision_config".
    if reads:
        return f"is a model of {' and '.join(reads)} ({model_type}){_why(model_type)}", TEXT_ONLY
    if _listed(model_type, *transformers_code.SPEECH):
        return f"is a model of sound ({model_type})", TEXT_ONLY
    if config.get("is_encoder_decoder") or _listed(model_type, transformers_code.ENCODER_DECODER):
        return (
            f"is an encoder-decoder ({model_type})",
            "dsrun trains decoders, which go on with a text: Llama, Qwen3, GLM-4 and their like.",
        )
    if _listed(model_type, transformers_code.MASKED) and not config.get("is_decoder"):
        return (
            f"is an encoder ({model_type}): it fills gaps and doesn't go on with a text",
            "For labels as answers take a small decoder, such as Qwen/Qwen3-0.6B.",
        )
    classes = [str(name) for name in config.get("architectures") or ()]
    if head := next((name for name in classes if name.endswith(OTHER_HEADS)), None):
        return f"is a {head}: it gives scores, not text", "Use the language model that it was made from."
    return _unknown(config, model_type)


def _why(model_type: str) -> str:
    """The inputs beside text that a model's class must have, in words."""
    name = transformers_code.causal_class(model_type) or transformers_code.multimodal_class(model_type)
    needed = transformers_code.required_inputs(model_type, name) if name else ()
    return f", which computes nothing without {', '.join(needed)}" if needed else ""


def _sense(key: str, value: object) -> str | None:
    if not value or not key.endswith(multimodal.PARTS):
        return None
    return next((medium for word, medium in SENSES.items() if word in key.split("_")), None)


def _listed(model_type: str, *tables: str) -> bool:
    return any(model_type in transformers_code.table(name) for name in tables)


def _unknown(config: Mapping[str, Any], model_type: str) -> tuple[str, str] | None:
    """A type that transformers has no causal language model for."""
    version = packages.installed_version("transformers")
    name = transformers_code.causal_class(model_type)
    if version is None or (name is not None and not name.endswith("ForConditionalGeneration")):
        return None
    if name or _listed(model_type, *transformers_code.MULTIMODAL):
        return f"is a model of images or sound beside text ({model_type})", TEXT_ONLY
    if _listed(model_type, transformers_code.ALL):
        return f"is no language model ({model_type})", TEXT_ONLY
    newer = f"A newer transformers than {version} may have it: pip install -U transformers"
    if config.get("auto_map"):
        return (
            f"needs code of its own repository ({model_type}), which dsrun never runs: transformers has no such class",
            f"Look for the same model in transformers' format (-hf), or a newer one of the family. {newer}",
        )
    return f"has model_type {model_type!r}, which transformers {version} doesn't know", newer

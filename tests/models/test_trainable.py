"""Models that are refused by their config.json alone, and models that aren't."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
from needed import needs, since

needs("transformers")

from dsrun import packages
from dsrun.errors import DsrunError
from dsrun.models import resolve, trainable, transformers_code

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QUANTISED = {
    "GPTQ, 4 bits": {"quant_method": "gptq", "bits": 4},
    "AWQ, 4 bits": {"quant_method": "awq", "bits": 4},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "bitsandbytes, 4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes, 8 bits": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "MXFP4": {"quant_method": "mxfp4"},
}
REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
OTHERS = [
    ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "images", "Qwen3-4B"),
    ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "images", "text-only"),
    ({"model_type": "blip", "vision_config": {"x": 1}, "text_config": {"hidden_size": 8}}, "pixel_values", "text-only"),
    ({"model_type": "florence2", "vision_config": {"x": 1}, "text_config": {"is_encoder_decoder": True}}, "images", ""),
    ({"model_type": "t5gemma2", "encoder": {}, "decoder": {}, "is_encoder_decoder": True}, "encoder-decoder", ""),
    ({"model_type": "brand_new_vl", "vision_config": {"x": 1}, "text_config": {"hidden_size": 8}}, "images", ""),
    ({"model_type": "gemma3"}, "images or sound", "text-only"),
    ({"model_type": "phi4_multimodal", "vision_config": {"x": 1}, "audio_config": {"x": 1}}, "images and sound", ""),
    ({"model_type": "qwen2_audio", "audio_config": {"x": 1}}, "sound", "text-only"),
    ({"model_type": "whisper", "is_encoder_decoder": True}, "sound", "text-only"),
    ({"model_type": "wav2vec2"}, "sound", ""),
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder", "Qwen3"),
    ({"model_type": "bart"}, "encoder-decoder", ""),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "is an encoder (bert)", "decoder"),
    ({"model_type": "modernbert"}, "is an encoder", ""),
    ({"model_type": "vit"}, "no language model", ""),
    ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "scores", "language model"),
    ({"model_type": "qwen2", "architectures": ["Qwen2ForRewardModel"]}, "scores", ""),
    ({"model_type": "baichuan", **REMOTE}, "never runs", "-hf"),
    ({"model_type": "internlm2", **REMOTE}, "never runs", "newer transformers"),
    ({"model_type": "brand_new"}, "'brand_new'", "pip install -U transformers"),
    ({"model_type": "chatglm", "position_encoding_2d": True}, "ChatGLM-6B, the first", "ChatGLM2-6B"),
]  # fmt: skip


def refused(config, **ways) -> str:
    with pytest.raises(DsrunError) as caught:
        trainable.check(config, "the config", **ways)
    (problem,) = caught.value.problems
    assert problem.where == "the config"
    assert problem.hint
    return f"{problem.what}\n{problem.hint}"


def test_sizes_that_are_left_open():
    trainable.check({**LLAMA, "head_dim": None, "hidden_size": 64}, "the config")


@pytest.mark.parametrize(("config", "what", "hint"), OTHERS, ids=lambda value: str(value)[:40])
def test_other_kinds_of_models(config, what, hint):
    said = refused(config)
    assert what in said
    assert hint in said
    assert refused(config, training=False) == said


@pytest.mark.parametrize(("words", "fields"), QUANTISED.items())
def test_quantised_weights_can_chat_but_not_train(words, fields):
    config = {**LLAMA, "quantization_config": fields, "_name_or_path": "lab/model"}
    said = refused(config)
    assert words in said
    assert "lab/model" in said
    assert "--method qlora" in said
    trainable.check(config, "", training=False)


@pytest.mark.parametrize(
    "name", ["llama", "glm4", "gpt_oss", "qwen3_moe", "gemma3_text", "mamba", "gpt2", "deepseek_v3"]
)
def test_language_models_of_transformers_are_taken(name):
    trainable.check({"model_type": name, **REMOTE}, "")


def test_an_encoder_made_a_decoder():
    trainable.check({"model_type": "bert", "is_decoder": True, "architectures": ["BertLMHeadModel"]}, "")


def test_without_transformers_nothing_is_known(monkeypatch):
    monkeypatch.setattr(transformers_code, "table", lambda _: {})
    monkeypatch.setattr(packages, "installed_version", lambda _: None)
    trainable.check({"model_type": "brand_new"}, "")


def test_quantised_weights_are_refused_before_they_are_looked_for(tmp_path):
    config = {**LLAMA, "quantization_config": QUANTISED["FP8"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DsrunError, match="FP8"):
        resolve.resolve(str(tmp_path), None)


def test_an_adapters_folder_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-4B"}')
    with pytest.raises(DsrunError, match="finetune Qwen/Qwen3-4B --adapter"):
        resolve.resolve(str(tmp_path), None)


# The tables, read from the source


def test_the_tables_are_transformers_own():
    from transformers.models.auto import modeling_auto

    for name in (transformers_code.CAUSAL, transformers_code.MASKED, transformers_code.ENCODER_DECODER):
        assert dict(transformers_code.table(name)) == dict(getattr(modeling_auto, name))


@pytest.mark.parametrize(
    "name",
    [
        "llama", "glm", "gemma3_text", "gpt_oss", "bloom", "gpt2", "qwen3_moe",
        pytest.param("internlm3", marks=since(transformers="5.23")),
    ],
)  # fmt: skip
def test_the_flags_are_those_of_the_class(name):
    import transformers

    known = getattr(transformers, str(transformers_code.causal_class(name)))
    for flag in ("_supports_sdpa", "_supports_flash_attn"):
        assert transformers_code.supports(name, flag) == getattr(known, flag)


def test_who_caps_scores_has_no_sdpa():
    """As read in the classes that hand caps to attention: encoder-decoders, which dsrun doesn't train, are left out."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    hands = "softcap=self.attn_logit_softcapping"
    capped = {path.parent.name for path in folder.glob("*/modeling_*.py") if hands in path.read_text("utf-8")}
    assert capped & set(transformers_code.table(transformers_code.CAUSAL)) == transformers_code.CAPPED
    for name in transformers_code.CAPPED:
        assert transformers_code.supports(name, "_supports_sdpa") is False
        assert transformers_code.supports(name, "_supports_flash_attn")


def test_an_unknown_model_type():
    assert transformers_code.causal_class("brand_new") is None
    assert transformers_code.supports("brand_new", "_supports_sdpa") is None


def test_without_transformers_a_release_is_known_as_recorded(monkeypatch):
    """Every question that is recorded has the answer of the installed source, which may be of another release."""
    from tools import transformers_code as recording

    asked = [(question, words, question(*words)) for question, words in recording.questions()]
    same = importlib.metadata.version("transformers") == transformers_code.record()["transformers"]
    transformers_code.table.cache_clear()
    monkeypatch.setattr(transformers_code, "_folder", lambda: None)
    # A flag that is set is left out: dsrun asks for those that are not.
    falls = [
        (question.__name__, words)
        for question, words, answer in asked
        if recording.plain(question(*words)) != (None if answer is True else recording.plain(answer))
    ]
    transformers_code.table.cache_clear()
    assert len(falls) < (1 if same else len(asked) / 10)
    assert transformers_code.causal_class("gpt_oss") == "GptOssForCausalLM"
    assert transformers_code.supports("gpt_oss", "_supports_sdpa") is False
    assert transformers_code.causal_class("brand_new") is None
    assert transformers_code.required_inputs("brand_new", "BrandNew") == ()
    transformers_code.table.cache_clear()

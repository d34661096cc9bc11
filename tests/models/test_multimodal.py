"""Text parts of checkpoints that have more: told from their configs and weights alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from needed import needs, since
from running import write_tokenizer

needs("transformers")

from dsrun.errors import DsrunError
from dsrun.models import adapters, multimodal, resolve, trainable, transformers_code
from dsrun.models.text_shape import shape_of

pytestmark = since(transformers="5.23")
TOWER = {"vision_config": {"hidden_size": 8}}
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "head_dim": 16,
}  # fmt: skip
WAYS = {
    "qwen3_5": "unloaded", "qwen3_5_moe": "unloaded", "llama4": "unloaded", "gemma3": "frozen", "gemma4": "frozen",
    "mistral3": "frozen", "qwen2_5_vl": "frozen", "qwen3_vl": "frozen", "qwen3_vl_moe": "frozen", "glm46v": "frozen",
    "glm4v_moe": "frozen", "llava": "frozen", "internvl": "frozen", "voxtral": "frozen", "blip": None, "blip-2": None,
    "brand_new": None,
}  # fmt: skip


def config(model_type, text_type="llama", **more):
    return {"model_type": model_type, **TOWER, "text_config": {"model_type": text_type, **SIZES}, **more}


@pytest.mark.parametrize(("model_type", "way"), WAYS.items())
def test_the_way_follows_transformers_own_classes(model_type, way):
    assert multimodal.way(config(model_type)) == way


def test_every_checkpoint_of_transformers_is_taken_or_refused_in_words():
    """Whatever transformers has with a text part: a way to train it, or a reason."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    types = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    taken = []
    for model_type in types:
        values = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
        try:
            trainable.check(values, "the config")
            taken.append(model_type)
        except DsrunError as error:
            assert error.problems[0].what
            assert error.problems[0].hint
    assert len(taken) > 60, taken


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_a_model_of_text_alone_stays_as_it_is(model_type):
    values = {"model_type": model_type, **SIZES, "quantization_config": {"bits": 4}}
    assert multimodal.completed(values) == values
    assert multimodal.text_config(values) == values
    assert multimodal.way(values) is None


def test_defaults_of_transformers_fill_a_short_text_part():
    """Gemma 3's published config.json names five sizes, and leaves the others to transformers."""
    from transformers import Gemma3Config

    short = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
    }
    text = multimodal.text_config({"model_type": "gemma3", **TOWER, "text_config": short})
    whole = Gemma3Config(text_config=short).text_config
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_hidden_layers"):
        assert text[name] == getattr(whole, name), name


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_a_default_does_not_stand_beside_its_other_name(name):
    """Qwen3-VL's mixtures are published with the one, and saved by transformers 5 with the other."""
    text = multimodal.text_config(
        {
            "model_type": "qwen3_vl_moe",
            **TOWER,
            "text_config": {"model_type": "qwen3_vl_moe_text", **SIZES, name: 4},
        }
    )
    assert {text[key] for key in ("num_experts", "num_local_experts") if key in text} == {4}


def test_a_text_part_beside_the_towers():
    """Qwen2.5-VL's published config.json has no dictionary for it."""
    flat = {"model_type": "qwen2_5_vl", **TOWER, **SIZES, "tie_word_embeddings": True}
    text = multimodal.text_config(flat)
    assert (text["model_type"], text["hidden_size"]) == ("qwen2_5_vl_text", 64)
    assert multimodal.way(flat) == "frozen"
    assert "vision_config" not in text


def test_defaults_are_transformers_own():
    from transformers import CONFIG_MAPPING

    for model_type in (
        "gemma3_text",
        "qwen3_5_text",
        "qwen2_5_vl_text",
        "glm4v_moe_text",
        "llama",
        "mistral",
    ):
        made = CONFIG_MAPPING[model_type]()
        for name, value in transformers_code.config_defaults(model_type).items():
            if name in SIZES and value is not None:  # a class may change others by what else it reads
                assert getattr(made, name, value) == value, (model_type, name)


# The shape


@pytest.mark.parametrize(("model_type", "text_type"), [("gemma3", "gemma3_text"), ("mistral3", "mistral")])
def test_frozen_towers_are_held_and_not_trained(model_type, text_type):
    values = config(model_type, text_type, tie_word_embeddings=True)
    text = shape_of(values, "")
    assert text.frozen == 0
    whole = shape_of(values, "", parameters=text.parameters + 1000)
    assert (whole.parameters, whole.frozen) == (text.parameters + 1000, 1000)
    assert whole.active == text.active
    assert whole.layer_parameters == text.layer_parameters


def test_unloaded_towers_take_nothing():
    values = config("qwen3_5", "qwen3_5_text")
    assert shape_of(values, "", parameters=10**9) == shape_of(values, "")


def test_the_outer_config_says_whether_ends_are_tied():
    apart = shape_of(config("mistral3", "mistral", tie_word_embeddings=False), "").parameters
    assert shape_of(config("mistral3", "mistral", tie_word_embeddings=True), "").parameters == apart - 6400
    assert shape_of(config("qwen3_5", "qwen3_5_text", tie_word_embeddings=True), "") == shape_of(
        config("qwen3_5", "qwen3_5_text"), ""
    ), "a text model by itself looks at its own config"


# Folders


@pytest.fixture
def folder(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    def make(values, *, rows=100, layers=3):
        names = {
            f"model.language_model.layers.{n}.input_layernorm.weight": torch.zeros(64) for n in range(layers)
        }
        names["model.language_model.embed_tokens.weight"] = torch.zeros(rows, 64)
        names["model.vision_tower.layers.0.w"] = torch.zeros(7)
        save_file(names, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(values))
        write_tokenizer(tmp_path)
        return tmp_path

    return make


def test_a_folder_is_taken_without_torch(folder, monkeypatch):
    path = folder(config("gemma3", "gemma3_text"))
    before = {name for name in sys.modules if name in {"torch", "transformers"}}
    for name in before:
        monkeypatch.setitem(sys.modules, name, None)
    spec, _ = resolve.resolve(str(path), None)
    assert spec.source == "folder"
    assert resolve.positions_of(spec) == 131072


@pytest.mark.parametrize(
    ("how", "words"),
    [({"rows": 90}, "embed_tokens.weight has shape [90, 64], and the text part in config.json [100, 64]"),
     ({"layers": 2}, "has the text weights of 2 layers, and config.json says 3")],
)  # fmt: skip
def test_weights_of_another_text_part(folder, how, words):
    path = folder(config("gemma3", "gemma3_text"), **how)
    with pytest.raises(DsrunError) as caught:
        resolve.resolve(str(path), None)
    (problem,) = caught.value.problems
    assert words in problem.what
    assert problem.where == str(path)
    assert "config.json" in problem.hint


@pytest.mark.parametrize(
    ("model_type", "text_type", "why"),
    [("gemma3", "gemma3_text", ""), ("qwen3_vl", "qwen3_vl_text", "no class of its own"),
     ("llama", "", "a model of text alone")],
)  # fmt: skip
def test_the_text_model_by_itself_needs_a_class(folder, model_type, text_type, why):
    values = config(model_type, text_type) if text_type else {"model_type": model_type, **SIZES}
    spec, _ = resolve.resolve(str(folder(values)), None)
    if not why:
        resolve.check_export_format(spec, "text")
        return
    with pytest.raises(DsrunError, match=why):
        resolve.check_export_format(spec, "text")


# LoRA inside a text part


@pytest.mark.parametrize("path", ["model.language_model", "language_model", "a.b_c.d"])
def test_a_pattern_for_layers_inside_a_module_is_read_back(path, tmp_path: Path):
    import re

    pattern = adapters.inside(path, ["q_proj", "up_proj"])
    assert re.fullmatch(pattern, f"{path}.layers.0.q_proj")
    assert re.fullmatch(pattern, f"{path}.up_proj")
    assert not re.fullmatch(pattern, "vision.layers.0.q_proj")
    assert not re.fullmatch(pattern, f"{path}.layers.0.k_proj")
    (tmp_path / "adapter_model.safetensors").touch()
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": pattern}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    assert adapters.read_adapter(tmp_path).fields["lora_target"] == "q_proj,up_proj"

"""The facts of the models that are known by name, beside transformers' own classes."""

from __future__ import annotations

import pytest

from dsrun.models import model_facts, model_files, multimodal

FILES = model_files.list_models()


def facts(name):
    return model_facts.facts_of(model_files.load_model_file(name))


@pytest.mark.parametrize("model", FILES, ids=lambda model: model.name)
def test_facts_are_those_of_transformers_config(model):
    transformers = pytest.importorskip("transformers")
    kind = model.architecture["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("the installed transformers doesn't have it")
    text = transformers.AutoConfig.for_model(**model.architecture).get_text_config().to_dict()
    told = model_facts.facts_of(model)
    names = {
        "context": "max_position_embeddings", "layers": "num_hidden_layers", "hidden_size": "hidden_size",
        "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
    }  # fmt: skip
    assert {key: told[key] for key in names} == {key: text[name] for key, name in names.items()}
    assert told["network"] == multimodal.text_config(model.architecture)["model_type"]


@pytest.mark.parametrize(
    ("name", "experts", "chosen"),
    [
        ("mixtral-8x7b", 8, 2),
        ("qwen3-30b-a3b", 128, 8),
        ("deepseek-v3.1-671b", 256, 8),
        ("gpt-oss-20b", 32, 4),
        ("llama-4-scout-17b-16e", 16, 1),
        ("gemma-4-26b-a4b", 128, 8),
        ("granite-4-h-tiny", 64, 6),
        ("granite-4-h-1b", None, None),
        ("gemma-4-31b", None, None),
        ("qwen3-8b", None, None),
    ],
)
def test_experts(name, experts, chosen):
    told = facts(name)
    assert (told["experts"], told["experts_per_token"]) == (experts, chosen)


def test_what_a_file_leaves_out_is_unknown(lab):
    folder = lab / "presets" / "models"
    folder.mkdir()
    (folder / "ours.toml").write_text(
        """
        summary = "Ours"
        parameters = 7
        prompt_format = "chat-template"
        repository = "lab/ours"
        architecture = { model_type = "brand_new", num_attention_heads = "many", num_hidden_layers = 2 }
        """,
        encoding="utf-8",
    )
    told = facts("ours")
    assert {key for key, value in told.items() if value is None} == {
        "context", "hidden_size", "heads", "kv_heads", "experts", "experts_per_token", "licence", "source",
    }  # fmt: skip
    assert (told["layers"], told["file"]) == (2, str(folder / "ours.toml"))

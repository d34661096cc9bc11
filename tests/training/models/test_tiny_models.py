"""The models that ship whole: made of a recipe, the same wherever they are made."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from needed import needs

needs("transformers")

from dsrun.cli.models import size_text
from dsrun.jobs.assembly.finetune.data import dataset_folder
from dsrun.models import model_files, resolve
from dsrun.training.models.tiny import build_random_model

FILES = model_files.list_models()
TINY = [model.name for model in FILES if model.random]
CORPUS = dataset_folder("advertise")


def build(name: str, folder: Path, corpus: Path = CORPUS, **architecture):
    spec, _ = resolve.resolve(name, None)
    folder.mkdir(parents=True, exist_ok=True)
    build_random_model(replace(spec, architecture={**spec.architecture, **architecture}), corpus, folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.is_file()
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Each tiny model, built once."""
    return {name: build(name, tmp_path_factory.mktemp("models") / f"a user's {name}") for name in TINY}


def test_both_ship():
    assert set(TINY) == {"chatglm2-tiny", "llama-tiny"}


@pytest.mark.parametrize("name", TINY)
def test_a_few_million_parameters_as_the_file_says(built, name):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(built[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    model_file = next(model for model in FILES if model.name == name)
    assert size_text(count) == size_text(model_file.parameters)
    assert f"{count / 1e6:.1f} million" in model_file.summary


@pytest.mark.parametrize("name", TINY)
def test_a_folder_that_transformers_loads(built, name):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(built[name], output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(built[name])
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(tokenizer) <= model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    logits = model(**tokenizer(["类型#裙"], return_tensors="pt")).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", TINY)
def test_the_real_architecture(built, name):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(built[name])
    fields_of_file = next(model for model in FILES if model.name == name).architecture
    for key, value in fields_of_file.items():
        if key not in {"rope_theta", "partial_rotary_factor"}:
            assert getattr(config, key) == value, key
    assert config.rope_parameters["rope_theta"] == fields_of_file["rope_theta"]
    if name == "chatglm2-tiny":
        assert config.model_type == "glm"
        assert config.attention_bias is True
        assert config.num_key_value_heads < config.num_attention_heads
        assert config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("name", TINY)
def test_same_seed_same_bytes(built, name, tmp_path):
    import torch

    torch.manual_seed(99)  # whatever was drawn before
    assert digests(build(name, tmp_path)) == digests(built[name])


def test_another_seed_other_weights(built, tmp_path):
    other = digests(build("llama-tiny", tmp_path, seed=21))
    same = digests(built["llama-tiny"])
    assert {name for name in same if same[name] != other[name]} == {"model.safetensors"}


def test_the_weights_depend_on_no_text(built, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = (CORPUS / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (corpus / "train.jsonl").write_text("".join(lines[::2]), encoding="utf-8")
    other = digests(build("llama-tiny", tmp_path / "model", corpus))
    assert other["model.safetensors"] == digests(built["llama-tiny"])["model.safetensors"]
    assert other["tokenizer.json"] != digests(built["llama-tiny"])["tokenizer.json"]


def test_drawing_weights_leaves_torchs_generator(tmp_path):
    import torch

    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    build("llama-tiny", tmp_path)
    assert torch.equal(torch.rand(3), wanted)


def test_a_vocabulary_that_does_not_fit(tmp_path):
    from dsrun.errors import DsrunError

    with pytest.raises(DsrunError, match="2000 tokens, the model only 1999"):
        build("llama-tiny", tmp_path, vocab_size=1999)

"""A weight that is no number is found while it is read, and named with its file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed")

from chatglm_checkpoint import loaded, random_weights, write_checkpoint
from safetensors.torch import load_file, save_file

from dsrun.errors import TrainingError
from dsrun.models.adapters import read_adapter
from dsrun.training import finite, prepare
from dsrun.training.models import load, prefix_tuning
from dsrun.training.models.adapters import merge_into

FOURTH = "model.layers.0.mlp.down_proj.weight"


def a_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_value(folder: Path, value: float, kind: str = "safetensors") -> Path:
    """A folder with one such value; returns the file that it is in."""
    model = a_llama()
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights[FOURTH][3, 5] = value
    if kind == "safetensors":
        save_file(weights, path, {"format": "pt"})
        return path
    path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["mapped", "cast"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(("value", "words"), [(float("nan"), "1 NaN"), (float("-inf"), "1 infinite")])
def test_a_folder(kind, dtype, value, words, tmp_path):
    path = with_value(tmp_path / "model", value, kind)
    with pytest.raises(TrainingError) as caught:
        load.load_answering(path.parent, dtype=dtype)
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert FOURTH in problem.what and words in problem.what


def test_what_is_too_large_for_fp16(tmp_path):
    path = with_value(tmp_path / "model", 1e6)
    with pytest.raises(TrainingError, match=f"{FOURTH} doesn't fit float16") as caught:
        load.load_answering(path.parent, dtype=torch.float16)
    assert "--precision bf16" in caught.value.problems[0].hint
    load.load_answering(path.parent, dtype=torch.bfloat16)


def test_names_that_only_transformers_knows(tmp_path):
    path = with_value(tmp_path / "model", float("nan"))
    save_file(
        {name.removeprefix("model."): one for name, one in load_file(path).items()}, path, {"format": "pt"}
    )
    with pytest.raises(TrainingError, match=FOURTH):
        load.load_answering(path.parent, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_an_original_chatglm_folder(kind, tmp_path):
    weights = random_weights()
    name = next(name for name in weights if name.endswith("query_key_value.weight"))
    weights[name][-1, 0] = float("nan")
    folder = write_checkpoint(tmp_path / "original", weights, kind)
    with pytest.raises(TrainingError, match=name):
        loaded(folder, tmp_path / "glm")


def test_a_gguf_file(tmp_path, monkeypatch):
    """Before anything of it is in the cache."""
    import transformers

    model = a_llama()
    with torch.no_grad():
        model.get_parameter(FOURTH)[0, 0] = float("inf")
    monkeypatch.setattr(prepare, "_gguf_dtype", lambda path: "float32")
    for name, found in (("AutoModelForCausalLM", model), ("AutoTokenizer", None)):
        given = SimpleNamespace(from_pretrained=lambda *args, found=found, **options: found)
        monkeypatch.setattr(transformers, name, given)
    job = SimpleNamespace(model=SimpleNamespace(location=str(tmp_path / "a.gguf")))
    folder = tmp_path / "made"
    folder.mkdir()
    with pytest.raises(TrainingError, match=rf"a\.gguf: {FOURTH} is not finite"):
        prepare._make_from_gguf(job, folder, lambda text: None)
    assert not list(folder.iterdir())


def test_an_adapter(tmp_path):
    weights = {
        f"base_model.model.model.layers.0.mlp.down_proj.lora_{part}.weight": one
        for part, one in (("A", torch.ones(2, 32)), ("B", torch.full((16, 2), float("nan"))))
    }
    save_file(weights, tmp_path / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(TrainingError, match=r"down_proj\.lora_B\.weight is not finite: 32 NaN"):
        merge_into(a_llama(), read_adapter(tmp_path))


def test_a_prefix(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"transformer.prefix_encoder.embedding.weight": torch.tensor([[1.0, float("nan")]])}, path)
    with pytest.raises(TrainingError, match=r"embedding\.weight is not finite"):
        prefix_tuning.read(path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_type(dtype):
    values = torch.zeros(1000, dtype=dtype)
    assert finite.is_finite(values) and finite.is_finite(values[:0])
    for bad in (float("nan"), float("inf"), float("-inf")):
        values[999] = bad
        assert not finite.is_finite(values)
    assert finite.is_finite(torch.zeros(3, dtype=torch.int8))

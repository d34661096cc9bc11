"""The model's folder, written shard by shard: what transformers would write of the whole, with one shard in memory."""

from __future__ import annotations

import errno
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("transformers")

from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from dsrun.errors import TrainingError
from dsrun.options.table import PeftOptions
from dsrun.training.models import adapters, export
from dsrun.training.models.export import SINGLE, shards, write_folders

SIZE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "head_dim": 8,
}  # fmt: skip
TOKENIZER = SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None)


def model_of(kind: str, **more):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZE, **more), dtype=torch.float32)


def a_job(tmp_path: Path, **more) -> SimpleNamespace:
    text_alone = SimpleNamespace(source="chatglm")
    return SimpleNamespace(run_dir=str(tmp_path), peft=PeftOptions(**more), model=text_alone)


def weights_in(model):
    state = model.state_dict()
    return lambda names: {name: state[name].clone() for name in names}


def written(tmp_path: Path, model, weights=None) -> Path:
    folder = tmp_path / "model"
    write_folders(
        model, weights or weights_in(model), tokenizer=TOKENIZER, end_ids=[2], job=a_job(tmp_path),
        folders={"model": folder},
    )  # fmt: skip
    return folder


def content(folder: Path) -> dict:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("size", [1 << 40, 40_000])
def test_it_is_what_save_pretrained_writes_of_the_whole(tmp_path, monkeypatch, kind, size):
    monkeypatch.setattr(export, "SHARD_BYTES", size)
    model = model_of("llama", tie_word_embeddings=True) if kind == "tied" else model_of(kind)
    folder = written(tmp_path, model)
    model.save_pretrained(tmp_path / "whole", max_shard_size=1 << 40)
    found, wanted = content(folder), content(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    files = sorted(path.name for path in folder.iterdir())
    if size > 1 << 30:
        assert files == ["config.json", "generation_config.json", SINGLE]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(one.nbytes for one in wanted.values())
        assert {name: index["weight_map"][name] for name in wanted} == index["weight_map"]
        assert len(set(index["weight_map"].values())) > 3
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in again.state_dict().items())


def test_layers_stay_together(monkeypatch):
    model = model_of("llama")
    layer = sum(one.nbytes for name, one in model.state_dict().items() if ".layers.0." in name)
    monkeypatch.setattr(export, "SHARD_BYTES", 2 * layer + 1)
    parts = shards(model)
    places = [{name.split(".")[2] for name in names if ".layers." in name} for names in parts]
    assert sum(map(len, places)) == SIZE["num_hidden_layers"], "each layer in one shard"
    monkeypatch.setattr(export, "SHARD_BYTES", 1)
    assert all(len(names) == 1 for names in shards(model)), "but for a layer that is larger than a shard"


class Counted:
    """Gives weights out, and counts the bytes of those that somebody still holds."""

    def __init__(self, weights) -> None:
        self.weights, self.held, self.most = weights, 0, 0

    def __call__(self, names) -> dict:
        found = self.weights(names)
        for tensor in found.values():
            self.held += tensor.nbytes
            weakref.finalize(tensor, self.drop, tensor.nbytes)
        self.most = max(self.most, self.held)
        return found

    def drop(self, size: int) -> None:
        self.held -= size


def test_one_shard_is_held_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 50_000)
    model = model_of("llama")
    counted = Counted(weights_in(model))
    written(tmp_path, model, counted)
    total = sum(one.nbytes for one in model.state_dict().values())
    assert total > 4 * 50_000
    assert 0 < counted.most <= 50_000


def test_a_merged_model_is_made_shard_by_shard(tmp_path, monkeypatch):
    """LoRA's products are added to a shard's weights as it is written."""
    monkeypatch.setattr(export, "SHARD_BYTES", 50_000)
    model_of("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapters.add_lora(adapted, PeftOptions(method="lora", lora_rank=2))
    for name, one in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(one)
    made, merged = [], adapters.merged
    monkeypatch.setattr("dsrun.training.models.load.plain_base", lambda job: base)
    monkeypatch.setattr(adapters, "merged", lambda name, *rest: made.append(name) or merged(name, *rest))
    at_a_time = []
    save = type(base).save_pretrained

    def noted(self, folder, **options):
        at_a_time.append(len(made))
        made.clear()
        return save(self, folder, **options)

    monkeypatch.setattr(type(base), "save_pretrained", noted)
    own = {name: one.detach() for name, one in adapted.named_parameters() if one.requires_grad}
    write_folders(
        adapted, lambda names: {name: own[name] for name in names}, tokenizer=TOKENIZER, end_ids=[2],
        job=a_job(tmp_path, method="lora", lora_rank=2), folders={"model": tmp_path / "model"},
    )  # fmt: skip
    assert len(at_a_time) > 3
    assert at_a_time == [len(names) for names in shards(base)]
    ids = torch.tensor([[5, 6, 7]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.allclose(again(ids).logits, adapted(ids).logits, atol=1e-5, rtol=0)


def test_a_disk_that_fills_up_in_the_middle_leaves_the_older_model(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 50_000)
    model = model_of("llama")
    folder = written(tmp_path, model)
    before = content(folder)
    whole, asked = weights_in(model), []

    def weights(names):
        asked.append(names)
        if len(asked) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(names)

    with pytest.raises(TrainingError, match="disk is full"):
        written(tmp_path, model, weights)
    assert content(folder).keys() == before.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_weights_that_are_not_whole_are_no_model(tmp_path):
    model = model_of("llama")
    weights = weights_in(model)

    def empty(names):
        return {name: one[:0] if one.dim() else one for name, one in weights(names).items()}

    with pytest.raises(RuntimeError, match="not the whole model"):
        written(tmp_path, model, empty)
    assert not list(tmp_path.iterdir())


def test_the_config_says_the_files_type(tmp_path):
    """The module may hold another one: FSDP's weights are fp32 in a bf16 job."""
    model = model_of("llama")
    state = model.state_dict()
    folder = written(tmp_path, model, lambda names: {name: state[name].bfloat16() for name in names})
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16

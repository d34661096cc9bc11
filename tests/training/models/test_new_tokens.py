"""New tokens: what a folder becomes with them, and that it is what transformers makes of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from plain_tokenizer import plain_tokenizer
from safetensors.torch import load_file

from dsrun.errors import DsrunError
from dsrun.training.data.prompts import encoder_for
from dsrun.training.models.load import _from_folder
from dsrun.training.models.new_tokens import MULTIPLE, SEED, add_tokens, link_folder

TOKENS = ("<think>", "<|turn|>")
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"


def make(folder: Path, rows: int, *, tied: bool = False, shard_size: str = "1GB") -> Path:
    """A small model with as many rows as said, whatever its tokenizer needs."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=rows, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=shard_size)
    plain_tokenizer().save_pretrained(folder)
    return folder


def grown(source: Path, tokens=TOKENS, template: str = TEMPLATE) -> Path:
    folder = source.with_name(f"{source.name}-new")
    folder.mkdir()
    link_folder(source, folder)
    add_tokens(folder, tokens, template)
    return folder


def weights(folder: Path) -> dict:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


ROWS = len(plain_tokenizer())


@pytest.mark.parametrize("tied", [False, True])
def test_the_rows_are_those_that_transformers_would_make(tmp_path, tied):
    source = make(tmp_path / "a model's", ROWS, tied=tied)
    before = {path: path.read_bytes() for path in source.iterdir()}
    folder = grown(source)
    model = transformers.LlamaForCausalLM.from_pretrained(source)
    torch.manual_seed(SEED)
    model.resize_token_embeddings(ROWS + len(TOKENS), pad_to_multiple_of=MULTIPLE)
    reloaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert reloaded.config.vocab_size == model.config.vocab_size == reloaded.lm_head.weight.shape[0]
    torch.testing.assert_close(reloaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    torch.testing.assert_close(reloaded.lm_head.weight, model.lm_head.weight, atol=1e-4, rtol=0)
    assert (reloaded.lm_head.weight.data_ptr() == reloaded.get_input_embeddings().weight.data_ptr()) == tied
    assert before == {path: path.read_bytes() for path in source.iterdir()}, "the user's folder stays"


def test_dsrun_loads_what_transformers_loads(tmp_path):
    folder = grown(make(tmp_path / "m", ROWS, shard_size="4KB"))
    ids = torch.tensor([[1, 300, ROWS, ROWS + 1]])
    own = _from_folder(folder, torch.float32, torch.device("cpu"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(own(ids).logits, plain(ids).logits, atol=0, rtol=0)


def test_only_the_shards_with_rows_for_tokens_are_written_anew(tmp_path):
    source = make(tmp_path / "m", ROWS, shard_size="4KB")
    folder = grown(source)
    links = {path.name for path in folder.iterdir() if path.is_symlink()}
    listed = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    fresh = {listed["model.embed_tokens.weight"], listed["lm_head.weight"]}
    assert links == set(listed.values()) - fresh
    assert weights(folder).keys() == weights(source).keys()


def test_spare_rows_are_used_and_drawn_anew(tmp_path):
    source = make(tmp_path / "m", ROWS + 50)
    old, new = weights(source)["lm_head.weight"], weights(grown(source))["lm_head.weight"]
    assert old.shape == new.shape
    changed = (old != new).any(1).nonzero().flatten().tolist()
    assert changed == [ROWS, ROWS + 1]


def test_bin_files_become_safetensors(tmp_path):
    source = make(tmp_path / "m", ROWS, tied=True)
    state = transformers.LlamaForCausalLM.from_pretrained(source).state_dict()
    (source / "model.safetensors").unlink()
    torch.save(state, source / "pytorch_model.bin")
    folder = grown(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not list(folder.glob("*.bin"))
    assert model.get_input_embeddings().weight.shape[0] % MULTIPLE == 0
    torch.testing.assert_close(
        model.model.layers[1].mlp.up_proj.weight.data, state["model.layers.1.mlp.up_proj.weight"]
    )


def test_a_token_is_one_in_the_data_unless_it_is_a_role_mark(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(grown(make(tmp_path / "m", ROWS)))
    (ids,) = encoder_for(tokenizer, "plain").encode_texts(["a<think>b<|turn|>"])
    thinks, turns = tokenizer.convert_tokens_to_ids(list(TOKENS))
    assert ids.count(thinks) == 1
    assert turns not in ids
    assert "<think>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode([turns], skip_special_tokens=True) == ""


def test_a_token_that_is_there_is_refused(tmp_path):
    with pytest.raises(DsrunError, match=r"holds <\|user\|> already"):
        grown(make(tmp_path / "m", ROWS), ("<|user|>",))


def test_weights_that_transformers_renames_get_their_rows(tmp_path):
    source = tmp_path / "a neox"
    config = transformers.GPTNeoXConfig(
        vocab_size=ROWS, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(source)
    assert "embed_out.weight" in weights(source), "else there is nothing to test"
    plain_tokenizer().save_pretrained(source)
    folder = grown(source)
    assert weights(folder)["embed_out.weight"].shape == (MULTIPLE * -(-(ROWS + 2) // MULTIPLE), 8)
    model = _from_folder(folder, torch.float32, torch.device("cpu"))
    old = load_file(source / "model.safetensors")["embed_out.weight"]
    torch.testing.assert_close(model.get_output_embeddings().weight[:ROWS].detach(), old)


def test_weights_under_other_names_are_refused(tmp_path):
    source = make(tmp_path / "m", ROWS)
    path = source / "model.safetensors"
    tensors = load_file(path)
    tensors["embeddings"] = tensors.pop("model.embed_tokens.weight")
    from safetensors.torch import save_file

    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(DsrunError, match=r"model\.embed_tokens\.weight under another name"):
        grown(source)

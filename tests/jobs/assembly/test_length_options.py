"""How long prompts and responses may be: what data need, what the model has, what is refused before the start."""

from __future__ import annotations

import json

import pytest
from asking import finetune_request

from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError
from dsrun.jobs.assembly import finetune
from dsrun.options.layers import Source

CPU = Machine("cpu", (), 2, "a test", 64 * 2**30)
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 400,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A Hugging Face folder of a model with 256 positions, whose tokens are letters."""
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(finetune, "check_operators", lambda *_: None)
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>"))
    path = tmp_path / "a model"
    path.mkdir()
    made.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"")
    return path


def planned(folder, lengths, **given):
    """lengths: letters of each example's prompt and response."""
    data = folder.parent / "rows.jsonl"
    rows = ({"content": "a" * prompt, "summary": "b" * response} for prompt, response in lengths)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    request = finetune_request(str(folder), train_file=(str(data),), preset="ddp", gpus=2, **given)
    return finetune.plan(request, CPU, {}, download=False)


def limits(job):
    return job.data.max_length, job.data.max_source_length, job.data.max_target_length


def refusal(*args, **given) -> str:
    with pytest.raises(DsrunError) as caught:
        planned(*args, **given)
    (problem,) = caught.value.problems
    return f"{problem} {problem.hint}"


def test_lengths_come_from_the_data(folder):
    found = planned(folder, [(20, 70)] * 30)
    # 36 + 71 tokens with the format's own, in whole 64s; the response's part holds what responses need.
    assert limits(found.job) == (128, 36, 92)
    assert found.resolved.origins["max_length"].source == Source.DERIVED
    assert any("lengths: 128 tokens of prompt and response" in note for note in found.notes)


def test_a_long_prompt_takes_what_its_response_leaves(folder):
    """One limit cuts none of these; one for each would have to be 128 + 128, or cut half of them."""
    rows = [(20, 80), (80, 20)] * 20
    found = planned(folder, rows)
    assert found.job.data.max_length == 128
    assert any("0 of 40 examples (0.0%) are longer" in note for note in found.notes)
    assert "99 % need --max-length 128" in refusal(folder, rows, max_length=90)
    # Where both are too long each has its part: the response at least half.
    assert limits(planned(folder, rows, max_length=90, allow_truncation=True).job) == (90, 45, 45)


def test_answers_may_have_what_the_prompts_leave(folder):
    data = planned(folder, [(20, 70)] * 30).job.data
    assert data.answer_tokens([36, 40], 256) == 92
    assert data.answer_tokens([50, 60], 256) == 78  # an answer that was trained on can't be longer
    assert data.answer_tokens([50, 100], 128) == 28  # the model has no positions beyond
    assert data.answer_tokens([200], 128) == 1
    apart = planned(folder, [(20, 70)] * 30, max_source_length=100).job.data
    assert apart.answer_tokens([100], None) == apart.max_target_length


def test_a_limit_for_one_of_the_two_keeps_both_apart(folder):
    asked = planned(folder, [(20, 70)] * 30, max_target_length=100).job.data
    assert (asked.max_length, asked.max_source_length, asked.max_target_length) == (None, 64, 100)


def test_a_run_that_would_cut_many_examples(folder):
    rows = [(20, 70)] * 30
    said = refusal(folder, rows, max_target_length=50)
    for words in ("30 of 30", "100", "--max-target-length 128", "--allow-truncation"):
        assert words in said
    cut = planned(folder, rows, max_target_length=50, allow_truncation=True)
    assert cut.job.data.max_target_length == 50
    assert (
        planned(folder, [(20, 20)] * 29 + [(20, 70)], max_target_length=50).job.data.max_target_length == 50
    )
    assert planned(folder, rows, official=True, precision="fp32").job.data.max_target_length == 64


def test_without_a_tokenizer_the_config_says_how_long(folder):
    """As of a repository that is not downloaded yet: what is known of it is its config."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    found = planned(folder, [(20, 70)] * 9)
    assert limits(found.job) == (256, 128, 128)
    assert any("lengths: 256 tokens, unless" in note for note in found.notes)
    assert "256 positions" in refusal(folder, [(20, 70)] * 9, max_source_length=300)


def test_a_model_has_positions(folder):
    said = refusal(folder, [(20, 20)] * 9, max_source_length=300)
    for words in ("256 positions", "--allow-truncation"):
        assert words in said
    lowered = planned(folder, [(20, 20)] * 9, max_source_length=300, allow_truncation=True).job.data
    assert lowered.max_source_length + lowered.max_target_length == 256
    said = refusal(folder, [(400, 20)] * 9)
    for words in ("--max-length 448, more than the model's 256 positions", "--allow-truncation"):
        assert words in said
    cut = planned(folder, [(400, 20)] * 9, allow_truncation=True)
    assert limits(cut.job) == (256, 192, 64)
    assert "256 positions" in refusal(folder, [(20, 20)] * 9, max_length=300)
    assert planned(folder, [(20, 20)] * 9, max_length=300, allow_truncation=True).job.data.max_length == 256

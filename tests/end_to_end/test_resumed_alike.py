"""A model with dropout and end marks of its own: a resumed run is the undisturbed one, bit for bit."""

from __future__ import annotations

import json

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers")

from running import SHORT, cut_off, finish, lines_of, starts_of

pytestmark = pytest.mark.slow
STEPS, SAVED = 8, 4
TIMES = ("time", "seconds", "tokens_per_second", "memory_bytes")
"""Values that differ between any two runs."""


@pytest.fixture(scope="module")
def gpt2(reference, tmp_path_factory):
    """GPT-2's network in miniature, whose class drops a tenth by default; the reference run's tokenizer."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    job = json.loads(reference.read("job.json"))
    tokenizer = AutoTokenizer.from_pretrained(job["prepared"]["model_dir"])
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    torch.manual_seed(3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    return folder


@pytest.fixture(scope="module")
def undisturbed(gpt2, dsrun_here, data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    words = (
        "finetune", "llama-tiny", "--model-path", gpt2, "--output-dir", run_dir, "--gpus", "2", *SHORT, *data,
        "--preset", "zero2", "--max-steps", STEPS, "--save-steps", SAVED, "--keep", "9", "--eval-steps", "3",
    )  # fmt: skip
    done = finish(dsrun_here(*words), run_dir)
    assert done.code == 0, done.err
    return done


def test_it_goes_on_as_if_nothing_had_happened(undisturbed, dsrun_here, tmp_path):
    from safetensors.torch import load_file

    run_dir = tmp_path / "run"
    cut_off(undisturbed.run_dir, SAVED, run_dir)
    done = finish(dsrun_here("resume", run_dir), run_dir)
    assert done.code == 0, done.err
    assert starts_of(run_dir) == [0, SAVED]
    one, other = (
        [
            {name: line[name] for name in line if name not in TIMES}
            for line in lines_of(path / "metrics.jsonl")
        ]
        for path in (undisturbed.run_dir, run_dir)
    )
    assert one == other
    whole, again = (load_file(path / "model/model.safetensors") for path in (undisturbed.run_dir, run_dir))
    assert whole.keys() == again.keys()
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


def test_what_else_ended_the_models_answers_still_does(undisturbed):
    written = json.loads(undisturbed.read("model/generation_config.json"))
    assert sorted(written["eos_token_id"]) == [2, 7, 9]

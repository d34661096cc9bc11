"""A chat template from a file and new special tokens, in whole runs: the same numbers under every division, cut off and
resumed on other ranks, and beside adapters."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
transformers = pytest.importorskip("transformers")

from running import SHORT, cut_off, finish, same

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS, SAVED = 6, 3
TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}<|turn|>assistant: "
MARK, WORD = "<|turn|>", "<kind>"
PRESETS = ("ddp", "zero1", "zero2", "zero3")
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def run(tmp_path_factory, dsrun_here):
    """`run(preset, *words)`: the finished run; each is done once."""
    folder, done = tmp_path_factory.mktemp("新 tokens"), {}
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    rows = [{"content": f"{WORD} {number}", "summary": ("odd", "even")[number % 2]} for number in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def made(preset, *words):
        if (preset, words) not in done:
            run_dir = folder / f"{preset}{len(done)}"
            given = (
                "llama-tiny", "--preset", preset, "--gpus", "2", *SHORT, "--train-file", folder / "rows.jsonl",
                "--max-steps", STEPS, "--save-steps", SAVED, "--keep", "9", "--chat-template",
                folder / "template.jinja", *words, "--output-dir", run_dir,
            )  # fmt: skip
            ended = finish(dsrun_here("finetune", *given), run_dir)
            assert ended.code == 0, ended.err
            done[preset, words] = ended
        return done[preset, words]

    return made


NEW = ("--add-special-tokens", f"{MARK},{WORD}")


@pytest.mark.parametrize("preset", PRESETS[1:])
def test_every_division_trains_the_same(run, preset):
    same(run(preset, *NEW).losses, run(PRESETS[0], *NEW).losses, TOLERANCE)


@pytest.mark.parametrize("preset", PRESETS)
def test_the_export_knows_the_tokens_and_the_template(run, preset):
    done = run(preset, *NEW)
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.run_dir / "model")
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer(f"{MARK}{WORD}", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == [MARK, WORD]
    model = transformers.AutoModelForCausalLM.from_pretrained(done.run_dir / "model")
    before = transformers.AutoModelForCausalLM.from_pretrained(
        json.loads(done.read("job.json"))["prepared"]["model_dir"]
    )
    rows = model.get_input_embeddings().weight
    assert len(rows) % 64 == 0 and len(rows) == len(model.get_output_embeddings().weight) >= len(tokenizer)
    moved = (rows - before.get_input_embeddings().weight).abs().amax(1)
    assert all(moved[token] > 0 for token in ids[-2:]), "new rows are trained"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_that_was_cut_off_goes_on(run, dsrun_here, tmp_path, preset):
    """It goes on with one rank, which has no job's folder but what the run itself wrote."""
    done, run_dir = run(preset, *NEW), tmp_path / "elsewhere"
    cut_off(done.run_dir, SAVED, run_dir)
    resumed = finish(dsrun_here("resume", run_dir, "--gpus", "1"), run_dir)
    assert resumed.code == 0, resumed.err
    same(resumed.losses, done.losses, TOLERANCE)


def test_an_adapter_is_trained_on_the_template(run):
    """New tokens it can't have: their rows would stay as they were drawn."""
    pytest.importorskip("peft")
    losses = run("zero2", "--method", "lora").losses
    assert losses[STEPS] < losses[1]


def test_new_tokens_beside_an_adapter_are_refused(dsrun_here, tmp_path):
    words = ("finetune", "llama-tiny", "--method", "lora", *NEW, "--output-dir", tmp_path / "run")
    ended = finish(dsrun_here(*words), tmp_path / "run")
    assert ended.code == 1
    assert "--add-special-tokens" in ended.err and "--method full" in ended.err
    assert not (tmp_path / "run").exists()

"""--log in a whole run: two ranks, TensorBoard for real, and a tracker that breaks on the way.

The run has other things that need ranks and little more: plain text beside classes, a chat template and a new token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from running import words_of

pytestmark = pytest.mark.slow
KEY = "geheim-0123456789"
BREAKS = """
import os, pathlib
calls = pathlib.Path(os.environ["WANDB_CALLS"])
class Settings:
    def __init__(self, **given): pass
class Run:
    id = "w-1"
    def define_metric(self, *words, **given): pass
    def log(self, values):
        with calls.open("a") as file:
            file.write(os.environ["RANK"] + "\\n")
        if values["trainer/step"] >= 2:
            raise ConnectionError("no network for " + os.environ["WANDB_API_KEY"])
    def finish(self, **given): raise ConnectionError("still none")
def init(**given): return Run()
"""


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}assistant: "
TOKEN = "<kind>"


def write_rows(folder) -> list[str]:
    """Plain text and classes to train on, classes to be held out; the options that name them."""
    classes = [
        {"content": f"{TOKEN} {number}", "summary": ("odd", "even")[number % 2]} for number in range(36)
    ]
    files = {
        "texts.jsonl": [{"text": f"chapter {number}: " + "one more word " * 9} for number in range(12)],
        "classes.jsonl": classes[:24],
        "held-out.jsonl": classes[24:],
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return [
        "--train-file", "texts.jsonl", "--train-file", "classes.jsonl", "--eval-file", "held-out.jsonl",
        "--chat-template", "template.jinja", "--add-special-tokens", TOKEN, "--generate-rows", "12",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, environ):
    """A run with --log, what it said, and the ranks that called the tracker that breaks."""
    folder = tmp_path_factory.mktemp("tracked")
    data = write_rows(folder)
    (folder / "wandb").mkdir()
    (folder / "wandb" / "__init__.py").write_text(BREAKS, encoding="utf-8")
    words = [*words_of("llama-tiny", folder / "run"), *data, "--max-steps", "4", "--log", "tensorboard"]
    env = {
        **environ, "WANDB_API_KEY": KEY, "WANDB_CALLS": str(folder / "calls"),
        "PYTHONPATH": f"{folder}{os.pathsep}{environ['PYTHONPATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "dsrun", *words, "--log", "wandb"], env=env, cwd=folder, capture_output=True,
        text=True, timeout=800, check=False,
    )  # fmt: skip
    return folder, done


def test_a_tracker_that_breaks_does_not_end_the_run(tracked):
    folder, done = tracked
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    notes = [event["text"] for event in events if event["event"] == "note" and "wandb" in event["text"]]
    assert len(notes) == 1
    assert "ConnectionError" in notes[0]
    assert done.stderr.count("ConnectionError") == 1


def test_one_rank_logs(tracked):
    folder, _ = tracked
    assert set((folder / "calls").read_text().split()) == {"0"}


def test_no_file_of_the_run_and_no_output_holds_the_key(tracked):
    folder, done = tracked
    assert KEY not in done.stdout + done.stderr
    found = [path for path in (folder / "run").rglob("*") if path.is_file()]
    assert len(found) > 10
    assert not [path for path in found if KEY.encode() in path.read_bytes()]


def test_tensorboard_has_what_metrics_jsonl_has(tracked):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tracked[0] / "run"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seen = EventAccumulator(str(run_dir / "tensorboard"))
    seen.Reload()
    for curve, name in (("train/loss", "loss"), ("train/lr", "lr"), ("eval/loss", "eval_loss")):
        wanted = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert wanted
        assert [(one.step, one.value) for one in seen.Scalars(curve)] == wanted


def test_text_and_classes_are_trained_on_together(tracked):
    run_dir = tracked[0] / "run"
    report = json.loads((run_dir / "data.json").read_text(encoding="utf-8"))["train"]
    assert [one["format"] for one in report["files"]] == ["text", "prompt-response"]
    assert report["trained_on"] == "responses and text"
    assert report["documents"] == 12
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert held_out[-1] < held_out[0]


def test_classes_are_scored_as_classes(tracked):
    result = json.loads((tracked[0] / "run" / "run.json").read_text(encoding="utf-8"))["result"]
    assert set(result["scores"]["after"]) == {"exact-match", "accuracy", "macro-f1", "majority"}


def test_the_exported_model_has_the_template_and_the_token(tracked):
    transformers = pytest.importorskip("transformers")
    folder = tracked[0] / "run" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    (token,) = tokenizer(TOKEN, add_special_tokens=False)["input_ids"][-1:]
    assert tokenizer.convert_ids_to_tokens(token) == TOKEN
    assert tokenizer.chat_template == TEMPLATE
    rows = transformers.AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight.shape[0]
    assert rows >= len(tokenizer) and rows % 64 == 0

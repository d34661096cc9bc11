"""--log in a whole run: two ranks, TensorBoard for real, and a tracker that breaks on the way."""

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


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, environ, data):
    """A run with --log, what it said, and the ranks that called the tracker that breaks."""
    folder = tmp_path_factory.mktemp("tracked")
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

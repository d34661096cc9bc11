"""The main job for real: dsrun, the `deepspeed` launcher and two CPU ranks. (Faults: test_faults_here.py.)

The runs are shared: each fixture is one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from running import (
    SAVE_STEPS,
    STEPS,
    Done,
    check_form,
    check_nothing_is_left,
    finish,
    lines_of,
    processes_of,
    reaches,
    same,
    words_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="module")
def sharded(dsrun_here, place, data) -> Done:
    """ZeRO-3 on the reference's rows, in a folder with a hostile name, with words for people and scores."""
    run_dir = place / 'a user\'s "double" 实验 run'
    words = (
        *words_of("llama-tiny", run_dir),
        *data,
        "--preset",
        "zero3",
        "--keep",
        "2",
        "--generate-rows",
        "4",
    )
    done = finish(dsrun_here(*words), run_dir)
    assert done.code == 0, done.err
    return done


def without_dsrun(code: str, *args: object) -> str:
    """Output of a Python in which dsrun can't be imported, installed or not."""
    guard = "import sys; sys.modules['dsrun'] = None\n"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", guard + code, *map(str, args)], capture_output=True, text=True, check=False,
        cwd="/", env={**environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_stage_computes_the_same(reference, sharded):
    same(reference.losses, sharded.losses, 1e-4)
    assert reference.last_eval == pytest.approx(sharded.last_eval, abs=1e-4)


def test_the_model_learns(reference):
    losses = reference.losses
    assert len(losses) == STEPS
    assert losses[STEPS] < losses[1] - 1


def test_the_result_is_json_on_stdout(reference):
    result = json.loads(reference.out)
    check_form("finetune", result)
    assert result["model"] == str(reference.run_dir / "model")
    assert result["steps"] == STEPS
    assert result["loss"] == reference.losses[STEPS]
    assert result["eval_loss"]["last"] == reference.last_eval < result["eval_loss"]["first"]


@pytest.mark.parametrize("run", ["reference", "sharded"])
def test_the_run_folder_is_complete(request, run):
    done = request.getfixturevalue(run)
    job = json.loads(done.read("job.json"))
    assert job["run_dir"] == str(done.run_dir)
    assert json.loads(done.read("deepspeed.json")) == job["ds_config"]
    assert "auto" not in done.read("deepspeed.json")
    environment = json.loads(done.read("environment.json"))
    assert environment["packages"]["deepspeed"]
    assert "git" in environment
    assert done.read("command.sh").startswith("#!/usr/bin/env bash")
    for rank in range(2):
        assert (done.run_dir / "logs" / f"rank-{rank}.log").stat().st_size > 0
    assert (done.run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert done.state == "finished"
    for line in done.metrics:
        assert "loss" not in line or {"step", "loss", "lr", "grad_norm", "tokens", "seconds"} <= set(line)


def test_predictions_and_scores(sharded):
    rows = lines_of(sharded.run_dir / "generated_predictions.jsonl")
    assert len(rows) == 4
    assert all({"labels", "predict"} <= set(row) for row in rows)
    assert all(row["labels"] for row in rows)
    (event,) = [line for line in lines_of(sharded.run_dir / "events.jsonl") if line["event"] == "scores"]
    assert event["when"] == "after"
    assert event["rows"] == 4


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    state = model.state_dict()
    assert all(weight.numel() > 0 and torch.isfinite(weight).all() for weight in state.values())
    inputs = tokenizer("类型#裙*颜色#红色", return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] > inputs["input_ids"].shape[1]
    print(json.dumps({name: [list(weight.shape), float(weight.double().sum())] for name, weight in state.items()}))
"""


def test_the_exported_models_load_without_dsrun(reference, sharded):
    said = without_dsrun(LOAD, *(done.run_dir / "model" for done in (reference, sharded)))
    one, other = map(json.loads, said.splitlines())
    assert len(one) > 30
    assert one.keys() == other.keys()
    for name, (shape, total) in one.items():
        assert shape == other[name][0]
        assert total == pytest.approx(other[name][1], abs=0.05), name


def test_the_exported_model_is_the_trained_one(reference):
    from safetensors.torch import load_file

    job = json.loads(reference.read("job.json"))
    before = load_file(Path(job["prepared"]["model_dir"]) / "model.safetensors")
    after = load_file(reference.run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


def test_the_command_that_uses_the_model_works(sharded):
    """The command runs as printed, in a shell, for a folder with quotes and spaces in its name."""
    (line,) = [line for line in sharded.out.splitlines() if line.startswith("use it ")]
    command = line.removeprefix("use it ").strip()
    assert shlex.split(command) == ["dsrun", "chat", str(sharded.run_dir)]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{command} --prompt 裙"],
        check=False,
        capture_output=True,
        text=True,
        env=environ,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_people_are_told_where_things_are(sharded):
    assert f"model       {sharded.run_dir / 'model'}" in sharded.out
    assert "ROUGE-L" in sharded.out
    assert re.search(rf"step {STEPS}/{STEPS}  loss \d+\.\d+  [\d,]+ tokens/s", sharded.err)


@pytest.mark.parametrize("run", ["reference", "sharded"])
def test_nothing_is_left_of_a_run_that_ends_well(request, run):
    check_nothing_is_left(request.getfixturevalue(run).run_dir)


def test_the_newest_checkpoints_are_kept(sharded):
    found = {path.name for path in (sharded.run_dir / "checkpoints").glob("step-*")}
    assert found == {f"step-{STEPS - SAVE_STEPS}", f"step-{STEPS - 2 * SAVE_STEPS}"}


def test_a_finished_run_is_neither_continued_nor_overwritten(reference, dsrun_here):
    for words in (("resume", reference.run_dir), words_of("llama-tiny", reference.run_dir)):
        done = finish(dsrun_here(*words), reference.run_dir)
        assert done.code == 1
        assert "finished" in done.err


def test_the_script_runs_by_hand(sharded, environ):
    """It runs in the folder with the hostile name, from somewhere else; after all tests that read the folder."""
    losses = sharded.losses
    shutil.rmtree(sharded.run_dir / "model")
    bare = {name: value for name, value in environ.items() if name not in {"DS_ACCELERATOR", "PYTHONPATH"}}
    done = subprocess.run(
        ["bash", str(sharded.run_dir / "command.sh")],
        check=False, capture_output=True, text=True, env=bare, cwd="/", timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list((sharded.run_dir / "model").glob("*.safetensors"))
    same(sharded.losses, losses, 1e-6)


@pytest.mark.full
def test_done_again(reference, dsrun_here, place):
    again = place / "again"
    done = finish(dsrun_here("rerun", reference.run_dir, "--output-dir", again), again)
    assert done.code == 0, done.err
    said = finish(dsrun_here("compare", reference.run_dir, again), again).out
    assert f"equal to the last digit at all {STEPS} steps" in said
    assert "[all] " in finish(dsrun_here("logs", again), again).out


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGTERM, 143, "it's asked to 结束"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_whole_job(dsrun_here, place, data, number, code, name):
    run_dir = place / name
    process = dsrun_here(*words_of("llama-tiny", run_dir), *data, "--max-steps", "100000")
    reaches(process, run_dir, 2)
    assert len(processes_of(run_dir)) >= 3
    process.send_signal(number)
    done = finish(process, run_dir)
    check_nothing_is_left(run_dir)
    assert (done.code, done.out, done.state) == (code, "", "interrupted")
    assert "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if "dsrun resume" in line]
    assert shlex.split(line[line.index("dsrun resume") :])[-1] == str(run_dir)


@pytest.mark.full
def test_a_rank_that_raises_says_why(reference, dsrun_here, place, data):
    model = place / "a wrong model"
    shutil.copytree(reference.run_dir / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (model / "config.json").write_text(json.dumps(config))
    run_dir = place / "raises"
    done = finish(dsrun_here(*words_of(str(model), run_dir), *data), run_dir)
    assert done.code not in {0, 3}
    assert done.out == ""
    assert re.search(r"rank [01] failed first", done.err)
    assert "the weights do not fit the config" in done.err
    assert "Is the download complete" in done.err, "the next step"
    assert done.state == "failed"
    check_nothing_is_left(run_dir)

"""The main job for real: dsrun, the `deepspeed` launcher, two CPU ranks, and what becomes of it when things go wrong.

The runs are shared: each fixture is one. $DSRUN_TEST_CACHE may name a cache that already holds the compiled operators.
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
import time
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from running import (
    Done,
    check_nothing_is_left,
    finish,
    lines_of,
    little_data,
    processes_of,
    ranks_of,
    reaches,
    same,
    step_of,
    until,
)

from dsrun import catalog

pytestmark = pytest.mark.slow

ROOT = catalog.PACKAGE.parent
STEPS, SAVE_STEPS = 16, 4
SHORT = (
    "--gpus", "2", "--precision", "fp32", "--micro-batch", "4", "--generate-rows", "4", "--no-score-before",
    "--max-source-length", "40", "--max-target-length", "16", "--warmup-steps", "0", "--eval-steps", "1000",
)  # fmt: skip


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("end_to_end")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> tuple[str, ...]:
    """The options that name a little data."""
    return little_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def start(environ, place):
    """`start(model, run_dir, *args)`: dsrun finetune, running; with a last word `finish(process)`."""
    started: list[subprocess.Popen[str]] = []

    def run(model: str, run_dir: Path, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dsrun", "finetune", model, "--output-dir", str(run_dir), *args]
        started.append(
            subprocess.Popen(
                command,
                env=environ,
                cwd=place,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def without_dsrun(code: str, *args: object) -> str:
    """What a Python says in which dsrun can't be imported, installed or not."""
    guard = "import sys; sys.modules['dsrun'] = None\n"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-c", guard + code, *map(str, args)], capture_output=True, text=True, check=False,
        cwd="/", env={**environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# The runs


@pytest.fixture(scope="session")
def offloaded(start, place, data) -> Done:
    """ZeRO-2 with the optimizer on the CPU, undisturbed, with checkpoints on the way."""
    run_dir = place / "offloaded"
    args = (
        *SHORT,
        *data,
        "--preset",
        "zero2-offload",
        "--max-steps",
        str(STEPS),
        "--save-steps",
        str(SAVE_STEPS),
    )
    done = finish(start("llama-tiny", run_dir, *args, "--json"), run_dir)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="session")
def partitioned(start, place, data) -> Done:
    """ZeRO-3 on the same rows, in a folder with a hostile name, with words for people."""
    run_dir = place / 'a user\'s "double" 实验 run'
    args = (*SHORT, *data, "--preset", "zero3", "--max-steps", str(STEPS))
    done = finish(start("llama-tiny", run_dir, *args), run_dir)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="session")
def killed(start, place, data) -> Done:
    """The offloaded run once more; rank 1 is killed after its first checkpoint."""
    run_dir = place / "killed"
    args = (
        *SHORT,
        *data,
        "--preset",
        "zero2-offload",
        "--max-steps",
        str(STEPS),
        "--save-steps",
        str(SAVE_STEPS),
    )
    process = start("llama-tiny", run_dir, *args)
    reaches(process, run_dir, SAVE_STEPS + 1)
    pid = ranks_of(run_dir)[1]
    os.kill(pid, signal.SIGSTOP)  # nothing goes on without it, however slow this test is
    assert (run_dir / "checkpoints" / f"step-{SAVE_STEPS}" / "complete").exists()
    assert step_of(run_dir) < STEPS
    os.kill(pid, signal.SIGKILL)
    return finish(process, run_dir, 60)


@pytest.fixture(scope="session")
def resumed(killed, start, place) -> Done:
    """The killed run, continued; a newer checkpoint lies there that was written by half."""
    run_dir = place / "resumed"
    shutil.copytree(killed.run_dir, run_dir)
    newest = run_dir / "checkpoints" / f"step-{STEPS - 1}"
    shutil.copytree(run_dir / "checkpoints" / f"step-{SAVE_STEPS}", newest)
    (newest / "complete").unlink()
    for path in newest.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    return finish(start("llama-tiny", run_dir, "--resume", "--json"), run_dir)


# A run that ends well


def test_every_stage_computes_the_same(offloaded, partitioned):
    same(offloaded.losses, partitioned.losses, 1e-4)
    assert offloaded.last_eval == pytest.approx(partitioned.last_eval, abs=1e-4)


def test_the_model_learns(offloaded):
    losses = offloaded.losses
    assert len(losses) == STEPS
    assert losses[STEPS] < losses[1] - 1


def test_the_result_is_json_on_stdout(offloaded):
    result = json.loads(offloaded.out)
    assert result["model"] == str(offloaded.run_dir / "model")
    assert result["steps"] == STEPS
    assert result["loss"] == offloaded.losses[STEPS]
    assert result["eval_loss"]["last"] == offloaded.last_eval < result["eval_loss"]["first"]
    assert set(result["scores"]["after"]) == {"rouge-1", "rouge-2", "rouge-l", "bleu-4"}


@pytest.mark.parametrize("run", ["offloaded", "partitioned"])
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


@pytest.mark.parametrize("run", ["offloaded", "partitioned"])
def test_predictions_and_scores(request, run):
    done = request.getfixturevalue(run)
    rows = lines_of(done.run_dir / "generated_predictions.jsonl")
    assert len(rows) == 4
    assert all({"labels", "predict"} <= set(row) for row in rows)
    assert all(row["labels"] for row in rows)
    (event,) = [line for line in lines_of(done.run_dir / "events.jsonl") if line["event"] == "scores"]
    assert event["when"] == "after"
    assert event["rows"] == 4


LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
_, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
state = model.state_dict()
assert all(weight.numel() > 0 and torch.isfinite(weight).all() for weight in state.values())
inputs = tokenizer("类型#裙*颜色#红色", return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=8, do_sample=False)
assert answer.shape[1] > inputs["input_ids"].shape[1]
print(json.dumps({name: [list(weight.shape), float(weight.double().sum())] for name, weight in state.items()}))
"""


def test_the_exported_models_load_without_dsrun(offloaded, partitioned):
    one, other = (
        json.loads(without_dsrun(LOAD, done.run_dir / "model")) for done in (offloaded, partitioned)
    )
    assert len(one) > 30
    assert one.keys() == other.keys()
    for name, (shape, total) in one.items():
        assert shape == other[name][0]
        assert total == pytest.approx(other[name][1], abs=0.05), name


def test_the_exported_model_is_the_trained_one(offloaded, environ):
    from safetensors.torch import load_file

    job = json.loads(offloaded.read("job.json"))
    before = load_file(Path(job["prepared"]["model_dir"]) / "model.safetensors")
    after = load_file(offloaded.run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


def test_the_command_that_uses_the_model_works(partitioned):
    """As printed, in a shell, for a folder with quotes and spaces in its name."""
    (line,) = [line for line in partitioned.out.splitlines() if line.startswith("use it ")]
    command = line.removeprefix("use it ").strip()
    words = shlex.split(command)
    assert words[0] == sys.executable, "bare python may be another one, without transformers"
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], check=False, capture_output=True, text=True, env=environ, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_people_are_told_where_things_are(partitioned):
    assert f"model       {partitioned.run_dir / 'model'}" in partitioned.out
    assert "ROUGE-L" in partitioned.out
    assert re.search(rf"step {STEPS}/{STEPS}  loss \d+\.\d+  [\d,]+ tokens/s", partitioned.err)


@pytest.mark.parametrize("run", ["offloaded", "partitioned"])
def test_nothing_is_left_of_a_run_that_ends_well(request, run):
    check_nothing_is_left(request.getfixturevalue(run).run_dir)


def test_the_newest_checkpoints_are_kept(offloaded):
    found = {path.name for path in (offloaded.run_dir / "checkpoints").glob("step-*")}
    assert found == {f"step-{STEPS - SAVE_STEPS}", f"step-{STEPS - 2 * SAVE_STEPS}"}


def test_a_finished_run_is_neither_continued_nor_overwritten(offloaded, start):
    for args in (("--resume",), SHORT):
        done = finish(start("llama-tiny", offloaded.run_dir, *args), offloaded.run_dir)
        assert done.code == 1
        assert "finished" in done.err


def test_the_script_runs_by_hand(partitioned, environ, place):
    """In the folder with the hostile name, from somewhere else; after all that looks at the folder."""
    losses = partitioned.losses
    shutil.rmtree(partitioned.run_dir / "model")
    bare = {name: value for name, value in environ.items() if name not in {"DS_ACCELERATOR", "PYTHONPATH"}}
    done = subprocess.run(
        ["bash", str(partitioned.run_dir / "command.sh")],
        check=False,
        capture_output=True,
        text=True,
        env=bare,
        cwd="/",
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list((partitioned.run_dir / "model").glob("*.safetensors"))
    same(partitioned.losses, losses, 1e-6)


# A rank that is killed


def test_a_killed_rank_is_named(killed):
    assert killed.code not in {0, 3}
    assert killed.out == ""
    assert "rank 1 died first" in killed.err
    assert "SIGKILL" in killed.err
    assert "Traceback" not in killed.err
    assert killed.state == "failed"


def test_a_killed_rank_leaves_nothing_running(killed):
    check_nothing_is_left(killed.run_dir)


def test_a_dead_run_keeps_its_logs_and_checkpoints_and_says_how_to_go_on(killed):
    assert (killed.run_dir / "logs" / "rank-1.log").stat().st_size > 0
    assert str(killed.run_dir / "logs" / "rank-1.log") in killed.err
    assert (killed.run_dir / "checkpoints" / f"step-{SAVE_STEPS}" / "complete").exists()
    assert f"step-{SAVE_STEPS}" in killed.err
    assert f"dsrun resume {killed.run_dir}" in killed.err


def test_a_resumed_run_ends_where_an_undisturbed_one_does(resumed, offloaded):
    assert resumed.code == 0, resumed.err
    same(resumed.losses, offloaded.losses, 1e-5)
    assert resumed.last_eval == pytest.approx(offloaded.last_eval, abs=1e-5)
    assert json.loads(resumed.out)["loss"] == pytest.approx(json.loads(offloaded.out)["loss"], abs=1e-5)
    assert resumed.state == "finished"


def test_a_half_written_checkpoint_is_not_used(resumed):
    plans = [line for line in lines_of(resumed.run_dir / "events.jsonl") if line["event"] == "plan"]
    assert [plan["start_step"] for plan in plans] == [0, SAVE_STEPS]


# A run that is ended


@pytest.fixture(scope="session")
def endless(start, place, data):
    """`endless(name)`: a run that would go on for a long time, once it trains."""

    def run(name: str) -> tuple[subprocess.Popen[str], Path]:
        run_dir = place / name
        process = start(
            "llama-tiny", run_dir, *SHORT, *data, "--max-steps", "100000", "--preset", "zero2-offload"
        )
        reaches(process, run_dir, 2)
        return process, run_dir

    return run


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [(signal.SIGTERM, 143, "it's asked to 结束"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_ends_the_whole_job(endless, number, code, name):
    process, run_dir = endless(name)
    assert len(processes_of(run_dir)) >= 3
    began = time.monotonic()
    process.send_signal(number)
    done = finish(process, run_dir, 60)
    assert time.monotonic() - began < 15
    check_nothing_is_left(run_dir)
    assert (done.code, done.out, done.state) == (code, "", "interrupted")
    assert "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if "--resume" in line]
    words = shlex.split(line[line.index("dsrun finetune") :])
    assert words[words.index("--output-dir") + 1] == str(run_dir)


@pytest.fixture(scope="session")
def orphaned(start, place, data) -> Path:
    """A run whose dsrun was killed; its ranks end by themselves."""
    run_dir = place / "orphaned"
    args = (*SHORT, *data, "--preset", "zero2-offload", "--max-steps", "30")
    process = start("llama-tiny", run_dir, *args)
    reaches(process, run_dir, 2)
    ranks = ranks_of(run_dir)
    os.kill(ranks[1], signal.SIGSTOP)  # so that the run can't end well in the meantime
    process.kill()
    os.kill(ranks[1], signal.SIGCONT)
    process.communicate()
    return run_dir


def test_ranks_end_when_dsrun_is_killed(orphaned):
    until(lambda: not processes_of(orphaned), "the ranks are gone", 15)
    from dsrun.jobs import run_folder

    assert run_folder.describe_state(orphaned) == "interrupted"


def test_a_run_without_a_checkpoint_starts_over(orphaned, start):
    until(lambda: not processes_of(orphaned), "the ranks are gone", 15)
    done = finish(start("llama-tiny", orphaned, "--resume", "--json"), orphaned)
    assert done.code == 0, done.err
    assert len(done.losses) == 30
    assert [line["step"] for line in done.metrics if "eval_loss" in line] == [0, 30]


# A rank that raises


def test_a_rank_that_raises_says_why(offloaded, start, place, data):
    model = place / "a wrong model"
    shutil.copytree(offloaded.run_dir / "model", model)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (model / "config.json").write_text(json.dumps(config))
    run_dir = place / "raises"
    args = (*SHORT, *data, "--preset", "zero2-offload", "--max-steps", "2")
    done = finish(start(str(model), run_dir, *args), run_dir)
    assert done.code not in {0, 3}
    assert done.out == ""
    assert re.search(r"rank [01] failed first", done.err)
    assert "the weights do not fit the config" in done.err
    assert "Is the download complete" in done.err, "the next step"
    assert done.state == "failed"
    check_nothing_is_left(run_dir)

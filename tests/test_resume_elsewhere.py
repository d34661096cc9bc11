"""Runs that go on with other ranks, another stage or another offload, for real: losses go on as if nothing happened.

The legs of a journey: each takes the run of another leg up at one of its checkpoints, which that leg itself wrote.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from running import THOROUGH

from dsrun.jobs import space
from dsrun.jobs.finetune import dataset_folder
from dsrun.jobs.job import Job
from dsrun.jobs.layout import SAVE_REQUEST, whole_checkpoints

pytestmark = pytest.mark.slow

STEPS = 10
COMMON = (
    "--micro-batch", "4", "--generate-rows", "0", "--no-score-before", "--max-source-length", "40",
    "--max-target-length", "16", "--warmup-steps", "0", "--eval-steps", "1000", "--save-steps", "2", "--keep", "9",
)  # fmt: skip
STARTS = {
    "fp32": ("--gpus", "2", "--preset", "zero2"),
    "bf16": ("--gpus", "2", "--preset", "zero2"),
    "fp16": ("--gpus", "1", "--preset", "ddp", "--grad-accum", "2"),
}
LEGS = {
    # Name: whose run, from which step, with what; in fp32 unless the run's name says else
    "zero2 -> zero3": ("fp32", 2, ("--preset", "zero3")),
    "zero3 -> zero1, 2 -> 1": ("zero2 -> zero3", 4, ("--preset", "zero1", "--gpus", "1")),
    "zero1 -> zero2-offload, 1 -> 2": (
        "zero3 -> zero1, 2 -> 1",
        6,
        ("--preset", "zero2-offload", "--gpus", "2"),
    ),
    "zero2-offload -> zero3": ("zero1 -> zero2-offload, 1 -> 2", 8, ("--preset", "zero3")),
    "zero2 -> ddp": ("fp32", 4, ("--preset", "ddp")),
    "ddp -> zero2, 2 -> 1": ("zero2 -> ddp", 6, ("--preset", "zero2", "--gpus", "1")),
    "bf16: zero2 -> zero3-offload, 2 -> 1": ("bf16", 6, ("--preset", "zero3-offload", "--gpus", "1")),
    "fp16: ddp -> zero2, 1 -> 2": ("fp16", 6, ("--preset", "zero2", "--gpus", "2")),
}
if not THOROUGH:
    for name in ("zero2-offload -> zero3", "bf16: zero2 -> zero3-offload, 2 -> 1"):
        del LEGS[name]
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(run_dir / "metrics.jsonl") if "loss" in line}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def command(place):
    """`command(run_dir, *args)`: the words of a dsrun finetune."""
    options = []
    for option, name, count in (("--train-file", "train.jsonl", 64), ("--eval-file", "dev.jsonl", 8)):
        rows = (dataset_folder("advertise") / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (place / name).write_text("".join(rows[:count]), encoding="utf-8")
        options += [option, str(place / name)]

    def words(run_dir: Path, *args: str) -> list[str]:
        first = () if "--resume" in args else (*COMMON, *options)
        return [
            sys.executable,
            "-m",
            "dsrun",
            "finetune",
            "llama-tiny",
            "--output-dir",
            str(run_dir),
            *first,
            *args,
        ]

    return words


@pytest.fixture(scope="module")
def run(place, environ, command):
    """`run(name)`: the folder of a finished run, of STARTS or LEGS; each is done once."""
    done: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name in done:
            return done[name]
        if name in LEGS:
            made(LEGS[name][0])
        run_dir = place / f"run {len(done)}"
        if name in STARTS:
            args = (*STARTS[name], "--precision", name, "--max-steps", str(STEPS))
        else:
            source, step, args = LEGS[name]
            cut_off(made(source), step, run_dir)
            args = (*args, "--resume")
        process = subprocess.run(
            command(run_dir, *args),
            env=environ,
            cwd=place,
            text=True,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        done[name] = run_dir
        return run_dir

    return made


def cut_off(source: Path, step: int, target: Path) -> None:
    """The run as it would lie there, had it died after a step's checkpoint."""
    shutil.copytree(source, target)
    shutil.rmtree(target / "model")
    (target / "run.json").write_text('{"state": "failed"}')
    for folder in whole_checkpoints(target):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", LEGS)
def test_losses_go_on(run, name):
    precision = name.split(":")[0] if ":" in name else "fp32"
    undisturbed, own = losses(run(precision)), losses(run(name))
    assert list(own) == list(range(1, STEPS + 1))
    tolerance = TOLERANCE[precision]
    for step, loss in own.items():
        assert loss == pytest.approx(undisturbed[step], abs=tolerance), f"step {step}"


@pytest.mark.parametrize("name", LEGS)
def test_it_went_on_from_there(run, name):
    starts = [line["start_step"] for line in lines(run(name) / "events.jsonl") if line["event"] == "plan"]
    assert starts[-1] == LEGS[name][1]


def test_the_job_is_what_runs_now(run):
    job = Job.read(run("ddp -> zero2, 2 -> 1") / "job.json")
    before = Job.read(run("fp32") / "job.json")
    assert (job.preset, job.world_size, job.micro_batch, job.grad_accum) == ("zero2", 1, 4, 2)
    assert job.ds_config["zero_optimization"] == before.ds_config["zero_optimization"]
    assert job.ds_config["optimizer"] == before.ds_config["optimizer"]
    assert job.ds_config["train_batch_size"] == before.ds_config["train_batch_size"] == 8
    assert json.loads((run("ddp -> zero2, 2 -> 1") / "deepspeed.json").read_text()) == job.ds_config


def test_the_comparison_says_something(run):
    """Steps move the loss by far more than it is allowed to differ."""
    found = losses(run("fp32"))
    assert abs(found[STEPS] - found[STEPS - 1]) > 100 * TOLERANCE["fp32"]


@pytest.mark.parametrize(
    ("name", "step"), [("fp32", 2), ("zero2 -> zero3", 8), ("zero2 -> ddp", 8), ("fp16", 2)]
)
def test_sizes_are_as_planned(run, name, step):
    job = Job.read(run(name) / "job.json")
    need = space.need_of(job, space.setup_of(job), STEPS)
    assert space.size_of(run(name) / "checkpoints" / f"step-{step}") == pytest.approx(
        need.checkpoint_bytes, rel=0.1
    )
    weights = (run(name) / "model" / "model.safetensors").stat().st_size
    assert weights == pytest.approx(need.model_bytes, rel=0.1)


@pytest.fixture(scope="module")
def stopped(place, environ, command):
    """A run that would take long: asked for a checkpoint, and then to stop."""
    run_dir = place / "stopped"
    args = (
        "--gpus",
        "2",
        "--precision",
        "fp32",
        "--preset",
        "zero2",
        "--max-steps",
        "100000",
        "--save-steps",
        "90000",
    )
    process = subprocess.Popen(
        command(run_dir, *args),
        env=environ,
        cwd=place,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    request = run_dir / SAVE_REQUEST
    try:
        for word in ("", "stop"):
            deadline = time.monotonic() + 200
            while not (run_dir / "metrics.jsonl").exists() or len(losses_so_far(run_dir)) < 2:
                assert process.poll() is None and time.monotonic() < deadline, process.communicate()
                time.sleep(0.05)
            request.write_text(word)
            while request.exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()
    return run_dir


def losses_so_far(run_dir: Path) -> list[str]:
    return [
        line for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True) if '"loss"' in line
    ]


def test_a_run_stops_on_request(stopped):
    events = lines(stopped / "events.jsonl")
    saved = [event["step"] for event in events if event["event"] == "checkpoint" and event["requested"]]
    assert len(saved) == 2
    assert [path.name for path in whole_checkpoints(stopped)] == [f"step-{step}" for step in saved]
    assert [event["step"] for event in events if event["event"] == "stopped"] == saved[-1:]
    assert max(losses(stopped)) == saved[-1], "not one step more"
    states = [json.loads(path.read_text()) for path in sorted((stopped / "state").glob("rank-*.json"))]
    assert [state["status"] for state in states] == ["stopped", "stopped"]
    assert not (stopped / "model").exists()

"""Runs that go on with other ranks, another stage or another offload, for real: losses go on as if nothing happened.

The legs of a journey: each takes the run of another leg up at one of its checkpoints, which that leg itself wrote.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needed import needs

needs("deepspeed", "transformers")

from running import STEPS, cut_off, finish, lines_of, needs_fp16, same, starts_of, words_of

from dsrun.job.job import Job
from dsrun.jobs.assembly.checks import disk_check

pytestmark = pytest.mark.slow

STARTS = {
    # Beside the reference, which is in fp32
    "bf16": ("--precision", "bf16"),
    "fp16": ("--precision", "fp16", "--gpus", "1", "--preset", "ddp", "--grad-accum", "2"),
}
LEGS = {
    # Name: whose run, from which step, with what; in fp32 unless the run's name says else
    "zero2 -> zero3, 2 -> 1": ("fp32", 4, ("--preset", "zero3", "--gpus", "1")),
}
FULL = {
    "zero3 -> zero2-offload, 1 -> 2": (
        "zero2 -> zero3, 2 -> 1",
        6,
        ("--preset", "zero2-offload", "--gpus", "2"),
    ),
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
WHENCE = LEGS | FULL
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "fp16": 1e-3}


def in_full(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.full)


every_leg = pytest.mark.parametrize("name", [*LEGS, *map(in_full, FULL)])


def precision_of(name: str) -> str:
    return name.partition(":")[0] if name in STARTS or ":" in name else "fp32"


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines_of(run_dir / "metrics.jsonl") if "loss" in line}


@pytest.fixture(scope="module")
def run(tmp_path_factory, dsrun_here, data, reference):
    """`run(name)`: the folder of a finished run; each is done once."""
    done: dict[str, Path] = {"fp32": reference.run_dir}
    place = tmp_path_factory.mktemp("elsewhere")

    def made(name: str) -> Path:
        if name in done:
            return done[name]
        if precision_of(name) == "fp16":
            needs_fp16()
        if name not in STARTS:  # it is counted, too
            made(WHENCE[name][0])
        run_dir = place / f"run {len(done)}"
        if name in STARTS:
            words = (*words_of("llama-tiny", run_dir), *data, *STARTS[name])
        else:
            source, step, options = WHENCE[name]
            cut_off(made(source), step, run_dir)
            words = ("resume", run_dir, *options)
        ended = finish(dsrun_here(*words), run_dir)
        assert ended.code == 0, ended.err
        done[name] = run_dir
        return run_dir

    return made


@every_leg
def test_losses_go_on(run, name):
    precision = precision_of(name)
    own = losses(run(name))
    assert list(own) == list(range(1, STEPS + 1))
    same(losses(run(precision)), own, TOLERANCE[precision])


@every_leg
def test_it_went_on_from_there(run, name):
    assert starts_of(run(name))[-1] == WHENCE[name][1]


def test_the_job_is_what_runs_now(run):
    job = Job.read(run("zero2 -> zero3, 2 -> 1") / "job.json")
    before = Job.read(run("fp32") / "job.json")
    assert (job.preset, job.world_size, job.micro_batch, job.grad_accum) == ("zero3", 1, 4, 2)
    assert job.ds_config["optimizer"] == before.ds_config["optimizer"]
    assert job.ds_config["train_batch_size"] == before.ds_config["train_batch_size"] == 8
    assert json.loads((run("zero2 -> zero3, 2 -> 1") / "deepspeed.json").read_text()) == job.ds_config


def test_the_comparison_says_something(run):
    """Steps move the loss by far more than it is allowed to differ."""
    found = losses(run("fp32"))
    assert abs(found[STEPS] - found[STEPS - 1]) > 100 * TOLERANCE["fp32"]


@pytest.mark.parametrize(
    ("name", "step"),
    [("fp32", 2), ("zero2 -> zero3, 2 -> 1", 8), in_full("zero2 -> ddp", 8), in_full("fp16", 2)],
)
def test_sizes_are_as_planned(run, name, step):
    job = Job.read(run(name) / "job.json")
    need = disk_check.need_of(job, disk_check.setup_of(job), STEPS)
    assert disk_check.size_of(run(name) / "checkpoints" / f"step-{step}") == pytest.approx(
        need.checkpoint_bytes, rel=0.1
    )
    weights = (run(name) / "model" / "model.safetensors").stat().st_size
    assert weights == pytest.approx(need.model_bytes, rel=0.1)

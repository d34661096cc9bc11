"""Real runs whose ranks run out of a GPU's memory, by a stand-in for its allocator (tests/out_of_memory)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from needed import needs

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers")

from running import COMMON, ranks_of, reaches

from dsrun.job.memory_division import (
    ACTIVATIONS,
    BUCKETS,
    GATHERED,
    GRADIENTS,
    LOGITS,
    STATES,
    UNKNOWN,
    WEIGHTS,
)
from dsrun.jobs.diagnosis.diagnosis import diagnose_files
from dsrun.jobs.diagnosis.memory import records

pytestmark = pytest.mark.slow
STAND_IN = Path(__file__).resolve().parents[1] / "out_of_memory"
NEAR = 0.02
"""Shares of what is in use in which owners by name and owners by calls may differ."""
TOGETHER = {GATHERED: WEIGHTS, BUCKETS: GRADIENTS}
"""Owners that calls alone don't tell apart: stage 3's weights that stay gathered, its buffer of gradients."""
CASES = [
    pytest.param("zero2", "cross_entropy", "training, after step 2", id="zero2"),
    pytest.param("zero3", "cross_entropy", "training, after step 2", id="zero3", marks=pytest.mark.full),
    pytest.param("fsdp", "cross_entropy", "training, after step 2", id="fsdp", marks=pytest.mark.full),
    pytest.param(
        "zero2", "evaluation_loss", "evaluating, after step 4", id="evaluation", marks=pytest.mark.full
    ),
]


def words(preset, run_dir, data, steps=4):
    return [
        sys.executable, "-m", "dsrun", "finetune", "llama-tiny", "--output-dir", str(run_dir), "--gpus", "2", *COMMON,
        "--preset", preset, "--max-steps", str(steps), *data,
    ]  # fmt: skip


def in_mib(owners):
    sizes = {}
    for one in owners:
        owner = TOGETHER.get(one.owner, one.owner)
        sizes[owner] = sizes.get(owner, 0.0) + one.gib * 1024
    return sizes


@pytest.mark.parametrize(("preset", "function", "when"), CASES)
def test_a_rank_that_runs_out_of_memory(preset, function, when, tmp_path, environ, data):
    """The record has owners and layers by names, the run's end and `diagnose` say them, and the snapshot says alike."""
    run_dir, taken = tmp_path / "run", tmp_path / "snapshots"
    taken.mkdir()
    done = subprocess.run(
        words(preset, run_dir, data), text=True, capture_output=True, timeout=900, check=False,
        env={
            **environ, "PYTHONPATH": f"{STAND_IN}{os.pathsep}{environ['PYTHONPATH']}",
            "OUT_OF_MEMORY": f"2 {function}", "OUT_OF_MEMORY_SNAPSHOTS": str(taken),
        },
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    rank = json.loads((run_dir / "run.json").read_text())["diagnosis"]["rank"]
    division = records.of_gpu(run_dir, rank, None)
    assert (division.rank, division.when) == (rank, when)
    sizes = in_mib(division.owners)
    weights = sum(weight.numel() for weight in loaded(run_dir).parameters()) * 4 / 2**20
    assert sizes[STATES] >= 2 * weights / 2
    assert weights / 2 <= sizes[WEIGHTS] <= 1.3 * weights
    assert sizes.get(UNKNOWN, 0.0) < 0.001 * sum(sizes.values())
    layers = {part.name for one in division.owners if one.owner == WEIGHTS for part in one.parts}
    assert "model.layers.0" in layers
    if function == "cross_entropy":
        assert sizes[LOGITS] > 0.4
        saved = next(one for one in division.owners if one.owner == ACTIVATIONS)
        of_layers = [part.gib for part in saved.parts if part.name.startswith("model.layers.")]
        assert len(of_layers) == 4
        assert max(of_layers) < 1.1 * min(of_layers)
    assert all(one.planned_gib is not None for one in division.owners if one.owner in (WEIGHTS, STATES))
    by_calls = diagnose_files([str(taken / f"{rank}.pickle")], {})
    assert (by_calls.cause, by_calls.confidence) == ("gpu_oom", "high")
    assert function in by_calls.memory.failed_in or "forward" in by_calls.memory.failed_in
    other = in_mib(by_calls.memory.owners)
    for owner in {*sizes, *other}:
        assert abs(sizes.get(owner, 0.0) - other.get(owner, 0.0)) <= NEAR * sum(sizes.values()), (
            sizes,
            other,
        )
    assert "in use are" in done.stderr
    shown = subprocess.run(
        [sys.executable, "-m", "dsrun", "diagnose", str(run_dir)], env=environ, text=True, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert shown.returncode == 0
    assert f"memory      {division.owners[0].owner}" in shown.stdout


def loaded(run_dir):
    from transformers import AutoConfig, AutoModelForCausalLM

    job = json.loads((run_dir / "job.json").read_text())
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["prepared"]["model_dir"]))


def test_what_ranks_had_of_the_host_when_one_is_killed(tmp_path, environ, data):
    run_dir = tmp_path / "run"
    job = subprocess.Popen(
        words("zero2", run_dir, data, steps=4000), env=environ, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    reaches(job, run_dir, 5)
    os.kill(ranks_of(run_dir)[1], signal.SIGKILL)
    output, _ = job.communicate(timeout=300)
    assert job.returncode in (1, 137), output  # 1: DeepSpeed's launcher looked at the other rank first
    seen = json.loads((run_dir / "state/resident-0.json").read_text())
    assert set(seen["resident"]) == {"0", "1"}
    assert all(100 << 20 < size < 4 << 30 for size in seen["resident"].values())
    assert 0 < seen["least_ram_bytes"] <= seen["ram_bytes"]
    seen |= {"least_ram_bytes": 1 << 28, "ooms": 1}
    (run_dir / "state/resident-0.json").write_text(json.dumps(seen))
    found = diagnose_run(run_dir, environ)
    assert found["cause"] in ("killed", "host_oom", None)
    assert found["memory"]["place"] == "host"
    assert [one["owner"] for one in found["memory"]["owners"]] in (["rank 0", "rank 1"], ["rank 1", "rank 0"])
    assert "processes" in [one["name"] for one in found["memory"]["planned"]]
    assert "Planned" in found["summary"]


def diagnose_run(run_dir, environ):
    done = subprocess.run(
        [sys.executable, "-m", "dsrun", "diagnose", str(run_dir), "--json"], env=environ, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    return json.loads(done.stdout)

"""bench/planner_gpu.py as far as it goes without a GPU: what it would run, and the table of what came of it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.planner import gpus
from dsrun.planner.speed import Hardware

HARDWARE = Hardware.from_gpu(gpus.load("a100-80g"), 2)
BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("planner_gpu")
    finally:
        sys.path.remove(str(BENCH))


def config(stage: int, micro_batch: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200_000_000},
    }


def rank_ended(out: Path, rank: int, **peaks) -> None:
    (out / "state").mkdir(parents=True, exist_ok=True)
    (out / "state" / f"rank-{rank}.json").write_text(
        json.dumps({"rank": rank, "peaks": {"rank": rank, **peaks}})
    )


def test_sizes(bench):
    counts = [case.parameters for case in bench.MODELS.values()]
    assert [round(count / 1e6, -2) for count in counts] == [100, 500, 1500]


def test_every_combination(bench):
    runs = list(bench.wanted(list(bench.MODELS), list(bench.PRESETS), [1, 4]))
    assert len(runs) == len({run.name for run in runs}) == 3 * 6 * 2 * 2


def test_the_command_is_one_that_dsrun_takes(bench, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from dsrun.cli.finetune import command as finetune

    run = bench.Run("100m", "zero2", 4, checkpointing=True)
    rows = tmp_path / "rows.jsonl"
    bench.write_rows(rows)
    for name, value in bench.write_model(run.case, tmp_path).items():
        if name == "DSRUN_PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    words = bench.command(run, 2, 3, rows, tmp_path / "out")[4:]
    done = CliRunner().invoke(finetune, [*words, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert '"train_micro_batch_size_per_gpu": 4' in done.output.replace("\\", "")


def test_the_largest_rank_counts(bench, tmp_path):
    rank_ended(tmp_path, 0, gpu_allocated_bytes=5, gpu_reserved_bytes=9, host_peak_bytes=3, step_seconds=0.5)
    rank_ended(tmp_path, 1, gpu_allocated_bytes=7, gpu_reserved_bytes=8, host_peak_bytes=4, step_seconds=None)
    found = bench.took(tmp_path)
    assert found == {
        "gpu_allocated_bytes": 7, "gpu_reserved_bytes": 9, "host_peak_bytes": 4, "step_seconds": 0.5,
    }  # fmt: skip


def test_a_run_that_never_began_has_no_figures(bench, tmp_path):
    assert set(bench.took(tmp_path).values()) == {None}


def test_the_table(bench, tmp_path):
    rows = []
    for stage, checkpointing, failed in ((0, False, ""), (2, True, "out of memory")):
        run = bench.Run("500m", f"zero{stage}", 4, checkpointing)
        out = tmp_path / run.name
        rank_ended(
            out, 0, gpu_allocated_bytes=8 * bench.GIB, gpu_reserved_bytes=9 * bench.GIB, step_seconds=0.25
        )
        found = {
            "model": run.model, "preset": run.preset, "micro_batch": 4, "checkpointing": checkpointing,
            "failed": failed, **bench.took(out), "ds_config": config(stage, 4),
        }  # fmt: skip
        rows.append(bench.judge(run, 2, found, HARDWARE if stage else None))
    first, second = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in bench.table(rows).splitlines()[2:]
    )
    assert first[:4] == ["500m", "zero0", "4", "no"]
    planned = rows[0]["planned_allocated_bytes"]
    assert float(first[6]) == pytest.approx(planned / (8 * bench.GIB), abs=0.005)
    assert first[5] == "8.00"
    assert first[9:] == ["", "0.250"]
    assert float(second[9]) > 0
    assert second[6] == "out of memory"
    assert second[3] == "yes"
    assert planned > rows[1]["planned_allocated_bytes"]
    json.dumps(rows)


def test_the_shell_script_says_what_it_lacks(tmp_path):
    script = BENCH / "gpu.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    told = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=True)
    assert "bench/gpu.sh [FOLDER" in told.stdout
    for name in ("dirname", "grep"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    bash = next(path for path in ("/bin/bash", "/usr/bin/bash") if os.access(path, os.X_OK))
    done = subprocess.run(
        [bash, str(script), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    assert "finds no GPU" in done.stderr
    assert not (tmp_path / "out").exists()

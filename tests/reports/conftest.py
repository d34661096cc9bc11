"""Runs as they lie in their folders, made in this process: what a page is made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsrun.job import run_folder
from dsrun.jobs.runs import past_runs
from dsrun.training.reports.report import Report

DATA = {
    "train": {
        "files": [
            {
                "file": "/data/训练.jsonl", "format": "prompt-response", "weight": 1.0, "rows": 9, "tokens": 99,
                "left_out": 1,
            }
        ],
        "rows": 9, "tokens": 99, "target_tokens": 40, "trained_on": "responses", "truncated": 0.25,
        "percentiles": {"50": 10, "99": 19}, "longest": 20, "dropped": {"no answer": 1},
        "histogram": {"width": 5, "counts": [1, 2, 5, 1]},
    }
}  # fmt: skip


@pytest.fixture
def home(tmp_path) -> Path:
    """Folder of runs; its name is a hostile one."""
    folder = tmp_path / "a user's <b>runs & 运行"
    folder.mkdir()
    return folder


@pytest.fixture
def make_run(home, make_job) -> Callable[..., Path]:
    """`make_run(name, state, losses, **fields of the job)`: the folder of a run that came so far."""

    def make(name: str = "mine", state: str = "finished", losses=(7.5, 7.25, 7.0), **fields) -> Path:
        path = home / name
        origins = {"config": {"zero_optimization.stage": "preset: zero2"}, "options": {"lr": "command line"}}
        predicted = {"device": "cpu", "gpu_allocated_bytes": 2**30, "host_bytes": 4 * 2**30}
        job = make_job(path, **{"origins": origins, "prediction": predicted, **fields})
        with run_folder.held(path):
            (path / "job.json").write_text(job.to_json(), encoding="utf-8")
            (path / "deepspeed.json").write_text(json.dumps(job.ds_config), encoding="utf-8")
            (path / "data.json").write_text(json.dumps(DATA), encoding="utf-8")
            run_folder.write_state(path, "running")
            reports = [Report(path, rank) for rank in range(2)]
            reports[0].phase(past_runs.FIRST_PHASE)
            reports[0].event("plan", total_steps=4, start_step=0, train_rows=9, eval_rows=9, step_rows=8)
            reports[0].metrics(step=0, eval_loss=7.75)
            for step, loss in enumerate(losses, 1):
                reports[0].metrics(
                    step=step, loss=loss, lr=1e-3, grad_norm=1.5, tokens=100, seconds=0.5, skipped=int(step > 1),
                    memory_bytes=2**30,
                )  # fmt: skip
            reports[0].event("checkpoint", step=2, path=str(path / "checkpoints" / "step-2"))
            if state == "finished":
                for report in reports:
                    report.finished()
            failed = {"why": "bad row", "problems": ["rank 1 failed first: ValueError: bad row"]}
            run_folder.write_state(path, state, **(failed if state == "failed" else {}))
        return path

    return make


@pytest.fixture
def answered() -> Callable[[Path], None]:
    """`answered(run)`: puts answers before and after training into a run's folder."""

    def put(path: Path) -> None:
        for name, said in (
            ("before_training.generated_predictions.jsonl", "noise"),
            ("generated_predictions.jsonl", "裙"),
        ):
            line = {"prompt": "类型#<script>alert(1)</script>", "labels": "长裙", "predict": said}
            (path / name).write_text(json.dumps(line) + "\n", encoding="utf-8")

    return put

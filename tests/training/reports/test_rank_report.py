"""What a rank says of itself: the peaks at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dsrun.errors import TrainingError
from dsrun.training.reports.report import BASELINE, Report, host_bytes

MIB = 2**20


def state(run_dir: Path, rank: int) -> dict:
    return json.loads((run_dir / f"state/rank-{rank}.json").read_text())


def events(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_peaks_at_the_end(tmp_path):
    report = Report(tmp_path, 0)
    report.phase("loading libraries")
    report.phase(BASELINE)
    for seconds in (3.0, 1.0, 2.0):
        report.metrics(step=1, seconds=seconds)
    report.metrics(step=1, eval_loss=0.5)
    report.finished()
    peaks = state(tmp_path, 0)["peaks"]
    assert peaks["step_seconds"] == 2.0
    assert peaks["gpu_allocated_bytes"] is peaks["gpu_reserved_bytes"] is None
    assert isinstance(peaks["host_peak_bytes"], int)
    assert MIB < peaks["host_baseline_bytes"] <= peaks["host_peak_bytes"]
    last = events(tmp_path)[-1]
    assert last["event"] == "peaks"
    assert {name: last[name] for name in peaks} == peaks


def test_the_baseline_is_the_first_of_its_phase(tmp_path, monkeypatch):
    sizes = iter([(10, 10), (20, 20), (30, 30), (40, 50), (45, 60), (45, 99)])
    monkeypatch.setattr("dsrun.training.reports.report.host_bytes", lambda: next(sizes))
    report = Report(tmp_path, 0)
    for text in ("loading libraries", BASELINE, BASELINE, "starting DeepSpeed", "training"):
        report.phase(text)
    peaks = report.peaks()
    assert (peaks["host_baseline_bytes"], peaks["host_peak_bytes"]) == (20, 99)
    assert peaks["host_loading_peak_bytes"] == 50, "until the phase after it begins"


def test_a_rank_that_fails_early_tells_too(tmp_path):
    report = Report(tmp_path, 1)
    report.failed(RuntimeError("out of memory"))
    written = state(tmp_path, 1)
    assert written["status"] == "failed"
    assert written["peaks"]["rank"] == 1
    assert written["peaks"]["host_baseline_bytes"] is written["peaks"]["step_seconds"] is None
    assert written["peaks"]["host_loading_peak_bytes"] is None
    assert not (tmp_path / "events.jsonl").exists()


def test_gpu_bytes(tmp_path, monkeypatch):
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True, max_memory_allocated=lambda: 5, max_memory_reserved=lambda: 7
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    peaks = Report(tmp_path, 0).peaks()
    assert (peaks["gpu_allocated_bytes"], peaks["gpu_reserved_bytes"]) == (5, 7)

    def broken():
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda.max_memory_allocated = broken
    assert Report(tmp_path, 0).peaks()["gpu_allocated_bytes"] is None


def test_the_peak_is_this_programs_own():
    """getrusage's figure begins with the parent's: a large parent would be taken for a large rank."""
    code = "from dsrun.training.reports.report import host_bytes; print(*host_bytes())"
    large = b"x" * (200 * MIB)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    now, most = map(int, done.stdout.split())
    assert now <= most < len(large)
    assert host_bytes()[1] >= len(large)


def test_the_worker_has_that_phase():
    source = Path(__file__).resolve().parents[3] / "dsrun/training/worker.py"
    assert f'report.phase("{BASELINE}")' in source.read_text(encoding="utf-8")


def test_what_all_ranks_agree_on_is_told_as_it_is(tmp_path):
    Report(tmp_path, 1).failed(TrainingError("step 3: the loss is nan"))
    written = state(tmp_path, 1)
    assert (written["status"], written["error"], written["traceback"]) == (
        "failed",
        "step 3: the loss is nan",
        "",
    )
    assert written["agreed"] is True


GOOD = [b'{"step": 1, "loss": 2.5}', b'{"step": 2, "loss": 2.25, "lr": 1e-05}', b'{"step": 3, "loss": 2.125}']


@pytest.mark.parametrize(
    "bad",
    [
        b'{"step": 2, "lo',
        b"\xff\xfe\x00",
        b"",
        b"[]",
        b"null",
        b'{"loss": 1.0}',
        b'{"step": "2"}',
        b"[" * 5000,
    ],
)
def test_a_line_that_is_damaged_is_left_out(tmp_path, bad):
    """A run that can't go on for one byte of its metrics would have been lost for it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([GOOD[0], bad, *GOOD[1:]]) + b'\n{"step": 4, "lo')
    report = Report(tmp_path, 0)
    assert [line["step"] for line in report.lines()] == [1, 2, 3]
    report.truncate_metrics(2)
    assert path.read_bytes() == b"\n".join(GOOD[:2]) + b"\n", "each as it was"
    (note,) = [line["text"] for line in events(tmp_path)]
    assert note == "metrics.jsonl: 1 line can't be read and left out"
    report.truncate_metrics(2)
    assert len(events(tmp_path)) == 1


def test_half_a_line_is_no_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(GOOD) + b'\n{"step": 4, "lo')
    Report(tmp_path, 0).truncate_metrics(9)
    assert not (tmp_path / "events.jsonl").exists()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"\n".join(GOOD) + b"\n"

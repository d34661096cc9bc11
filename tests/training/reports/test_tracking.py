"""Trackers: what is logged, in which run, and that none of them can harm the training."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.job.layout import TRACKERS
from dsrun.options import table
from dsrun.options.table import TrackerOptions
from dsrun.training.reports import tracking

LINE = {"loss": 2.0, "lr": 1e-3, "grad_norm": 0.5, "tokens_per_second": 9.0, "seconds": 1.0, "skipped": 0}
SHOWN = {"train/loss": 2.0, "train/lr": 1e-3, "train/grad_norm": 0.5, "train/tokens_per_second": 9.0}
KEY = "geheim-0123456789"


@pytest.fixture
def track(make_job, tmp_path):
    """`track(name, step=0)`: a run's trackers, after that many steps, and what they said."""

    def start(*names, step=0, project=None):
        run_dir = tmp_path / "a lab's 夜"
        run_dir.mkdir(exist_ok=True)
        job = replace(make_job(run_dir), trackers=TrackerOptions(log=names, log_project=project))
        notes = []
        return tracking.Tracking(job, step, notes.append), notes, run_dir

    return start


class FakeTracker:
    """Stands for a tracker; keeps what it is told. fails: what its `log` raises, each time."""

    def __init__(self, run_id="id-1", fails=None):
        self.run_id, self.fails, self.runs, self.logged, self.ends = run_id, fails, [], [], []

    def start(self, run):
        self.runs.append(run)
        return self

    def log(self, step, values):
        if self.fails:
            raise self.fails
        self.logged.append((step, dict(values)))

    def finish(self, *, failed):
        self.ends.append(failed)


@pytest.fixture
def fake(monkeypatch):
    """`fake(name, ...)`: in place of a tracker."""

    def put(name, **more):
        tracker = FakeTracker(**more)
        module = types.SimpleNamespace(start=tracker.start)
        monkeypatch.setitem(sys.modules, f"dsrun.training.reports.trackers.{name}", module)
        return tracker

    return put


def test_each_tracker_is_a_module():
    from dsrun.training.reports import trackers

    folder = Path(trackers.__file__).parent
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(table.TRACKERS)


def test_what_is_logged(track, fake):
    tracker = fake("wandb")
    trackers_of_run, notes, run_dir = track("wandb")
    trackers_of_run.metrics({"step": 1, **LINE})
    trackers_of_run.metrics({"step": 2, **LINE, "grad_norm": None, "lr": float("nan")})
    trackers_of_run.metrics({"step": 2, "eval_loss": 1.5})
    trackers_of_run.metrics({"step": 2, "unknown": 3})
    assert trackers_of_run.close(failed=False)
    rest = {name: value for name, value in SHOWN.items() if name not in ("train/grad_norm", "train/lr")}
    assert tracker.logged == [(1, SHOWN), (2, rest), (2, {"eval/loss": 1.5})]
    assert tracker.ends == [False]
    assert not notes
    run = tracker.runs[0]
    assert (run.name, run.project, run.earlier) == (run_dir.name, tracking.PROJECT, None)
    assert {"model", "lr", "train_file", "method", "preset"} <= set(run.config)


def test_it_goes_on_in_the_same_run(track, fake):
    tracker, other = fake("wandb", run_id="id-7"), fake("mlflow", run_id="m-1")
    track("wandb")[0].close(failed=False)
    trackers_of_run, _, run_dir = track("wandb", "mlflow", step=40)
    assert trackers_of_run.close(failed=True)
    assert [run.earlier for run in tracker.runs] == [None, "id-7"]
    assert tracker.runs[1].step == 40
    assert tracker.ends == [False, True]
    assert other.runs[0].earlier is None
    assert json.loads((run_dir / TRACKERS).read_text()) == {"wandb": "id-7", "mlflow": "m-1"}


def test_the_project(track, fake, monkeypatch):
    tracker = fake("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    track("wandb")[0].close(failed=False)
    track("wandb", project="ours")[0].close(failed=False)
    assert [run.project for run in tracker.runs] == ["theirs", "ours"]


def test_a_failing_tracker_is_told_once_and_hides_its_key(track, fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    fake("wandb", fails=ConnectionError(f"https://me:{KEY}@host is down\nand more"))
    good = fake("mlflow")
    trackers_of_run, notes, _ = track("wandb", "mlflow")
    for step in (1, 2, 3):
        trackers_of_run.metrics({"step": step, **LINE})
    assert trackers_of_run.close(failed=False)
    assert len(notes) == 1
    assert "wandb" in notes[0]
    assert "ConnectionError" in notes[0]
    assert KEY not in notes[0]
    assert len(good.logged) == 3


@pytest.mark.parametrize("error", [ImportError("no such package"), SystemExit(3)])
def test_one_that_does_not_start_is_told(track, fake, monkeypatch, error):
    tracker = fake("wandb")

    def start(run):
        raise error

    monkeypatch.setattr(sys.modules["dsrun.training.reports.trackers.wandb"], "start", start)
    trackers_of_run, notes, _ = track("wandb")
    trackers_of_run.metrics({"step": 1, **LINE})
    assert trackers_of_run.close(failed=False)
    assert len(notes) == 1
    assert not tracker.logged


def test_one_that_hangs_is_left_behind(track, fake, monkeypatch):
    tracker, free = fake("wandb"), threading.Event()
    monkeypatch.setattr(tracker, "log", lambda *_: free.wait(60))
    monkeypatch.setattr(tracking, "CLOSE_S", 0.2)
    monkeypatch.setattr(tracking, "MOST_WAITING", 2)
    trackers_of_run, notes, _ = track("wandb")
    for step in range(9):
        trackers_of_run.metrics({"step": step, **LINE})
    assert not trackers_of_run.close(failed=False)
    free.set()
    assert len(notes) == 2  # too slow, left behind


def test_tensorboard(track):
    pytest.importorskip("tensorboard")
    trackers_of_run, notes, run_dir = track("tensorboard")
    for step in (1, 2, 3):
        trackers_of_run.metrics({"step": step, **LINE, "loss": float(step)})
    assert trackers_of_run.close(failed=False)
    trackers_of_run, *_ = track("tensorboard", step=1)  # it continues from an earlier checkpoint
    trackers_of_run.metrics({"step": 2, **LINE, "loss": 20.0})
    trackers_of_run.metrics({"step": 2, "eval_loss": 1.5})
    assert trackers_of_run.close(failed=False)
    assert not notes
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run_dir / "tensorboard"))
    seen.Reload()
    assert [(one.step, one.value) for one in seen.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]
    assert [(one.step, one.value) for one in seen.Scalars("eval/loss")] == [(2, 1.5)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "trackio"])
def test_for_real_without_a_network(track, monkeypatch, tmp_path, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(variable, "offline")
    monkeypatch.setattr(tracking, "CLOSE_S", 600.0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for step in (0, 2):
        trackers_of_run, notes, run_dir = track(name, step=step)
        trackers_of_run.metrics({"step": step + 1, **LINE})
        trackers_of_run.metrics({"step": step + 1, "eval_loss": 1.5})
        assert trackers_of_run.close(failed=False)
        assert not notes
        ids = json.loads((run_dir / TRACKERS).read_text())
    assert [*ids] == [name]


# Each one's own calls, with its package replaced


class Recorder(types.ModuleType):
    """A package whose every name can be called, and that keeps the calls."""

    def __init__(self, name, calls, results):
        super().__init__(name)
        self.calls, self.results = calls, results

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **given):
            self.calls.append((name, args, given))
            return self.results.get(name, Recorder(name, self.calls, self.results))

        return call


@pytest.fixture
def package(monkeypatch):
    """`package(name, **results)`: in place of a tracker's own; the list of its calls."""

    def put(name, *more, **results):
        calls = []
        for path in (name, *more):
            monkeypatch.setitem(sys.modules, path, Recorder(path, calls, results))
        return calls

    return put


def of(calls, name):
    return [(args, given) for called, args, given in calls if called == name]


def test_wandb_continues_under_its_id(package, track):
    class Run(Recorder):
        id = "w-1"

    calls = []
    package("wandb")
    sys.modules["wandb"] = module = Recorder("wandb", calls, {})
    module.results["init"] = Run("run", calls, {})
    for step in (0, 4):
        trackers_of_run, notes, run_dir = track("wandb", step=step)
        trackers_of_run.metrics({"step": step + 1, **LINE})
        trackers_of_run.close(failed=bool(step))
    assert not notes
    first, again = (given for _, given in of(calls, "init"))
    assert (first["id"], again["id"], again["resume"]) == (None, "w-1", "allow")
    assert first["dir"] == str(run_dir)
    assert of(calls, "log")[0] == (({"trainer/step": 1, **SHOWN},), {})
    assert [given for _, given in of(calls, "finish")] == [{"exit_code": 0}, {"exit_code": 1}]


def test_swanlab_continues_under_its_id(package, track):
    calls = package("swanlab")
    for step in (0, 4):
        trackers_of_run, notes, _ = track("swanlab", step=step)
        trackers_of_run.metrics({"step": step + 1, **LINE})
        trackers_of_run.close(failed=False)
    assert not notes
    first, again = (given for _, given in of(calls, "init"))
    assert first["id"] == again["id"]
    assert of(calls, "log")[0] == ((SHOWN,), {"step": 1})


def test_mlflow_continues_its_run(package, track, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere:1")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="m-1"))
    calls = package(
        "mlflow", "mlflow.tracking", "mlflow.entities", create_run=run, get_experiment_by_name=None
    )
    for step in (0, 4):
        trackers_of_run, notes, _ = track("mlflow", step=step)
        trackers_of_run.metrics({"step": step + 1, **LINE})
        trackers_of_run.close(failed=False)
    assert not notes
    assert of(calls, "MlflowClient")[0] == (("http://nowhere:1",), {})
    assert len(of(calls, "create_run")) == 1
    assert of(calls, "update_run") == [(("m-1",), {"status": "RUNNING"})]
    assert ("train/loss", 2.0) in [args[:2] for args, _ in of(calls, "Metric")]
    assert of(calls, "set_terminated")[-1] == (("m-1", "FINISHED"), {})


def test_trackio_continues_under_its_name(package, track):
    calls = package("trackio")
    for step in (0, 4):
        trackers_of_run, notes, run_dir = track("trackio", step=step)
        trackers_of_run.metrics({"step": step + 1, **LINE})
        trackers_of_run.close(failed=False)
    assert not notes
    assert [given["resume"] for _, given in of(calls, "init")] == ["never", "allow"]
    assert {given["name"] for _, given in of(calls, "init")} == {run_dir.name}

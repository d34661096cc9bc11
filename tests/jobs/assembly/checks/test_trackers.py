"""--log before the start: what is missing is said, with what to do."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json

import pytest

from dsrun.job import job as jobs
from dsrun.jobs.allocation.request import ConnectionOptions
from dsrun.jobs.assembly.checks.packages import check_trackers
from dsrun.options.table import TRACKERS, TrackerOptions


@pytest.fixture
def installed(monkeypatch):
    """`installed(*names)`: these trackers are, and no others."""

    def install(*names):
        def find(name):
            return importlib.machinery.ModuleSpec(name, None, origin="there") if name in names else None

        monkeypatch.setattr(importlib.util, "find_spec", find)

    return install


def problems(names, environ, **connection):
    found = check_trackers(TrackerOptions(log=names), environ, ConnectionOptions(**connection))
    return [str(problem) for problem in found]


def test_all_that_are_not_installed_are_said(installed):
    installed("tensorboard")
    found = problems(TRACKERS, {})
    assert [text.count(f"pip install {name}") for name, text in zip(TRACKERS[1:], found, strict=True)] == [
        1
    ] * 4


def test_a_folder_of_that_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandbx").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("wandbx") is not None
    assert "pip install wandbx" in problems(("wandbx",), {})[0]


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_an_account_is_asked_for(installed, tmp_path, name):
    installed(name)
    mode, key, home = f"{name.upper()}_MODE", f"{name.upper()}_API_KEY", {"HOME": str(tmp_path)}
    (refused,) = problems((name,), home)
    assert mode in refused
    assert key in refused
    assert not problems((name,), {**home, key: "x"})
    assert not problems((name,), {**home, mode: "offline"})
    assert not problems((name,), home, env=(f"{mode}=disabled",))
    assert not problems((name,), home, cluster_env={mode: "offline"})
    netrc = tmp_path / (".netrc" if name == "wandb" else ".swanlab/.netrc")
    netrc.parent.mkdir(exist_ok=True)
    netrc.touch()
    assert not problems((name,), home)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "trackio"])
def test_these_need_no_account(installed, tmp_path, name):
    installed(name)
    assert not problems((name,), {"HOME": str(tmp_path)})


def test_it_is_refused_before_anything_is_made(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "swanlab" else find(name))
    said = dsrun("finetune", "llama-tiny", "--gpus", 2, "--log", "swanlab")
    assert said.code == 1
    assert "pip install swanlab" in said.err
    assert not [*tmp_path.iterdir()]


def test_the_job_has_them_and_no_key(make_job, dsrun, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheim-0123456789")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None, origin="there")
    )
    words = ("--log", "mlflow", "--log", "trackio", "--log-project", "lab", "--dry-run", "--json")
    said = dsrun("finetune", "llama-tiny", "--gpus", 2, *words)
    found = json.loads(said.out)["job"]["trackers"]
    assert found == {"log": ["mlflow", "trackio"], "log_project": "lab"}
    assert "geheim" not in said.out
    job = make_job(trackers=TrackerOptions(log=("mlflow",)))
    assert jobs.from_json(job.to_json(), "").trackers == job.trackers

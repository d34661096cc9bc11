"""`dsrun rerun RUN` with other values: planned anew from the run file that the run's folder keeps."""

from __future__ import annotations

import json

import pytest

from dsrun.job import run_folder


@pytest.fixture
def run(tmp_path, monkeypatch, make_job):
    """A finished run with its run file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "runs" / "我的 run"
    with run_folder.held(path):
        (path / "job.json").write_text(make_job(path).to_json(), encoding="utf-8")
        run_folder.write_state(path, "finished")
    text = 'model = "chatglm2-tiny"\nkept = ["lr"]\nlr = 0.5\nmax_steps = 3\nseed = 7\n'
    (path / "run.toml").write_text(text, encoding="utf-8")
    return path


def test_an_option_changes_the_job_and_the_rest_stays(dsrun, run):
    said = dsrun("rerun", run, "--lr", "1e-4", "--dry-run", "--json")
    assert said.code == 0, said.err
    job = json.loads(said.out)["job"]
    assert (job["training"]["lr"], job["training"]["max_steps"], job["training"]["seed"]) == (1e-4, 3, 7)
    assert job["run_dir"] != str(run)
    assert job["run_dir"].startswith(f"{run}-")
    before = json.loads((run / "job.json").read_text(encoding="utf-8"))
    assert sum(len(host["devices"]) for host in job["hosts"]) == sum(
        len(host["devices"]) for host in before["hosts"]
    )


def test_a_dry_run_alone_shows_the_same(dsrun, run):
    said = dsrun("rerun", run, "--dry-run", "--json")
    assert json.loads(said.out)["job"]["training"]["lr"] == 0.5


@pytest.mark.parametrize("words", [("--resume",), ("--checkpoint", 3), ("--continue",)])
def test_what_goes_on_is_resumes(dsrun, run, words):
    said = dsrun("rerun", run, *words)
    assert said.code == 2
    assert "dsrun resume RUN" in said.err


def test_an_older_run_says_what_to_do(dsrun, run):
    (run / "run.toml").unlink()
    said = dsrun("rerun", run, "--lr", 1)
    assert said.code == 1
    assert "an older dsrun made it" in said.err

"""`dsrun doctor` on real hosts, and the real all-reduce across them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab import wait_for

from dsrun.errors import DsrunError
from dsrun.job.job import HostDevices, ScriptJob
from dsrun.jobs.supervision import host_checks
from dsrun.jobs.supervision.run_options import RunOptions

pytestmark = pytest.mark.slow

JOBS = ("PYTHONPATH", "DSRUN_CACHE", "DS_ACCELERATOR")


@pytest.fixture
def doctor(lab, environ, tmp_path):
    """Calls `dsrun doctor` on the controller, in an empty folder, with `options`."""
    env = {name: environ[name] for name in JOBS}

    def call(*options: object, popen: bool = False):
        argv = [sys.executable, "-m", "dsrun", "doctor", "--hostfile", lab.hostfile(slots=1), *options]
        if popen:
            return lab.controller.popen(
                argv, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        return lab.controller.run(argv, env=env, cwd=tmp_path, check=False, timeout_s=300)

    return call


def test_all_hosts_answer(doctor):
    found = json.loads(doctor("--json", "--timeout", 60).stdout)
    assert [row["host"] for row in found["hosts"]] == ["node1", "node2"]
    colours = {(row["host"], row["check"]): row["colour"] for row in found["results"]}
    for check in ("reachable", "python", "packages", "route", "interface", "own-name", "folder"):
        assert {colours[name, check] for name in ("node1", "node2")} == {"green"}, check
    assert found["hosts"][1]["facts"]["route"]["interface"] == "eth0"


@pytest.mark.parametrize("launcher", ["ssh", pytest.param("pdsh", marks=pytest.mark.full)])
def test_an_all_reduce(lab, doctor, launcher, tmp_path):
    before = [host.shm() for host in lab.hosts]
    said = doctor("--smoke", "--timeout", 60, "--launcher", launcher)
    assert "ok  smoke: 2 ranks on 2 hosts add up 8 MiB in" in said.stdout, said.stdout + said.stderr
    assert "by eth0" in said.stdout
    assert "matrix: 2 x cpu multiply in float32" in said.stdout and "pairs: 1 of hosts" in said.stdout
    assert said.returncode == int("; 0 red" not in said.stderr)
    assert list(tmp_path.iterdir()) == []
    assert [host.processes() for host in lab.hosts] == [[], []]
    assert [host.shm() for host in lab.hosts] == before


def test_a_host_that_is_cut_off(lab, doctor, tmp_path):
    second = lab.hosts[1]
    second.cut()
    try:
        said = doctor("--smoke", "--timeout", 20)
    finally:
        second.mend()
    assert said.returncode == 1
    assert "bad  reachable: node2: nothing answers at its address" in said.stdout
    assert "bad  smoke: node2: does not answer" in said.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_host_that_is_cut_off_in_the_middle(lab, doctor, tmp_path):
    second = lab.hosts[1]
    running = doctor("--smoke", "--timeout", 60, "--json", popen=True)
    try:
        assert wait_for(lambda: list(tmp_path.glob("runs/smoke-*/state/rank-1.json")), 300)
        second.cut()
        out, err = running.communicate(timeout=300)
    finally:
        second.mend()
        running.kill()
    found = json.loads(out)["smoke"]
    assert running.returncode == 1
    assert found["found"] is None
    assert any("node2" in problem["what"] + problem["where"] for problem in found["problems"]), err
    assert Path(found["run_dir"], "logs").is_dir()
    assert wait_for(lambda: not any(host.processes() for host in lab.hosts))


def test_a_folder_that_is_not_shared(doctor):
    said = doctor("--smoke", "--timeout", 60, "--output-dir", "/dev/shm/of-the-controller")
    assert said.returncode == 1
    assert "has to be on a file system that all hosts share" in said.stdout


def job_on(lab, folder: Path, launcher: str) -> ScriptJob:
    hosts = tuple(HostDevices(host.name, (0,)) for host in lab.hosts)
    return ScriptJob(
        run_dir=str(folder), script="train.py", args=(), cwd=str(folder), accelerator="cpu", hosts=hosts,
        dsrun_version="0", launcher=launcher,
    )  # fmt: skip


@pytest.fixture
def here(lab, environ, monkeypatch):
    """This process with the lab's environment."""
    for name, value in {**environ, **lab.environ}.items():
        monkeypatch.setenv(name, value)
    return RunOptions(env={name: environ[name] for name in JOBS})


def test_before_a_job(lab, here, tmp_path):
    notes = host_checks.checkup(job_on(lab, tmp_path / "new" / "run", "ssh"), here)
    assert not any("answer" in note for note in notes)
    second = lab.hosts[1]
    second.cut()
    try:
        with pytest.raises(DsrunError) as caught:
            host_checks.checkup(job_on(lab, tmp_path, "ssh"), here)
    finally:
        second.mend()
    (problem,) = caught.value.problems
    assert problem.where == "node2" and "nothing answers" in problem.what and "--no-check" in problem.hint


def test_slurm_asks_for_us(slurm, here, tmp_path, monkeypatch):
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    job = job_on(slurm.lab, tmp_path, "slurm")
    # Nothing but srun leads to the hosts.
    monkeypatch.setenv("DSRUN_SSH", "/nowhere/ssh")
    assert isinstance(host_checks.checkup(job, here), tuple)
    answers = host_checks.by_srun(["node2", "node1"], {}, 60)
    assert [answer.facts["hostname"]["name"] for answer in answers] == ["node2", "node1"]
    lost = host_checks.by_srun(["node1", "node9"], {}, 60)
    assert all("srun ended with 1" in answer.fault for answer in lost)

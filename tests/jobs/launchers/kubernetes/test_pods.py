"""The pods of a Kubernetes job, as processes of this machine that have what the training operator gives to pods."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import until

from dsrun.errors import DsrunError
from dsrun.jobs.launchers.kubernetes import pods

SCRIPT = """
import os, sys, time
from pathlib import Path

rank, times = os.environ["RANK"], Path(sys.argv[-1])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "at", os.environ["MASTER_PORT"])
if rank == "1" and not times.exists():
    times.touch()
    sys.exit("not yet")
if rank == "0" and not times.exists():
    time.sleep(600)
"""


def start(folder: Path, number: int, environ, *words: str, count: int = 2) -> subprocess.Popen[str]:
    name = "x-master-0" if number == 0 else f"x-worker-{number - 1}"
    place = {"RANK": str(number), "WORLD_SIZE": str(count), "HOSTNAME": name, "MASTER_ADDR": "x-master-0"}
    return subprocess.Popen(
        [sys.executable, "-m", "dsrun", "launch", "--launcher", "kubernetes", *words],
        env={**environ, **place, "MASTER_PORT": "23456"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def listens(process: subprocess.Popen[str]) -> None:
    """Wait until it has an answer to SIGTERM of its own."""
    status = Path("/proc", str(process.pid), "status")

    def caught() -> int:
        assert process.poll() is None
        return int(status.read_text().partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1

    until(caught, "it listens")


def ended(*processes: subprocess.Popen[str], timeout_s: float = 400) -> list[tuple[int, str]]:
    try:
        said = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "a pod's 卷"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.mark.slow
def test_pods_find_each_other(folder, environ):
    """The job fails once, and is started again in the same pods."""
    run = folder / "run"
    words = ("--output-dir", str(run), "--max-restarts", "1", "--continue", "train.py", str(folder / "tried"))
    worker = start(folder, 1, environ, *words)
    first, second = ended(start(folder, 0, environ, *words), worker)
    assert first[0] == 0, first[1]
    assert second[0] == 0, second[1]
    assert "waiting for 1 more pod" in first[1]
    assert "not yet" in first[1]
    assert "starting again (1 of 1)" in first[1]
    assert "finished" in first[1]
    job = json.loads((run / "job.json").read_text(encoding="utf-8"))
    assert [host["host"] for host in job["hosts"]] == ["x-master-0", "x-worker-0"]
    for rank in range(2):
        text = (run / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        assert text.count(f"rank {rank} of 2 at ") == 2
        assert "at 23456" not in text, "the port is one that was found to be free"
    state = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert (state["state"], state["result"]["restarts"]) == ("finished", 1)
    (said,) = ended(start(folder, 0, environ, *words))
    assert (said[0], "is finished; there is nothing to continue" in said[1]) == (1, True)


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_in_its_folder(folder, environ):
    """The first pods are ended; the next ones find the folder, and a control file that leads nowhere."""
    run = folder / "run"
    (folder / "wait.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    words = ("--output-dir", str(run), "--continue", "wait.py")
    both = [start(folder, number, environ, *words) for number in (1, 0)]
    log = run / "logs" / "rank-1.log"
    until(lambda: log.exists() and "begun" in log.read_text(), "the first words")
    for process in both:  # as Kubernetes ends a job
        process.terminate()
    assert [code for code, _ in ended(*both)] == [128 + signal.SIGTERM] * 2
    stale = {"addresses": ["127.0.0.1"], "port": 9, "token": "x", "hosts": []}
    (run / pods.CONTROL).write_text(json.dumps(stale))
    (folder / "wait.py").write_text("print('again')\n")
    worker, head = ended(*[start(folder, number, environ, *words) for number in (1, 0)])
    assert (worker[0], head[0]) == (0, 0), head[1]
    assert "again" in head[1]
    assert "begun" not in head[1], "what was said before is not said again"
    assert log.read_text().split()[0] == "begun", "nor is it lost"


@pytest.mark.slow
def test_other_pods_are_agents_at_once(tmp_path, environ):
    """They look at nothing, not even at whether there is such a script; and end when they are told to."""
    process = start(tmp_path, 2, environ, "--output-dir", "run", "no.py", count=3)
    try:
        listens(process)
        process.terminate()
    finally:
        assert ended(process)[0] == (128 + signal.SIGTERM, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_while_the_run_goes_on_its_end_is_the_first_pods(tmp_path, environ):
    """Which writes a checkpoint first, where it is asked to; told twice, a pod ends by itself."""
    (tmp_path / "run.json").write_text('{"state": "running"}')
    process = start(tmp_path, 1, environ, "--output-dir", ".", "no.py")
    try:
        listens(process)
        process.terminate()
        time.sleep(3)
        assert process.poll() is None
        process.terminate()
    finally:
        assert ended(process)[0] == (128 + signal.SIGTERM, "")


@pytest.mark.parametrize(("number", "code"), [(0, 1), (1, 1)])
def test_pods_meet_in_the_runs_folder(dsrun, monkeypatch, number, code):
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (
        ("launch", "--launcher", "kubernetes", "no.py"),
        ("finetune", "--launcher", "kubernetes", "x"),
    ):
        said = dsrun(*words)
        assert (said.code, "--output-dir /runs/NAME" in said.err) == (code, True)


def test_outside_of_pods(dsrun, monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    said = dsrun("finetune", "--launcher", "kubernetes", "--output-dir", tmp_path / "run", "llama-tiny")
    assert (said.code, "dsrun submit --cluster NAME" in said.err) == (1, True)
    with pytest.raises(DsrunError, match="PyTorchJob"):
        pods.become_agent({}, tmp_path)


def test_the_first_pod_goes_on(tmp_path):
    pods.become_agent({"RANK": "0", "WORLD_SIZE": "2"}, tmp_path)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("glm-master-0", ("glm-master-0", "glm-worker-0")),
        ("a-worker-1-worker-12", ("a-worker-1-master-0", "a-worker-1-worker-0")),
        ("node7", ("pod-master-0", "pod-worker-0")),
    ],
)
def test_names(name, names):
    assert pods.this_pod({"RANK": "1", "WORLD_SIZE": "2", "HOSTNAME": name}) == pods.Pod(1, names)


@pytest.mark.parametrize(
    ("content", "state"),
    [
        ('{"state": "running"}', "running"),
        ('{"state": "failed"}', "failed"),
        ('{"st', ""),
        ("[]", ""),
        ("{}", ""),
    ],
)
def test_the_state_of_the_run(tmp_path, content, state):
    (tmp_path / "run.json").write_text(content)
    assert pods._state(tmp_path) == state


@pytest.mark.parametrize(
    ("environ", "number", "names"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2", "HOSTNAME": "x-worker-0"}, 1, ("x-master-0", "x-worker-0"),
        ),
        (
            {"PET_NODE_RANK": "2", "PET_NNODES": "3", "HOSTNAME": "x-node-0-2"}, 2,
            ("x-node-0-0", "x-node-0-1", "x-node-0-2"),
        ),
    ],
)  # fmt: skip
def test_both_kinds_of_jobs_tell_a_pod_its_place(environ, number, names):
    found = pods.this_pod(environ)
    assert (found.number, found.names) == (number, names)

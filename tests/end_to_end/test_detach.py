"""--detach: a job that outlives its terminal, in real terminals that are closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from running import in_terminal, until

from dsrun.job.run_folder import OWN_LOG, describe_state

WAITS = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
LAUNCH = ["launch", "--gpus", "2", "--output-dir", "a lab's 夜", "--detach"]


def dsrun_of(*words: object) -> list[str]:
    return [sys.executable, "-m", "dsrun", *map(str, words)]


@pytest.fixture
def say(environ, tmp_path):
    """`say(*words)`: a dsrun in a process of its own, with what it printed."""

    def run(*words, **more):
        return subprocess.run(
            dsrun_of(*words), env={**environ, **more}, cwd=tmp_path, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def run_dir(tmp_path, say):
    """The run's folder; what runs in it is ended afterwards."""
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    folder = tmp_path / "a lab's 夜"
    yield folder
    if folder.exists() and describe_state(folder) in ("running", "preparing"):
        say("stop", folder)


def pids_of(run_dir: Path) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in run_dir.glob("state/rank-*.json")]


def comes(path: Path, process: subprocess.Popen) -> None:
    """Wait for a file of the run's, as long as the command goes on."""
    until(lambda: path.exists() or process.poll() is not None, f"{path.name} or an end", every=0.001)
    assert path.exists(), process.returncode


def printed(terminal: int) -> str:
    """Output of a terminal, to its end."""
    text = b""
    while True:
        try:
            new = os.read(terminal, 1 << 16)
        except OSError:  # its last process has ended
            return text.decode()
        text += new


@pytest.mark.slow
def test_a_job_outlives_its_terminal(environ, tmp_path, run_dir, say):
    process, terminal = in_terminal(dsrun_of(*LAUNCH, "waits.py"), env=environ, cwd=tmp_path)
    shown = printed(terminal)
    assert process.wait(300) == 0, shown
    assert str(run_dir) in shown
    os.close(terminal)
    until(lambda: len(pids_of(run_dir)) == 2, "two ranks")
    pid = json.loads((run_dir / "run.json").read_text())["pid"]
    assert os.getsid(pid) == pid != process.pid
    os.killpg(pid, signal.SIGHUP)
    until(lambda: "here" in (run_dir / OWN_LOG).read_text(), "the ranks' first words")
    assert describe_state(run_dir) == "running"
    assert all(map(psutil.pid_exists, [pid, *pids_of(run_dir)]))
    assert psutil.Process(pid).terminal() is None

    assert "running" in say("runs", tmp_path).stdout
    assert "running" in say("show", run_dir).stdout
    follower = subprocess.Popen(
        dsrun_of("logs", "-f", run_dir), env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert follower.stdout.readline() == "[all] here\n"
    family = psutil.Process(pid).children(recursive=True)
    assert say("stop", run_dir).returncode == 0
    out, err = follower.communicate(timeout=300)
    assert out == ""
    assert "interrupted" in err
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_terminal_that_is_closed_before_the_start_stops_nothing(environ, tmp_path, run_dir):
    process, terminal = in_terminal(dsrun_of(*LAUNCH, "waits.py"), env=environ, cwd=tmp_path)
    comes(run_dir / OWN_LOG, process)
    os.close(terminal)
    assert process.wait(300) in (0, -signal.SIGHUP)
    until(lambda: len(pids_of(run_dir)) == 2, "two ranks")
    assert describe_state(run_dir) == "running"


@pytest.mark.slow
def test_ctrl_c_before_the_start_ends_it(environ, tmp_path, run_dir):
    process = subprocess.Popen(
        dsrun_of(*LAUNCH, "waits.py"), env=environ, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    comes(run_dir / "run.json", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted" in err
    assert describe_state(run_dir) == "interrupted"


@pytest.mark.slow
def test_a_failure_before_the_ranks_start_is_shown_in_the_terminal(say, tmp_path, data):
    words = ["finetune", "llama-tiny", "--gpus", 2, *data, "--output-dir", "night", "--detach"]
    # Nothing can be prepared: the cache is a file.
    (tmp_path / "cache").write_text("")
    done = say(*words, DSRUN_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert str(tmp_path / "cache") in done.stderr


def test_a_mistake_is_answered_as_without_it(say, tmp_path):
    plain, away = (say("launch", "--gpus", 2, *more, "nothing.py") for more in ((), ("--detach",)))
    assert (plain.returncode, plain.stderr) == (away.returncode, away.stderr)
    assert away.returncode == 1
    assert not [*tmp_path.iterdir()]


def test_it_is_refused_where_the_job_ends_with_the_command(say):
    done = say("launch", "--detach", "nothing.py", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="localhost")
    assert done.returncode == 1
    assert "dsrun submit" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("finetune", "llama-tiny", "--detach", "--dry-run"),
        ("submit", "--gpus-per-node", "2", "--", "finetune", "llama-tiny", "--detach"),
    ],
)
def test_wrong_usage(dsrun, words):
    said = dsrun(*words)
    assert said.code == 2
    assert "--detach" in said.err

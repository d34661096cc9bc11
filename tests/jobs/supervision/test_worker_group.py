"""A host's part of a job, and the processes of preparing steps: real processes, and no agent around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from running import until

from dsrun.errors import JobFailedError
from dsrun.job import processes
from dsrun.jobs.supervision import worker_group
from dsrun.jobs.supervision.preparation import run_step
from dsrun.jobs.supervision.worker_group import RankWatch, WorkerGroup

MASTER = ("127.0.0.1", 29999)


@pytest.fixture
def node(stage):
    """`node(code, ranks)`: a node whose launcher is this Python."""

    def start(code: str, ranks=range(2), number: int = 0) -> WorkerGroup:
        found = WorkerGroup(stage.run_dir, number, ranks)
        found.start([sys.executable, "-c", code], stage.environ, MASTER)
        return found

    return start


def wait(node: WorkerGroup) -> None:
    until(lambda: node.code is not None, "the launcher's end")


def test_what_the_launcher_said_in_this_run(node, stage):
    (stage.run_dir / "logs" / "launcher.log").write_text("of the run before\n")
    started = node(
        "import sys; print('x' * 300_000, flush=True); sys.stderr.write('the end 中\\n'); sys.exit(3)"
    )
    wait(started)
    end = started.end()
    assert (end.host, end.code) == (0, 3)
    assert end.output.endswith("the end 中\n")
    assert len(end.output) <= 8000
    assert "before" not in end.output
    assert 0 < end.least_ram_bytes <= end.ram_bytes


def test_a_launcher_of_another_host_has_its_own_log(node, stage):
    started = node("print('here')", number=3)
    wait(started)
    assert started.end().output == "here\n"
    assert (stage.run_dir / "logs" / "launcher-3.log").read_text() == "here\n"


@pytest.mark.parametrize(
    ("answer", "grace_s", "code"), [("lambda *_: sys.exit(6)", 300, 6), ("signal.SIG_IGN", 0.2, -9)]
)
def test_the_code_of_a_launcher_that_is_ended(node, stage, answer, grace_s, code):
    """It is this process's child: whoever waits for it must not take its code away."""
    started = node(
        f"import signal, sys, time\nsignal.signal(15, {answer})\nprint('up', flush=True)\ntime.sleep(600)"
    )
    until(lambda: "up" in (stage.run_dir / "logs" / "launcher.log").read_text(), "the launcher")
    assert started.end(grace_s).code == code


def test_only_its_own_ranks_count(node, stage):
    state = {"status": "failed", "ended": time.time(), "error": "x", "host": "other"}
    (stage.run_dir / "state").mkdir()
    for rank in range(3):
        content = {"rank": rank, "pid": 999_999_999, **state}
        (stage.run_dir / "state" / f"rank-{rank}.json").write_text(json.dumps(content))
    started = node("", ranks=[1])
    assert [end.rank for end in started.new_ends()] == [1]
    assert started.new_ends() == []
    wait(started)
    assert started.end().statuses == {"1": "failed"}


def test_broken_states_are_none(tmp_path):
    ranks = RankWatch(tmp_path, range(9))
    (tmp_path / "state").mkdir()
    for rank, text in enumerate(
        ["", "{", "[]", "null", '{"rank": 4}', '{"pid": "x", "status": 1}', "\0" * 50]
    ):
        (tmp_path / "state" / f"rank-{rank}.json").write_text(text)
    ranks.look()
    ranks.close()
    assert (ranks.states(), ranks.ends) == ({}, {})


def test_ranks_of_the_next_attempt_are_another_agents(tmp_path):
    """An agent that was stopped goes on, and the job has been started again: it ends its own rank, not the new one."""
    ranks = RankWatch(tmp_path, range(3))
    (tmp_path / "state").mkdir()

    def write(rank, pid, **more):
        text = json.dumps({"rank": rank, "pid": pid, "status": "running", **more})
        (tmp_path / "state" / f"rank-{rank}.json").write_text(text)

    for rank in range(3):
        write(rank, 10 + rank, supervisor=os.getpid())
    assert ranks.pids() == [10, 11, 12]
    write(1, 21, supervisor=os.getpid() + 1)
    write(2, 22)  # of an older dsrun
    ranks.close()
    assert ranks.pids() == [10, 11, 22]


def test_a_state_that_changes_is_seen(tmp_path):
    ranks = RankWatch(tmp_path, [0])
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "rank-0.json"
    for status in ("running", "stopped", "running", "failed"):
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"rank": 0, "pid": os.getpid(), "status": status}))
        new.replace(path)
        assert ranks.states()[0]["status"] == status
    ranks.close()


def test_a_last_word_between_two_looks_counts(tmp_path, monkeypatch):
    """The state is read, then the rank finishes and goes, then its process is looked at."""
    (tmp_path / "state").mkdir()
    path = tmp_path / "state" / "rank-0.json"
    path.write_text('{"rank": 0, "pid": 999999999, "status": "running"}')

    def lives(_pid: int) -> bool:
        path.write_text('{"rank": 0, "pid": 999999999, "status": "finished"}')
        return False

    monkeypatch.setattr(worker_group, "lives", lives)
    ranks = RankWatch(tmp_path, [0])
    for _ in range(2):
        ranks.look()
    ranks.close()
    assert ranks.ends == {}


def test_the_shared_folder_is_touched_once_in_a_while(tmp_path, monkeypatch):
    """A thousand agents look at it: what runs on is seen without it, and what is new at the next look."""
    now = [0.0]
    monkeypatch.setattr(worker_group.time, "monotonic", lambda: now[0])
    (tmp_path / "state").mkdir()

    def write(rank, status):
        new = tmp_path / "state" / ".new"
        new.write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "status": status, "ended": 1, "error": "x"})
        )
        new.replace(tmp_path / "state" / f"rank-{rank}.json")

    for rank in range(8):
        write(rank, "running")
    ranks = RankWatch(tmp_path, range(8))
    for now[0] in (10.0, 13.0, 16.0):
        ranks.look()
    touched = []
    monkeypatch.setattr(Path, "stat", counted(touched, Path.stat))
    for quarter in range(40):
        now[0] = 20.0 + quarter / 4
        ranks.look()
    assert len([path for path in touched if tmp_path in path.parents]) <= 10
    write(3, "failed")
    now[0] += worker_group.LATER_LOOK_S
    ranks.look()
    ranks.close()
    assert [*ranks.ends] == [3]


def counted(touched, call):
    def stat(path, **given):
        touched.append(path)
        return call(path, **given)

    return stat


def test_handles_are_given_back(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    ranks = RankWatch(tmp_path, range(2))
    (tmp_path / "state").mkdir()
    for rank in range(2):
        (tmp_path / "state" / f"rank-{rank}.json").write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "status": "running"})
        )
    ranks.look()
    ranks.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# Ending processes


@pytest.mark.parametrize("hurried", [True, False])
def test_who_is_asked_and_does_not_go(hurried):
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline()
    processes.end_processes(process.pid, [], 1e9 if hurried else 0.3, lambda: hurried)
    assert process.wait(300) == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_code_of_a_process_that_nobody_has_collected(code, exit_code):
    process = subprocess.Popen([sys.executable, "-c", code])
    assert until(lambda: processes.exit_code_of(process.pid) is not None, "its end")
    assert processes.exit_code_of(process.pid) == exit_code
    process.wait()
    assert processes.exit_code_of(process.pid) is None
    assert processes.exit_code_of(os.getpid()) is None


def test_the_stacks_are_those_of_ranks_that_run(node, stage, monkeypatch):
    """py-spy is a program in its place that prints what it is asked; without it the rank's own signal is sent."""
    asked = []
    monkeypatch.setattr(worker_group, "rank_process", psutil.Process)
    started = node("import time; time.sleep(60)")
    pid = started._process.pid
    for rank, status in ((0, "failed"), (1, "running")):
        state = {"rank": rank, "pid": pid, "status": status, "stacks": True, "error": "x", "ended": 1.0}
        (stage.run_dir / "state").mkdir(exist_ok=True)
        (stage.run_dir / "state" / f"rank-{rank}.json").write_text(json.dumps(state))
    folder = stage.run_dir / "bin"
    folder.mkdir()
    (folder / "py-spy").write_text('#!/bin/sh\necho "$@"\n')
    (folder / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    started.take_stacks()
    assert (stage.run_dir / "state" / "stack-1.txt").read_text() == f"dump --full-filenames --pid {pid}\n"
    assert not (stage.run_dir / "state" / "stack-0.txt").exists()
    (folder / "py-spy").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(worker_group.os, "kill", lambda *signalled: asked.append(signalled))
    started._has_stacks = False
    started.take_stacks()
    monkeypatch.undo()
    assert asked == [(pid, worker_group.STACK_SIGNAL)]
    started.end(0)


def test_one_that_nobody_collects_has_ended():
    """Not this process's child, and its parent does not look: as in a container without an init."""
    code = (
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    processes._signal([psutil.Process(child)], psutil.Process.terminate)
    assert processes._all_ended([psutil.Process(child)], 300)
    parent.kill()
    parent.wait()
    parent.stdout.close()


# Preparing steps


@pytest.fixture
def step(tmp_path):
    """`step(code)`: run a preparing step of that code; gives what it said."""

    def run(code: str) -> list[str]:
        said = []
        (tmp_path / "step.py").write_text(code)
        run_step(
            [sys.executable, "-u", str(tmp_path / "step.py")],
            dict(os.environ),
            tmp_path / "prepare.log",
            said.append,
        )
        return said

    return run


def test_a_step_is_heard(step, tmp_path):
    assert step("import sys; print('分词'); print('done'); sys.stderr.write('noise\\n')") == ["分词", "done"]
    assert (tmp_path / "prepare.log").read_text() == "noise\n"


def test_a_steps_problems_are_the_users(step):
    problems = [
        {"what": "no row", "where": "a.jsonl", "hint": "Look."},
        {"what": "b", "where": "", "hint": ""},
    ]
    code = f"import sys; print({json.dumps({'problems': problems})!r}); sys.exit(1)"
    with pytest.raises(JobFailedError) as caught:
        step(code)
    assert [vars(problem) for problem in caught.value.problems] == problems


def test_a_step_that_breaks_shows_its_log(step, tmp_path):
    with pytest.raises(JobFailedError) as caught:
        step("raise ValueError('broken')")
    (problem,) = caught.value.problems
    assert "ValueError: broken" in problem.what
    assert str(tmp_path / "prepare.log") in problem.hint


def test_a_step_that_is_killed(step):
    with pytest.raises(JobFailedError) as caught:
        step("import os; os.kill(os.getpid(), 9)")
    assert caught.value.exit_code == 128 + 9
    assert "SIGKILL" in str(caught.value)


def test_a_step_means_sigterm_as_it_was_before(step):
    before = signal.getsignal(signal.SIGTERM)
    step("print(1)")
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(processes.TerminatedError):
        step(f"import os, time; os.kill({os.getpid()}, 15); time.sleep(600)")
    assert signal.getsignal(signal.SIGTERM) is before

"""The agents of a job on two hosts, and how it ends when one of its parts does. The hosts are this one, twice."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import psutil
import pytest

from dsrun.errors import DsrunError, JobFailedError
from dsrun.job.job import HostDevices
from dsrun.job.processes import TerminatedError, lives
from dsrun.job.run_folder import MARK
from dsrun.jobs.diagnosis import run_logs
from dsrun.jobs.supervision import coordinator, host_agent, protocol

pytestmark = pytest.mark.slow

DONE = "state('finished')"
FOREVER = "forever()"
TWO = {"node1": 1, "node2": 1}
UNEQUAL = {"node1": 1, "node2": 3}


@pytest.fixture
def failure(stage, monkeypatch):
    """`failure(job)`: run a job that fails; the problem and the exit code."""

    monkeypatch.setattr(coordinator, "SETTLE_S", 1.0)

    def run(job, watch=lambda: False, **options):
        with pytest.raises(DsrunError) as caught:
            stage.run(job, watch, **options)
        (problem,) = caught.value.problems
        return problem, caught.value.exit_code

    return run


def test_two_hosts(stage):
    script = (
        "names = ('RANK', 'WORLD_SIZE', 'DSRUN_NODE', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')\n"
        "say(json.dumps([os.environ.get(name) for name in names]))\n" + DONE
    )
    stage.run(stage.job(*[script] * 4, hosts=UNEQUAL, launcher="ssh"))
    import json

    told = [
        json.loads((stage.run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()[-1])
        for rank in range(4)
    ]
    assert [words[:3] for words in told] == [["0", "4", "0"], *([str(rank), "4", "1"] for rank in (1, 2, 3))]
    (address,) = {words[3] for words in told}
    assert address == protocol.own_addresses()[0]
    assert {words[4] for words in told} == {protocol.interface_of(address)}
    assert (stage.run_dir / "logs" / "launcher-1.log").exists()


def test_forwarded_variables_arrive(stage):
    script = f"assert os.environ['NCCL_IB_HCA'] == 'a b' and os.environ['GLOO_SOCKET_IFNAME'] == 'lo'; {DONE}"
    env = {**stage.forwarded, "NCCL_IB_HCA": "a b", "GLOO_SOCKET_IFNAME": "lo"}
    stage.run(stage.job(script, script, hosts=TWO, launcher="ssh"), env=env)


def test_the_address_that_is_asked_for(stage, failure):
    script = f"assert os.environ['MASTER_ADDR'] == '127.0.0.1'; {DONE}"
    stage.run(stage.job(script, script, hosts=TWO, launcher="ssh"), master_addr="127.0.0.1")


def test_an_address_that_nobody_reaches(stage, failure):
    problem, _ = failure(stage.job(DONE, DONE, hosts=TWO, launcher="ssh"), master_addr="no-such-name.invalid")
    assert "node2 can't reach port" in problem.what
    assert "no-such-name.invalid" in problem.what
    assert "--master-addr" in problem.hint


def test_the_host_of_a_rank_that_fails_is_named(stage, failure):
    scripts = [FOREVER, FOREVER, "fail('ValueError: bad row')", FOREVER]
    problem, code = failure(stage.job(*scripts, hosts=UNEQUAL, launcher="ssh"))
    assert stage.causes == [("rank-failed", 2)]
    assert "node2" in problem.what
    assert code == 1


def test_a_host_that_fails_ends_the_others(stage, failure, monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE_S", 5.0)  # a busy machine's launcher tells its code late
    problem, code = failure(
        stage.job(FOREVER, "watched(); os.kill(os.getpid(), 9)", hosts=TWO, launcher="ssh")
    )
    assert stage.causes == [("rank-killed", 1)]
    assert "node2" in problem.what
    assert code == 128 + 9
    assert not stage.left(0)


def test_a_launcher_that_fails_on_one_host(stage, failure):
    problem, _ = failure(
        stage.job(FOREVER, FOREVER, hosts=TWO, launcher="ssh",
                  runner="if arguments.node_rank == '1': sys.exit('No module named deepspeed')")
    )  # fmt: skip
    assert stage.causes == [("launcher-failed", None)]
    assert "node2" in problem.what
    assert "No module named deepspeed" in problem.what
    assert "launcher-1.log" in problem.hint


# Hosts that can't


def test_a_host_that_sees_another_folder(stage, failure, monkeypatch):
    """The coordinator's mark is not what the agents read: its folder is another one, under the same path."""
    monkeypatch.setattr(coordinator, "put_mark", lambda _run_dir: "0123")
    (stage.run_dir / MARK).write_text("4567")
    problem, _ = failure(stage.job(DONE, DONE, hosts=TWO, launcher="ssh"))
    assert problem.where == str(stage.run_dir)
    assert "is another one on " + os.uname().nodename in problem.what
    assert "--output-dir" in problem.hint
    (stage.run_dir / MARK).unlink()
    problem, _ = failure(stage.job(DONE, DONE, hosts=TWO, launcher="ssh"))
    assert "is not there" in problem.what
    assert not list((stage.run_dir / "logs").glob("rank-*"))


def test_a_host_without_the_scripts_folder(stage, failure):
    import dataclasses

    job = stage.put(dataclasses.replace(stage.job(DONE), cwd="/nowhere"))
    problem, _ = failure(job)
    assert problem.where == "/nowhere"
    assert os.uname().nodename in problem.what


def test_a_host_that_ssh_does_not_reach(stage, failure):
    stage.program("ssh", "#!/bin/sh\necho 'Permission denied (publickey).' >&2\nexit 255\n")
    problem, _ = failure(stage.job(DONE, DONE, hosts=TWO, launcher="ssh"))
    assert re.match("node[12]: ssh ended with exit code 255", problem.what)
    assert "Permission denied" in problem.what


def test_a_host_without_dsrun(stage, failure):
    stage.program("ssh", "#!/bin/sh\necho 'No module named dsrun' >&2\nexit 1\n")
    problem, _ = failure(stage.job(DONE, DONE, hosts=TWO, launcher="ssh"))
    assert "No module named dsrun" in problem.what


def test_a_host_that_never_answers(stage, failure, monkeypatch):
    monkeypatch.setattr(protocol, "START_S", 0.5)
    stage.program("ssh", "#!/bin/sh\nexec sleep 600\n")
    problem, _ = failure(stage.job(DONE, DONE, hosts=TWO, launcher="ssh"))
    assert "no heartbeat from node1" in problem.what


# One of its parts ends


@pytest.mark.parametrize(("launcher", "hosts", "name"), [("local", None, "localhost"), ("ssh", TWO, "node2"),
                                                         ("pdsh", TWO, "node2")])  # fmt: skip
def test_an_agent_that_is_killed(stage, failure, launcher, hosts, name):
    number = 0 if hosts is None else 1
    job = stage.job(FOREVER, FOREVER, hosts=hosts, launcher=launcher, real=True)
    (stage.root / "script.py").write_text("import time; time.sleep(600)")
    problem, _ = failure(job, stage.when(stage.up(), lambda: stage.agent(number).kill()))
    assert name in problem.what
    if launcher == "local":
        states = (stage.run_dir / "state").glob("rank-*.json")
        assert not any(lives(json.loads(path.read_text())["pid"]) for path in states), (
            "nobody keeps their devices"
        )
        found = run_logs.of_run(stage.run_dir, said=problem.what)
        assert found.cause == "launcher" and "host agent" in found.summary
        assert "A rank was killed" not in str(found)
    assert not stage.left()  # its ranks end by themselves


def test_an_agent_that_is_asked_to_end(stage, failure):
    job = stage.job(FOREVER, FOREVER, hosts=TWO, launcher="ssh")
    problem, _ = failure(job, stage.when(stage.up(), lambda: stage.agent(1).terminate()))
    assert "node2" in problem.what
    assert any("asked to end (SIGTERM)" in line for line in stage.said)
    assert not stage.left()


def test_a_host_that_is_silent_is_lost(stage, failure):
    """Its agent is stopped, as with a machine that hangs. Back again, it finds that nobody waits, and clears up."""
    stopped = []

    def stop() -> None:
        stopped.append(stage.agent(1))
        stopped[0].suspend()

    try:
        problem, _ = failure(
            stage.job(FOREVER, FOREVER, hosts=TWO, launcher="ssh"),
            stage.when(stage.up(), stop),
            host_timeout=3 / 60,
        )
    finally:
        for process in stopped:
            process.resume()
    assert "no heartbeat from node2" in problem.what
    assert not stage.left()


def test_a_silent_host_whose_ranks_work_on_is_waited_for(stage, monkeypatch):
    """Longer than --host-timeout; then it is heard again, and the job comes to its end."""
    monkeypatch.setattr(coordinator, "LOOK_S", 0.2)
    stopped = []
    working = "while not (run_dir / 'go').exists(): say('step'); time.sleep(0.1)\n" + DONE

    def watch() -> bool:
        if not stopped and stage.up()():
            stopped.append(stage.agent(1))
            stopped[0].suspend()
            began.append(time.monotonic())
        if began and time.monotonic() - began[0] > 8:  # more than twice the time-out
            began.clear()
            stopped[0].resume()
            (stage.run_dir / "go").touch()
        return False

    began = []
    try:
        stage.run(stage.job(working, working, hosts=TWO, launcher="ssh"), watch, host_timeout=3 / 60)
    finally:
        for process in filter(psutil.Process.is_running, stopped):
            process.resume()
    assert not stage.left()


def test_a_host_that_is_lost_and_not_who_missed_it(stage, failure, monkeypatch):
    """The other host's ranks see that their peers are gone before the silence has lasted long enough."""
    monkeypatch.setattr(coordinator, "SETTLE_S", 3.0)
    stopped = []

    def stop() -> None:
        monkeypatch.setattr(coordinator, "BLAME_S", 3.0)
        stopped.append(stage.agent(1))
        stopped[0].suspend()
        (stage.run_dir / "lost").touch()

    lost = "while not (run_dir / 'lost').exists(): time.sleep(0.02)\nfail('RuntimeError: Connection reset by peer')"
    try:
        problem, _ = failure(
            stage.job(lost, FOREVER, hosts=TWO, launcher="ssh"), stage.when(stage.up(), stop)
        )
    finally:
        for process in stopped:
            process.resume()
    assert "no heartbeat from node2" in problem.what
    assert not stage.left()


# Compiling


@pytest.fixture
def tune(stage, make_job):
    """A fine-tune, for whose config an operator is missing."""
    (stage.operators / "fused_adam" / "fused_adam.so").unlink()
    stage.play(DONE)
    return stage.put(make_job(stage.run_dir, ranks=1))


def _fake_builder(stage, code: str) -> None:
    folder = stage.root / "fake" / "deepspeed" / "accelerator"
    folder.mkdir(exist_ok=True)
    (folder / "__init__.py").write_text(
        "import os, sys, time\n"
        "class Builder:\n"
        f"    def load(self, verbose):\n        {code}\n"
        "class Accelerator:\n"
        "    def create_op_builder(self, name): return Builder()\n"
        "def get_accelerator(): return Accelerator()\n"
    )


def test_what_is_missing_is_compiled_first(stage, tune):
    path = stage.operators / "fused_adam" / "fused_adam.so"
    _fake_builder(stage, f"open({str(path)!r}, 'w')")
    stage.run(tune)
    assert path.exists()
    assert any(line.startswith("compiling DeepSpeed's fused_adam") for line in stage.said)


def test_a_lock_that_a_killed_build_left_is_removed(stage):
    lock = stage.operators / "fused_adam" / "lock"
    lock.touch()
    stage.run(stage.job(DONE))
    assert not lock.exists()
    assert any(str(lock) in line for line in stage.said)


def test_a_build_that_fails_shows_its_log(stage, failure, tune):
    _fake_builder(stage, "raise RuntimeError('no compiler')")
    problem, _ = failure(tune)
    assert "no compiler" in problem.what
    assert "prepare.log" in problem.hint


@pytest.mark.parametrize("who", ["dsrun", "its agent"])
def test_a_build_that_is_interrupted(stage, tune, who):
    _fake_builder(stage, "time.sleep(600)")
    running = stage.coordinator(tune)
    real, began = running._receive, []

    def receive() -> None:
        real()
        if not began and stage.processes("build_operator"):
            began.append(True)
            os.kill(os.getpid() if who == "dsrun" else stage.agent(0).pid, signal.SIGTERM)

    running._receive = receive
    with pytest.raises(TerminatedError if who == "dsrun" else JobFailedError):
        running.run()
    assert not stage.left(0)


# What Slurm gives


@pytest.mark.parametrize(
    ("launcher", "devices", "visible", "given", "wanted"),
    [
        ("slurm", (0, 1), (), "4,6", "4,6"),
        ("slurm", (1, 0), (), "4,6", "6,4"),
        ("slurm", (1,), (), "GPU-a,GPU-b", "GPU-b"),
        ("slurm", (0, 1), (), "", "0,1"),
        ("slurm", (0, 1), ("GPU-x", "GPU-y"), "4,6", "GPU-x,GPU-y"),
        ("ssh", (0, 1), (), "4,6", "0,1"),
        ("local", (3, 1), (), "0,1,2,3", "3,1"),
    ],
)
def test_the_devices_of_a_host(make_job, launcher, devices, visible, given, wanted):
    job = make_job(hosts=(HostDevices("n1", devices, visible),), launcher=launcher)
    assert host_agent.visible_devices(job, 0, {"CUDA_VISIBLE_DEVICES": given}) == wanted


def test_slurm_gave_too_few(make_job):
    job = make_job(hosts=(HostDevices("n1", (0, 1, 2)),), launcher="slurm")
    with pytest.raises(DsrunError, match="2 GPUs"):
        host_agent.visible_devices(job, 0, {"CUDA_VISIBLE_DEVICES": "0,1"})


# Who it is


def test_an_agent_that_can_not_tell_its_number(stage, capsys, monkeypatch):
    import argparse

    words = argparse.Namespace(node=None, node_from="SLURMD_NODENAME")
    for value, number in (("n2", 1), ("0", 0)):
        monkeypatch.setenv("SLURMD_NODENAME", value)
        assert host_agent._number(words, ["n1", "n2"]) == number
    for value in ("n3", ""):
        monkeypatch.setenv("SLURMD_NODENAME", value)
        with pytest.raises(SystemExit, match="none of the job's hosts: n1, n2"):
            host_agent._number(words, ["n1", "n2"])


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_an_agent_without_the_run_folder(tmp_path, wait_s):
    import argparse

    words = argparse.Namespace(control=tmp_path / ".control", wait=wait_s)
    with pytest.raises(SystemExit, match="all hosts have to share it"):
        host_agent._called(words)

"""The ways to a job's hosts: the words that start the agents, and agents that are started so, on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess

import pytest

from dsrun.errors import DsrunError, JobFailedError
from dsrun.jobs import launchers
from dsrun.jobs.launchers.common import agent_command
from dsrun.jobs.supervision import coordinator, job_hosts, protocol

pytestmark = pytest.mark.slow

DONE = "state('finished')"
FOREVER = "forever()"
TWO = {"node1": 1, "node2": 1}
OVER_TCP = ("pdsh", "openmpi", "mpich", "impi", "slurm")
COMMAND = [
    "env",
    "PYTHONPATH=/a b",
    "/opt/python",
    "-m",
    "dsrun.jobs.supervision.host_agent",
    "--control",
    "/runs/100%n it's/.control",
]


def test_every_launcher_has_one_way():
    assert set(launchers.CHOICES) == {launchers.AUTO, *launchers.names()} - {"local"}
    for name in launchers.names():
        found = launchers.get(name)
        assert found.name == name
        assert sum(way is not None for way in (found.to_each, found.to_all, found.by_hand)) == 1
        assert found.package or not found.program


def test_an_unknown_one():
    with pytest.raises(DsrunError, match="no launcher 'mosix'") as caught:
        launchers.get("mosix")
    assert "pdsh" in str(caught.value)


def test_here_no_way_is_needed(monkeypatch):
    import socket

    for name, host in (("local", "localhost"), ("ssh", "localhost"), ("ssh", socket.gethostname())):
        assert launchers.get(name).to_each(host, COMMAND) == COMMAND


def test_ssh(monkeypatch):
    monkeypatch.setenv("DSRUN_SSH", "/bin/true")
    words = launchers.get("ssh").to_each("user@node1", COMMAND)
    assert words[0] == "/bin/true"
    assert words[-3:-1] == ["--", "user@node1"]
    assert shlex.split(words[-1]) == COMMAND
    assert "BatchMode=yes" in words


def test_pdsh():
    words = launchers.get("pdsh").to_all(["n1", "n2"], COMMAND, {})
    assert words[words.index("-w") + 1] == "n1,n2"
    assert words[words.index("-R") + 1] == "ssh"
    assert shlex.split(words[-1].replace("%n", "1").replace("%1", "%n")) == [*COMMAND, "--node", "1"]


@pytest.mark.parametrize(
    ("name", "program", "variable"),
    [
        ("openmpi", "mpirun", "OMPI_COMM_WORLD_RANK"), ("mpich", "mpiexec.hydra", "PMI_RANK"),
        ("impi", "mpirun", "PMI_RANK"), ("slurm", "srun", "SLURMD_NODENAME"),
    ],
)  # fmt: skip
def test_one_process_on_every_host(name, program, variable):
    words = launchers.get(name).to_all(["n1", "n2", "n3"], COMMAND, {})
    assert words[0] == program == launchers.get(name).program
    assert words[-len(COMMAND) - 2 :] == [*COMMAND, "--node-from", variable]
    assert any(word.replace(":1", "") == "n1,n2,n3" for word in words)
    assert "3" in words


def test_slurm_gives_the_step_all_cores_of_the_job():
    words = launchers.get("slurm").to_all(["n1"], COMMAND, {"SLURM_CPUS_PER_TASK": "16"})
    assert words[words.index("--cpus-per-task") + 1] == "16"
    assert "--cpus-per-task" not in launchers.get("slurm").to_all(
        ["n1"], COMMAND, {"SLURM_CPUS_ON_NODE": "8(x2)"}
    )


def test_by_hand():
    lines = launchers.get("manual").by_hand(["n1", "n2"], COMMAND)
    assert [line.split()[1] for line in lines] == ["n1:", "n2:"]
    assert [shlex.split(line)[2:] for line in lines] == [
        [*COMMAND, "--node", str(number)] for number in (0, 1)
    ]


def test_nothing_of_the_users_environment_is_on_the_command_line():
    words = agent_command.agent_command({"HF_TOKEN": "s3cr3t", "PYTHONPATH": "/mine"})
    assert words[-2:] == ["-m", "dsrun.jobs.supervision.host_agent"]
    assert not any("s3cr3t" in word for word in words)


def test_agents_find_modules_where_the_head_does():
    words = agent_command.agent_command({"PYTHONPATH": "/mine:/other"})
    assert words[0] == "env"
    assert words[1].startswith("PYTHONPATH=")
    assert words[1].endswith("/mine:/other")


# Started so


@pytest.mark.parametrize("launcher", ["ssh", *OVER_TCP])
def test_a_job_on_two_hosts(stage, launcher):
    script = f"say(os.environ['DSRUN_NODE'] + os.environ['RANK']); {DONE}"
    stage.run(stage.job(script, script, script, hosts={"node1": 2, "node2": 1}, launcher=launcher))
    said = [(stage.run_dir / "logs" / f"rank-{rank}.log").read_text().split()[-1] for rank in range(3)]
    assert said == ["00", "01", "12"]
    assert not stage.left()
    assert not (stage.run_dir / ".control").exists()


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[] if name == "pdsh" else pytest.mark.full) for name in OVER_TCP]
)
def test_a_rank_that_fails_ends_all(stage, launcher, monkeypatch):
    monkeypatch.setattr(coordinator, "SETTLE_S", 1.0)
    job = stage.job(FOREVER, "fail('ValueError: bad row')", hosts=TWO, launcher=launcher)
    with pytest.raises(JobFailedError, match="rank 1 on node2 failed first: ValueError: bad row"):
        stage.run(job)
    assert not stage.left()


def test_a_way_that_is_killed_leaves_nothing(stage):
    """The agents have connections of their own: the job goes on without pdsh, and nothing stays."""
    job = stage.job(f"time.sleep(1); {DONE}", DONE, hosts=TWO, launcher="pdsh")
    running = stage.coordinator(job)
    running.watch = stage.when(stage.up(), lambda: os.kill(running.hosts.process.pid, signal.SIGKILL))
    running.run()
    assert not stage.left()


@pytest.mark.parametrize("launcher", ["pdsh", "openmpi"])
def test_a_way_that_fails(stage, launcher):
    for name in ("pdsh", "mpirun"):
        stage.program(name, "#!/bin/sh\necho 'node2: Permission denied' >&2\nexit 3\n")
    with pytest.raises(JobFailedError) as caught:
        stage.run(stage.job(DONE, DONE, hosts=TWO, launcher=launcher))
    (problem,) = caught.value.problems
    assert "node1, node2 did not call in" in problem.what
    assert "ended with exit code 3" in problem.what
    assert "Permission denied" in problem.what


def test_agents_that_do_not_call(stage, monkeypatch):
    monkeypatch.setattr(coordinator, "CALL_S", 0.3)
    stage.program("pdsh", "#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(JobFailedError, match="did not call in"):
        stage.run(stage.job(DONE, DONE, hosts=TWO, launcher="pdsh"))
    assert not stage.left()


class Hand:
    """The user, who reads the lines and starts what they say."""

    def __init__(self, stage) -> None:
        self.stage, self.started = stage, []

    def __call__(self, line: str) -> None:
        self.stage.said.append(line)
        if line.startswith("on node"):
            env = {"PATH": "/usr/bin:/bin", "DSRUN_TEST_STAGE": str(self.stage.root)}
            self.started.append(subprocess.Popen(line.split(":", 1)[1], shell=True, env=env))


def test_started_by_hand(stage):
    hand = Hand(stage)
    stage.coordinator(stage.job(DONE, DONE, hosts=TWO, launcher="manual"), say=hand).run()
    assert [process.wait(300) for process in hand.started] == [0, 0]
    assert {"node1 is there", "node2 is there"} == {
        line.split(" (")[0] for line in stage.said if "is there" in line
    }


def test_started_twice_by_hand(stage):
    """The second agent of a host is sent away; the first goes on."""
    hand = Hand(stage)
    job = stage.job(f"time.sleep(0.5); {DONE}", DONE, hosts=TWO, launcher="manual")
    stage.coordinator(job, say=lambda line: (hand(line), hand(line) if "on node1" in line else None)).run()
    for process in hand.started:
        process.wait(300)
    assert not stage.left()


def test_ctrl_c_while_the_user_starts_them(stage):
    job = stage.job(DONE, DONE, hosts=TWO, launcher="manual")

    def strike(line: str) -> None:
        if "on node2" in line:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        stage.coordinator(job, say=strike).run()
    assert not (stage.run_dir / ".control").exists()


def test_more_hosts_than_files_may_be_open(stage, monkeypatch):
    """The usual limit is raised as far as that is allowed."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        job_hosts._allow_files(522)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 600
        job_hosts._allow_files(812)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(812, hard if hard > 0 else 812)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_fifty_hosts_that_never_answer_are_left(stage, monkeypatch):
    monkeypatch.setattr(protocol, "START_S", 2.0)
    stage.program("ssh", "#!/bin/sh\ntrap '' TERM\nexec sleep 600\n")
    hosts = {f"node{number}": 1 for number in range(50)}
    with pytest.raises(JobFailedError, match="no heartbeat"):
        stage.run(stage.job(*[DONE] * 50, hosts=hosts, launcher="ssh"))
    assert not stage.left()

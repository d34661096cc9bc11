"""What can end on a cluster of two hosts, ended for real. Each time nothing may be left anywhere, what dsrun says must
be true, and the run goes on to the losses of one that was not disturbed.

A journey is one run that is ended again and again, each time by something else, and resumed each time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from needed import needs

needs("deepspeed", "transformers")

from lab import Host
from running import Done, held_at, let_go, reaches, same, starts_of, step_of, until
from runs import GONE_S, Cluster, far_agent

from dsrun.job.layout import whole_checkpoints
from dsrun.job.run_folder import describe_state

pytestmark = pytest.mark.slow

FIRST, LEAP = 3, 3
"""The first fault comes after FIRST steps, the others LEAP steps after one another."""


@pytest.fixture(scope="module")
def cluster(lab, environ, data, tmp_path_factory):
    made = Cluster(lab, environ, tmp_path_factory.mktemp("faults"), data)
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _end(cluster):
    yield
    cluster.end()


@dataclass(frozen=True)
class Scene:
    """A job that is held in the middle of its training."""

    cluster: Cluster
    process: subprocess.Popen[str]
    ranks: Mapping[int, int]

    @property
    def second(self) -> Host:
        return self.cluster.lab.hosts[1]

    def running(self, host: Host, module: str) -> int:
        """The process on a host that runs a module; below others that do, the first."""
        found = host.running(module)
        assert found, f"{module} on {host.name}"
        return min(found, key=lambda one: one.create_time()).pid


@dataclass(frozen=True)
class Fault:
    """Something that ends. says: a pattern of what dsrun has to say, None where dsrun itself is ended; mend: brings it
    back."""

    name: str
    strike: Callable[[Scene], None]
    says: str | None
    mend: Callable[[Cluster], None] = lambda _: None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


BY_SSH = (
    Fault(
        "the agent on a far host",
        lambda scene: kill(scene.running(scene.second, "dsrun.jobs.supervision.host_agent")),
        r"agent on node2 is gone|node2: ssh ended|rank 1 on node2 failed first: the launcher or dsrun is gone",
    ),
    Fault(
        "the network of a host",
        lambda scene: scene.second.cut(),
        r"no heartbeat from node2",
        lambda cluster: cluster.lab.hosts[1].mend(),
    ),
    Fault("rank 0", lambda scene: kill(scene.ranks[0]), r"rank 0 on node1 died first: killed \(SIGKILL\)"),
    Fault(
        "sshd of a host, and its sessions",
        lambda scene: scene.second.kill_sshd(),
        r"node2: ssh ended with exit code 255|agent on node2 is gone",
        lambda cluster: cluster.lab.hosts[1].start_sshd(),
    ),
)
BY_PDSH = (
    Fault("dsrun", lambda scene: scene.process.kill(), None),
    Fault(
        "launch.py on a far host",
        lambda scene: kill(scene.running(scene.second, "deepspeed.launcher.launch")),
        r"on node2 .*launcher",
    ),
    Fault("rank 1", lambda scene: kill(scene.ranks[1]), r"rank 1 on node2 died first: killed \(SIGKILL\)"),
    Fault(
        "launch.py on the first host",
        lambda scene: kill(scene.running(scene.cluster.lab.hosts[0], "deepspeed.launcher.launch")),
        # What the other host's rank sees of it may come first.
        r"DeepSpeed's launcher on node1 was killed|rank 1 on node2 failed first: .*[Cc]onnection",
    ),
)


@pytest.mark.parametrize(
    ("launcher", "faults"),
    [
        pytest.param("ssh", BY_SSH[:2], id="ssh"),
        pytest.param("ssh", BY_SSH[2:], id="ssh, more", marks=pytest.mark.full),
        pytest.param("pdsh", BY_PDSH[:2], id="pdsh", marks=pytest.mark.full),
        pytest.param("pdsh", BY_PDSH[2:], id="pdsh, more", marks=pytest.mark.full),
    ],
)
def test_a_journey(cluster, reference, launcher: str, faults: Sequence[Fault]):
    name = f"{launcher}-{len(list(cluster.folder.iterdir()))}"
    run_dir = cluster.folder / name
    soon = ("--host-timeout", "0.2")
    where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", launcher, *soon)
    process = cluster.train(name, *where)
    wanted = [0]
    for number, fault in enumerate(faults):
        ranks = held_at(process, run_dir, FIRST + number * LEAP)
        try:
            fault.strike(Scene(cluster, process, ranks))
            let_go(ranks)
            check_the_end(cluster, process, fault, run_dir)
        finally:
            fault.mend(cluster)
        whole = whole_checkpoints(run_dir)
        assert whole, fault.name
        wanted.append(int(whole[-1].name.removeprefix("step-")))
        process = cluster.dsrun("resume", run_dir, *soon)
    done = cluster.finish(process, name)
    assert (done.code, done.state) == (0, "finished"), done.err
    assert starts_of(run_dir) == wanted
    same(done.losses, reference.losses)
    cluster.check_nothing_is_left()


def check_the_end(cluster: Cluster, process: subprocess.Popen[str], fault: Fault, run_dir: Path) -> None:
    """Check how the job that was struck ended."""
    cluster.check_nothing_is_left()
    done = cluster.finish(process, run_dir.name, GONE_S)
    if fault.says is None:
        assert describe_state(run_dir) == "interrupted"
        return
    assert done.code not in (0, None), fault.name
    assert re.search(fault.says, done.err), f"{fault.name}: {done.err}"
    assert not done.own_traceback
    assert f"dsrun resume {run_dir}" in done.err
    record = json.loads(done.read("run.json"))
    assert record["state"] == "failed"
    assert re.search(fault.says, " ".join(record["problems"]))


def test_a_restart_while_a_host_agent_is_stopped(cluster, reference):
    """It can't end before it goes on. When it does, the next attempt trains on its host, and isn't ended by it."""
    run_dir = cluster.folder / "stopped-agent"
    where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", "ssh", "--host-timeout", "0.2")
    process = cluster.train(run_dir.name, *where, "--max-restarts", "1")
    ranks = held_at(process, run_dir, FIRST)
    agent = far_agent(cluster.lab.hosts[1])
    agent.suspend()
    try:
        wanted, reached = int(whole_checkpoints(run_dir)[-1].name.removeprefix("step-")), step_of(run_dir)

        def trains_again() -> bool:
            assert process.poll() is None, process.communicate()
            return len(starts_of(run_dir)) == 2

        until(trains_again, "the next attempt")
        reaches(process, run_dir, reached + 1)
        assert agent.status() == psutil.STATUS_STOPPED
    finally:
        agent.resume()
        let_go(ranks)
    done = cluster.finish(process, run_dir.name)
    assert (done.code, done.state) == (0, "finished"), done.err
    assert "no heartbeat from node2" in done.err
    assert "starting again" in done.err
    assert starts_of(run_dir) == [0, wanted]
    same(done.losses, reference.losses)
    cluster.check_nothing_is_left()


# Jobs that can't begin


@pytest.fixture
def refused(cluster):
    """`refused(name, *options)`: what dsrun says of a job that can't begin. Nothing is left of it."""

    def run(name: str, *options: object) -> Done:
        done = cluster.finish(cluster.train(name, *options), name)
        assert done.code == 1, done.err
        assert not done.own_traceback
        cluster.check_nothing_is_left()
        assert [host.shm() for host in cluster.lab.hosts] == [[], []]
        return done

    return run


@pytest.mark.parametrize("check", [(), ("--no-check",)], ids=["looked at", "not looked at"])
@pytest.mark.parametrize("launcher", ["ssh", "openmpi"])
def test_a_host_that_can_not_be_reached(cluster, refused, launcher, check):
    second = cluster.lab.hosts[1]
    second.kill_sshd()
    try:
        where = ("--hostfile", cluster.lab.hostfile(slots=1), "--launcher", launcher, *check)
        done = refused(f"silent-{launcher}{len(check)}", *where)
    finally:
        second.start_sshd()
    assert "node2" in done.err
    assert re.search(r"refuses|ssh ended with exit code 255|did not call in", done.err), done.err


def test_a_hostfile_with_a_wrong_name(cluster, refused):
    hostfile = cluster.folder / "hostfile"
    hostfile.write_text("node1 slots=1\nnode7 slots=1\n")
    done = refused("wrong-name", "--hostfile", hostfile)
    assert "node7" in done.err
    assert not done.run_dir.exists()


@pytest.mark.parametrize("check", [(), ("--no-check",)], ids=["looked at", "not looked at"])
def test_a_run_folder_that_a_host_does_not_share(cluster, refused, check):
    alone = cluster.folder / f"alone{len(check)}"
    alone.mkdir()
    second = cluster.lab.hosts[1]
    second.run(["mount", "-t", "tmpfs", "tmpfs", alone])
    try:
        where = ("--hostfile", cluster.lab.hostfile(slots=1), *check)
        done = refused(f"{alone.name}/run", *where)
    finally:
        second.run(["umount", alone])
    assert "node2" in done.err
    assert str(alone) in done.err
    assert re.search(r"is not there on node2|share", done.err), done.err


def test_a_host_with_another_data_file(cluster, tmp_path):
    """Nobody has looked before the start, and the host has no rows yet: it refuses to make them of another file."""
    first, second = cluster.lab.hosts
    path, rows = Path(cluster.data[1]), Path(cluster.environ["DSRUN_CACHE"]) / "rows"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[:40]), encoding="utf-8")
    rows.mkdir(parents=True, exist_ok=True)
    second.run(["mount", "-t", "tmpfs", "tmpfs", rows])
    second.run(["mount", "--bind", other, path])
    try:
        where = ("--hostfile", cluster.lab.hostfile(slots=1), "--no-check")
        done = cluster.finish(cluster.train("another-file", *where, at=first), "another-file")
        made = second.run(["ls", "-A", rows]).stdout
    finally:
        second.run(["umount", path])
        second.run(["umount", rows])
    assert done.code == 1, done.err
    assert not done.own_traceback
    said = " ".join(done.err.split())
    assert f"{path}: is not the data that the run was planned with" in said
    assert f"bytes on node2, {path.stat().st_size:,} on node1, where the run was planned" in said
    assert "copy node1's to node2" in said
    assert made == ""
    cluster.check_nothing_is_left()

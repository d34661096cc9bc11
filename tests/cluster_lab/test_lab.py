"""The lab itself: its hosts behave as two hosts, and nothing of it outlives it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from lab import Host, Lab, UnavailableError, claim_subnet, demand_programs, ip, pinned, processes_in, wait_for

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def said(environ, *argv) -> list[str]:
    """Lines that a program on this machine printed, sorted."""
    done = subprocess.run(
        [str(arg) for arg in argv], env={**os.environ, **environ},
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


def test_ssh_reaches_both_hosts_by_their_names(lab):
    for host in lab.hosts:
        assert said(lab.environ, "ssh", host.name, "hostname") == [host.name]
        assert said(lab.environ, "ssh", host.address, "hostname -I | tr -d ' '") == [host.address]


def test_ssh_from_host_to_host(lab):
    first, second = lab.hosts
    assert first.run(["ssh", second.name, "hostname"]).stdout == "node2\n"
    assert said(lab.environ, "ssh", "node2", "ssh node1 hostname") == ["node1"]


def test_scp(lab, tmp_path):
    (tmp_path / "a file").write_text("text")
    said(lab.environ, "scp", "-q", tmp_path / "a file", f"node1:{tmp_path}/copy")
    assert (tmp_path / "copy").read_text() == "text"


def test_names_are_known_on_the_hosts(lab):
    found = lab.hosts[0].run(["getent", "ahostsv4", "node2"]).stdout
    assert found.startswith(lab.hosts[1].address)
    outside = lab.hosts[0].run(["getent", "ahostsv4", os.uname().nodename]).stdout
    assert outside.startswith(lab.address)


def test_pdsh(lab):
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed")
    assert said(lab.environ, "pdsh", "-w", "node1,node2", "hostname") == ["node1: node1", "node2: node2"]


@pytest.mark.parametrize(
    "argv",
    [
        ("mpirun.openmpi", "--host", "node1,node2"),
        ("mpiexec.hydra", "-hosts", "node1,node2", "-n", "2", "-ppn", "1"),
    ],
    ids=lambda argv: argv[0],
)
def test_mpi(lab, argv):
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    assert said(lab.environ, *argv, "hostname") == ["node1", "node2"]
    assert sorted(lab.hosts[0].run([*argv, "hostname"]).stdout.split()) == ["node1", "node2"]


def test_commands_on_a_host(lab, tmp_path):
    done = lab.hosts[1].run(
        ["sh", "-c", "pwd; echo $WORD; exit 3"], cwd=tmp_path, env={"WORD": "a b"}, check=False
    )
    assert (done.returncode, done.stdout) == (3, f"{tmp_path}\na b\n")
    with pytest.raises(RuntimeError, match=r"node1: false: exit 1"):
        lab.hosts[0].run(["false"])


def test_hosts_have_their_own_shared_memory_and_no_other_files_of_their_own(lab, tmp_path):
    first, second = lab.hosts
    first.run(["touch", "/dev/shm/mine", tmp_path / "ours"])
    try:
        assert "mine" in first.shm()
        assert "mine" not in second.shm()
        assert not Path("/dev/shm/mine").exists()
        second.run(["test", "-e", tmp_path / "ours"])
    finally:
        first.run(["rm", "-f", "/dev/shm/mine"])


def test_processes_of_a_host(lab):
    first, second = lab.hosts
    before = {process.pid for process in first.processes()}
    sleeping = first.popen(["sleep", "600"])
    try:
        assert wait_for(lambda: sleeping.pid in {process.pid for process in first.processes()} - before)
        assert sleeping.pid not in {process.pid for process in second.processes()}
    finally:
        sleeping.kill()
        sleeping.wait()
    assert sleeping.pid not in {process.pid for process in first.processes()}


def test_hostfile(lab):
    assert lab.hostfile(slots=3).read_text() == "node1 slots=3\nnode2 slots=3\n"


def test_a_cut_host_is_silent_and_comes_back(lab):
    first, second = lab.hosts
    second.cut()
    try:
        assert not second.answers()
        assert first.answers()
        tried = first.run(["ssh", "-o", "ConnectTimeout=2", "node2", "hostname"], check=False)
        assert tried.returncode == 255
        assert second.run(["hostname"]).stdout == "node2\n"  # Alive, only out of reach.
    finally:
        second.mend()
    assert said(lab.environ, "ssh", "node2", "hostname") == ["node2"]


def test_a_cable_out_and_in_keeps_sessions(lab):
    second = lab.hosts[1]
    argv = ["ssh", "node2", "echo here; read word; echo $word"]
    session = subprocess.Popen(
        argv, env={**os.environ, **lab.environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert session.stdout.readline() == "here\n"
    second.cut()
    second.mend()
    assert session.communicate("back\n", timeout=300)[0] == "back\n"


def test_a_dead_sshd_takes_its_sessions_along(lab):
    second = lab.hosts[1]
    argv = ["ssh", "node2", "echo here; exec sleep 600"]
    session = subprocess.Popen(argv, env={**os.environ, **lab.environ}, stdout=subprocess.PIPE, text=True)
    assert session.stdout.readline() == "here\n"
    second.kill_sshd()
    try:
        assert session.wait(300) == 255
        assert not second.answers()
        assert wait_for(lambda: not second.named("sshd"))
        (left,) = second.processes()
        assert left.name() == "sleep"
        left.kill()
    finally:
        session.stdout.close()
        second.start_sshd()
    assert said(lab.environ, "ssh", "node2", "hostname") == ["node2"]


def test_srun(slurm):
    assert said(slurm.environ, "srun", "-N2", "-n2", "hostname") == ["node1", "node2"]
    inside = slurm.lab.hosts[1].run(["srun", "-N2", "-n2", "hostname"], env=slurm.environ)
    assert sorted(inside.stdout.split()) == ["node1", "node2"]


def test_slurm_gives_out_gpus(slurm):
    held = subprocess.Popen(
        ["srun", "-N1", "--nodelist=node1", "--gres=gpu:3", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 600"],
        env={**os.environ, **slurm.environ}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert held.stdout.readline() == "0,1,2\n"
        show = "echo $SLURM_NODEID: $CUDA_VISIBLE_DEVICES"
        assert said(slurm.environ, "srun", "-N2", "-n2", "--gres=gpu:1", "sh", "-c", show) == ["0: 3", "1: 0"]
    finally:
        held.terminate()
        held.communicate(timeout=300)


def test_sbatch(slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH -N2 --ntasks-per-node=1\nsrun hostname\n")
    said(slurm.environ, "sbatch", "--wait", f"--output={tmp_path}/out", script)
    assert sorted((tmp_path / "out").read_text().split()) == ["node1", "node2"]


def test_nothing_stays_on_the_hosts_of_a_cancelled_job(slurm, tmp_path):
    script = tmp_path / "job.sh"
    # A session of its own: an ended job must not leave these either.
    script.write_text(f"#!/bin/sh\nsrun sh -c 'setsid sleep 600 & touch {tmp_path}/$SLURM_NODEID; wait'\n")
    (number,) = said(slurm.environ, "sbatch", "--parsable", "-N2", "-n2", "--output=/dev/null", script)
    assert wait_for(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    said(slurm.environ, "scancel", number)

    def sleeping():
        return [found for host in slurm.lab.hosts for found in host.named("sleep")]

    assert wait_for(lambda: not sleeping()), sleeping()
    assert wait_for(lambda: list(slurm.states().values()) == ["idle", "idle"])


# The end of a lab.


class Traces:
    """Places to look for leftovers of a lab. Made while it lives."""

    def __init__(self, bridge: str, folder: str, holders: list[int]) -> None:
        self.bridge = bridge
        self.folder = folder
        self._stack = ExitStack()
        self._networks = self._stack.enter_context(pinned(holders))

    def __enter__(self) -> Traces:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def places(lab: Lab) -> dict[str, object]:
        holders = [host.pids["holder"] for host in [*lab.hosts, lab.controller]]
        return {"bridge": lab.bridge, "folder": str(lab.folder), "holders": holders}

    def left(self) -> list[str]:
        links = [link["ifname"] for link in json.loads(ip("-json", "link"))]
        found = [
            f"link {name}" for name in links if name == self.bridge or name.startswith(f"{self.bridge}-")
        ]
        found += [f"{process}" for process in processes_in(self._networks)]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if self.folder in line]
        keeper = Path("/proc", self.bridge.removeprefix("dsl"), "cmdline")
        with suppress(OSError):
            if self.folder in keeper.read_text():
                found.append("its keeper")
        if Path(self.folder).exists():
            found.append(self.folder)
        return found


def test_two_labs_beside_each_other_and_nothing_left(lab):
    mounts = Path("/proc/self/mounts").read_text()
    with Lab(count=3) as other:
        assert [host.name for host in other.hosts] == ["node1", "node2", "node3"]
        assert other.address.rpartition(".")[0] != lab.address.rpartition(".")[0]
        sleeping = other.hosts[2].popen(["sleep", "600"])
        traces = Traces(**Traces.places(other))
        assert traces.left()
    with traces:
        assert traces.left() == []
    assert sleeping.wait(60) == -signal.SIGKILL
    assert Path("/proc/self/mounts").read_text() == mounts
    assert said(lab.environ, "ssh", "node1", "hostname") == ["node1"]


def test_nothing_is_left_of_a_lab_that_failed_half_way(lab, monkeypatch):
    seen = []

    def fail(host):
        seen.append(Traces(**Traces.places(host.lab)))
        raise RuntimeError("no sshd today")

    monkeypatch.setattr(Host, "start_sshd", fail)
    with pytest.raises(RuntimeError, match="no sshd today"):
        Lab().__enter__()
    with seen[0] as traces:
        assert traces.left() == []


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_tests_are_killed(slurm, tmp_path, with_signal):
    inner = tmp_path / "test_inner.py"
    inner.write_text(
        textwrap.dedent("""
        import json, os, time
        from pathlib import Path
        from lab import Lab
        from slurm import Slurm
        from test_lab import Traces

        def test_forever():
            with Lab() as lab, Slurm(lab):
                lab.hosts[0].popen(["sleep", "600"])
                written = Path(os.environ["SEEN"] + ".new")
                written.write_text(json.dumps(Traces.places(lab)))
                written.rename(os.environ["SEEN"])
                time.sleep(600)
        """)
    )
    seen = tmp_path / "seen.json"
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", inner],
        env={**os.environ, "PYTHONPATH": str(HERE), "SEEN": str(seen)}, cwd=tmp_path, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert wait_for(seen.exists, 300)
        traces = Traces(**json.loads(seen.read_text()))
        assert traces.left()
    finally:
        tests.send_signal(with_signal)
        tests.wait(300)
    with traces:
        assert wait_for(lambda: not traces.left()), traces.left()


def test_a_subnet_has_one_owner(lab):
    first, its = claim_subnet()
    second, other = claim_subnet()
    with first, second:
        assert its != other
        assert f"{lab.address.rpartition('.')[0]}.0/24" not in (its, other)


def test_what_is_missing_is_named():
    with pytest.raises(UnavailableError, match="not installed: no-such-a, no-such-b"):
        demand_programs(["no-such-a", "sh", "no-such-b"])

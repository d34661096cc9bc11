"""Devices are chosen, waited for and held, on machines of paper with real locks; and the command that waits."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from asking import finetune_request

from dsrun import catalog
from dsrun.cluster import gpu_locks
from dsrun.cluster.devices import VISIBLE, Gpu, Machine
from dsrun.cluster.gpu_use import BusyError, GpuProcess, GpuUse, LockHolder
from dsrun.errors import DsrunError
from dsrun.jobs.allocation import reservation
from dsrun.jobs.allocation.request import ConnectionOptions, DeviceRequest
from dsrun.jobs.assembly.finetune import plan
from dsrun.jobs.assembly.plan_target import target, visible
from dsrun.options.commands import PlanOptions

GIB = 2**30
ALICE = GpuUse((GpuProcess(1234, 20 * GIB, "alice", "python"),), 20 * GIB)
CPU = Machine("cpu", (), 4, "a machine of paper", 64 * GIB)


def machine(state: str, free=60) -> Machine:
    """ "faf": three GPUs, free, alice's, free; one that a dsrun holds is seen as such."""
    gpus = []
    for index, letter in enumerate(state):
        holder = gpu_locks.holder_of(f"GPU-test-{index}")
        use = GpuUse((), 0, holder) if letter == "f" else ALICE
        gpus.append(Gpu(index, "NVIDIA A100", f"GPU-test-{index}", 80 * GIB, (8, 0), free * GIB, use))
    return Machine("cuda", tuple(gpus), 8, "a machine of paper", 500 * GIB)


@pytest.fixture(autouse=True)
def _own_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(reservation, "POLL_S", 0.01)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said():
    return []


@contextmanager
def reserving(states, said, *, wait_min=None, environ=None):
    """A reservation on a machine that is as each of `states` in turn, and stays as the last."""
    left = list(states)

    def look():
        state = left.pop(0) if len(left) > 1 else left[0]
        return machine(state) if isinstance(state, str) else state

    with reservation.Reservation(look(), environ or {}, look, said.append, wait_min=wait_min) as reserved:
        yield reserved


def holders(count=4):
    return [index for index in range(count) if gpu_locks.holder_of(f"GPU-test-{index}")]


def test_held_until_the_end(said):
    with reserving(["affa"], said) as reserved:
        taken = reserved.allocate(DeviceRequest(gpus=2))
        assert taken.devices == (1, 2)
        assert holders() == [1, 2]
    assert holders() == []
    assert said == []
    assert [note.partition(" ")[2][0] for note in reserved.notes] == ["0", "3"]


def test_an_error_lets_go(said):
    with pytest.raises(ZeroDivisionError), reserving(["ff"], said) as reserved:
        reserved.allocate(DeviceRequest(gpus=1))
        raise ZeroDivisionError
    assert holders() == []


def test_two_dsrun_take_different_gpus(said):
    with reserving(["ffff"], said) as first, reserving(["ffff"], said) as second:
        # Both looked before either took: the one that comes second sees it when it locks.
        assert first.allocate(DeviceRequest(gpus=2)).devices == (0, 1)
        assert second.allocate(DeviceRequest(gpus=2)).devices == (2, 3)
        with pytest.raises(BusyError, match="GPU"), reserving(["ffff"], said) as third:
            third.allocate(DeviceRequest(gpus=1))
        with pytest.raises(BusyError, match="another dsrun"), reserving(["ffff"], said) as third:
            third.allocate(DeviceRequest(devices="1"))


def test_a_named_gpu_that_others_use_is_taken(said):
    with reserving(["fa"], said) as reserved:
        assert reserved.allocate(DeviceRequest(devices="1")).devices == (1,)
        assert "used anyway" in reserved.notes[0]


def test_a_lost_race_that_never_ends(said, monkeypatch):
    def always(*_):
        raise BusyError("another dsrun was faster", [])

    monkeypatch.setattr(gpu_locks, "locked", always)
    with pytest.raises(BusyError, match="faster"), reserving(["ff"], said) as reserved:
        reserved.allocate(DeviceRequest(gpus=1))


@pytest.mark.parametrize(
    ("gpus", "devices", "expected"), [(2, None, (0, 1)), (None, "1,2", (1, 2)), (None, None, (0,))]
)
def test_waited_for(said, gpus, devices, expected):
    with reserving(["aaa", "aaa", "faa", "ffa", "fff"], said, wait_min=math.inf) as reserved:
        assert reserved.allocate(DeviceRequest(gpus=gpus, devices=devices)).devices == expected
    assert len(said) == 1
    assert said[0].startswith("waiting")
    assert "alice's python (pid 1234, 20.0 GiB)" in said[0]


def test_waited_for_in_vain(said):
    with (
        pytest.raises(DsrunError, match=r"0\.001 minutes.*--gpus 2"),
        reserving(["fa"], said, wait_min=0.001) as reserved,
    ):
        reserved.allocate(DeviceRequest(gpus=2))
    assert holders() == []


def test_no_wait_for_what_can_not_be(said):
    with (
        pytest.raises(DsrunError, match="2 GPUs"),
        reserving(["fa"], said, wait_min=math.inf) as reserved,
    ):
        reserved.allocate(DeviceRequest(gpus=3))
    assert said == []


def test_gpus_that_stop_answering(said):
    with (
        pytest.raises(DsrunError, match="paper"),
        reserving(["aa", CPU], said, wait_min=math.inf) as reserved,
    ):
        reserved.allocate(DeviceRequest(gpus=1))


def test_on_a_cpu_nothing_is_held(said):
    with reserving([CPU], said, wait_min=math.inf) as reserved:
        assert reserved.allocate(DeviceRequest(gpus=3)).devices == (0, 1, 2)
    assert not gpu_locks.FOLDER.exists()


def test_memory_is_looked_at_when_the_lock_is_held(said):
    seen = []

    def look():
        seen.append(holders())
        return machine("ff", free=7)

    with reservation.Reservation(machine("ff"), {}, look, said.append) as reserved:
        assert reserved.allocate(DeviceRequest(gpus=1)).machine.gpus[0].memory_free_bytes == 7 * GIB
    assert seen == [[0]]


def test_a_job_gets_what_was_reserving(said, monkeypatch):
    monkeypatch.setattr("dsrun.cluster.extensions.nvcc_fault", lambda environ: "no nvcc")
    with reserving(["affa"], said) as reserved:
        planned = plan(finetune_request(gpus=1), reserved.machine, {}, allocator=reserved)
        assert planned.job.hosts[0].devices == (1,)
        assert sum(note.startswith("GPU ") for note in planned.notes) == 2
        assert holders() == [1]


def test_a_plan_alone_holds_nothing(monkeypatch):
    monkeypatch.setattr("dsrun.cluster.extensions.nvcc_fault", lambda environ: "no nvcc")
    planned = plan(finetune_request(), machine("affa"), {})
    assert planned.job.hosts[0].devices == (1, 2)
    assert not gpu_locks.FOLDER.exists()
    with pytest.raises(DsrunError, match="GPU"):
        plan(finetune_request(), machine("aaaa"), {})
    alone = plan(finetune_request(), reservation.idle(machine("aaaa")), {})
    assert alone.job.hosts[0].devices == (0, 1, 2, 3)


@pytest.mark.parametrize("seen", [None, "3,2", "2,3,0", "0,1"])
@pytest.mark.parametrize("count", [None, 1, 2])
@pytest.mark.parametrize("state", ["ffff", "afff", "fafa"])
def test_what_is_planned_for_is_what_finetune_takes(state, count, seen):
    """A memory of its own for each GPU shows which of them the planner took: the scarcest counts."""
    from dataclasses import replace

    there = machine(state)
    sizes = tuple(replace(gpu, memory_free_bytes=(10 + gpu.index) * GIB) for gpu in there.gpus)
    there, environ = replace(there, gpus=sizes), {} if seen is None else {VISIBLE: seen}
    try:
        taken = reservation.Preview(there, environ).allocate(DeviceRequest(gpus=count)).devices
    except BusyError:
        return
    room = target(PlanOptions(gpus=count), visible(there, environ)).room
    assert (room.gpus, room.gpu_bytes) == (len(taken), (10 + min(taken)) * GIB)


def test_a_plan_for_busy_gpus_says_so():
    found = target(PlanOptions(gpus=2), machine("aaf"))
    assert found.room.gpus == 2
    (note,) = found.notes
    assert "alice's python (pid 1234, 20.0 GiB)" in note
    assert target(PlanOptions(gpus=1), machine("aaf")).notes == ()


# The command, with NVML alone a stand-in

NVML = """
import json, os, types
class NVMLError(Exception): pass
nvmlMemory_v2 = 2
GPUS = json.load(open(os.environ["TEST_GPUS"]))
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: len(GPUS)
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda handle: "NVIDIA A100-SXM4-80GB"
nvmlDeviceGetUUID = lambda handle: f"GPU-of-paper-{os.getppid()}-{handle}"
nvmlDeviceGetCudaComputeCapability = lambda handle: (8, 0)
def nvmlDeviceGetMemoryInfo(handle, version=None):
    used = GPUS[handle] * 2**30
    return types.SimpleNamespace(total=80 * 2**30, free=80 * 2**30 - used, used=used)
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [types.SimpleNamespace(pid=2**22 + 7, usedGpuMemory=None)] if GPUS[handle] else []
"""


@pytest.fixture
def ask(tmp_path):
    """`ask(gib, *args)`: dsrun finetune in a process of its own; gib: what is in use on each GPU."""
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "pynvml.py").write_text(NVML)
    environ = {
        **os.environ, "DS_ACCELERATOR": "cuda", "TEST_GPUS": str(tmp_path / "gpus.json"), "HOME": str(tmp_path),
        "PYTHONPATH": f"{tmp_path / 'fake'}:{catalog.PACKAGE.parent}", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    environ.pop(VISIBLE, None)
    started = []

    def run(gib, *args):
        (tmp_path / "gpus.json").write_text(json.dumps(gib))
        process = subprocess.Popen(
            [sys.executable, "-m", "dsrun", "finetune", "llama-tiny", *args], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=environ, cwd=tmp_path,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_dry_run_says_what_is_left_out(ask):
    process = ask([0, 20, 0], "--dry-run", "--json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["job"]["hosts"][0]["devices"] == [0, 2]
    assert "note: GPU 1 " in err
    assert "pid 4194311" in err


def test_all_are_in_use(ask, tmp_path):
    process = ask([20, 20], "--gpus", "1")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "--gpus 1" in err
    assert "--wait" in err
    assert not (tmp_path / "runs").exists()
    process = ask([20, 20], "--wait", "--dry-run")
    assert "2 ranks (cuda), launcher local" in process.communicate(timeout=60)[0]


def test_a_wait_ends_with_ctrl_c(ask, tmp_path):
    process = ask([20, 20], "--gpus", "1", "--wait")
    for line in process.stderr:
        if line.startswith("waiting"):
            break
    assert line.count("pid 4194311") == 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in err, "Traceback" in err) == (130, True, False)
    assert not (tmp_path / "runs").exists()


def test_a_wait_that_ends_by_itself(ask):
    process = ask([20], "--wait-timeout", "0")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "0 minutes" in err


def test_what_is_wrong_is_said_before_the_wait(ask):
    process = ask([20], "--wait", "--preset", "zero2-ofload")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "zero2-offload" in err
    assert "waiting" not in err


def test_a_time_that_is_none(ask):
    for minutes in ("nan", "inf", "-1"):
        process = ask([0], "--wait-timeout", minutes)
        assert "--wait-timeout" in process.communicate(timeout=60)[1]
        assert process.returncode == 2


@pytest.mark.parametrize("resume", [False, True])
def test_the_command_holds_them_while_it_runs(monkeypatch, tmp_path, resume):
    from click.testing import CliRunner

    from dsrun.cli import finetune
    from dsrun.job.run_folder import JOB

    seen = []

    def run(job, where, *_, **__):
        seen.append((job.hosts[0].devices, holders(), where.gpus[1].use))
        (tmp_path / "a run").mkdir(exist_ok=True)
        (tmp_path / "a run" / JOB).write_text(job.to_json(), encoding="utf-8")

    monkeypatch.setattr("dsrun.cluster.extensions.nvcc_fault", lambda environ: "no nvcc")
    monkeypatch.setattr("dsrun.cluster.devices.detect", lambda _: machine("affa"))
    monkeypatch.setattr(finetune, "run", run)
    arguments = ["llama-tiny", "--output-dir", str(tmp_path / "a run")]
    for more in [["--gpus", "1"], ["--resume"]][: 1 + resume]:
        done = CliRunner().invoke(finetune.command, [*arguments, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert "alice's python" in done.output
        (devices, held, use) = seen.pop()
        assert (devices, held) == ((1,), [1])
        assert use.holder.pid == os.getpid()  # it was looked at with the lock held
        assert holders() == []


def test_this_machines_part_of_a_job_is_held(said, monkeypatch):
    """Other hosts' GPUs are held by the agents there."""
    monkeypatch.setattr("socket.gethostname", lambda: "w1")
    with reservation.Reservation(
        machine("ffff"), {}, lambda: machine("ffff"), said.append, connection=ConnectionOptions(check=False)
    ) as reserved:
        placed = reserved.allocate(DeviceRequest(hosts="w1:4,w2:4", gpus=2))
        assert [host.devices for host in placed.hosts] == [(0, 1), (0, 1)]
        assert (placed.gpus_here, holders(), placed.launcher) == ((0, 1), [0, 1], "ssh")
    with reservation.Reservation(
        machine("ff"), {}, lambda: machine("ff"), said.append, connection=ConnectionOptions(check=False)
    ) as reserved:
        reserved.allocate(DeviceRequest(hosts="w2:4,w3:4"))
        assert holders() == []


def test_waiting_is_for_this_machine(said, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "w1")
    states = ["aa", "fa", "ff"]
    look = lambda: machine(states.pop(0) if len(states) > 1 else states[0])  # noqa: E731
    reach = ConnectionOptions(check=False)
    with reservation.Reservation(
        look(), {}, look, said.append, connection=reach, wait_min=math.inf
    ) as reserved:
        assert reserved.allocate(DeviceRequest(hosts="w1:2,w2:2")).gpus_here == (0, 1)
    assert "alice's" in said[0]


def test_who_holds_it_is_said(said, monkeypatch):
    monkeypatch.setattr(gpu_locks, "_locker", lambda _: None)  # bob's process is another container's
    who = LockHolder("bob", 98, since="2026-01-02 03:04")
    with (
        gpu_locks.locked(["GPU-test-0"], who),
        pytest.raises(BusyError, match=r"bob's dsrun \(pid 98"),
        reserving(["fa"], said) as reserved,
    ):
        reserved.allocate(DeviceRequest(gpus=1))

"""Users of a GPU, from NVML and the process table, and messages about them. NVML alone is a stand-in."""

from __future__ import annotations

import os
import pwd
import sys
import types

import psutil
import pytest

from dsrun.cluster import gpu_locks, gpu_use
from dsrun.cluster.devices import Gpu, Machine, detect
from dsrun.cluster.gpu_use import GpuProcess, GpuUse, LockHolder, in_use, in_words, query
from dsrun.words import printable

GIB = 2**30
ALICE = GpuProcess(1234, int(20.1 * GIB), "alice", "python")


class NVMLError(Exception):
    pass


def fails(*_arguments, **_options):
    raise NVMLError("Not Supported")


def entry(pid, used):
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)


@pytest.fixture
def nvml(monkeypatch):
    """`nvml(processes=, used=, ...)`: a stand-in for pynvml with one GPU."""

    def pretend(processes=(), used=0, reserved=None, **functions):
        module = types.ModuleType("pynvml")
        module.NVMLError = NVMLError
        module.nvmlDeviceGetComputeRunningProcesses = lambda _handle: list(processes)

        def memory(_handle, version=None):
            if reserved is None and version is not None:
                raise NVMLError("Function Not Found")
            own = used + (reserved or 0) * (version is None)
            return types.SimpleNamespace(total=80 * GIB, free=80 * GIB - own, used=own)

        module.nvmlDeviceGetMemoryInfo = memory
        module.nvmlMemory_v2 = 0x2000028
        for name in ("nvmlInit", "nvmlShutdown"):
            setattr(module, name, lambda: None)
        module.nvmlDeviceGetCount = lambda: 1
        module.nvmlDeviceGetHandleByIndex = lambda index: index
        module.nvmlDeviceGetName = lambda _handle: "NVIDIA A100"
        module.nvmlDeviceGetUUID = lambda _handle: "GPU-0"
        module.nvmlDeviceGetCudaComputeCapability = lambda _handle: (8, 0)
        for name, function in functions.items():
            setattr(module, name, function)
        monkeypatch.setitem(sys.modules, "pynvml", module)

    return pretend


@pytest.fixture
def own_pids(monkeypatch):
    monkeypatch.setattr(gpu_use, "pids_are_the_machines", lambda: True)


@pytest.mark.parametrize(
    ("use", "busy", "text"),
    [
        (GpuUse(), False, "unknown"),
        (GpuUse((), 0), False, "nobody"),
        (GpuUse((), GIB), False, "nobody"),
        (GpuUse(None, 0), False, "nobody"),
        (GpuUse((), GIB + 1), True, "1.0 GiB by processes that can't be seen from here"),
        (GpuUse(None, 3 * GIB), True, "3.0 GiB by processes that can't be seen from here"),
        (GpuUse((ALICE,), 0), True, "alice's python (pid 1234, 20.1 GiB)"),
        (GpuUse((ALICE,), None), True, "alice's python (pid 1234, 20.1 GiB)"),
        (GpuUse((GpuProcess(5),), 0), True, "a process (pid 5, memory unknown)"),
        (GpuUse((GpuProcess(5, GIB, None, "java"),), 0), True, "java (pid 5, 1.0 GiB)"),
        (GpuUse((GpuProcess(5, GIB, "bob"),), 0), True, "bob's process (pid 5, 1.0 GiB)"),
        (GpuUse((ALICE, GpuProcess(5)), 0), True,
            "alice's python (pid 1234, 20.1 GiB), a process (pid 5, memory unknown)"),
        (GpuUse((ALICE,) * 7, 0), True, ", ".join(["alice's python (pid 1234, 20.1 GiB)"] * 3) + " and 4 more"),
        (GpuUse((ALICE,), 0, LockHolder("bob", 7, "/runs/x", "2026-01-02 03:04")), True,
         "bob's dsrun (pid 7, since 2026-01-02 03:04, run folder /runs/x)"),
        (GpuUse((), 0, LockHolder("bob", 7)), True, "bob's dsrun (pid 7)"),
        (GpuUse((), 0, LockHolder()), True, "another dsrun"),
    ],
)  # fmt: skip
def test_busy_and_in_words(use, busy, text):
    assert (use.busy, str(use)) == (busy, text)


def test_the_whole_line():
    assert in_words(3, GpuUse((ALICE,))) == "GPU 3 is in use: alice's python (pid 1234, 20.1 GiB)"


def test_only_what_is_busy_is_in_use():
    uses = [None, GpuUse(), GpuUse((), 0), GpuUse((ALICE,)), GpuUse((), 0, LockHolder())]
    gpus = tuple(Gpu(i, "A100", f"GPU-{i}", 80 * GIB, (8, 0), use=use) for i, use in enumerate(uses))
    assert set(in_use(Machine("cuda", gpus, 8, ""))) == {3, 4}
    assert in_use(Machine("cpu", gpus, 8, "")) == {}


@pytest.mark.usefixtures("own_pids")
def test_a_real_process_and_its_owner(nvml):
    nvml([entry(os.getpid(), 2 * GIB)], used=3 * GIB)
    me = psutil.Process()
    assert query(0) == GpuUse(
        (GpuProcess(os.getpid(), 2 * GIB, pwd.getpwuid(os.getuid()).pw_name, me.name()),), 3 * GIB
    )


@pytest.mark.usefixtures("own_pids")
@pytest.mark.parametrize("used", [None, 2**64 - 1])
def test_a_process_that_ended_and_has_no_size(nvml, used):
    nvml([entry(2**22 + 1, used)])
    assert query(0).processes == (GpuProcess(2**22 + 1),)


@pytest.mark.usefixtures("own_pids")
def test_a_process_that_may_not_be_looked_at(nvml, monkeypatch):
    def denied(_self):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "username", denied)
    nvml([entry(os.getpid(), GIB)])
    assert query(0).processes == (GpuProcess(os.getpid(), GIB),)


def test_in_a_container_a_pid_is_nobodys(nvml, monkeypatch):
    """The number is the machine's: the container's own process of that number is another one."""
    monkeypatch.setattr(gpu_use, "FIRST_PID_NAMESPACE", "pid:[1]")
    nvml([entry(os.getpid(), GIB)])
    assert query(0).processes == (GpuProcess(os.getpid(), GIB),)


def test_nvml_that_knows_nothing(nvml):
    nvml(nvmlDeviceGetComputeRunningProcesses=fails, nvmlDeviceGetMemoryInfo=fails)
    assert query(0) == GpuUse()
    assert query(0).unknown


def test_what_the_driver_reserves_is_nobodys(nvml):
    nvml(used=GIB // 2, reserved=GIB)
    assert not query(0).busy
    nvml(used=GIB + GIB // 2)  # an older driver doesn't tell them apart
    assert query(0).used_bytes == GIB + GIB // 2


def test_a_machine_is_detected_with_its_users(nvml, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_locks, "FOLDER", tmp_path / "locks")
    monkeypatch.setattr(gpu_use, "pids_are_the_machines", lambda: False)
    nvml([entry(7, GIB)], used=2 * GIB)
    environ = {"DS_ACCELERATOR": "cuda"}
    assert in_use(detect(environ)) == {0: GpuUse((GpuProcess(7, GIB),), 2 * GIB)}
    me = gpu_locks.this_process()
    with gpu_locks.locked(["GPU-0"], me):
        assert in_use(detect(environ))[0].holder == me
    assert in_use(detect(environ))[0].holder is None


def test_other_peoples_text_does_not_steer_the_terminal():
    assert printable("a\x1b[2Jb\nc\u202ed 训练") == "a\\x1b[2Jb\\nc\\u202ed 训练"
    assert printable("x" * 10_000, 200) == "x" * 200 + "..."

"""The use of a GPU at this moment: compute processes as NVML shows them, memory in use, and their owners."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import DsrunError
from dsrun.words import printable, size_text

if TYPE_CHECKING:
    from dsrun.cluster.devices import Machine

MUCH_BYTES = 1 << 30
"""More in use than this is somebody's work, also where NVML shows no process (in a container it often does not). What
nobody's work takes stays below: a desktop some hundred MiB, the driver itself as much where it counts that as used."""
NOT_AVAILABLE = 1 << 63
"""NVML answers 2^64 - 1 for a process whose memory it can't tell (NVML_VALUE_NOT_AVAILABLE); pynvml mostly None."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The machine's own (PROC_PID_INIT_INO, include/linux/proc_ns.h). NVML counts pids there; in a container's own the
same number is another process, or none."""
LONGEST_NAME = 200
"""Characters of other people's names that are shown."""
SHOWN_PROCESSES = 3
"""Processes of a GPU that are named; the rest is only counted."""


class BusyError(DsrunError):
    """Too few GPUs are free: what `--wait` waits for to pass."""

    def __init__(self, what: str, lines: list[str], *, hint: str = "") -> None:
        super().__init__("\n  ".join([what, *lines]), hint=hint)
        self.lines = lines
        """The owners of the others, a line each."""


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on a GPU; a field is None where NVML doesn't say."""

    pid: int
    used_bytes: int | None = None
    """Memory of the GPU that it has."""
    user: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        """ "alice's python (pid 1234, 20.1 GiB)"."""
        size = "memory unknown" if self.used_bytes is None else size_text(self.used_bytes)
        program = self.name or ("process" if self.user else "a process")
        return f"{owned(self.user, program)} (pid {self.pid}, {size})"


@dataclass(frozen=True)
class LockHolder:
    """The dsrun that holds a GPU. Empty text and pid 0 where its note can't be read."""

    user: str = ""
    pid: int = 0
    run_dir: str = ""
    since: str = ""
    """The start of its hold, in local time."""
    program: str = "dsrun"
    """The program that has the lock, where it is known not to be a dsrun."""

    def __str__(self) -> str:
        """ "alice's dsrun (pid 1234, since 2026-11-21 09:30, run folder /home/alice/runs/x)"."""
        facts = {"pid": self.pid, "since": self.since, "run folder": self.run_dir}
        known = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
        if not self.user:
            return "another dsrun"
        past = "" if self.program == "dsrun" else "; DSRUN_GPU_LOCKS names another folder of locks"
        return owned(self.user, self.program) + (f" ({known})" if known else "") + past


@dataclass(frozen=True)
class GpuUse:
    """A GPU's use at one moment."""

    processes: tuple[GpuProcess, ...] | None = None
    """Processes that compute on it; None where NVML can't tell."""
    used_bytes: int | None = None
    """Memory in use; None where NVML can't tell."""
    holder: LockHolder | None = None
    """The dsrun that has it."""

    @property
    def busy(self) -> bool:
        """Whether somebody has it: it is held by a dsrun, computed on, or has more than MUCH_BYTES in use."""
        return bool(self.holder or self.processes) or (self.used_bytes or 0) > MUCH_BYTES

    @property
    def unknown(self) -> bool:
        """Whether nothing at all is known of it. Such a GPU counts as free."""
        return self.holder is None and self.processes is None and self.used_bytes is None

    def __str__(self) -> str:
        """Its users, in words; "unknown" or "nobody" where there are none."""
        if self.holder:
            return str(self.holder)  # its ranks are the processes
        if self.processes:
            more = len(self.processes) - SHOWN_PROCESSES
            shown = ", ".join(map(str, self.processes[:SHOWN_PROCESSES]))
            return shown + (f" and {more} more" if more > 0 else "")
        if self.busy:
            return f"{size_text(self.used_bytes or 0)} by processes that can't be seen from here"
        return "unknown" if self.unknown else "nobody"


def in_use(machine: Machine) -> dict[int, GpuUse]:
    """The GPUs that somebody has, by index, as they were when the machine was looked at; none on a CPU machine."""
    if machine.accelerator == "cpu":
        return {}
    return {gpu.index: gpu.use for gpu in machine.gpus if gpu.use is not None and gpu.use.busy}


def in_words(index: int, use: GpuUse) -> str:
    """ "GPU 3 is in use: alice's python (pid 1234, 20.1 GiB)"."""
    return f"GPU {index} is in use: {use}"


def query(handle: Any, holder: LockHolder | None = None) -> GpuUse:
    """Ask NVML about one GPU, between nvmlInit and nvmlShutdown. What it can't answer is None, never an error."""
    import pynvml

    processes: tuple[GpuProcess, ...] | None
    try:
        entries = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        processes = tuple(_process(entry.pid, entry.usedGpuMemory) for entry in entries)
    except pynvml.NVMLError:
        processes = None
    return GpuUse(processes, _used_bytes(handle), holder)


def _used_bytes(handle: Any) -> int | None:
    """Memory in use, without what the driver reserves for itself where NVML tells them apart (drivers from 510 on)."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError, AttributeError, TypeError):  # an older driver; older bindings
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError:
            return None
    return int(memory.used)


def _process(pid: int, used: int | None) -> GpuProcess:
    size = None if used is None or used >= NOT_AVAILABLE else int(used)
    if not pids_are_the_machines():
        return GpuProcess(pid, size)
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return GpuProcess(
                pid,
                size,
                printable(process.username(), LONGEST_NAME),
                printable(process.name(), LONGEST_NAME),
            )
    except psutil.Error:  # it has ended, or /proc shows other users' processes to nobody (hidepid)
        return GpuProcess(pid, size)


def pids_are_the_machines() -> bool:
    """Whether this process sees the machine's own pids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == FIRST_PID_NAMESPACE
    except OSError:
        return False


def owned(user: str | None, program: str) -> str:
    """ "alice's python"; the program alone where its owner is unknown."""
    return f"{user}'s {program}" if user else program

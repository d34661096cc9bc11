"""Processes of a job: ending them all, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from dsrun.job.layout import RANK_MODULE

GRACE_S = 10.0
LOOK_S = 0.05


class TerminatedError(Exception):
    """SIGTERM reached dsrun."""


class TimeLimitError(TerminatedError):
    """SIGUSR1: the scheduler says that the job's time is nearly over."""


class TerminalClosedError(TerminatedError):
    """SIGHUP: the terminal that dsrun was started in is gone."""


REQUESTS: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: TerminatedError,
    signal.SIGHUP: TerminalClosedError,
    signal.SIGUSR1: TimeLimitError,
}
"""The signals that ask a job to end, and what each raises."""


@contextlib.contextmanager
def handled(handlers: Mapping[int, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Take signals over, and give them back. SIGHUP only where nobody has it ignored, as nohup does."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    taken = {
        number: handler for number, handler in handlers.items() if number != signal.SIGHUP or not ignored
    }
    before = {number: signal.signal(number, handler) for number, handler in taken.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def requests_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise inside, so that a job's processes are ended before dsrun is."""

    def handler(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the kernel sends it, and the shell once more
            signal.signal(number, signal.SIG_IGN)
        raise REQUESTS[number]

    with handled(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), handler)):
        yield


def lives(process: psutil.Process | int) -> bool:
    """Whether the process still runs; one that only waits to be collected does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, or is held by a debugger: it can do nothing."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
    return False


def exit_code_of(pid: int) -> int | None:
    """The exit code of a process that has ended and that nobody has collected yet, -N for signal N (proc(5), the last
    field of stat); None where it runs, is gone, or is another user's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        )
        if fields[0] in ("Z", "X"):
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None


def rank_process(pid: int) -> psutil.Process | None:
    """The rank with this process id; None where it is gone, and its number maybe a stranger's."""
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        process = psutil.Process(pid)
        return process if RANK_MODULE in process.cmdline() else None
    return None


def session_of(pid: int) -> int:
    """The session of a process; 0 where the process is gone."""
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


def end_processes(
    root: int, ranks: list[int], grace_s: float = GRACE_S, hurried: Callable[[], bool] = lambda: False
) -> None:
    """End a session's leader, all of its session, and the given ranks with everything below them.

    SIGTERM first. SIGKILL follows after grace_s seconds, or at once where dsrun is interrupted again meanwhile or
    `hurried`, called again and again, says so.
    """
    family = _family(root, ranks)
    _signal(family, psutil.Process.terminate)
    with contextlib.suppress(KeyboardInterrupt, TerminatedError):
        if _all_ended(family, grace_s, hurried):
            return
    # Again: a process may have started children since it was first asked.
    family = [*family, *_family(root, ranks)]
    _signal(family, psutil.Process.kill)
    while True:
        # A third interruption changes nothing either: SIGKILL is out, and this only waits for it to be carried out.
        with contextlib.suppress(KeyboardInterrupt, TerminatedError):
            _all_ended(family, GRACE_S)
            return


def _all_ended(
    processes: list[psutil.Process], timeout_s: float, hurried: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until all have ended; False where they have not in time.

    One that nobody has collected yet has ended: psutil.wait_procs would wait for ever where process 1 collects none (a
    container without an init), and would itself take the exit codes of this process's children.
    """
    deadline = time.monotonic() + timeout_s
    while any(map(lives, processes)):
        if time.monotonic() >= deadline or hurried():
            return False
        time.sleep(LOOK_S)
    return True


def _family(root: int, ranks: list[int]) -> list[psutil.Process]:
    """Every process of root's session (a child of a killed rank has no parent any more), and the ranks' own."""
    family: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        if pid == root or session_of(pid) == root:
            with contextlib.suppress(psutil.NoSuchProcess):
                family[pid] = psutil.Process(pid)
    for process in [family.get(root), *map(rank_process, ranks)]:
        with contextlib.suppress(psutil.Error):
            if process:
                family |= {entry.pid: entry for entry in [process, *process.children(recursive=True)]}
    return list(family.values())


def _signal(processes: list[psutil.Process], action: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            action(process)


def remove_shared_memory(master: tuple[str, int]) -> None:
    """Delete the buffers that DeepSpeed's CPU collectives leave in /dev/shm: 69 MB a rank, after a clean exit too.

    master: address and port of the job, which are part of their names.
    """
    address, port = master
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{address}_{port}_*"):  # noqa: S108
        with contextlib.suppress(OSError):
            path.unlink()

"""End a running job from its folder: ask the dsrun that holds it, and wait until nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass

import psutil

from dsrun.errors import DsrunError
from dsrun.file_lock import is_holder
from dsrun.job.processes import lives, rank_process, session_of
from dsrun.job.run_folder import LOCK, describe_state, in_use, request_checkpoint
from dsrun.jobs.runs.past_runs import Run

POLL_S = 0.1
AGAIN = "It is still ending. The same command again is a second request, which kills what has not ended."


@dataclass(frozen=True)
class Stopped:
    """The outcome of a stop."""

    state: str
    processes: int
    """Number of processes that were there."""
    seconds: float


def stop(run: Run, timeout_s: float, *, save: bool = False) -> Stopped:
    """End the run and every process of it. save: the ranks are asked to write a checkpoint and end by themselves.

    The process in run.json is asked (SIGTERM), and only if it is a dsrun that holds this folder's lock: process ids
    are reused. Raises DsrunError for a run that is not running, that is held by somebody else or on another host, or
    that has not ended after timeout_s seconds.
    """
    if not in_use(run.path):
        raise DsrunError(f"is not running ({run.state})", where=str(run.path))
    began = time.monotonic()
    root = _ask(run)
    known = {root.pid: root}
    sessions: set[int] = set()
    _add_family(known, sessions, run)
    if save:
        request_checkpoint(run.path, then_stop=True)
    else:
        _request(root, run)
    while left := [process for process in known.values() if lives(process)]:
        if time.monotonic() - began > timeout_s:
            names = ", ".join(f"{process.pid} ({_name(process)})" for process in left)
            raise DsrunError(
                f"has not ended after {timeout_s:g} s; still there: {names}", where=str(run.path), hint=AGAIN
            )
        time.sleep(POLL_S)
        _add_family(known, sessions, run)
    return Stopped(describe_state(run.path), len(known), time.monotonic() - began)


def _ask(run: Run) -> psutil.Process:
    """The dsrun that holds the run. Raises DsrunError where the process in run.json is not that one."""
    where, pid = str(run.path), run.record.get("pid")
    if not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        raise DsrunError("is held, and run.json names no process", where=where, hint="Try again in a moment.")
    if run.host and run.host != socket.gethostname():
        raise DsrunError(f"runs on {run.host}", where=where, hint="Stop it there.")
    try:
        process = psutil.Process(pid)
        if any("dsrun" in word for word in process.cmdline()) and is_holder(run.path / LOCK, pid):
            return process
    except (psutil.NoSuchProcess, ProcessLookupError, OverflowError):
        pass
    except (psutil.AccessDenied, PermissionError):
        raise _not_ours(run, pid) from None
    raise DsrunError(
        f"is held, but not by process {pid}, which run.json names; nothing was stopped",
        where=where,
        hint="Was it started on another host or in a container? Stop it there. If it is only just starting, try again.",
    )


def _request(process: psutil.Process, run: Run) -> None:
    """SIGTERM to exactly this process, even if its number is given to another at this moment."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # gone, or a kernel before 5.3: psutil compares the times of birth
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        return
    try:
        if process.is_running() and is_holder(run.path / LOCK, process.pid):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except (ProcessLookupError, FileNotFoundError):
        pass  # it has just ended by itself
    except PermissionError:
        raise _not_ours(run, process.pid) from None
    finally:
        os.close(handle)


def _not_ours(run: Run, pid: int) -> DsrunError:
    owner = "another user"
    with contextlib.suppress(psutil.Error, KeyError):
        owner = psutil.Process(pid).username()
    return DsrunError(f"belongs to {owner} (process {pid}); nothing was stopped", where=str(run.path))


def _add_family(known: dict[int, psutil.Process], sessions: set[int], run: Run) -> None:
    """Add what descends from the known processes, what is in the sessions that they opened, and the ranks."""
    first = next(iter(known.values()))
    own = session_of(first.pid)
    pids = [state["pid"] for state in run.ranks if isinstance(state.get("pid"), int)]
    for process in [first, *(rank_process(pid) for pid in pids if pid not in known)]:
        with contextlib.suppress(psutil.Error):
            if process and process.is_running():
                for member in [process, *process.children(recursive=True)]:
                    known.setdefault(member.pid, member)
    # Only sessions that a known process leads: another one may be the shell's, with the user's other programs in it.
    sessions |= {
        session for pid in known if (session := session_of(pid)) and session != own and session in known
    }
    for pid in psutil.pids() if sessions else []:
        if pid not in known and session_of(pid) in sessions:
            with contextlib.suppress(psutil.Error):
                known[pid] = psutil.Process(pid)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return "?"

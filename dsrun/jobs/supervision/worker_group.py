"""The ranks of one host: started through DeepSpeed's launcher, watched, and ended. The one module that starts ranks.

DeepSpeed's launcher leaves its ranks running when it is killed; here nothing is left, whatever ends first.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from dsrun.errors import DsrunError
from dsrun.files import json_text, write_atomic
from dsrun.host.memory import host_ram, oom_kills
from dsrun.job.layout import STACK_SIGNAL, STATE, resident_file, stack_file, state_file
from dsrun.job.processes import (
    GRACE_S,
    end_processes,
    exit_code_of,
    is_stopped,
    lives,
    rank_process,
    remove_shared_memory,
)
from dsrun.job.rank_state import FAILED, FINISHED, RUNNING, STOPPED, read_state
from dsrun.job.run_folder import launcher_log, rank_log
from dsrun.jobs.diagnosis.ends import HostEnd, RankEnd
from dsrun.jobs.diagnosis.logs import end_of

LOOK_S, LATER_LOOK_S = 0.2, 2.0
"""Between two looks at the folder of the ranks' states: until all of them are there, and after that."""
SAMPLE_S = 1.0
"""Between two looks at the host's memory."""
PY_SPY_S = 5.0
"""Time for py-spy to take the stack of one rank."""
MOST_OUTPUT = 8000
"""Characters of the launcher's output that are told."""


class WorkerGroup:
    """The job's part on this host. host: its number, from 0; ranks: the global ones that run here."""

    def __init__(self, run_dir: Path, host: int, ranks: Sequence[int]) -> None:
        self.host, self._run_dir = host, run_dir
        self.ranks = RankWatch(run_dir, ranks)
        self.logs = [run_dir / rank_log(rank) for rank in ranks]
        self._told: set[int] = set()
        self._has_stacks = False
        self._process: subprocess.Popen[bytes] | None = None
        self._master = ("", 0)
        self._ooms_before = oom_kills()
        self._log = run_dir / launcher_log(host)
        self._log_before = 0
        self._sampled_at = 0.0
        ram = host_ram()
        self._least_ram, self._total_ram = ram.available, ram.total
        self._resident: dict[int, int] = {}
        """Most bytes that each rank was seen to have resident."""

    def start(self, argv: Sequence[str], env: Mapping[str, str], master: tuple[str, int]) -> None:
        """Start the launcher in a session of its own. master: address and port that the ranks meet at."""
        self._master = master
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log_before = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        return self._process.poll() if self._process else None

    def new_ends(self) -> list[RankEnd]:
        """The ranks that have ended without finishing since the last call."""
        if time.monotonic() - self._sampled_at >= SAMPLE_S:
            self._sampled_at = time.monotonic()
            self._least_ram = min(self._least_ram, host_ram().available)
            self._sample_ranks()
        self.ranks.look(at_once=self.code is not None)
        new = [end for rank, end in self.ranks.ends.items() if rank not in self._told]
        self._told |= {end.rank for end in new}
        return new

    def _sample_ranks(self) -> None:
        """Note what each rank's process has resident."""
        for rank, pid in self.ranks.living().items():
            with contextlib.suppress(psutil.Error):
                resident = psutil.Process(pid).memory_info().rss
                self._resident[rank] = max(self._resident.get(rank, 0), resident)

    def _keep_resident(self, ooms: int) -> None:
        """Write down what the ranks had at most, beside the host's memory: a rank that is killed can't say it."""
        seen = {
            "resident": self._resident, "least_ram_bytes": self._least_ram, "ram_bytes": self._total_ram, "ooms": ooms,
        }  # fmt: skip
        with contextlib.suppress(DsrunError):  # a full disk: the end itself is told all the same
            write_atomic(self._run_dir / resident_file(self.host), json_text(seen), overwrite=True)

    def print_stacks(self) -> list[str]:
        """Have every rank print its threads' stacks into its log. Returns those that can't, and why, in words."""
        self.take_stacks()
        unable = []
        for rank, state in self.ranks.states().items():
            if state["status"] != RUNNING:
                continue
            if is_stopped(state["pid"]):
                unable.append(f"rank {rank} is stopped (kill -CONT {state['pid']} lets it go on)")
            elif not state.get("stacks"):  # the signal would end it
                path = self._run_dir / stack_file(rank)
                taken = path.is_file() and path.stat().st_size
                where = f"; py-spy wrote its stack into {path}" if taken else ""
                unable.append(f"rank {rank} runs in another Python, or has only just begun{where}")
            else:
                with contextlib.suppress(OSError):
                    os.kill(state["pid"], signal.SIGUSR2)
        return unable

    def take_stacks(self) -> None:
        """Have the stacks of the ranks that still run written into their files: by py-spy where it is installed, which
        reads those of another Python, too, else by themselves."""
        if self._has_stacks:
            return
        self._has_stacks, program = True, shutil.which("py-spy")
        dumps: list[tuple[dict[str, Any], int, subprocess.Popen[bytes]]] = []
        for rank, state in self.ranks.states().items():
            process = rank_process(state["pid"]) if state["status"] == RUNNING else None
            if process is None or is_stopped(process.pid):
                continue
            with contextlib.suppress(psutil.Error):
                inside = [process] if state.get("stacks") else process.children()
                for target in inside if program else ():
                    command = [str(program), "dump", "--full-filenames", "--pid", str(target.pid)]
                    dump = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                    dumps.append((state, rank, dump))
                if not program and state.get("stacks"):
                    os.kill(process.pid, STACK_SIGNAL)
        until = time.monotonic() + PY_SPY_S
        for state, rank, dump in dumps:
            text = b""
            try:
                text, _ = dump.communicate(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                dump.kill()
                dump.communicate()
            if dump.returncode == 0:
                with (self._run_dir / stack_file(rank)).open("ab") as file:
                    file.write(text)
            elif state.get("stacks"):  # py-spy may not look: ptrace is forbidden in many containers
                with contextlib.suppress(OSError):
                    os.kill(state["pid"], STACK_SIGNAL)

    def end(self, grace_s: float = GRACE_S, hurried: Callable[[], bool] = lambda: False) -> HostEnd:
        """End what still runs, clear up, and say how it went. hurried: as for `end_processes`."""
        self.ranks.look(at_once=True)
        self.ranks.close()
        code_before = self.code
        if self._process:
            end_processes(self._process.pid, self.ranks.pids(), grace_s, hurried)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            remove_shared_memory(self._master)
        ooms = max(0, oom_kills() - self._ooms_before)
        if self.ranks.ends:
            self._keep_resident(ooms)
        return HostEnd(
            host=self.host,
            code=self.code,
            output=self._output(),
            ooms=ooms,
            least_ram_bytes=self._least_ram,
            ram_bytes=self._total_ram,
            killed_by=max(0, -(code_before or 0)),
            statuses={str(rank): state["status"] for rank, state in self.ranks.states().items()},
        )

    def _output(self) -> str:
        """The launcher's output since it was started."""
        with contextlib.suppress(OSError):
            return end_of(self._log, self._log_before).decode("utf-8", errors="replace")[-MOST_OUTPUT:]
        return ""


class RankWatch:
    """The ranks of this host in a running job, and which of them have ended, in order.

    A thread does nothing but wait for their processes to end: the launcher ends the other ranks a moment after the
    first, and whoever looks later finds them all gone.
    """

    def __init__(self, run_dir: Path, ranks: Sequence[int]) -> None:
        self._run_dir = run_dir
        self._files = {rank: run_dir / state_file(rank) for rank in ranks}
        self._folder, self._looked, self._version, self._changed = run_dir / STATE, 0.0, -1, True
        self.ends: dict[int, RankEnd] = {}
        """Ends of the ranks that did not finish."""
        self._gone_at: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._read: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._waiting = select.epoll()
        self.gone = threading.Event()
        """Set when a rank's process has ended, until somebody clears it."""
        self._closed = False
        self._thread = threading.Thread(target=self._wait, daemon=True, name="dsrun-ranks")
        self._thread.start()

    def _wait(self) -> None:
        while not self._closed:
            for handle, _ in self._waiting.poll(0.2):
                now = time.time()
                self._waiting.unregister(handle)
                for rank in [rank for rank, own in list(self._handles.items()) if own == handle]:
                    # At once: the launcher collects it within its next look, and with it the kernel's word.
                    if (code := exit_code_of(self._read[rank][1]["pid"])) is not None:
                        self._codes[rank] = code
                    self._gone_at[rank] = now
                self.gone.set()

    def states(self) -> dict[int, dict[str, Any]]:
        """The state of each rank of this host, as it wrote it (job/rank_state.py). A file is read again only if it
        changed.

        If this agent was stopped and goes on, a rank of the next attempt may have written it: that rank belongs to
        another agent, and isn't this one's to end."""
        for rank, path in self._files.items():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stat = path.stat()
                version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if rank not in self._read or self._read[rank][0] != version:
                    state = read_state(self._run_dir, rank)
                    state |= {"pid": int(state["pid"]), "status": str(state["status"])}
                    if state.get("supervisor") in (None, 0, os.getpid()):
                        self._read[rank] = version, state
        return {rank: state for rank, (_, state) in self._read.items()}

    def _known(self) -> dict[int, dict[str, Any]]:
        """The same as it was read last, or again where it may be news. The files lie on a file system that all hosts
        share: it is touched once in LOOK_S, to see whether any state in the folder is new. A rank writes its own only
        as it starts and as it ends, and that a process is gone is seen without it."""
        every_s = LATER_LOOK_S if len(self._read) == len(self._files) else LOOK_S
        if (now := time.monotonic()) - self._looked >= every_s:
            self._looked = now
            with contextlib.suppress(OSError):
                version = self._folder.stat().st_mtime_ns
                # Once more after a change: there may be another one in the same tick of that clock.
                again, self._changed = self._changed, version != self._version
                self._version = version
                if again or self._changed:
                    return self.states()
        return {rank: state for rank, (_, state) in self._read.items()}

    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [state["pid"] for state in self.states().values()]

    def living(self) -> dict[int, int]:
        """Process ids of the ranks that are watched and have not ended, without reading anything."""
        return {
            rank: state["pid"]
            for rank, (_, state) in self._read.items()
            if rank in self._handles and rank not in self._gone_at
        }

    def look(self, *, at_once: bool = False) -> None:
        """Wait for the ranks that are new, and note every rank that has ended since the last look. at_once: nothing
        more is to come, so that all that they wrote counts now."""
        for rank, known in (self.states() if at_once else self._known()).items():
            state, pid, status = known, known["pid"], known["status"]
            if rank not in self._handles and not self._closed:
                with contextlib.suppress(OSError):  # gone already, or a kernel before 5.3: `lives` tells
                    self._handles[rank] = os.pidfd_open(pid)
                    self._waiting.register(self._handles[rank], select.EPOLLIN)
            if rank in self.ends or status in (FINISHED, STOPPED):
                continue
            if status != FAILED and not lives(pid):
                # Seen gone before its file was read anew: it may have written its last state in between, and then it
                # was not killed but failed, or finished. Only where nothing is new did it end without a word.
                last = self.states()[rank]
                if last == known:
                    when = self._gone_at.get(rank, time.time())
                    self.ends[rank] = RankEnd(rank, when, "", True, pid, code=self._codes.get(rank))
                state, status = last, last["status"]
            if status == FAILED:
                agreed = state.get("agreed", False)
                code = state.get("code")
                ended = float(state["ended"])
                self.ends[rank] = RankEnd(rank, ended, state["error"], False, pid, agreed, code)

    def close(self) -> None:
        """Stop waiting, and let go of the processes."""
        self._closed = True
        self._thread.join()
        self._waiting.close()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

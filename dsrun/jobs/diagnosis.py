"""Why a job died: which rank ended first, of what, and what its log says last.

DeepSpeed's launcher reports the rank that it happens to look at first, and not why a rank was killed. Here the
ranks' own state files, the moments at which their processes ended, and the kernel's counters are put together.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.errors import Problem
from dsrun.jobs.layout import STATE, whole_checkpoints
from dsrun.jobs.processes import lives
from dsrun.jobs.run_folder import LAUNCHER_LOG, LOGS

TAIL_LINES = 12
COLLATERAL = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was|peer|nccl|gloo|processgroup|store|timed? ?out",
    re.IGNORECASE,
)
"""An error that says so is what a rank sees when another one is gone."""


class RankEnd(NamedTuple):
    """How a rank ended. when: seconds since the epoch; error: its last line; killed: it left no word."""

    rank: int
    when: float
    error: str
    killed: bool


class Ranks:
    """The ranks of a running job, and which of them have ended, in order.

    A thread does nothing but wait for their processes to end: the launcher ends the other ranks a moment after the
    first, and whoever looks later finds them all gone.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.ends: dict[int, RankEnd] = {}
        self._gone: dict[int, float] = {}
        self._handles: dict[int, int] = {}
        self._waiting = select.epoll()
        self._closed = False
        self._thread = threading.Thread(target=self._wait, daemon=True, name="dsrun-ranks")
        self._thread.start()

    def _wait(self) -> None:
        while not self._closed:
            for handle, _ in self._waiting.poll(0.2):
                now = time.time()
                self._waiting.unregister(handle)
                self._gone |= {rank: now for rank, own in self._handles.items() if own == handle}

    def states(self) -> dict[int, dict[str, Any]]:
        """What each rank wrote of itself (dsrun/training/report.py)."""
        found = {}
        for path in (self.run_dir / STATE).glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_text(encoding="utf-8"))
                found[int(state["rank"])] = state
        return found

    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [int(state["pid"]) for state in self.states().values()]

    def look(self) -> None:
        """Wait for the ranks that are new, and note every rank that has ended since the last look."""
        for rank, state in self.states().items():
            if rank not in self._handles and not self._closed:
                with contextlib.suppress(OSError):  # gone already, or a kernel before 5.3: `lives` tells
                    self._handles[rank] = os.pidfd_open(int(state["pid"]))
                    self._waiting.register(self._handles[rank], select.EPOLLIN)
            if rank in self.ends or state["status"] == "finished":
                continue
            if state["status"] == "failed":
                self.ends[rank] = RankEnd(rank, float(state["ended"]), state["error"], killed=False)
            elif not lives(int(state["pid"])):
                self.ends[rank] = RankEnd(rank, self._gone.get(rank, time.time()), "", killed=True)

    def close(self) -> None:
        """Stop waiting, and let go of the processes."""
        self._closed = True
        self._thread.join()
        self._waiting.close()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def first(self) -> RankEnd | None:
        """The rank whose end is the cause: the first that did not merely lose its peers."""
        ends = sorted(self.ends.values(), key=lambda end: end.when)
        causes = [end for end in ends if end.killed or not COLLATERAL.search(end.error)]
        return next(iter([*causes, *ends]), None)


def oom_kills() -> int:
    """How often the kernel's OOM killer has struck in this process's cgroup (v2, else v1, else 0)."""
    for name in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in Path(name).read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def diagnose(ranks: Ranks, code: int, said: str, ooms: int) -> tuple[Problem, int]:
    """What to tell of a job that failed, and the exit code that stands for it: the first rank's, where it is known.

    code: the launcher's exit code; said: what it printed in this run; ooms: strikes of the OOM killer during it.
    """
    first, run_dir = ranks.first(), ranks.run_dir
    if first is None:
        log = run_dir / LAUNCHER_LOG
        what = f"the launcher ended with exit code {code} before any rank failed by itself"
        return Problem(f"{what}\n{tail(log)}", hint=f"The whole of it: {log}"), code or 1
    log = run_dir / LOGS / f"rank-{first.rank}.log"
    if first.killed:
        # The launcher names one code, of whichever rank it saw first; where others failed too it may be theirs.
        alone = all(end.killed for end in ranks.ends.values())
        found = reported_code(said, code, alone)
        code = found or (-signal.SIGKILL if ooms else code)
        what = f"rank {first.rank} died first: {killed_in_words(found, ooms)}"
    else:
        what = f"rank {first.rank} failed first: {first.error}"
    hint = f"The whole log: {log}"
    if resume := whole_checkpoints(run_dir):
        again = shlex.join(["--output-dir", str(run_dir), "--resume"])
        hint += f"\n  Continue from {resume[-1].name}: the same command with {again}"
    return Problem(f"{what}\n{tail(log)}", hint=hint), code or 1


def reported_code(said: str, code: int, alone: bool) -> int | None:
    """The first rank's exit code, if the launcher's words can be taken for it: -N for signal N; None otherwise.

    alone: no other rank ended with an error of its own, so that a positive code can only be the first rank's.
    """
    reported = re.findall(r"exits with return code = (-?\d+)", said)
    found = int(reported[-1]) if reported else (code - 256 if code > 128 else code)
    return found if found < 0 or (alone and found > 0) else None


def killed_in_words(code: int | None, ooms: int) -> str:
    """Why a process that left no word is gone. code: as in `reported_code`; ooms: strikes of the OOM killer."""
    if ooms > 0:
        return (
            "killed by the kernel's OOM killer: host memory ran out "
            "(fewer ranks per host, no CPU offload, or more RAM)"
        )
    if code is not None and code > 0:
        return f"it left with exit code {code}, without a word"
    number = -(code or 0)
    name = signal.Signals(number).name if number in {entry.value for entry in signal.Signals} else ""
    if name in {"SIGKILL", ""}:
        return (
            "killed (SIGKILL): by somebody, a resource manager, or the kernel when memory ran out (see dmesg)"
        )
    reasons = {
        "SIGBUS": "a memory-mapped file or /dev/shm ran out of room",
        "SIGSEGV": "a fault in compiled code",
        "SIGABRT": "compiled code gave up; the reason stands in its log",
        "SIGILL": "compiled for another processor: delete the compiled operators (TORCH_EXTENSIONS_DIR)",
        "SIGTERM": "asked to end by somebody or by a resource manager",
    }
    return f"killed by {name}: {reasons.get(name, 'see its log')}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; says so where there are none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    # Of a bar that was drawn over itself only its last state counts, and a finished one says nothing.
    drawn = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    found = [line for line in drawn if line.strip() and "100%|" not in line][-lines:]
    return "\n".join(f"    | {line[:240]}" for line in found) or "    | (its log is empty)"

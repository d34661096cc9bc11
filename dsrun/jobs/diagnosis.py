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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.cluster import host
from dsrun.errors import Problem
from dsrun.jobs.job import AnyJob, Job
from dsrun.jobs.layout import STATE, whole_checkpoints
from dsrun.jobs.processes import lives
from dsrun.jobs.rank_state import FINISHED, STOPPED
from dsrun.jobs.run_folder import LOGS, launcher_log

TAIL_LINES, TAIL_BYTES = 12, 256 << 10
COLLATERAL = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was|peer|nccl|gloo|processgroup|store|timed? ?out"
    r"|launcher or dsrun is gone",
    re.IGNORECASE,
)
"""An error that says so is what a rank sees when another one is gone."""


REPORTED = re.compile(r"exits with return code = (-?\d+)")
"""The launcher's words for a rank's exit code (deepspeed/launcher/launch.py)."""


class RankEnd(NamedTuple):
    """How a rank ended. when: seconds since the epoch; error: its last line; killed: it left no word."""

    rank: int
    when: float
    error: str
    killed: bool


class NodeEnd(NamedTuple):
    """How a host's part ended. code: the launcher's exit code, None where it did not come to one; said: what it printed
    in this run; ooms: strikes of the kernel's OOM killer during it; least_ram_bytes: of ram_bytes, what the host had
    left when that was least; killed_by: the signal that ended the launcher, unless it was dsrun's; statuses: of its
    ranks, by number (as text), as they wrote them.
    """

    node: int
    code: int | None
    said: str = ""
    ooms: int = 0
    least_ram_bytes: int = 0
    ram_bytes: int = 0
    killed_by: int = 0
    statuses: Mapping[str, str] = {}


class Ranks:
    """The ranks of this host in a running job, and which of them have ended, in order.

    A thread does nothing but wait for their processes to end: the launcher ends the other ranks a moment after the
    first, and whoever looks later finds them all gone.
    """

    def __init__(self, run_dir: Path, own: Sequence[int]) -> None:
        self.run_dir = run_dir
        self.own = frozenset(own)
        self.ends: dict[int, RankEnd] = {}
        self._gone: dict[int, float] = {}
        self._handles: dict[int, int] = {}
        self._read: dict[int, tuple[tuple[int, ...], dict[str, Any]]] = {}
        self._waiting = select.epoll()
        self._closed = False
        self._thread = threading.Thread(target=self._wait, daemon=True, name="dsrun-ranks")
        self._thread.start()

    def _wait(self) -> None:
        while not self._closed:
            for handle, _ in self._waiting.poll(0.2):
                now = time.time()
                self._waiting.unregister(handle)
                self._gone |= {rank: now for rank, own in list(self._handles.items()) if own == handle}

    def states(self) -> dict[int, dict[str, Any]]:
        """What each rank of this host wrote of itself (dsrun/jobs/rank_state.py). A file is read again only where it
        is another one: they lie on a file system that all hosts share, and are looked at many times a second."""
        for rank in self.own:
            path = self.run_dir / STATE / f"rank-{rank}.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stat = path.stat()
                version = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if rank not in self._read or self._read[rank][0] != version:
                    state = json.loads(path.read_text(encoding="utf-8"))
                    state |= {"pid": int(state["pid"]), "status": str(state["status"])}
                    self._read[rank] = version, state
        return {rank: state for rank, (_, state) in self._read.items()}

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
            if rank in self.ends or state["status"] in (FINISHED, STOPPED):
                continue
            if state["status"] == "failed":
                self.ends[rank] = RankEnd(rank, float(state["ended"]), state["error"], killed=False)
            elif not lives(int(state["pid"])) and self.states()[rank] == state:  # no last word came meanwhile
                self.ends[rank] = RankEnd(rank, self._gone.get(rank, time.time()), "", killed=True)

    def close(self) -> None:
        """Stop waiting, and let go of the processes."""
        self._closed = True
        self._thread.join()
        self._waiting.close()
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def first_of(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank whose end is the cause: the first that did not merely lose its peers."""
    in_order = sorted(ends, key=lambda end: end.when)
    return next(iter([*filter(is_cause, in_order), *in_order]), None)


def is_cause(end: RankEnd) -> bool:
    """Whether a rank ended of itself, as far as can be told, and not because others had."""
    return end.killed or not COLLATERAL.search(end.error)


def oom_kills(root: Path = host.ROOT) -> int:
    """How often the kernel's OOM killer has struck in this process's cgroups; on the machine where it has none."""
    found = []
    for folder in host.cgroup_folders(root):
        for name in ("memory.events", "memory.oom_control"):
            found += _counters(folder / name)
    return max(found) if found else max(_counters(Path("/proc/vmstat")), default=0)


def _counters(path: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    return []


def diagnose(job: AnyJob, ends: Iterable[RankEnd], nodes: Iterable[NodeEnd]) -> tuple[Problem, int]:
    """What to tell of a job that failed, and the exit code that stands for it: the first rank's, where it is known."""
    ends, by_node = list(ends), {node.node: node for node in nodes}
    first, run_dir = first_of(ends), Path(job.run_dir)
    struck = next((node for node in by_node.values() if node.killed_by), None)
    if struck and not any(map(is_cause, ends)):  # what the ranks say is what came of it
        log = run_dir / launcher_log(struck.node)
        what = f"DeepSpeed's launcher{_on(job, struck.node)} was killed ({signal.Signals(struck.killed_by).name})"
        return Problem(f"{what}\n{tail(log)}", hint=f"The whole of it: {log}{again(job)}"), -struck.killed_by
    if first is None:
        bad = next(
            (node for node in by_node.values() if node.code), next(iter(by_node.values()), NodeEnd(0, 0))
        )
        log = run_dir / launcher_log(bad.node)
        what = f"the launcher{_on(job, bad.node)} ended with exit code {bad.code} before any rank failed by itself"
        return Problem(f"{what}\n{tail(log)}", hint=f"The whole of it: {log}"), bad.code or 1
    number = node_of(job, first.rank)
    node = by_node.get(number, NodeEnd(number, None))
    log = run_dir / LOGS / f"rank-{first.rank}.log"
    # The launcher takes a while to end, and may itself have been ended by then: what it printed comes first.
    reported = REPORTED.findall(node.said)
    code = (int(reported[-1]) if reported else max(0, node.code or 0)) or 1
    if first.killed:
        # The launcher names one code, of whichever rank it saw first; where others failed too it may be theirs.
        alone = all(end.killed for end in ends if node_of(job, end.rank) == number)
        found = reported_code(node.said, node.code or 0, alone)
        if found is None and node.code == 0 and "exits successfully" in node.said:
            found = 0  # os._exit(0), or another program in its place: its work was not done
        code = found or (-signal.SIGKILL if node.ooms else code)
        how = killed_in_words(found, node.ooms) + _memory(found, node)
        what = f"rank {first.rank}{_on(job, number)} died first: {how}"
    else:
        what = f"rank {first.rank}{_on(job, number)} failed first: {first.error}"
    hint = f"The whole log: {log}{again(job)}"
    return Problem(f"{what}\n{tail(log)}", hint=hint), code


def again(job: AnyJob) -> str:
    """How to go on from the newest checkpoint, as more lines of a hint; empty where there is none."""
    whole = whole_checkpoints(Path(job.run_dir)) if isinstance(job, Job) else []
    return (
        f"\n  Continue from {whole[-1].name}: {shlex.join(['dsrun', 'resume', job.run_dir])}" if whole else ""
    )


def node_of(job: AnyJob, rank: int) -> int:
    """The number of the host that a rank runs on."""
    last = 0
    for number, one in enumerate(job.hosts):
        last += len(one.devices)
        if rank < last:
            return number
    raise ValueError(f"no rank {rank}")


def _on(job: AnyJob, node: int) -> str:
    return f" on {job.hosts[node].host}" if len(job.hosts) > 1 else ""


def _memory(code: int | None, node: NodeEnd) -> str:
    """How little memory the host had left, where that may be why a rank was killed."""
    if not node.ram_bytes or (code not in (None, -signal.SIGKILL) and not node.ooms):
        return ""
    least, total = node.least_ram_bytes / 2**30, node.ram_bytes / 2**30
    return f"; the least host memory left while it ran was {least:.1f} of {total:.1f} GiB"


def reported_code(said: str, code: int, alone: bool) -> int | None:
    """The first rank's exit code, if the launcher's words can be taken for it: -N for signal N; None otherwise.

    alone: no other rank ended with an error of its own, so that a positive code can only be the first rank's.
    """
    reported = REPORTED.findall(said)
    if not reported and code < 0:
        return None  # a signal ended the launcher itself
    found = int(reported[-1]) if reported else (code - 256 if code > 128 else code)
    return found if found < 0 or (alone and found > 0) else None


def killed_in_words(code: int | None, ooms: int) -> str:
    """Why a process that left no word is gone. code: as in `reported_code`; ooms: strikes of the OOM killer."""
    if ooms > 0:
        return (
            "killed by the kernel's OOM killer: host memory ran out "
            "(fewer ranks per host, no CPU offload, or more RAM)"
        )
    if code is not None and code >= 0:
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


def end_of(path: Path, since: int = 0) -> bytes:
    """The end of a log, which may be one of gigabytes. since: what stood there before does not count (in bytes)."""
    with path.open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES)


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; says so where there are none."""
    try:
        text = end_of(path).decode("utf-8", errors="replace")
    except OSError:
        text = ""
    # Of a bar that was drawn over itself only its last state counts, and a finished one says nothing.
    drawn = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    found = [line for line in drawn if line.strip() and "100%|" not in line][-lines:]
    return "\n".join(f"    | {line[:240]}" for line in found) or "    | (its log is empty)"

"""Run a job's processes, watch them to their end, and say what happened. The one module that starts processes.

DeepSpeed's launcher leaves its ranks running when it is killed, reports the rank that it happens to look at first,
and knows nothing of why a rank was killed; what is said here comes from the ranks' own state files, from watching
their processes, and from the kernel's counters.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil

from dsrun.errors import JobFailedError, Problem
from dsrun.jobs.job import Job
from dsrun.jobs.run_folder import LAUNCHER_LOG, LOGS, Follower

POLL_S = 0.1
GRACE_S = 10.0
TAIL_LINES = 12
TERMINATED = 143
COLLATERAL = re.compile(
    r"connection (closed|reset|refused)|broken pipe|connection was|peer|nccl|gloo|processgroup|store|timed? ?out",
    re.IGNORECASE,
)
"""An error that says so is what a rank sees when another one is gone."""


class View(Protocol):
    """What is told while a job runs. `event` and `metrics` get the lines that rank 0 writes."""

    def event(self, event: dict[str, Any]) -> None: ...

    def metrics(self, metrics: dict[str, Any]) -> None: ...


class TerminatedError(Exception):
    """SIGTERM reached dsrun."""


@dataclass
class RankEnd:
    """How a rank ended, as far as is known. order: monotonic seconds when it was noticed, or its own clock's."""

    rank: int
    when: float
    error: str
    killed: bool


@dataclass
class _Ranks:
    """The ranks' states, and which of them are gone."""

    run_dir: Path
    ends: dict[int, RankEnd] = field(default_factory=dict)

    def states(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path in (self.run_dir / "state").glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError):
                state = json.loads(path.read_text(encoding="utf-8"))
                found[int(state["rank"])] = state
        return found

    def look(self) -> None:
        """Note every rank that has ended since the last look."""
        for rank, state in self.states().items():
            if rank in self.ends or state["status"] == "finished":
                continue
            if state["status"] == "failed":
                self.ends[rank] = RankEnd(rank, float(state["ended"]), state["error"], killed=False)
            elif not _lives(int(state["pid"])):
                self.ends[rank] = RankEnd(rank, time.time(), "", killed=True)

    def first(self) -> RankEnd | None:
        """The rank whose end is the cause: the first that did not merely lose its peers."""
        ends = sorted(self.ends.values(), key=lambda end: end.when)
        causes = [end for end in ends if end.killed or not COLLATERAL.search(end.error)]
        return next(iter([*causes, *ends]), None)


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run_job(job: Job, argv: list[str], env: dict[str, str], view: View) -> None:
    """Start the launcher and watch until every rank has ended.

    Raises JobFailedError unless every rank said that it finished; KeyboardInterrupt and TerminatedError after
    having ended every process of the job.
    """
    run_dir = Path(job.run_dir)
    for path in (run_dir / "state").glob("rank-*.json"):
        path.unlink()
    ooms = oom_kills()
    ranks = _Ranks(run_dir)
    log = run_dir / LAUNCHER_LOG
    events = Follower(run_dir / "events.jsonl", from_end=True)
    metrics = Follower(run_dir / "metrics.jsonl", from_end=True)
    with log.open("ab") as output, _sigterm_raises():
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                ranks.look()
                _tell(events, metrics, view)
                time.sleep(POLL_S)
            _tell(events, metrics, view)
        finally:
            ranks.look()
            end_processes(process.pid, [int(state["pid"]) for state in ranks.states().values()])
            remove_shared_memory(argv)
    states = ranks.states()
    done = [rank for rank, state in states.items() if state["status"] == "finished"]
    if process.returncode == 0 and len(done) == job.world_size:
        return
    raise JobFailedError(
        [_diagnose(job, ranks.first(), process.returncode, oom_kills() - ooms)], process.returncode or 1
    )


def _tell(events: Follower, metrics: Follower, view: View) -> None:
    for event in events.lines():
        view.event(event)
    for line in metrics.lines():
        view.metrics(line)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_processes(root: int, others: list[int]) -> None:
    """End a process, everything below it and the given ranks: asked first, killed after GRACE_S seconds."""
    found: dict[int, psutil.Process] = {}
    for pid in [root, *others]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if pid == root or "dsrun.training.worker" in process.cmdline():
                for entry in [process, *process.children(recursive=True)]:
                    found[entry.pid] = entry
    for action in (psutil.Process.terminate, psutil.Process.kill):
        for process in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                action(process)
        _, alive = psutil.wait_procs(list(found.values()), timeout=GRACE_S)
        if not alive:
            return


def remove_shared_memory(argv: list[str]) -> None:
    """Delete the buffers that DeepSpeed's CPU collectives leave in /dev/shm: 69 MB a rank, after a clean exit too."""
    address, port = (argv[argv.index(option) + 1] for option in ("--master_addr", "--master_port"))
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{address}_{port}_*"):  # noqa: S108
        with contextlib.suppress(OSError):
            path.unlink()


def oom_kills() -> int:
    """How often the kernel's OOM killer has struck in this process's cgroup (v2, else v1, else 0)."""
    for name in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in Path(name).read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _diagnose(job: Job, first: RankEnd | None, code: int, ooms: int) -> Problem:
    """What to tell of a job that failed."""
    run_dir = Path(job.run_dir)
    if first is None:
        log = run_dir / LAUNCHER_LOG
        what = f"the launcher ended with exit code {code} before any rank failed by itself"
        return Problem(f"{what}\n{tail(log)}", hint=f"The whole of it: {log}")
    log = run_dir / LOGS / f"rank-{first.rank}.log"
    if first.killed:
        reason = killed_in_words(_reported_code(run_dir, code), ooms)
        what = f"rank {first.rank} died first: {reason}"
    else:
        what = f"rank {first.rank} failed first: {first.error}"
    resume = whole_checkpoints(run_dir)
    hint = f"The whole log: {log}"
    if resume:
        hint += f"\n  Continue from {resume[-1].name}: the same command with --output-dir {run_dir} --resume"
    return Problem(f"{what}\n{tail(log)}", hint=hint)


def _reported_code(run_dir: Path, code: int) -> int:
    """The negative code that the launcher's log names last, else its own."""
    text = (run_dir / LAUNCHER_LOG).read_text(encoding="utf-8", errors="replace")
    reported = re.findall(r"exits with return code = (-\d+)", text)
    return int(reported[-1]) if reported else code


def killed_in_words(code: int, ooms: int) -> str:
    """Why a process that left no word is gone. ooms: strikes of the OOM killer during the run."""
    if ooms > 0:
        return (
            "killed by the kernel's OOM killer: host memory ran out "
            "(fewer ranks per host, no CPU offload, or more RAM)"
        )
    name = signal.Signals(-code).name if -code in {entry.value for entry in signal.Signals} else ""
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
    found = [line for line in text.splitlines() if line.strip()][-lines:]
    return "\n".join(f"    | {line[:240]}" for line in found) or "    | (its log is empty)"


def whole_checkpoints(run_dir: Path) -> list[Path]:
    marks = run_dir.glob("checkpoints/step-*/complete")
    return sorted((mark.parent for mark in marks), key=lambda path: int(path.name.removeprefix("step-")))


def run_step(argv: list[str], env: dict[str, str], log: Path, say: Callable[[str], None]) -> None:
    """Run a preparing step, passing on each line that it prints; its errors go to the log.

    A last line {"problems": [...]} is a message for the user. Raises JobFailedError if it fails.
    """
    problems: list[Problem] = []
    with log.open("ab") as errors, _sigterm_raises():
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        try:
            for line in process.stdout or ():
                if line.startswith('{"problems"'):
                    problems = [Problem(**entry) for entry in json.loads(line)["problems"]]
                else:
                    say(line.rstrip("\n"))
            code = process.wait()
        finally:
            end_processes(process.pid, [])
    if code != 0:
        raise JobFailedError(
            problems or [Problem(f"{argv[2]} failed\n{tail(log)}", hint=f"The whole log: {log}")], code
        )

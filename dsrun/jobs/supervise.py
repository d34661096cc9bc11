"""Run a job's processes and watch them to their end. The one module that starts them.

DeepSpeed's launcher leaves its ranks running when it is killed; here nothing is left, whatever ends first.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dsrun.errors import JobFailedError, Problem
from dsrun.jobs.diagnosis import Ranks, diagnose, killed_in_words, oom_kills, tail
from dsrun.jobs.job import Job
from dsrun.jobs.layout import EVENTS, METRICS, STATE
from dsrun.jobs.processes import end_processes, remove_shared_memory, sigterm_raises
from dsrun.jobs.run_folder import LAUNCHER_LOG, Follower

POLL_S = 0.1


class View(Protocol):
    """What is told while a job runs. `event` and `metrics` get the lines that rank 0 writes."""

    def event(self, event: dict[str, Any]) -> None: ...

    def metrics(self, metrics: dict[str, Any]) -> None: ...


def run_job(job: Job, argv: list[str], env: dict[str, str], view: View) -> None:
    """Start the launcher and watch until every rank has ended.

    Raises JobFailedError unless every rank said that it finished; KeyboardInterrupt and TerminatedError after
    having ended every process of the job.
    """
    run_dir = Path(job.run_dir)
    for path in (run_dir / STATE).glob("rank-*.json"):
        path.unlink()
    ooms = oom_kills()
    ranks = Ranks(run_dir)
    log = run_dir / LAUNCHER_LOG
    before = log.stat().st_size if log.exists() else 0
    events = Follower(run_dir / EVENTS, from_end=True)
    metrics = Follower(run_dir / METRICS, from_end=True)
    with log.open("ab") as output, sigterm_raises():
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
            ranks.close()
            end_processes(process.pid, ranks.pids())
            remove_shared_memory(argv)
    done = [rank for rank, state in ranks.states().items() if state["status"] == "finished"]
    if process.returncode == 0 and len(done) == job.world_size:
        return
    said = log.read_bytes()[before:].decode("utf-8", errors="replace")
    problem, code = diagnose(ranks, process.returncode, said, oom_kills() - ooms)
    raise JobFailedError([problem], code)


def _tell(events: Follower, metrics: Follower, view: View) -> None:
    for event in events.lines():
        view.event(event)
    for line in metrics.lines():
        view.metrics(line)


def run_step(argv: list[str], env: dict[str, str], log: Path, say: Callable[[str], None]) -> None:
    """Run a preparing step, passing on each line that it prints; its errors go to the log.

    A last line {"problems": [...]} is a message for the user. Raises JobFailedError if it fails.
    """
    problems: list[Problem] = []
    ooms = oom_kills()
    with log.open("ab") as errors, sigterm_raises():
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            encoding="utf-8", errors="replace", start_new_session=True,
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
        how = f": {killed_in_words(code, oom_kills() - ooms)}" if code < 0 else ""
        failed = Problem(f"{argv[2]} failed{how}\n{tail(log)}", hint=f"The whole log: {log}")
        raise JobFailedError(problems or [failed], code)

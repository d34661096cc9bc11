"""Preparing steps of a job: a process on this machine, its words passed on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from dsrun.errors import JobFailedError, Problem
from dsrun.jobs.diagnosis import killed_in_words, oom_kills, tail
from dsrun.jobs.processes import end_processes, sigterm_raises


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

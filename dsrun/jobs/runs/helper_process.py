"""A process of dsrun.training that does one thing and prints its result in its last line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.host.memory import oom_kills
from dsrun.job.processes import end_processes, requests_raise
from dsrun.jobs.diagnosis.killed import killed_in_words


def result_of(argv: Sequence[str], env: Mapping[str, str], what: str, where: str) -> dict[str, Any]:
    """Run it to its end; return the JSON object that it printed last. What else it says goes to stderr.

    what, where: for an error, as "the evaluation" and the model's folder. Raises DsrunError with what is wrong with
    the input, JobFailedError where the process died, KeyboardInterrupt or TerminatedError if it was ended.
    """
    ooms = oom_kills()
    with requests_raise():
        process = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate()
        finally:
            end_processes(process.pid, [])
    try:
        result = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        result = {}
    if "problems" in result:
        raise DsrunError(Problem(**entry) for entry in result["problems"])
    if process.returncode or not result:
        code = process.returncode
        how = killed_in_words(code, oom_kills() - ooms) if code < 0 else "what it said is above"
        raise JobFailedError([Problem(f"{what} failed: {how}", where)], code or 1)
    return dict(result)

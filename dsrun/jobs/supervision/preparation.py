"""The work before the ranks start: preparing processes on this machine, and DeepSpeed's operators on each host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dsrun.cluster import extensions
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.file_lock import FileLock
from dsrun.files import explained
from dsrun.host.memory import oom_kills
from dsrun.host.operators import stale_locks
from dsrun.job.job import AnyJob, Job
from dsrun.job.processes import end_processes, requests_raise
from dsrun.jobs.diagnosis.killed import killed_in_words
from dsrun.jobs.diagnosis.logs import tail
from dsrun.options.optimizers import ADAM_TAKES, WHICH_ADAM


def run_step(argv: list[str], env: dict[str, str], log: Path, say: Callable[[str], None]) -> None:
    """Run a preparing process here, passing on each line that it prints; its errors go to the log.

    A last line {"problems": [...]} is a message for the user. Raises JobFailedError if it fails.
    """
    problems: list[Problem] = []
    ooms = oom_kills()
    with log.open("ab") as errors, requests_raise():
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


def compiled_first(job: AnyJob) -> list[str]:
    """The operators that are compiled before the ranks start.

    None for a script: it may end with its usage, or never ask for them, and DeepSpeed compiles what it does ask for.
    """
    return extensions.needed(job.ds_config) if isinstance(job, Job) else []


def build_operators(
    job: AnyJob,
    env: Mapping[str, str],
    run: Callable[[list[str]], None],
    say: Callable[[str], None],
    wait: Callable[[], None],
) -> None:
    """Compile the DeepSpeed operators that this host lacks: one dsrun at a time, past the locks of killed builds.

    env: of the ranks, with TORCH_EXTENSIONS_DIR; run: runs a command to its end, and raises where it fails; say: called
    with a line for the user; wait: called again and again while another dsrun compiles.
    """
    if extensions.VARIABLE not in env:  # ranks without DeepSpeed, or of another Python
        return
    directory = Path(env[extensions.VARIABLE])
    names = compiled_first(job)
    if not extensions.missing(names, directory) and not list(directory.glob("*/lock")):
        return
    with _only_builder(directory, say, wait):
        for lock in stale_locks(directory):
            say(f"removing {lock}: a build that was killed left it, and every later run would wait for it")
            lock.unlink(missing_ok=True)
        for name in extensions.missing(names, directory):
            say(f"compiling DeepSpeed's {name} (once per environment, one to three minutes)")
            try:
                run(
                    [sys.executable, "-m", "dsrun.training.engines.build_operator", extensions.BUILDERS[name]]
                )
            except DsrunError as error:
                if name in INSTEAD:
                    last = error.problems[-1]
                    error.problems[-1] = replace(last, hint=f"{last.hint}\n  {INSTEAD[name]}")
                raise


PLAIN_ADAM = {*ADAM_TAKES, *WHICH_ADAM}
"""Parameters that torch's AdamW takes, and those that only say which Adam of DeepSpeed's it is."""


def without_fused_adam(job: AnyJob, error: DsrunError) -> Job | None:
    """The job with torch's fused AdamW, where DeepSpeed's wasn't compiled and no parameter needs it; else None."""
    failed = f"{extensions.BUILDERS['fused_adam']} failed"
    if not isinstance(job, Job) or job.accelerator != "cuda" or failed not in str(error):
        return None
    optimizer = job.ds_config.get("optimizer", {})
    params = optimizer.get("params", {})
    if not params.keys() <= PLAIN_ADAM or params.get("adam_w_mode") is False:
        return None
    params = {**params, "torch_adam": True, "fused": True}
    return replace(job, ds_config={**job.ds_config, "optimizer": {**optimizer, "params": params}})


INSTEAD = {
    "fused_adam": "Or take torch's fused AdamW, for which nothing is compiled: "
    "--set optimizer.params.torch_adam=true --set optimizer.params.fused=true"
}
"""The way to do without an operator whose build has failed."""


@contextmanager
def _only_builder(directory: Path, say: Callable[[str], None], wait: Callable[[], None]) -> Iterator[None]:
    lock = FileLock(directory / ".dsrun.lock")
    with explained("can't be written", directory):
        directory.mkdir(parents=True, exist_ok=True)
        waiting = False
        while not lock.take():
            if not waiting:
                say("waiting for another dsrun that is compiling operators")
            waiting = True
            wait()
    try:
        yield
    finally:
        lock.release()

"""Carry a planned job out: write its folder, prepare, launch, and tell what came of it."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.cluster import extensions
from dsrun.cluster.devices import Machine
from dsrun.cluster.ports import free_port
from dsrun.config.build import render_json
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.files import write_atomic
from dsrun.jobs import environment, run_folder, scripts, supervise
from dsrun.jobs.calibration import measured
from dsrun.jobs.finetune import environment_of
from dsrun.jobs.job import Job
from dsrun.jobs.launchers import local
from dsrun.jobs.layout import EVENTS, METRICS, SUPERVISOR
from dsrun.jobs.processes import TerminatedError
from dsrun.jobs.progress import LiveView, PlainView

SMALL_BYTES = 4 << 20
"""Data files of up to this size are tokenised by the first rank as it starts, in less than a second; a process of their
own would take longer than that to start. Bigger ones are done before any device is taken."""


@dataclass(frozen=True)
class Launch:
    """What is started: environment (what is added to the user's), prepare and train commands."""

    env: dict[str, str]
    prepare: list[str]
    train: list[str]


def launch_of(job: Job, environ: Mapping[str, str], *, resume: bool = False) -> Launch:
    """The commands of a job on this machine. Chooses a free port; starts nothing.

    resume: the ranks go on from the newest whole checkpoint, where there is one.
    """
    run_dir = Path(job.run_dir)
    extra = ["--resume"] if resume else []
    return Launch(
        env=environment_of(job, environ),
        prepare=[sys.executable, "-m", "dsrun.training.prepare", str(run_dir / run_folder.JOB)],
        train=local.command(job, run_dir, free_port(), extra),
    )


def command_text(job: Job, launch: Launch) -> str:
    """command.sh: the same run by hand."""
    return scripts.render(
        "local.sh.j2",
        title=f"{job.model.name} with preset {job.preset}",
        env=launch.env,
        prepare=launch.prepare,
        train=launch.train,
    )


def write_folder(job: Job, launch: Launch, machine: Machine, environ: Mapping[str, str]) -> None:
    """Everything that the run folder holds before the run."""
    run_dir = Path(job.run_dir)
    write_atomic(run_dir / run_folder.JOB, job.to_json())
    write_atomic(run_dir / run_folder.CONFIG, render_json(job.ds_config))
    write_atomic(run_dir / run_folder.HOSTFILE, local.hostfile(job))
    write_atomic(run_dir / run_folder.COMMAND, command_text(job, launch))
    (run_dir / run_folder.COMMAND).chmod(0o755)
    described = environment.describe(machine, {**environ, **launch.env})
    write_atomic(run_dir / run_folder.ENVIRONMENT, json.dumps(described, ensure_ascii=False, indent=2) + "\n")


def carry_out(
    job: Job,
    machine: Machine,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    live: bool,
    resume: bool,
) -> dict[str, Any]:
    """Run the job to its end and return its result (see `result_of`).

    say: called with each line for the user; live: a moving line on stderr instead of plain lines. Raises DsrunError
    if the run fails, KeyboardInterrupt or TerminatedError if it was ended; the folder tells in every case.
    """
    run_dir = Path(job.run_dir)
    with run_folder.held(run_dir):
        launch = launch_of(job, environ, resume=resume)
        env = {**environ, **launch.env}
        write_folder(job, launch, machine, environ)
        run_folder.write_state(run_dir, "preparing")
        try:
            _prepare(job, launch, env, say)
            _build_operators(job, env, say)
            run_folder.write_state(run_dir, "running")
            say(
                f"starting {job.world_size} rank{'s' * (job.world_size > 1)}; logs are in {run_dir / run_folder.LOGS}"
            )
            view = LiveView() if live else PlainView(say)
            with view if isinstance(view, LiveView) else nullcontext():
                supervise.run_job(job, launch.train, {**env, SUPERVISOR: str(os.getpid())}, view)
        except (KeyboardInterrupt, TerminatedError):
            run_folder.write_state(run_dir, "interrupted")
            raise
        except DsrunError as error:
            run_folder.write_state(run_dir, "failed", problems=[str(problem) for problem in error.problems])
            raise
        result = {**result_of(run_dir), "predicted": job.prediction, "measured": measured(run_dir, job)}
        run_folder.write_state(run_dir, "finished", result=result)
        return result


def _prepare(job: Job, launch: Launch, env: dict[str, str], say: Callable[[str], None]) -> None:
    files = [(job.data.train_file, job.prepared.train_rows), (job.data.eval_file, job.prepared.eval_rows)]
    missing = [source for source, rows in files if source and rows and not Path(rows).exists()]
    size = sum(Path(source).stat().st_size for source in missing)
    if Path(job.prepared.model_dir).exists() and size <= SMALL_BYTES:
        return  # the ranks do what is left
    say("preparing (once: the result is kept in the cache)")
    supervise.run_step(launch.prepare, env, Path(job.run_dir) / run_folder.PREPARE_LOG, say)


def _build_operators(job: Job, env: dict[str, str], say: Callable[[str], None]) -> None:
    """Compile DeepSpeed's operators before the ranks need them, one dsrun at a time, past dead locks."""
    directory = Path(env[extensions.VARIABLE])
    names = extensions.needed(job.ds_config, job.accelerator)
    if not extensions.missing(names, directory) and not list(directory.glob("*/lock")):
        return
    log = Path(job.run_dir) / run_folder.PREPARE_LOG
    with _building(directory, say):
        for lock in extensions.stale_locks(directory):
            say(f"removing {lock}: a build that was killed left it, and every later run would wait for it")
            lock.unlink(missing_ok=True)
        for name in extensions.missing(names, directory):
            say(f"compiling DeepSpeed's {name} (once per environment, one to three minutes)")
            argv = [sys.executable, "-m", "dsrun.training.build_operator", extensions.BUILDERS[name]]
            supervise.run_step(argv, env, log, lambda _: None)


@contextmanager
def _building(directory: Path, say: Callable[[str], None]) -> Any:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".dsrun.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another dsrun that is compiling operators")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def result_of(run_dir: Path) -> dict[str, Any]:
    """What came of a run, from its folder: model, losses, scores, steps."""
    events = run_folder.Follower(run_dir / EVENTS).lines()
    metrics = run_folder.Follower(run_dir / METRICS).lines()
    losses = [line for line in metrics if "loss" in line]
    evals = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    scores = {event["when"]: event["scores"] for event in events if event["event"] == "scores"}
    models = [event["path"] for event in events if event["event"] == "model"]
    if not models:
        raise JobFailedError([Problem("every rank finished, and none wrote a model", str(run_dir))], 1)
    return {
        "run_dir": str(run_dir),
        "model": models[-1],
        "steps": losses[-1]["step"] if losses else 0,
        "loss": losses[-1]["loss"] if losses else None,
        "eval_loss": {"first": evals[min(evals)], "last": evals[max(evals)]} if evals else None,
        "scores": scores,
        "example_prompt": next(
            (event["example_prompt"] for event in events if event["event"] == "scores"), None
        ),
        "skipped_steps": losses[-1]["skipped"] if losses else 0,
    }

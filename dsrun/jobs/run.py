"""Carry a planned job out: write its folder, prepare, launch, and tell what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsrun.cluster.devices import Machine
from dsrun.cluster.ports import free_port
from dsrun.config.build import render_json
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.files import write_atomic
from dsrun.jobs import deepspeed_command, environment, run_folder, scripts, steps
from dsrun.jobs.calibration import measured
from dsrun.jobs.checkup import checkup
from dsrun.jobs.head import Head, StoppedError, Wishes
from dsrun.jobs.job import AnyJob, Job
from dsrun.jobs.layout import EVENTS, METRICS, whole_checkpoints
from dsrun.jobs.processes import TerminatedError
from dsrun.jobs.progress import LiveView, PlainView

SMALL_BYTES = 4 << 20
"""Data files of up to this size are tokenised by the first rank as it starts, in less than a second; a process of their
own would take longer than that to start. Bigger ones are done before any device is taken."""


@dataclass(frozen=True)
class Launch:
    """What is started: environment (what is added to the user's), prepare command (empty for a script), and the
    command of each host's ranks."""

    env: dict[str, str]
    prepare: list[str]
    train: list[list[str]]


@dataclass(frozen=True)
class Going:
    """How a run goes on where it breaks off. wishes: of the way it is run; restarts: how often it is started again;
    check: whether its hosts are looked at first."""

    wishes: Wishes = field(default_factory=Wishes)
    restarts: int = 0
    check: bool = True


def launch_of(job: AnyJob, environ: Mapping[str, str], *, resume: bool = False) -> Launch:
    """The commands of a job, as they are shown and kept; the address and port that it meets at are found at its start.

    resume: the ranks go on from the newest whole checkpoint, where there is one.
    """
    run_dir = Path(job.run_dir)
    extra = ["--resume"] if resume else []
    address = deepspeed_command.LOOPBACK if len(job.hosts) == 1 else job.hosts[0].host
    master = (address, free_port())
    prepare = [sys.executable, "-m", "dsrun.training.prepare", str(run_dir / run_folder.JOB)]
    return Launch(
        env=environment.of_ranks(job, environ),
        prepare=prepare if isinstance(job, Job) else [],
        train=[deepspeed_command.command(job, number, master, extra) for number in range(len(job.hosts))],
    )


def command_text(job: AnyJob, launch: Launch) -> str:
    """command.sh: the same run by hand."""
    return scripts.render(
        "command.sh.j2",
        title=job.title,
        env=launch.env,
        prepare=launch.prepare,
        cwd=getattr(job, "cwd", ""),
        hosts=[host.host for host in job.hosts],
        train=launch.train,
    )


def write_folder(job: AnyJob, launch: Launch, machine: Machine, environ: Mapping[str, str]) -> None:
    """Everything that the run folder holds before the run."""
    run_dir = Path(job.run_dir)
    write_atomic(run_dir / run_folder.JOB, job.to_json())
    if job.ds_config is not None:
        write_atomic(run_dir / run_folder.CONFIG, render_json(job.ds_config))
    write_atomic(run_dir / run_folder.HOSTFILE, deepspeed_command.hostfile(job))
    write_atomic(run_dir / run_folder.COMMAND, command_text(job, launch))
    (run_dir / run_folder.COMMAND).chmod(0o755)
    described = environment.describe(machine, {**environ, **launch.env})
    write_atomic(run_dir / run_folder.ENVIRONMENT, json.dumps(described, ensure_ascii=False, indent=2) + "\n")


class Watcher(AbstractContextManager["Watcher"]):
    """Tells the user what a fine-tune's first rank writes while it runs."""

    def __init__(self, run_dir: Path, view: PlainView) -> None:
        self._view = view
        self._events = run_folder.Follower(run_dir / EVENTS, from_end=True)
        self._metrics = run_folder.Follower(run_dir / METRICS, from_end=True)
        self._frame = view if isinstance(view, LiveView) else nullcontext()

    def __enter__(self) -> Watcher:
        self._frame.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._frame.__exit__(*error)

    def __call__(self) -> bool:
        """Tell what is new; whether anything was."""
        events, metrics = self._events.lines(), self._metrics.lines()
        for event in events:
            self._view.event(event)
        for line in metrics:
            self._view.metrics(line)
        return bool(events or metrics)


def carry_out(
    job: Job,
    machine: Machine,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    *,
    live: bool,
    resume: bool,
    going: Going | None = None,
) -> dict[str, Any]:
    """Run the job to its end and return its result (see `result_of`).

    say: called with each line for the user; live: a moving line on stderr instead of plain lines. Raises DsrunError
    if the run fails, KeyboardInterrupt or TerminatedError if it was ended; the folder tells in every case.
    """
    run_dir = Path(job.run_dir)

    def watcher() -> Watcher:
        return Watcher(run_dir, LiveView() if live else PlainView(say))

    with started(job, machine, environ, resume=resume) as launch:
        _prepare(job, launch, {**environ, **launch.env}, say)
        go_on(job, environ, say, watcher, resume=resume, going=going or Going())
        result = {**result_of(run_dir), "predicted": job.prediction, "measured": measured(run_dir, job)}
        run_folder.write_state(run_dir, "finished", result=result)
        return result


@contextmanager
def started(job: AnyJob, machine: Machine, environ: Mapping[str, str], *, resume: bool) -> Iterator[Launch]:
    """The run folder, written and held; it tells afterwards how what was done in it went wrong."""
    run_dir = Path(job.run_dir)
    with run_folder.held(run_dir):
        launch = launch_of(job, environ, resume=resume)
        write_folder(job, launch, machine, environ)
        run_folder.write_state(run_dir, "preparing")
        try:
            yield launch
        except (KeyboardInterrupt, TerminatedError):
            run_folder.write_state(run_dir, "interrupted")
            raise
        except DsrunError as error:
            with suppress(DsrunError):  # a full disk must not hide what it is full of
                run_folder.write_state(
                    run_dir, "failed", problems=[str(problem) for problem in error.problems]
                )
            raise


def go_on(
    job: AnyJob,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    watcher: Callable[[], AbstractContextManager[Callable[[], bool]]],
    *,
    resume: bool,
    going: Going,
) -> None:
    """Start the ranks and watch them to their end; again from the newest checkpoint, as often as is wished for, where
    they fail. A failure that comes again before anything new was done is the last; of a script nobody knows that."""
    run_dir, wishes = Path(job.run_dir), replace(going.wishes, resume=resume)
    for note in checkup(job, wishes) if going.check else ():
        say(f"note: {note}")
    for attempt in range(going.restarts + 1):
        run_folder.write_state(run_dir, "running", restarts=attempt)
        before = _progress(run_dir)
        say(
            f"starting {job.world_size} rank{'s' * (job.world_size > 1)}; logs are in {run_dir / run_folder.LOGS}"
        )
        try:
            with watcher() as watch:
                Head(job, environ, wishes, watch, say).run()
            return
        except StoppedError as error:
            raise error.cause from None
        except JobFailedError as error:
            if attempt == going.restarts:
                raise
            if attempt and isinstance(job, Job) and _progress(run_dir) == before:
                say("it failed again before anything new was done: it is not started once more")
                raise
            say(f"{error}\nstarting again ({attempt + 1} of {going.restarts})")
            wishes = replace(wishes, resume=True)


def _progress(run_dir: Path) -> tuple[int, int]:
    """How far a run has come: its checkpoints' newest step, and what it has written."""
    whole = whole_checkpoints(run_dir)
    metrics = run_dir / METRICS
    return (
        int(whole[-1].name.rpartition("-")[2]) if whole else 0,
        metrics.stat().st_size if metrics.exists() else 0,
    )


def _prepare(job: Job, launch: Launch, env: dict[str, str], say: Callable[[str], None]) -> None:
    files: list[tuple[str | None, str | None]] = [
        *((file, job.prepared.train_rows) for file in job.data.train_files),
        (job.data.eval_file, job.prepared.eval_rows),
    ]
    missing = [source for source, rows in files if source and rows and not Path(rows).exists()]
    size = sum(Path(source).stat().st_size for source in missing)
    if Path(job.prepared.model_dir).exists() and size <= SMALL_BYTES:
        return  # the ranks do what is left
    say("preparing (once: the result is kept in the cache)")
    steps.run_step(launch.prepare, env, Path(job.run_dir) / run_folder.PREPARE_LOG, say)


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

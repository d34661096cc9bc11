"""Runs, read from their folders: what ran, how far it came, what came of it. Starts nothing, changes nothing.

A folder is taken as it is found: half a line is left out, and a folder that can't be read says why.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from dsrun import catalog
from dsrun.errors import DAMAGE, DsrunError, Problem
from dsrun.files import why_not_readable
from dsrun.job import health
from dsrun.job.job import AnyJob, Job, ScriptJob, read_shown
from dsrun.job.job import read as read_job
from dsrun.job.layout import EVENTS, METRICS, STATE, whole_checkpoints
from dsrun.job.run_folder import (
    ENVIRONMENT,
    JOB,
    LOCK,
    LOGS,
    SUBMITTED,
    describe_state,
    json_object,
    json_objects,
)
from dsrun.job.run_folder import STATE as RECORD
from dsrun.jobs.runs.metrics_file import StepColumns, backwards, has, number, read_bytes, time_of, value_of

HOME = "runs"
"""The folder for runs that nobody named another one for, below the working folder."""
DEPTH = 4
"""Levels below a folder in which runs are looked for."""
ALIVE = ("preparing", "running")
WORSE = "finished: worse than it began"
"""The state, in words, of a run whose loss ended above where it began."""
FIRST_PHASE = "loading libraries"
"""The phase that every launch of the ranks begins with (dsrun/training/worker.py)."""


@dataclass(frozen=True)
class Run:
    """A run's folder as it is now."""

    path: Path
    any_job: AnyJob
    state: str
    record: Mapping[str, Any] = field(repr=False)
    """run.json; empty where there is none."""
    kept: StepColumns | None = field(default=None, repr=False, compare=False)
    """Its metrics, where somebody has read them before: only what was added since is read."""

    @property
    def job(self) -> Job:
        """The job of a fine-tune. Raises DsrunError where the run is a script's, of which less is known."""
        if isinstance(self.any_job, Job):
            return self.any_job
        fault = f"is the run of a script ({self.any_job.title}): its checkpoints and its losses are the script's own"
        hint = f"Start the same command again: {shlex.join(['dsrun', 'rerun', str(self.path)])}"
        raise DsrunError(fault, where=str(self.path), hint=hint)

    def with_secrets(self) -> Run:
        """The run with what its job.json hides, to do its job again. Raises DsrunError for who may not read that."""
        return replace(self, any_job=read_job(self.path / JOB))

    @property
    def script(self) -> ScriptJob | None:
        """The job of a script; None where the run is a fine-tune."""
        return self.any_job if isinstance(self.any_job, ScriptJob) else None

    @property
    def result(self) -> Mapping[str, Any]:
        """The result in run.json; empty where the run has none."""
        result = self.record.get("result")
        return result if isinstance(result, dict) else {}

    @property
    def state_text(self) -> str:
        """The state, and whether the run was good for anything: a finished one may have made its model worse."""
        return WORSE if self.state == "finished" and self.result.get("worse") is True else self.state

    @property
    def alive(self) -> bool:
        """Whether a dsrun works on it."""
        return self.state in ALIVE

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl."""
        return json_objects(read_bytes(self.path, EVENTS))

    @cached_property
    def columns(self) -> StepColumns:
        """The training steps and evaluations of metrics.jsonl, as they were when they were first asked for."""
        return (self.kept or StepColumns(self.path)).read()

    @cached_property
    def newest(self) -> list[dict[str, Any]]:
        """The last lines of metrics.jsonl, newest first: it may be long."""
        return list(backwards(self.path / METRICS))

    @property
    def metrics_end(self) -> dict[str, Any]:
        """The last training step's line of metrics.jsonl; empty before the first."""
        return next((line for line in self.newest if value_of(line, "loss") is not None), {})

    @cached_property
    def losses(self) -> dict[int, float]:
        """Optimizer step -> training loss, in order; of a step that was done twice the later one."""
        return self.columns.losses

    @cached_property
    def eval_losses(self) -> dict[int, float]:
        """Optimizer step -> evaluation loss, in order; step 0 is before training."""
        return dict(sorted(self.columns.evals.items()))

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """ "before" and "after" training -> score -> value."""
        by_event = {}
        for event in self.events:
            scores = event.get("scores") if event.get("event") == "scores" else None
            if isinstance(scores, dict) and isinstance(event.get("when"), str):
                by_event[event["when"]] = {name: value for name, value in scores.items() if number(value)}
        return by_event

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None until the ranks have counted the rows."""
        plans = [event.get("total_steps") for event in self.events if event.get("event") == "plan"]
        known = [int(steps) for steps in plans if number(steps)]
        if known or self.script:
            return known[-1] if known else None
        return self.job.training.max_steps

    @property
    def why(self) -> str:
        """The reason of a failed run in a line, as it was shown when it failed; empty where that isn't known."""
        recorded = self.record.get("why")
        return recorded if self.state == "failed" and isinstance(recorded, str) else ""

    @property
    def problems(self) -> list[str]:
        """The reasons of a failed run, as they were shown when it failed; else the error of the rank that failed
        first."""
        recorded = self.record.get("problems")
        if self.state == "failed" and isinstance(recorded, list) and recorded:
            return [str(problem) for problem in recorded]
        failed = [state for state in self.ranks if state.get("status") == "failed"]
        if self.state == "finished" or self.alive or not failed:
            return []
        from dsrun.jobs.diagnosis.ends import lost_others

        failed.sort(key=lambda state: state["ended"] if number(state.get("ended")) else float("inf"))
        causes = [state for state in failed if not lost_others(str(state.get("error")))]
        first = (causes or failed)[0]
        message = str(first.get("error"))
        return [message if first.get("agreed") else f"rank {first.get('rank')} failed first: {message}"]

    @property
    def diagnosis(self) -> Mapping[str, Any]:
        """The diagnosis of a failed run, as `dsrun diagnose --json` has it; empty where there is none."""
        recorded = self.record.get("diagnosis")
        return recorded if self.state == "failed" and isinstance(recorded, dict) else {}

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """The state of each rank, as it wrote it."""
        names = sorted(f"{STATE}/{path.name}" for path in (self.path / STATE).glob("rank-*.json"))
        return [state for name in names if (state := json_object(read_bytes(self.path, name)))]

    @property
    def restarts(self) -> int:
        """Number of times that its ranks were started again after a failure."""
        restarts = self.record.get("restarts", self.result.get("restarts"))
        return int(restarts) if number(restarts) else 0

    @property
    def environment(self) -> dict[str, Any]:
        """The content of environment.json; empty where it can't be read."""
        return json_object(read_bytes(self.path, ENVIRONMENT))

    @property
    def host(self) -> str | None:
        """The machine that it was started on."""
        name = self.environment.get("host")
        return name if isinstance(name, str) else None

    @cached_property
    def launches(self) -> list[tuple[float, float]]:
        """When the ranks were started and when they were last heard of, for each launch; seconds since 1970."""
        spans: list[list[float]] = []
        for event in self.events:
            when = event.get("time")
            if not number(when):
                continue
            if not spans or event.get("text") == FIRST_PHASE:
                spans.append([when, when])
            spans[-1][1] = when
        return [(first, last) for first, last in spans]

    @property
    def started(self) -> float | None:
        """When the ranks were first started; of a run that never came to that when its folder was written."""
        return self.launches[0][0] if self.launches else time_of(self.path / JOB)

    @property
    def seconds(self) -> float | None:
        """Time that it was worked on, up to now if it goes on; pauses between launches don't count."""
        written = self.record.get("time")
        spans = self.launches
        if not spans and number(written) and self.started is not None:
            spans = [(self.started, max(self.started, written))]
        if not spans:
            return None
        first, last = spans[-1]
        if self.alive:
            last = time.time()
        elif self.record.get("state") not in ALIVE and number(written):
            last = max(last, written)  # that of a dsrun which was killed is the time of the start
        else:
            last = max(last, next((line["time"] for line in self.newest if has(line, "time")), last))
        return sum(end - begin for begin, end in [*spans[:-1], (first, last)])

    @property
    def peaks(self) -> dict[str, float | None] | None:
        """Peak memory and time, as `dsrun.jobs.runs.calibration.measured` gives them; None for a run without an end."""
        from dsrun.jobs.runs.calibration import measured

        try:
            return measured(self.path, self.job)
        except (DsrunError, KeyError, TypeError, ValueError):
            return None

    @cached_property
    def health(self) -> health.Health | None:
        """How long its ranks compute and wait; None where that isn't known."""
        return health.read(self.path, self.any_job.hosts)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens without padding, all ranks together; the first step, which warms up, is left out where others are."""
        columns = self.columns.columns
        steps = [
            pair
            for pair in zip(columns["tokens"], columns["seconds"], strict=True)
            if all(map(isfinite, pair))
        ]
        counted = steps[1:] or steps
        seconds = sum(taken for _, taken in counted)
        return sum(tokens for tokens, _ in counted) / seconds if seconds > 0 else None

    @property
    def checkpoints(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return whole_checkpoints(self.path)

    @property
    def model(self) -> Path | None:
        """The folder of the fine-tuned model, once there is one."""
        folder = self.path / "model"
        return folder if (folder / "config.json").is_file() else None


def read(path: Path, kept: StepColumns | None = None) -> Run:
    """The run in a folder. Raises DsrunError where it holds none that can be read. kept: see `Run`."""
    if not os.path.isdir(path):  # noqa: PTH112 - never raises
        raise DsrunError("is not a folder" if path.exists() else "no such folder", where=str(path))
    if problem := kept_out(path):
        raise DsrunError([problem])
    if not os.path.lexists(path / JOB):
        raise DsrunError([no_run(path)])
    job = read_shown(path / JOB)
    try:  # what everybody asks for
        _ = job.world_size, job.title
        if isinstance(job, Job):
            _ = job.micro_batch, job.grad_accum, job.zero_stage
    except DAMAGE as error:
        fault = f"is not a job file: {type(error).__name__}: {error}"
        raise DsrunError(fault, where=str(path / JOB), hint="Was it changed by hand?") from error
    return Run(path.absolute(), job, describe_state(path), json_object(read_bytes(path, RECORD)), kept)


def named(text: str) -> Path:
    """The folder of the run that somebody names: a path, or a run's name below runs/. Raises DsrunError."""
    path = Path(text).expanduser()
    try:
        there = [candidate for candidate in (path, Path(HOME) / path) if candidate.is_dir()]
        if there:
            return next(filter(is_run, there), there[0]).absolute()
        known = [run.name for run in find(Path(HOME))] if Path(HOME).is_dir() else []
    except PermissionError:
        raise DsrunError([closed(path, why_not_readable(path))]) from None
    except (OSError, ValueError) as error:
        raise DsrunError(f"no such run: {getattr(error, 'strerror', None) or error}", where=text) from None
    if path.exists():
        raise DsrunError("is not a folder", where=text, hint="Name a run's folder; `dsrun runs` lists them.")
    near = catalog.closest(text, known)
    raise DsrunError(
        "no such run", where=text, hint=f"Did you mean {near!r}?" if near else "`dsrun runs` lists them."
    )


def is_run(folder: Path) -> bool:
    """Whether dsrun has worked in a folder."""
    return any(os.path.isfile(folder / name) for name in (JOB, RECORD, LOCK, SUBMITTED))  # noqa: PTH113 - never raises


def waits(folder: Path) -> bool:
    """Whether its job was sent to Slurm and has not begun: nobody has written it down."""
    return os.path.isfile(folder / SUBMITTED) and not os.path.isfile(folder / JOB)  # noqa: PTH113 - never raises


def slurm_log(folder: Path) -> Path | None:
    """The newest file of the job's output that Slurm keeps; None before it has begun one."""
    return max((folder / LOGS).glob("slurm-*.out"), key=lambda path: time_of(path) or 0.0, default=None)


def no_run(folder: Path) -> Problem:
    """Why a folder without job.json can't be read as a run's, and where to look instead."""
    if why := why_not_readable(folder):
        return closed(folder, why)
    if not waits(folder):
        return Problem("holds no run: there is no job.json", str(folder), "`dsrun runs` lists them.")
    fault = "was sent to Slurm, and the job has not begun"
    if log := slurm_log(folder):
        return Problem(fault, str(folder), f"What it has printed: {log}")
    return Problem(fault, str(folder), "`squeue --me` shows where it stands, `scancel` takes it out.")


def closed(folder: Path, why: str) -> Problem:
    """A run that this user may not read. why: as `why_not_readable` says it."""
    hint = "Whose it is can open it: chmod -R g+rX FOLDER, for a group that you are in."
    return Problem(f"can't be read: {why}", str(folder), hint)


def kept_out(folder: Path) -> Problem | None:
    """What says that this user may not read the job of a run; None where nothing is in the way."""
    why = why_not_readable(folder / JOB)
    return closed(folder, why) if why else None


def find(folder: Path) -> list[Path]:
    """The run folders at and below a folder, and the folders that can't be looked into.

    Links below it are not followed: they lead to other people's runs, or to the same ones again.
    """
    folders: list[Path] = []

    def look(here: Path, depth: int) -> None:
        if is_run(here):
            folders.append(here)
            return
        try:
            inside = sorted(
                entry.name
                for entry in os.scandir(here)
                if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
            )
        except OSError:
            folders.append(here)
            return
        if depth:
            for name in inside:
                look(here / name, depth - 1)

    look(folder, DEPTH)
    return folders

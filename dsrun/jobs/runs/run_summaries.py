"""Runs in a line each: `dsrun runs`, and the table of `dsrun board`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dsrun.errors import DAMAGE, DsrunError, Problem
from dsrun.files import why_not_readable
from dsrun.job.job import Job, devices_text
from dsrun.job.layout import EVENTS, METRICS
from dsrun.job.run_folder import JOB
from dsrun.job.run_folder import STATE as RECORD
from dsrun.job.run_folder import SUBMITTED as SCRIPT
from dsrun.jobs.runs.metrics_file import has, number, time_of, value_of
from dsrun.jobs.runs.outcome import Score, main_score
from dsrun.jobs.runs.past_runs import Run, closed, find, no_run, read, waits

BROKEN, CLOSED, SUBMITTED = "broken", "no access", "submitted"
NAMES = tuple(f"/{name}" for name in (JOB, RECORD, EVENTS, METRICS))
RECENT = 20
"""Steps by which speed and time left are judged."""


@dataclass(frozen=True)
class Summary:
    """A run in a line."""

    name: str
    """Its path below the folder that was looked through."""
    path: str
    state: str
    """State in run.json, with the reason; "broken" where the folder is damaged, "no access" where this user may not
    read it, "submitted" where Slurm has not started the job yet."""
    problem: str | None = None
    """Why the folder can't be read; the state is "broken", "no access" or "submitted" then, and the rest None."""
    cause: str | None = None
    """Class of the failure, as `dsrun diagnose` names it."""
    first_rank: int | None = None
    """Rank that failed first, where that is known."""
    model: str | None = None
    """The script, of a script's run."""
    preset: str | None = None
    ranks: int | None = None
    devices: str | None = None
    """Hosts and their devices, in the order of the ranks."""
    steps: int | None = None
    """Optimizer steps done so far; None where nobody knows."""
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    score: Score | None = None
    """Score of the answers after training; None where none was taken."""
    tokens_per_second: float | None = None
    """Over the last steps, all ranks together, without padding."""
    seconds_left: float | None = None
    """Time left in training, at the speed of the last steps."""
    memory_bytes: float | None = None
    """Rank 0's peak so far: allocated on its GPU, or resident on a CPU."""
    planned_bytes: float | None = None
    """The planner's estimate of that peak."""
    started: float | None = None
    """Seconds since 1970."""
    seconds: float | None = None
    """Time of all its launches together, without the pauses between them."""


def summaries(folders: Iterable[Path]) -> list[Summary]:
    """Every run at and below some folders, newest first. Raises DsrunError for a folder that is not there."""
    by_path: dict[str, Summary] = {}
    for folder in folders:
        for name, path in named_runs(folder).items():
            by_path.setdefault(str(path.absolute()), summary(path, name))
    return newest_first(by_path.values())


def named_runs(folder: Path) -> dict[str, Path]:
    """The runs at and below a folder by the names that tables show. Raises DsrunError where there is no such folder."""
    if why := why_not_readable(folder):
        raise DsrunError([closed(folder, why)])
    if not os.path.isdir(folder):  # noqa: PTH112 - never raises
        fault = "is not a folder" if os.path.lexists(folder) else "no such folder"
        raise DsrunError(fault, where=str(folder))
    names = {}
    for path in find(folder):
        name = path.name if path == folder else str(path.relative_to(folder))
        names[name or path.absolute().name] = path
    return names


def newest_first(runs: Iterable[Summary]) -> list[Summary]:
    """Runs as tables list them."""
    return sorted(runs, key=lambda run: run.started or 0.0, reverse=True)


def summary(path: Path, name: str) -> Summary:
    """A run in a line. Never raises: what can't be read says why."""
    where = str(path.absolute())
    if waits(path):
        return Summary(name, where, SUBMITTED, no_run(path).what, started=time_of(path / SCRIPT))
    if why := why_not_readable(path / JOB):
        return Summary(name, where, CLOSED, closed(path, why).what)
    try:
        run = read(path)
        return _of_finetune(run, run.any_job, name) if isinstance(run.any_job, Job) else _of_any(run, name)
    except DsrunError as error:
        problem = "; ".join(_in_words(each) for each in error.problems)
    except OSError as error:
        problem = f"can't be read: {error.strerror}"
    except DAMAGE as error:
        problem = f"is damaged: {type(error).__name__}: {error}"
    return Summary(name, where, BROKEN, problem, started=time_of(path))


def _in_words(problem: Problem) -> str:
    """A problem in words, with its file."""
    file = Path(problem.where).name if problem.where.endswith(NAMES) else ""
    return f"{file} {problem.what.splitlines()[0]}".lstrip()


def _of_any(run: Run, name: str) -> Summary:
    job = run.any_job
    return Summary(
        name=name,
        path=str(run.path),
        state=run.state_text,
        cause=run.diagnosis.get("cause"),
        first_rank=run.diagnosis.get("rank"),
        model=job.title,
        preset=job.preset,
        ranks=job.world_size,
        devices=devices_text(job.hosts),
        total_steps=run.total_steps,
        started=run.started,
        seconds=run.seconds,
    )


def _of_finetune(run: Run, job: Job, name: str) -> Summary:
    steps, loss, eval_loss = _latest(run)
    speed, step_seconds = _recent(run)
    total = run.total_steps
    left = None if total is None or step_seconds is None else max(0.0, step_seconds * (total - steps))
    return replace(
        _of_any(run, name),
        model=job.model.name,
        steps=steps,
        total_steps=total,
        loss=loss,
        eval_loss=eval_loss,
        score=_score(run),
        tokens_per_second=speed,
        seconds_left=left if run.alive else None,
        memory_bytes=value_of(run.metrics_end, "memory_bytes"),
        planned_bytes=planned_bytes(job),
    )


def _score(run: Run) -> Score | None:
    """The score after training, from run.json: a table of many runs reads no file more for them."""
    scores = run.result.get("scores")
    after = scores.get("after") if isinstance(scores, dict) else None
    known = {name: value for name, value in after.items() if number(value)} if isinstance(after, dict) else {}
    return main_score(known) if known else None


def planned_bytes(job: Job) -> float | None:
    """The planner's estimate of a rank's memory: allocated on its GPU, or its share of the host's on a CPU."""
    prediction = job.prediction or {}
    if job.accelerator == "cuda":
        return value_of(prediction, "gpu_allocated_bytes")
    whole = value_of(prediction, "host_bytes")
    return None if whole is None else whole * len(job.hosts) / job.world_size


def _recent(run: Run) -> tuple[float | None, float | None]:
    """Tokens per second and seconds of a step, over the last steps."""
    lines = (line for line in run.newest if has(line, "tokens") and has(line, "seconds"))
    last = list(islice(lines, RECENT))
    seconds = sum(line["seconds"] for line in last)
    if seconds <= 0:
        return None, None
    return sum(line["tokens"] for line in last) / seconds, seconds / len(last)


def _latest(run: Run) -> tuple[int, float | None, float | None]:
    """Steps done, last loss and last evaluation loss, from the end of metrics.jsonl."""
    steps, loss, eval_loss = None, None, None
    for line in run.newest:
        if steps is None and "loss" in line and has(line, "step"):
            steps = int(line["step"])
        loss = value_of(line, "loss") if loss is None else loss
        eval_loss = value_of(line, "eval_loss") if eval_loss is None else eval_loss
        if loss is not None and eval_loss is not None:
            break
    if eval_loss is None:  # far back, among many steps
        evals = (
            line["loss"] for line in reversed(run.events) if line.get("event") == "eval" and has(line, "loss")
        )
        eval_loss = next(evals, None)
    return steps or 0, loss, eval_loss

"""Carry a planned job out, a fine-tune or a script: write its folder, prepare, start the ranks, read the result."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsrun import versions
from dsrun.cluster import python_environment
from dsrun.cluster.devices import Machine
from dsrun.config.presets.build import render_json
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.files import is_full, json_text, write_atomic
from dsrun.host.hiding import shown_value, without_secrets
from dsrun.job import run_folder
from dsrun.job.checkpoints import CheckpointChoice, put_choice
from dsrun.job.job import AnyJob, Job, ScriptJob
from dsrun.job.layout import EVENTS, METRICS, RUN_FILE, whole_checkpoints
from dsrun.job.processes import TerminalClosedError, TerminatedError, requests_raise
from dsrun.jobs.diagnosis import run_logs
from dsrun.jobs.diagnosis.diagnosis import Diagnosis, told
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs.calibration import measured
from dsrun.jobs.runs.outcome import is_worse
from dsrun.jobs.supervision.commands import JobCommands, command_text, commands_of
from dsrun.jobs.supervision.coordinator import Coordinator, StoppedError
from dsrun.jobs.supervision.host_checks import checkup
from dsrun.jobs.supervision.preparation import run_step, without_fused_adam
from dsrun.jobs.supervision.run_options import GROUP_TIMEOUT, RunOptions
from dsrun.options.table import NO_EXPORT
from dsrun.words import counted

SMALL_BYTES = 4 << 20
"""Data files of up to this size are tokenised by the first rank as it starts, in less than a second; a process of their
own would take longer than that to start. Bigger ones are done before any device is taken."""

PAUSE_S, LONGEST_PAUSE_S = 15, 240
"""Before a job is started again whose cause passes by itself (a host that is gone, a port that is taken): doubled each
time."""

SHORTER = "timeout-10-minutes"
"""The change of DeepSpeed's limit, in presets/versions/."""

WayOut = Callable[[Job, Mapping[str, float]], str]
"""Says the changes with which a fine-tune fits whose GPU ran out of memory, by the sizes in the message; or nothing."""
View = AbstractContextManager[Callable[[], bool]]
"""The display while ranks run: entered at each start, then called often; returns whether anything was new."""


def carry_out(
    job: AnyJob,
    machine: Machine,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    view: View,
    *,
    options: RunOptions,
    resume: CheckpointChoice | None = None,
    run_file: str = "",
    way_out: WayOut = lambda *_: "",
) -> dict[str, Any]:
    """Run the job to its end and return its result, which goes into run.json too.

    say: called with each line for the user. resume: the checkpoint that the ranks continue from; None: they begin.
    run_file: the text of its run file, which the folder keeps; empty for a job without one.
    Raises DsrunError if the run fails, KeyboardInterrupt or TerminatedError if it was ended; the folder tells in every
    case.
    """
    run_dir, began = Path(job.run_dir), time.time()
    with opened(job, machine, environ, resume=resume) as commands:
        if run_file:
            write_run_file(run_dir, run_file)
        if isinstance(job, Job):
            _prepare(job, commands, {**environ, **commands.env}, say)
        restarts = run_ranks(
            job, environ, say, view, options=options, resume=resume is not None, way_out=way_out
        )
        if isinstance(job, Job):
            exports = job.training.export_format != NO_EXPORT
            result = {
                **result_of(run_dir, exports=exports),
                "predicted": job.prediction,
                "measured": measured(run_dir, job),
            }
        else:
            result = {
                "run_dir": job.run_dir,
                "ranks": job.world_size,
                "seconds": time.time() - began,
                "restarts": restarts,
                "logs": str(run_dir / run_folder.LOGS),
            }
        run_folder.write_state(run_dir, "finished", result=result)
        return result


@contextmanager
def opened(
    job: AnyJob, machine: Machine, environ: Mapping[str, str], *, resume: CheckpointChoice | None = None
) -> Iterator[JobCommands]:
    """The run folder, written and locked; run.json tells afterwards how what was done in it went wrong."""
    run_dir = Path(job.run_dir)
    with requests_raise(), run_folder.held(run_dir):
        commands = commands_of(job, environ, resume=resume is not None)
        write_folder(job, commands, machine, environ)
        if resume:
            put_choice(run_dir, resume)
        run_folder.write_state(run_dir, "preparing")
        try:
            yield commands
        except TerminalClosedError:
            run_folder.write_state(run_dir, "stopped", why="the terminal was closed")
            raise
        except (KeyboardInterrupt, TerminatedError):
            run_folder.write_state(run_dir, "interrupted")
            raise
        except DsrunError as error:
            _failed(run_dir, error)
            raise
        except OSError as error:
            if not is_full(error):
                raise
            hint = "Free some room, then: dsrun resume"
            full = DsrunError(
                f"can't be written: {error.strerror}", where=str(error.filename or run_dir), hint=hint
            )
            _failed(run_dir, full)
            raise full from error


def _failed(run_dir: Path, error: DsrunError) -> None:
    with suppress(DsrunError):  # what can't be written must not hide why
        problems = [str(problem) for problem in error.problems]
        why = error.problems[0].what.partition("\n")[0]
        fields = {"diagnosis": error.diagnosis} if isinstance(error, JobFailedError) else {}
        run_folder.write_state(run_dir, "failed", why=why, problems=problems, **fields)


def write_folder(job: AnyJob, commands: JobCommands, machine: Machine, environ: Mapping[str, str]) -> None:
    """Everything that the run folder holds before the run."""
    run_dir = Path(job.run_dir)
    job.write()
    _write_config(job)
    write_atomic(run_dir / run_folder.COMMAND, command_text(job, commands), executable=True)
    described = environment.describe(
        machine, {**environ, **commands.env}, job.python if isinstance(job, ScriptJob) else None
    )
    write_atomic(run_dir / run_folder.ENVIRONMENT, json_text(described, indent=2) + "\n")


def _write_config(job: AnyJob) -> None:
    """deepspeed.json, which a script reads as it is: with a secret in it, for its owner alone."""
    if job.ds_config:
        private = shown_value("", job.ds_config) != job.ds_config
        write_atomic(Path(job.run_dir) / run_folder.CONFIG, render_json(job.ds_config), private=private)


def write_run_file(run_dir: Path, text: str) -> None:
    """run.toml, which `rerun` reads as it is: with a secret in it (--set), for its owner alone."""
    write_atomic(run_dir / RUN_FILE, text, overwrite=True, private=without_secrets(text) != text)


def run_ranks(
    job: AnyJob,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    view: View,
    *,
    options: RunOptions,
    resume: bool = False,
    way_out: WayOut = lambda *_: "",
) -> int:
    """Start the ranks and watch them to their end, again from the newest checkpoint where they fail and a restart is
    left; return how many were taken.

    A fine-tune that fails again before it has done anything new is not started once more; what a script has done
    nobody knows. Where DeepSpeed's fused AdamW can't be compiled on a host, torch's takes its place.
    """
    run_dir = Path(job.run_dir)
    for note in checkup(job, options) if options.check else ():
        say(f"note: {note}")
    for attempt in range(options.max_restarts + 1):
        run_folder.write_state(run_dir, "running", restarts=attempt)
        before, sizes = _done_so_far(run_dir), run_logs.log_sizes(run_dir)
        say(f"starting {counted(job.world_size, 'rank')}; logs are in {run_dir / run_folder.LOGS}")
        try:
            with view as watch:
                Coordinator(job, environ, options, watch, say, resume=resume or attempt > 0).run()
            break
        except StoppedError as error:
            raise error.cause from None
        except JobFailedError as error:
            diagnosis = _explained(error, job, sizes, environ, way_out)
            if attempt == options.max_restarts:
                raise
            if diagnosis.is_hopeless:
                say(f"{diagnosis.cause}: this doesn't get better by itself, so it is not started again")
                raise
            # Steps are the only proof of progress: each restart from the same checkpoint would fail in the same place.
            if attempt and isinstance(job, Job) and _done_so_far(run_dir) == before:
                say("it failed again before anything new was done: it is not started once more")
                raise
            pause_s = min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S) if diagnosis.cause and diagnosis.retry else 0
            later = f" in {pause_s} s" if pause_s else ""
            problems = "\n".join(map(str, error.problems))
            say(f"{problems}\nstarting again{later} ({attempt + 1} of {options.max_restarts})")
            time.sleep(pause_s)
        except DsrunError as error:
            other = without_fused_adam(job, error)
            if other is None:
                raise
            say(f"{error.problems[0].what}\ntorch's fused AdamW takes its place: nothing is compiled for it")
            other.write()
            _write_config(other)
            return run_ranks(other, environ, say, view, options=options, resume=resume, way_out=way_out)
    return attempt


def _explained(
    error: JobFailedError, job: AnyJob, sizes: Mapping[str, int], environ: Mapping[str, str], way_out: WayOut
) -> Diagnosis:
    """Why an attempt failed; what is said of it goes into the error's hint. sizes: of the logs before it."""
    first, *others = error.problems
    python = job.python if isinstance(job, ScriptJob) else None
    try:
        diagnosis = run_logs.of_run(
            Path(job.run_dir), rank=error.rank, said=first.what, since=sizes, environ=environ, hosts=job.hosts
        )
    except DsrunError as unread:  # a lab's own signature that is broken, say
        error.problems += unread.problems
        return Diagnosis(cause=None, summary="", next_step="", confidence="none")
    error.diagnosis = {**asdict(diagnosis), "since": dict(sizes)}
    hint = "\n  ".join(
        filter(
            None,
            [
                *told(diagnosis, environ),
                _about_the_limit(diagnosis, environ, python),
                _about_memory(diagnosis, job, way_out),
                first.hint,
            ],
        )
    )
    error.problems = [replace(first, hint=hint), *others]
    return diagnosis


def _about_memory(diagnosis: Diagnosis, job: AnyJob, way_out: WayOut) -> str:
    """The changes with which a fine-tune fits whose GPU ran out of memory, or the command that looks for them; else
    empty."""
    if diagnosis.cause != "gpu_oom" or not isinstance(job, Job):
        return ""
    with suppress(DsrunError):  # a network that the planner doesn't know, say: the command tells why
        if changes := way_out(job, diagnosis.numbers or {}):
            return changes
    return f"`{shlex.join(['dsrun', 'diagnose', job.run_dir])}` says the shortest list of changes with which it fits"


def _about_the_limit(diagnosis: Diagnosis, environ: Mapping[str, str], python: str | None = None) -> str:
    """The limit of an exchange that took too long, and why it is so short; else empty. python: the ranks',
    where it isn't this one."""
    if diagnosis.cause not in run_logs.TIMED_OUT_CAUSES:
        return ""
    if minutes := environ.get(GROUP_TIMEOUT):
        return f"The limit was {minutes} minutes ({GROUP_TIMEOUT}): --timeout MINUTES gives another."
    there = python_environment.ask(Path(python), "--python").packages if python else versions.installed()
    known = versions.judge(there, versions.Circumstances(loop="deepspeed"))
    shorter = next((str(match) for match in known if match.combination.name == SHORTER), "")
    theirs = "a time-out that the script names itself, as the Trainer does, is not touched"
    rest = f"Longer: --timeout 30 ({GROUP_TIMEOUT}); {theirs}."
    return f"{shorter}. {rest}" if shorter else rest


def _done_so_far(run_dir: Path) -> tuple[Path | None, int]:
    """The newest whole checkpoint, and the size of what was written."""
    metrics = run_dir / METRICS
    newest = next(reversed(whole_checkpoints(run_dir)), None)
    return newest, metrics.stat().st_size if metrics.exists() else 0


def _prepare(job: Job, commands: JobCommands, env: dict[str, str], say: Callable[[str], None]) -> None:
    files: list[tuple[str | None, str | None]] = [
        *((file, job.prepared.train_rows) for file in job.data.train_files),
        (job.data.eval_file, job.prepared.eval_rows),
    ]
    missing = [source for source, rows in files if source and rows and not Path(rows).exists()]
    there = [Path(source) for source in missing if Path(source).exists()]  # who prepares says what is gone
    size = sum(source.stat().st_size for source in there)
    if Path(job.prepared.model_dir).exists() and size <= SMALL_BYTES:
        return  # the ranks do what is left
    say("preparing (once: the result is kept in the cache)")
    run_dir, log = Path(job.run_dir), Path(job.run_dir) / run_folder.PREPARE_LOG
    sizes = {**run_logs.log_sizes(run_dir), str(log): log.stat().st_size if log.exists() else 0}
    try:
        run_step(commands.prepare, env, log, say)
    except JobFailedError as error:
        _diagnose_preparing(error, run_dir, sizes, env)
        raise


def _diagnose_preparing(
    error: JobFailedError, run_dir: Path, sizes: Mapping[str, int], env: Mapping[str, str]
) -> None:
    """Add why preparing failed, where its log says so. What it has said in its own words stays as it is."""
    first, *others = error.problems
    message = f"{first.where}: {first.what}" if first.where else first.what
    with suppress(DsrunError):  # a lab's own signature that is broken, say: the error itself is told
        diagnosis = run_logs.of_run(run_dir, said=message, since=sizes, environ=env)
        if diagnosis.cause:
            error.diagnosis = {**asdict(diagnosis), "since": dict(sizes)}
            if not first.where:
                hint = "\n  ".join([*told(diagnosis, env), first.hint])
                error.problems = [replace(first, hint=hint), *others]


def _first_and_last(by_step: Mapping[int, float]) -> dict[str, float] | None:
    return {"first": by_step[min(by_step)], "last": by_step[max(by_step)]} if by_step else None


def result_of(run_dir: Path, *, exports: bool = True) -> dict[str, Any]:
    """The result of a fine-tune, from its folder: model (None where none was asked for), losses, scores, steps."""
    events = run_folder.Follower(run_dir / EVENTS).lines()
    metrics = run_folder.Follower(run_dir / METRICS).lines()
    losses = [line for line in metrics if "loss" in line]
    evals = {line["step"]: line["eval_loss"] for line in metrics if "eval_loss" in line}
    perplexities = {line["step"]: line["eval_perplexity"] for line in metrics if "eval_perplexity" in line}
    scored = [event for event in events if event["event"] == "scores"]
    models = [event for event in events if event["event"] == "model"]
    if exports and not models:
        raise JobFailedError([Problem("every rank finished, and none wrote a model", str(run_dir))], 1)
    last = losses[-1] if losses else {"step": 0, "loss": None, "skipped": 0}
    return {
        "run_dir": str(run_dir),
        "model": models[-1]["path"] if models else None,
        "template_args": models[-1].get("template_args", {}) if models else {},
        "steps": last["step"],
        "loss": last["loss"],
        "best": _best(run_dir, evals),
        "eval_loss": _first_and_last(evals),
        "perplexity": _first_and_last(perplexities),
        "scores": {event["when"]: event["scores"] for event in scored},
        "answered": {event["when"]: {"rows": event.get("rows"), "of": event.get("of")} for event in scored},
        "worse": is_worse([line["loss"] for line in losses], [evals[step] for step in sorted(evals)]),
        "example_prompt": scored[0]["example_prompt"] if scored else None,
        "skipped_steps": last["skipped"],
    }


def _best(run_dir: Path, evals: Mapping[int, float]) -> dict[str, Any] | None:
    """The step of the lowest evaluation loss, and the folder that keeps its model, if one does."""
    known = {step: loss for step, loss in evals.items() if loss is not None}
    if not known:
        return None
    step = min(known, key=lambda step: (known[step], -step))
    kept = [event for event in run_folder.Follower(run_dir / EVENTS).lines() if event["event"] == "best"]
    model = kept[-1]["path"] if kept and kept[-1]["step"] == step else None
    return {"step": step, "loss": known[step], "model": model}

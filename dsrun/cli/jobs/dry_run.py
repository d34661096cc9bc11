"""The output of --dry-run: a job's ranks and their places, its config, its environment, its commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.results import print_json
from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.host.hiding import shown, shown_arguments, shown_value, shown_variable
from dsrun.job.job import Job, ScriptJob
from dsrun.words import counted, marked, value_text

if TYPE_CHECKING:
    from dsrun.job.checkpoints import CheckpointChoice
    from dsrun.job.job import AnyJob
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.assembly import PlannedJob
    from dsrun.jobs.supervision.commands import JobCommands
    from dsrun.options.declare import Entry
    from dsrun.options.layers import Origin

EXAMPLES = "dsrun.training.examples"
"""The process that makes examples without training."""
SHORT_VALUE = 10
"""Columns for a short value of an option."""


@dataclass(frozen=True)
class DryRun:
    """All that --dry-run shows of a job, without secrets."""

    planned: PlannedJob[Any]
    env: Mapping[str, str]
    """Variables on top of the user's own."""
    forwarded: Mapping[str, str]
    """The user's own variables that go to other hosts."""
    launch: JobCommands
    resume_from: str | None
    """The checkpoint's folder; None for a job that begins."""


def show(
    planned: PlannedJob[Any],
    connection: ConnectionOptions,
    *,
    as_json: bool,
    resume: CheckpointChoice | None = None,
) -> None:
    """Print what the job would do. resume: the checkpoint that it goes on from. Raises DsrunError for faults of
    --env."""
    dry_run = _decided(planned, connection, resume)
    if as_json:
        print_json("dry-run", _value_of(dry_run))
    else:
        click.echo("\n".join(_text_of(dry_run)))


def _decided(
    planned: PlannedJob[Any], connection: ConnectionOptions, resume: CheckpointChoice | None
) -> DryRun:
    from dsrun.cli.jobs.running import run_options_of
    from dsrun.jobs.assembly.resume import checkpoint_of
    from dsrun.jobs.supervision.commands import commands_of

    job: AnyJob = planned.job
    run_options, environ = run_options_of(connection, job.launcher)
    launch = commands_of(job, environ, resume=resume is not None)
    added = {name: value for name, value in environ.items() if os.environ.get(name) != value}
    return DryRun(
        planned=planned,
        env=shown({**added, **launch.env}),
        forwarded=shown(run_options.env) if len(job.hosts) > 1 else {},
        launch=launch,
        resume_from=str(checkpoint_of(Path(job.run_dir), resume)[0]) if resume else None,
    )


def _value_of(dry_run: DryRun) -> dict[str, Any]:
    """The job for machines."""
    from dsrun.jobs.allocation.allocation import rank_places

    job, launch = dry_run.planned.job, dry_run.launch
    return {
        "job": job.shown(),
        "ranks": [row._asdict() for row in rank_places(job.hosts)],
        "environment": dry_run.env,
        "forwarded": dry_run.forwarded,
        "commands": [*([launch.prepare] if launch.prepare else []), *launch.train],
        "resume_from": dry_run.resume_from,
        "options": _options(dry_run.planned),
    }


def _text_of(dry_run: DryRun) -> Iterator[str]:
    """The job for people, as a script that could be run by hand."""
    from shlex import join, quote

    from dsrun.jobs.allocation.allocation import rank_table

    job, launch = dry_run.planned.job, dry_run.launch
    yield f"# run folder: {job.run_dir}" + (f", from {dry_run.resume_from}" if dry_run.resume_from else "")
    yield f"# {counted(job.world_size, 'rank')} ({job.accelerator}), launcher {job.launcher}"
    yield from (f"#   {line}" for line in rank_table(job.hosts).splitlines())
    yield from (f"# {line}" for line in _option_lines(dry_run.planned, everything=False))
    yield from _config_text(job)
    yield "\n# environment, on top of yours"
    yield from (f"export {name}={quote(value)}" for name, value in dry_run.env.items())
    if dry_run.forwarded:
        yield "\n# of yours, to the other hosts\n# " + " ".join(dry_run.forwarded)
    if isinstance(job, ScriptJob):
        yield f"\n# each rank runs, in {job.cwd}\n# {join(rank_command(job))}"
    yield "\n# commands"
    if launch.prepare:
        yield join(launch.prepare)
    for host, words in zip(job.hosts, launch.train, strict=True):
        yield (f"# on {host.host}\n" if len(job.hosts) > 1 else "") + join(words)


def _config_text(job: AnyJob) -> Iterator[str]:
    """The engine's config, where there is one."""
    from dsrun.config.presets.build import render_json

    if job.ds_config:
        yield f"\n# deepspeed.json\n{render_json(shown_value('', job.ds_config))}"
    elif isinstance(job, Job) and job.fsdp:
        yield f"\n# FSDP, which has no deepspeed.json\n{json_text(asdict(job.fsdp), indent=2)}"


def explain(planned: PlannedJob[Any], *, as_json: bool) -> None:
    """Print every option with its value and where it came from."""
    if as_json:
        print_json("explain", {"options": _options(planned)})
    for line in () if as_json else _option_lines(planned, everything=True):
        click.echo(line)


def _options(planned: PlannedJob[Any]) -> dict[str, Any]:
    """The value and the origin of each option, for machines."""
    return {
        entry.name: {"value": str(value) if isinstance(value, Path) else value, "from": str(origin)}
        for entry, value, origin in _rows(planned)
    }


def _rows(planned: PlannedJob[Any]) -> Iterator[tuple[Entry, Any, Origin]]:
    """Each option with its value, secrets hidden, and its origin."""
    for entry, value, origin in planned.resolved.rows() if planned.resolved else ():
        yield entry, tuple(map(_without_secret, value)) if entry.name == "env" else value, origin


def _without_secret(text: str) -> str:
    """NAME=VALUE of --env, without a secret value."""
    name, sign, value = text.partition("=")
    return f"{name}={shown_variable(name, value)}" if sign else text


def _option_lines(planned: PlannedJob[Any], *, everything: bool) -> list[str]:
    """Options with values and origins in columns. everything: with those whose values are built in.

    A value that is long, as a path is, moves its own line alone.
    """
    from dsrun.options.layers import Source

    rows = [
        (entry.flag, "-" if value in (None, ()) else value_text(value), str(origin))
        for entry, value, origin in _rows(planned)
        if everything or origin.source > Source.BUILT_IN
    ]
    widths = [max((len(row[0]) for row in rows), default=0), SHORT_VALUE]
    return [f"{flag:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for flag, value, origin in rows]


def rank_command(job: ScriptJob) -> list[str]:
    """The command of a rank, with secrets hidden."""
    local_rank = ["--local_rank=N"] if job.local_rank else []
    args = shown_arguments(job.args)
    return [job.python or "python", *(["-m"] if job.module else []), job.script, *local_rank, *args]


def show_examples(job: Job, count: int, *, as_json: bool) -> None:
    """Print the first training examples, made by the tokenizer in a process of their own. Raises DsrunError."""
    import sys
    import tempfile

    from dsrun.jobs.runs.helper_process import result_of

    if job.model.source == "hub":
        message = f"{job.model.name}'s tokenizer is not on this machine yet"
        raise DsrunError(message, where="--show-examples", hint="Download the model, and name its folder.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(job.to_json(), encoding="utf-8")
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        argv = [sys.executable, "-m", EXAMPLES, str(path), str(count)]
        result = result_of(argv, env, "showing examples", job.data.train_file)
    if as_json:
        print_json("examples", result)
        return
    for row in result["left_out"]:
        click.echo(f"row {row['row']} is left out: {row['why']}")
    for example in result["examples"]:
        trained = f"{example['tokens']:,} tokens, {example['trained_on']:,} trained on"
        click.echo(f"row {example['row']} ({trained}): {marked(example)}")

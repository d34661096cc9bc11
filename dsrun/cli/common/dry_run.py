"""What --dry-run prints of a job: where its ranks run, its config, its environment, its commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.common.json_output import print_json
from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.host.hiding import shown, shown_arguments, shown_value, shown_variable
from dsrun.words import counted, marked, value_text

if TYPE_CHECKING:
    from dsrun.job.checkpoints import CheckpointChoice
    from dsrun.job.job import AnyJob, Job, ScriptJob
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.assembly import PlannedJob
    from dsrun.options.table import Entry, Origin

EXAMPLES = "dsrun.training.examples"
"""The process that makes examples without training."""
SHORT_VALUE = 10
"""Columns for an option's value."""


def show(
    planned: PlannedJob[Any],
    connection: ConnectionOptions,
    *,
    as_json: bool,
    resume: CheckpointChoice | None = None,
) -> None:
    """Print it. resume: the checkpoint that it goes on from; None: it begins. Raises DsrunError for what --env has
    wrong."""
    from dsrun.cli.common.running import run_options_of
    from dsrun.job.job import Job, ScriptJob
    from dsrun.jobs.assembly.resume import checkpoint_of
    from dsrun.jobs.supervision.commands import commands_of

    job: AnyJob = planned.job
    run_options, environ = run_options_of(connection, job.launcher)
    launch = commands_of(job, environ, resume=resume is not None)
    added = {name: value for name, value in environ.items() if os.environ.get(name) != value}
    env = shown({**added, **launch.env})
    forwarded = shown(run_options.env) if len(job.hosts) > 1 else {}
    checkpoint = checkpoint_of(Path(job.run_dir), resume)[0] if resume else None
    resume_from = str(checkpoint) if checkpoint else None
    commands = [*([launch.prepare] if launch.prepare else []), *launch.train]
    if as_json:
        from dsrun.jobs.allocation.allocation import rank_places

        everything: dict[str, Any] = {
            "job": job.shown(),
            "ranks": [row._asdict() for row in rank_places(job.hosts)],
            "environment": env,
            "forwarded": forwarded,
            "commands": commands,
            "resume_from": resume_from,
            "options": _options(planned),
        }
        print_json("dry-run", everything)
        return
    from dataclasses import asdict
    from shlex import join, quote

    from dsrun.config.presets.build import render_json
    from dsrun.jobs.allocation.allocation import rank_table

    click.echo(f"# run folder: {job.run_dir}" + (f", from {resume_from}" if resume_from else ""))
    click.echo(f"# {counted(job.world_size, 'rank')} ({job.accelerator}), launcher {job.launcher}")
    click.echo("".join(f"#   {line}\n" for line in rank_table(job.hosts).splitlines()), nl=False)
    for line in _option_lines(planned, everything=False):
        click.echo(f"# {line}")
    if job.ds_config:
        click.echo(f"\n# deepspeed.json\n{render_json(shown_value('', job.ds_config))}")
    elif isinstance(job, Job) and job.fsdp:
        click.echo(f"\n# FSDP, which has no deepspeed.json\n{json_text(asdict(job.fsdp), indent=2)}")
    click.echo("\n# environment, on top of yours")
    for name, value in env.items():
        click.echo(f"export {name}={quote(value)}")
    if forwarded:
        click.echo("\n# of yours, to the other hosts\n# " + " ".join(forwarded))
    if isinstance(job, ScriptJob):
        click.echo(f"\n# each rank runs, in {job.cwd}\n# {join(rank_command(job))}")
    click.echo("\n# commands")
    if launch.prepare:
        click.echo(join(launch.prepare))
    for host, words in zip(job.hosts, launch.train, strict=True):
        click.echo((f"# on {host.host}\n" if len(job.hosts) > 1 else "") + join(words))


def explain(planned: PlannedJob[Any], *, as_json: bool) -> None:
    """Print every option with its value and where it came from."""
    if as_json:
        print_json("explain", {"options": _options(planned)})
    for line in () if as_json else _option_lines(planned, everything=True):
        click.echo(line)


def _options(planned: PlannedJob[Any]) -> dict[str, Any]:
    """Each option's value and where it came from, for machines."""
    return {
        entry.name: {"value": str(value) if isinstance(value, Path) else value, "from": str(origin)}
        for entry, value, origin in _rows(planned)
    }


def _rows(planned: PlannedJob[Any]) -> Iterator[tuple[Entry, Any, Origin]]:
    """Each option, its value without what is secret, and where it came from."""
    for entry, value, origin in planned.resolved.rows() if planned.resolved else ():
        yield entry, tuple(map(_without_secret, value)) if entry.name == "env" else value, origin


def _without_secret(text: str) -> str:
    """NAME=VALUE of --env, without a secret value."""

    name, sign, value = text.partition("=")
    return f"{name}={shown_variable(name, value)}" if sign else text


def _option_lines(planned: PlannedJob[Any], *, everything: bool) -> list[str]:
    """Each option, its value and where it came from, in columns; else only those that are not built in.

    A value that is long, as a path is, moves its own line alone.
    """
    from dsrun.options.table import Source

    rows = [
        (entry.flag, "-" if value in (None, ()) else value_text(value), str(origin))
        for entry, value, origin in _rows(planned)
        if everything or origin.source > Source.BUILT_IN
    ]
    widths = [max((len(row[0]) for row in rows), default=0), SHORT_VALUE]
    return [f"{flag:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for flag, value, origin in rows]


def rank_command(job: ScriptJob) -> list[str]:
    """What a rank does, as a command of Python's; what is secret in it is hidden."""

    local_rank = ["--local_rank=N"] if job.local_rank else []
    args = shown_arguments(job.args)
    return [job.python or "python", *(["-m"] if job.module else []), job.script, *local_rank, *args]


def show_examples(job: Job, count: int, *, as_json: bool) -> None:
    """Print the first training examples, made by the tokenizer in a process of their own. Raises DsrunError."""
    import sys
    import tempfile

    from dsrun.jobs.runs.helper_process import result_of

    if job.model.source == "hub":
        what = f"{job.model.name}'s tokenizer is not on this machine yet"
        raise DsrunError(what, where="--show-examples", hint="Download the model, and name its folder.")
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

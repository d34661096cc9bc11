"""`dsrun launch` (jobs): run a DeepSpeed script of your own."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.parsing.completion import files
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import LaunchOptions
from dsrun.words import counted, span_text

if TYPE_CHECKING:
    from dsrun.cli.jobs.detach import Detached
    from dsrun.cluster.devices import Machine
    from dsrun.job.job import ScriptJob
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.assembly import PlannedJob


@click.command(cls=TableCommand, context_settings={"allow_interspersed_args": False})
@click.argument("script", shell_complete=files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
@options_of(LaunchOptions)
def command(script: str, args: tuple[str, ...], **values: Any) -> None:
    """Run SCRIPT, a training script for DeepSpeed, on every device, and watch it to its end.

    All that follows SCRIPT is its own. A config that it names is validated first. What the ranks print is shown as one
    text, [rank N] where they differ, and kept in the run folder. A script that is started again has to find its own
    checkpoint.

    \b
    dsrun launch --gpus 2 train.py --deepspeed_config ds.json
    dsrun launch --devices 2,3 --preset zero2-offload train.py --epochs 3
    dsrun launch --hosts "node[01-04]:8" -m lab.train --lr 1e-5
    """
    from dsrun.cli.jobs import dry_run
    from dsrun.cli.jobs.detach import detached
    from dsrun.cli.jobs.running import allocated, began, join_pods, tell
    from dsrun.cli.parsing.where import connection_of
    from dsrun.jobs.assembly import script as script_jobs
    from dsrun.jobs.assembly.script.stages import ScriptRequest

    requested = given(LaunchOptions, values)
    again = requested.options.go_on and began(requested.options.output_dir)
    requested, connection = connection_of(requested)
    options = requested.options
    away = detached(options.detach, connection, as_json=options.as_json, dry_run=options.dry_run)
    join_pods(connection, options.output_dir, dry_run=options.dry_run)
    request = ScriptRequest(script, args, requested, again)

    def plan(allocator: Allocator, _for_good: bool) -> PlannedJob[ScriptJob]:
        return script_jobs.plan(request, allocator.machine, os.environ, allocator=allocator)

    with allocated(plan, connection, options, dry_run=options.dry_run) as (planned, machine):
        tell(planned.notes)
        if options.dry_run:
            dry_run.show(planned, connection, as_json=options.as_json)
        else:
            run(planned.job, machine, connection, options, away)


def run(
    job: ScriptJob,
    machine: Machine,
    connection: ConnectionOptions,
    options: LaunchOptions,
    away: Detached | None = None,
) -> None:
    """Carry a script's job out (running.run_job), and show the output of its ranks."""
    from shlex import join

    from dsrun.cli.jobs.running import run_job, say
    from dsrun.jobs.allocation.allocation import in_words
    from dsrun.jobs.supervision.display.script_view import ScriptView

    def summarise(result: dict[str, Any]) -> None:
        say(f"finished after {span_text(result['seconds'])}; run folder {result['run_dir']}")

    if away:
        away.settle(Path(job.run_dir))
    preset = f", preset {job.preset}" if job.preset else ""
    say(
        f"{job.title}{preset}: {counted(job.world_size, 'rank')} on {job.accelerator} ({in_words(job.hosts)})"
    )
    view = ScriptView(Path(job.run_dir), job.world_size, partial(click.echo, err=options.as_json))
    again = f"Start it again: {join(['dsrun', 'rerun', job.run_dir])}"
    run_job(job, machine, connection, options, view=view, summarise=summarise, again=again, away=away)

"""`dsrun rerun` (jobs): do the job of a run again, in a new folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import FinetuneOptions, LaunchOptions, RerunOptions
from dsrun.options.declare import select

if TYPE_CHECKING:
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.assembly import PlannedJob


@click.command(cls=TableCommand)
@click.argument("run", shell_complete=runs)
@options_of(RerunOptions)
def command(run: str, **values: Any) -> None:
    """Do the job of RUN again from its beginning, in a new folder: same model, data, config, seed and ranks.

    It runs where RUN ran: on as many free devices of this machine, or on the same devices of the same hosts.
    RUN is a run's folder, or its name in runs/. It is refused where the data or the model have changed since, as far
    as the run knows what they were. Of a script's run the same command is started again.
    """
    from dsrun.cli import finetune, launch
    from dsrun.cli.jobs.detach import detached
    from dsrun.cli.jobs.running import allocated, tell
    from dsrun.cli.parsing.where import connection_of
    from dsrun.jobs.allocation.request import DeviceRequest
    from dsrun.jobs.assembly import rerun
    from dsrun.jobs.assembly.script import repeat
    from dsrun.jobs.runs import past_runs

    past = past_runs.read(past_runs.named(run)).with_secrets()
    requested, connection = connection_of(given(RerunOptions, values), again=True)
    options = requested.options
    if past.script and options.force:
        raise click.UsageError(
            "--force is for a fine-tune that is predicted to run out of memory; RUN is a script's."
        )
    devices = select(DeviceRequest, options)
    away = detached(options.detach, connection, as_json=options.as_json, dry_run=False)

    def plan(allocator: Allocator, _for_good: bool) -> PlannedJob[Any]:
        if past.script:
            return repeat.repeated(
                past, past.script, allocator.machine, os.environ, output_dir=options.output_dir, wanted=devices,
                allocator=allocator,
            )  # fmt: skip
        return rerun.repeated(
            past, allocator.machine, os.environ, output_dir=options.output_dir, wanted=devices, force=options.force,
            allocator=allocator,
        )  # fmt: skip

    with allocated(plan, connection, options) as (planned, machine):
        tell(planned.notes)
        if past.script:
            launch.run(planned.job, machine, connection, select(LaunchOptions, options), away)
        else:
            chosen = select(FinetuneOptions, options)
            finetune.run(planned.job, machine, connection, chosen, resume=None, away=away)

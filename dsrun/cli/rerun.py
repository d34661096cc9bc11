"""`dsrun rerun` (jobs): do the job of a run again, in a new folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import click

from dsrun.cli.parsing.completion import runs
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import FinetuneOptions, LaunchOptions, RerunOptions
from dsrun.options.declare import entries, flag_of, select
from dsrun.options.layers import Resolved, Source
from dsrun.options.table import (
    DetachOptions,
    DeviceOptions,
    ForceOptions,
    HostOptions,
    JsonOptions,
    OutputOptions,
    PushOptions,
    RestoreOptions,
    WaitOptions,
)

if TYPE_CHECKING:
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.assembly import PlannedJob
    from dsrun.jobs.runs.past_runs import Run


AS_IT_WAS = frozenset(
    name
    for group in (
        DeviceOptions,
        HostOptions,
        WaitOptions,
        DetachOptions,
        PushOptions,
        ForceOptions,
        JsonOptions,
        OutputOptions,
    )
    for name in entries(group)
)
"""Options that say where the job runs, and leave it what it is."""
OF_RESUME = ("resume", "go_on", *entries(RestoreOptions))


@click.command(cls=TableCommand)
@click.argument("run", shell_complete=runs)
@options_of(RerunOptions)
def command(run: str, **values: Any) -> None:
    """Do the job of RUN again from its beginning, in a new folder: same model, data, config, seed and ranks.

    It runs where RUN ran: on as many free devices of this machine, or on the same devices of the same hosts.
    RUN is a run's folder, or its name in runs/. It is refused where the data or the model have changed since, as far
    as the run knows what they were. Of a script's run the same command is started again.

    An option of finetune changes the job: it is planned anew, from RUN/run.toml.

    \b
    dsrun rerun runs/first                        the same again
    dsrun rerun runs/first --lr 1e-4 --dry-run    what would run with another
    """
    from dsrun.cli import finetune, launch
    from dsrun.cli.jobs import pushing
    from dsrun.cli.jobs.detach import detached
    from dsrun.cli.jobs.running import allocated, tell
    from dsrun.cli.parsing.where import connection_of
    from dsrun.jobs.allocation.request import DeviceRequest
    from dsrun.jobs.assembly import rerun
    from dsrun.jobs.assembly.script import repeat
    from dsrun.jobs.runs import past_runs

    past = past_runs.read(past_runs.named(run)).with_secrets()
    asked = given(RerunOptions, values)
    if changes := [name for name in asked.user if name not in AS_IT_WAS]:
        _with_changes(past, asked, changes)
        return
    requested, connection = connection_of(asked, again=True)
    options = requested.options
    if past.script and options.force:
        raise click.UsageError(
            "--force is for a fine-tune that is predicted to run out of memory; RUN is a script's."
        )
    if past.script and (options.push or options.public):
        raise click.UsageError("--push is for a fine-tune's model; RUN is a script's.")
    pushing.goal(options)
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
            pushing.check_model(planned.job, options)
            chosen = select(FinetuneOptions, options)
            finetune.run(planned.job, machine, connection, chosen, resume=None, away=away)


def _with_changes(past: Run, asked: Resolved[RerunOptions], changes: list[str]) -> None:
    """Plan the run's job anew with other values of these options, and carry it out; or only look.

    Raises click.UsageError for a script's run, and for options of a run that goes on.
    """
    from dsrun.cli import finetune
    from dsrun.errors import DsrunError
    from dsrun.job.layout import RUN_FILE
    from dsrun.jobs.assembly.rerun import beside
    from dsrun.options import run_file

    flags = ", ".join(flag_of(RerunOptions, name) for name in changes)
    if past.script:
        raise click.UsageError(
            f"{flags}: for a fine-tune, and RUN is a script's: start it with dsrun launch."
        )
    if going_on := [flag_of(RerunOptions, name) for name in changes if name in OF_RESUME]:
        raise click.UsageError(f"{going_on[0]} is for a run that goes on: dsrun resume RUN.")
    path = past.path / RUN_FILE
    if not path.is_file():
        hint = "dsrun show RUN has its options: give them to dsrun finetune, with those that change."
        raise DsrunError(f"has no {RUN_FILE}: an older dsrun made it", where=str(past.path), hint=hint)
    kept = run_file.read(path)
    hosts = past.job.hosts
    own = {"output_dir": beside(past.path), "gpus": len(hosts[0].devices) if len(hosts) == 1 else None}
    if any(asked.said(name) for name in entries(DeviceOptions)):
        del own["gpus"]
    requested = kept.into(asked).filled(Source.KEPT, own, str(path))
    # RerunOptions are FinetuneOptions with another help text for one of them.
    finetune.start(str(kept.model), cast("Resolved[FinetuneOptions]", requested))

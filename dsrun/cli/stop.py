"""`dsrun stop` (jobs): end a run that goes on."""

from __future__ import annotations

import click

from dsrun.cli.parsing.completion import runs
from dsrun.errors import DsrunError

TIMEOUT_S, SAVE_S = 60.0, 1800.0
"""Longer than dsrun itself gives its ranks before it kills them (job/processes.py); and with a checkpoint."""


@click.command()
@click.argument("run", shell_complete=runs)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help=f"How long to wait for its end.  [default: {TIMEOUT_S:g}; with --save {SAVE_S:g}]",
)
@click.option("--save", is_flag=True, help="Have it write a checkpoint first.")
def command(run: str, *, timeout_s: float | None, save: bool) -> None:
    """Ask RUN to end, and wait until every process of it has.

    RUN is a run's folder, or its name in runs/. Without --save, what was trained since the last checkpoint is lost;
    `dsrun resume` goes on from there (a script's run: the script, if it can).
    """
    from shlex import join

    from dsrun.jobs.runs import past_runs, stopping

    past = past_runs.read(past_runs.named(run))
    if save and past.script:
        raise DsrunError(
            "is the run of a script, which dsrun can't ask for a checkpoint", where=str(past.path)
        )
    if timeout_s is None:
        timeout_s = SAVE_S if save else TIMEOUT_S
    ended = stopping.stop(past, timeout_s, save=save)
    many = f"{ended.processes} process{'es' if ended.processes != 1 else ''}"
    click.echo(f"{past.path}: {ended.state}; {many} ended within {ended.seconds:.1f} s")
    if ended.state != "finished" and past.script:
        click.echo(f"  Start it again: {join(['dsrun', 'rerun', str(past.path)])}", err=True)
    elif ended.state != "finished":
        checkpoints = past.checkpoints
        advice = (
            f"Continue it from {checkpoints[-1].name}"
            if checkpoints
            else "There is no checkpoint; start it again"
        )
        click.echo(f"  {advice}: {join(['dsrun', 'resume', str(past.path)])}", err=True)

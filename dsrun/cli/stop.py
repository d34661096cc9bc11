"""`dsrun stop`: end a run that goes on."""

from __future__ import annotations

import click

TIMEOUT_S = 60.0
"""Longer than dsrun itself gives its ranks before it kills them (dsrun/jobs/processes.py)."""


@click.command()
@click.argument("run")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for its end.",
)
def command(run: str, timeout_s: float) -> None:
    """Ask RUN to end, and wait until every process of it has.

    RUN is a run's folder, or its name in runs/. What was trained since the last checkpoint is lost; `dsrun resume`
    goes on from there.
    """
    from shlex import join

    from dsrun.jobs import runs, stopping

    found = runs.read(runs.named(run))
    ended = stopping.stop(found, timeout_s)
    many = f"{ended.processes} process{'es' if ended.processes != 1 else ''}"
    click.echo(f"{found.path}: {ended.state}; {many} ended within {ended.seconds:.1f} s")
    if ended.state != "finished":
        kept = found.checkpoints
        what = f"Continue it from {kept[-1].name}" if kept else "There is no checkpoint; start it again"
        click.echo(f"  {what}: {join(['dsrun', 'resume', str(found.path)])}", err=True)

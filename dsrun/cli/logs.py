"""`dsrun logs` (runs): the logs of all ranks of a run, merged."""

from __future__ import annotations

import click

from dsrun.cli.common.completion import runs


@click.command()
@click.argument("run", shell_complete=runs)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, or until Ctrl-C.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's log, without a prefix.")
def command(run: str, *, follow: bool, rank: int | None) -> None:
    """Print the logs of all ranks of RUN, merged: each line with its rank, [all] where every rank prints it.

    Keys and passwords in them are hidden. RUN is a run's folder, or its name in runs/. Ctrl-C ends the printing; the
    run goes on. A job that waits in Slurm's queue is waited for with -f.
    """
    from dsrun.host.hiding import without_secrets
    from dsrun.jobs.runs import past_runs, rank_logs

    path = past_runs.named(run)
    if follow and past_runs.waits(path):
        click.echo("dsrun: Slurm has not begun the job: waiting for it (Ctrl-C ends the waiting)", err=True)
        rank_logs.await_job(path, lambda line: click.echo(f"dsrun: {line}", err=True))
    found = past_runs.read(path)
    for number, text in rank_logs.tell(found, rank, follow=follow):
        who = "all" if number is None else f"rank {number}"
        click.echo(without_secrets(text if rank is not None else f"[{who}] {text}"))
    if follow:
        click.echo(f"dsrun: the run is {past_runs.read(found.path).state}", err=True)

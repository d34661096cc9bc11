"""`dsrun logs` (runs): the logs of all ranks of a run, merged."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import datetime, timedelta

import click

from dsrun.cli.parsing.completion import runs

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
CLOCKS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d")
TODAY = ("%H:%M:%S", "%H:%M")


def _moment(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """--since in seconds since 1970: a time of this machine's, or how long ago. Raises click.BadParameter."""
    if text is None:
        return None
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", text):
        return time.time() - float(match[1]) * UNITS[match[2]]
    for form in CLOCKS:
        with contextlib.suppress(ValueError):
            return datetime.strptime(text, form).astimezone().timestamp()
    now = datetime.now().astimezone()
    for form in TODAY:
        with contextlib.suppress(ValueError):
            clock = datetime.strptime(text, form).time()
            moment = datetime.combine(now.date(), clock).astimezone()
            return (moment if moment <= now else moment - timedelta(days=1)).timestamp()
    raise click.BadParameter(f"{text!r} is no time: 10m, 2h, 1d, 18:30, or 2026-11-23 18:30")


def _pattern(_context: click.Context, _option: click.Parameter, text: str | None) -> re.Pattern[str] | None:
    """--grep, compiled. Raises click.BadParameter."""
    try:
        return None if text is None else re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise click.BadParameter(f"{text!r} is no regular expression: {error}") from None


@click.command()
@click.argument("run", shell_complete=runs)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, or until Ctrl-C.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank's log, without a prefix.")
@click.option("-n", "--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines.")
@click.option(
    "--since",
    callback=_moment,
    metavar="TIME",
    help="Only what was printed since then: 10m ago, 2h, 18:30, a date.",
)
@click.option("--grep", callback=_pattern, metavar="PATTERN", help="Only lines with this regular expression.")
def command(
    run: str,
    *,
    follow: bool,
    rank: int | None,
    tail: int | None,
    since: float | None,
    grep: re.Pattern[str] | None,
) -> None:
    """Print the logs of all ranks of RUN, merged: each line with its rank, [all] where every rank prints it.

    Keys and passwords in them are hidden. RUN is a run's folder, or its name in runs/. Ctrl-C ends the printing; the
    run goes on. A job that waits in Slurm's queue is waited for with -f. With --grep, --tail counts the
    lines that match.
    """
    from dsrun.host.hiding import without_secrets
    from dsrun.jobs.runs import past_runs, rank_logs

    path = past_runs.named(run)
    if follow and past_runs.waits(path):
        click.echo("dsrun: Slurm has not begun the job: waiting for it (Ctrl-C ends the waiting)", err=True)
        rank_logs.await_job(path, lambda line: click.echo(f"dsrun: {line}", err=True))
    past = past_runs.read(path)
    selection = rank_logs.LineSelection(tail, since, grep)
    for number, text in rank_logs.tell(past, rank, follow=follow, selection=selection):
        who = "all" if number is None else f"rank {number}"
        click.echo(without_secrets(text if rank is not None else f"[{who}] {text}"))
    if follow:
        click.echo(f"dsrun: the run is {past_runs.read(past.path).state}", err=True)

"""`dsrun runs` (runs): list the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.cli.common.columns import columns
from dsrun.cli.common.json_output import print_json
from dsrun.words import loss_text, printable, span_text, time_text

if TYPE_CHECKING:
    from dsrun.jobs.runs.run_summaries import Summary

TITLES = ("run", "model", "preset", "ranks", "state", "steps", "loss", "eval loss", "started", "took")
TEXTS = (0, 1, 2, 4, 8)
"""The columns of texts, aligned to the left."""


@click.command()
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the runs in FOLDER and below, newest first: how far they are, and what came of them.

    FOLDER may be a run's own folder.  [default: runs]

    \b
    dsrun runs
    dsrun runs /scratch/me/runs --json
    """
    from dsrun.jobs.runs import past_runs, run_summaries

    chosen = [folder.expanduser() for folder in folders] or [Path(past_runs.HOME)]
    nothing = not folders and not Path(past_runs.HOME).exists()
    found = [] if nothing else run_summaries.summaries(chosen)
    if as_json:
        from dataclasses import asdict

        print_json("runs", {"runs": [asdict(one) for one in found]})
    elif found:
        _table(found)
    if not found:
        where = " ".join(str(folder.absolute()) for folder in chosen)
        click.echo(f"dsrun: no runs in {where}\n  Elsewhere: dsrun runs FOLDER", err=True)


def _table(found: list[Summary]) -> None:

    rows = [TITLES, *(_row(one) for one in found if not one.problem)]
    lines = iter(columns(rows, left=TEXTS))
    if len(rows) > 1:
        click.echo(next(lines))
    else:
        next(lines)
    for one in found:
        click.echo(
            f"{printable(one.name)}  {one.state}: {printable(one.problem)}" if one.problem else next(lines)
        )


def _state(one: Summary) -> str:
    """The state, and of a failed run its cause."""

    return f"{one.state}: {printable(str(one.cause))}" if one.cause else one.state


def _row(one: Summary) -> tuple[str, ...]:

    total = "?" if one.total_steps is None else str(one.total_steps)
    steps = "-" if one.steps is None else f"{one.steps}/{total}"
    return (
        one.name, one.model or "", one.preset or "-", str(one.ranks), _state(one), steps,
        loss_text(one.loss), loss_text(one.eval_loss), time_text(one.started), span_text(one.seconds),
    )  # fmt: skip

"""`dsrun runs` (runs): list the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.cli.common.columns import columns, folded, screen_width
from dsrun.cli.common.json_output import print_json
from dsrun.words import loss_text, printable, span_text, time_text, width

if TYPE_CHECKING:
    from dsrun.jobs.runs.run_summaries import Summary

TITLES = ("run", "model", "preset", "ranks", "state", "steps", "loss", "eval loss", "started", "took")
TEXTS = ("run", "model", "preset", "state", "started")
"""The columns of texts, aligned to the left."""
INDENT = 4
LEFT_OUT = ("took", "preset", "ranks", "model", "started")
"""What a terminal that is too narrow does without, in this order: a run's own name often says model and preset."""


@click.command()
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path, readable=False))
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
    """The runs in columns: all of them in files and pipes, as many as there is room for on a terminal."""
    rows, room = [TITLES, *(_row(one) for one in found if not one.problem)], screen_width()
    made = _fitting(rows, room) or _below_names(rows, room or 0)
    if len(rows) > 1:
        click.echo(made[0])
    lines = iter(made[1:])
    for one in found:
        told = f"{printable(one.name)}  {one.state}: {printable(one.problem)}" if one.problem else next(lines)
        click.echo(folded(told, room, 4) if one.problem else told)


def _fitting(rows: list[tuple[str, ...]], room: int | None, without: str = "") -> list[str]:
    """A line for each row, with all columns that there is room for; none where a line is too wide with the fewest."""
    shown = list(rows[0])
    for title in (without, *LEFT_OUT):
        shown = [name for name in shown if name != title]
        places = [rows[0].index(name) for name in shown]
        left = [place for place, name in enumerate(shown) if name in TEXTS]
        made = columns([[row[place] for place in places] for row in rows], left=left)
        if room is None or max(map(width, made)) <= room:
            return made
    return []


def _below_names(rows: list[tuple[str, ...]], room: int) -> list[str]:
    """The same where names are long: each on a line of its own, with the columns in the next."""
    indent = " " * INDENT
    rest = _fitting(rows, room - INDENT, TITLES[0])
    if not rest:  # narrower than any terminal that is used: at the words
        rest = [folded("  ".join(row[4:8]), room - INDENT, 0).replace("\n", f"\n{indent}") for row in rows]
    return [f"{printable(row[0])}\n{indent}{line}" for row, line in zip(rows, rest, strict=True)]


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

"""`dsrun runs` (runs): list the runs in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.cli.output.columns import columns, folded, screen_width
from dsrun.cli.output.results import print_json
from dsrun.words import loss_text, printable, span_text, time_text, width

if TYPE_CHECKING:
    from dsrun.jobs.runs.run_summaries import Summary

SCORE = "score"
TITLES = ("run", "model", "preset", "ranks", "state", "steps", "loss", "eval loss", SCORE, "started", "took")
TEXTS = ("run", "model", "preset", "state", SCORE, "started")
"""The columns of texts, aligned to the left."""
INDENT = 4
LEFT_OUT_FIRST = ("took", "preset", "ranks", "model", "started", SCORE)
"""Columns that a narrow terminal does without, in this order: a run's own name often says model and preset."""


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
    summaries = [] if nothing else run_summaries.summaries(chosen)
    if as_json:
        from dataclasses import asdict

        print_json("runs", {"runs": [asdict(run) for run in summaries]})
    elif summaries:
        _table(summaries)
    if not summaries:
        where = " ".join(str(folder.absolute()) for folder in chosen)
        click.echo(f"dsrun: no runs in {where}\n  Elsewhere: dsrun runs FOLDER", err=True)


def _table(summaries: list[Summary]) -> None:
    """The runs in columns: all of them in files and pipes, as many as there is room for on a terminal."""
    rows, room = [TITLES, *(_row(run) for run in summaries if not run.problem)], screen_width()
    lines_made = _fitting(rows, room) or _below_names(rows, room or 0)
    if len(rows) > 1:
        click.echo(lines_made[0])
    lines = iter(lines_made[1:])
    for run in summaries:
        text = f"{printable(run.name)}  {run.state}: {printable(run.problem)}" if run.problem else next(lines)
        click.echo(folded(text, room, 4) if run.problem else text)


def _fitting(rows: list[tuple[str, ...]], room: int | None, without: str = "") -> list[str]:
    """A line for each row, with all columns that there is room for; none where a line is too wide with the fewest."""
    scored = any(row[rows[0].index(SCORE)] for row in rows[1:])
    shown = [name for name in rows[0] if name != SCORE or scored]
    for title in (without, *LEFT_OUT_FIRST):
        shown = [name for name in shown if name != title]
        places = [rows[0].index(name) for name in shown]
        left = [place for place, name in enumerate(shown) if name in TEXTS]
        lines = columns([[row[place] for place in places] for row in rows], left=left)
        if room is None or max(map(width, lines)) <= room:
            return lines
    return []


def _below_names(rows: list[tuple[str, ...]], room: int) -> list[str]:
    """The lines of rows with long names: each name on a line of its own, with the columns in the next."""
    indent = " " * INDENT
    rest = _fitting(rows, room - INDENT, TITLES[0])
    if not rest:  # narrower than any terminal that is used: at the words
        rest = [folded("  ".join(row[4:8]), room - INDENT, 0).replace("\n", f"\n{indent}") for row in rows]
    return [f"{printable(row[0])}\n{indent}{line}" for row, line in zip(rows, rest, strict=True)]


def _state(run: Summary) -> str:
    """The state, and the cause of a failed run."""
    return f"{run.state}: {printable(str(run.cause))}" if run.cause else run.state


def _score(run: Summary) -> str:
    """The score of the answers after training, with what to hold it against."""
    if run.score is None:
        return ""
    beside = f" ({run.score.beside})" if run.score.beside else ""
    return f"{run.score.name} {run.score.value:.2f}{beside}"


def _row(run: Summary) -> tuple[str, ...]:
    total = "?" if run.total_steps is None else str(run.total_steps)
    steps = "-" if run.steps is None else f"{run.steps}/{total}"
    return (
        run.name, run.model or "", run.preset or "-", str(run.ranks), _state(run), steps,
        loss_text(run.loss), loss_text(run.eval_loss), _score(run), time_text(run.started), span_text(run.seconds),
    )  # fmt: skip

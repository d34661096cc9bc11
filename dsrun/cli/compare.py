"""`dsrun compare` (runs): compare runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dsrun.cli.output.columns import columns, echo_folded, screen_width, without_middle
from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import runs
from dsrun.errors import Problem, collected, raise_all
from dsrun.words import printable, width

LEAST_VALUE = 9
"""Columns of a value on a terminal, at least: a loss with its digits."""


@click.command()
@click.argument("chosen", metavar="RUN RUN [RUN]...", nargs=-1, required=True, shell_complete=runs)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the curves: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, with every step of the curves.")
def command(chosen: tuple[str, ...], *, plot: Path | None, as_json: bool) -> None:
    """Say what RUNs differ in, and put their curves side by side.

    RUN is a run's folder, or its name in runs/. Configs are compared with DeepSpeed's defaults where a key is left out.

    \b
    dsrun compare runs/a runs/b
    dsrun compare runs/* --plot curves.png
    """
    from dsrun.jobs.runs import past_runs
    from dsrun.jobs.runs.compare_runs import FIGURES, agreement_text, compare_runs, figure_text, value_text

    if len(chosen) < 2:
        raise click.UsageError("Name two runs, or more.")
    runs_read, problems = [], list[Problem]()
    for text in chosen:
        with collected(problems):
            runs_read.append(past_runs.read(past_runs.named(text)))
    raise_all(problems)
    if plot is not None:
        from dsrun.cli.output.curves import draw

        draw([(run.path.name, run.losses, run.eval_losses) for run in runs_read], plot)
    comparison = compare_runs(runs_read)
    if as_json:
        from dataclasses import asdict

        shown = {
            "runs": [run.path for run in runs_read],
            **asdict(comparison),
            "losses": [run.losses for run in runs_read],
            "eval_losses": [run.eval_losses for run in runs_read],
        }
        print_json("compare", shown)
        return
    for place, run in enumerate(runs_read, 1):
        click.echo(f"run {place}: {printable(str(run.path))} ({run.state})")
    # What came of them stands first: it is what they were made for.
    click.echo("\nfigures")
    figures = comparison.figures.items()
    _table({FIGURES[name]: [figure_text(name, value) for value in row] for name, row in figures})
    if comparison.scores:
        _rows("scores", comparison.scores, lambda value: "-" if value is None else f"{value:.2f}", "")
    _rows("evaluation loss at step", comparison.eval_losses, _loss, "none")
    _rows("training loss at step", comparison.losses, _loss, "no step that all of them have done")
    for place, agreement in enumerate(comparison.agreement, 2):
        echo_folded(f"  run {place} and run 1: {agreement_text(agreement)}", 4)
    _rows("config", comparison.config, value_text, "the same in all")
    _rows("settings", comparison.settings, value_text, "the same in all")
    if plot is not None:
        click.echo(f"dsrun: the curves are drawn in {plot}", err=True)


def _rows(title: str, rows: Mapping[Any, Sequence[Any]], text: Callable[[Any], str], nothing: str) -> None:
    click.echo(f"\n{title}" + ("" if rows else f": {nothing}"))
    _table({str(name): [text(value) for value in row] for name, row in rows.items()})


def _table(rows: Mapping[str, Sequence[str]]) -> None:
    """A row for each name. On a terminal that is too narrow, long names have lines of their own, and long values lose
    their middle: they differ at an end most often.
    """
    if not rows:
        return
    count = len(next(iter(rows.values())))
    screen = screen_width() or sys.maxsize
    most = max(LEAST_VALUE, (screen - len("  ")) // count - len("  "))
    cut = {name: [without_middle(printable(value), most) for value in row] for name, row in rows.items()}
    shown = {"": [f"run {place}" for place in range(1, count + 1)], **cut}
    values = max(width(line) for line in columns([["", *row] for row in shown.values()]))
    limit = screen - len("  ") - values
    short = [name if width(name) <= limit else "" for name in shown]
    lines = columns([[name, *row] for name, row in zip(short, shown.values(), strict=True)])
    for name, kept, line in zip(shown, short, lines, strict=True):
        if name and not kept:
            click.echo(f"  {printable(name)}")
        click.echo(f"  {line}")


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"

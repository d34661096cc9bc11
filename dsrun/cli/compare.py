"""`dsrun compare` (runs): compare runs side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.common.completion import runs

if TYPE_CHECKING:
    from dsrun.jobs.runs.compare_runs import Agreement

FIGURES = {
    "steps": "steps",
    "last_loss": "last loss",
    "last_eval_loss": "last evaluation loss",
    "step_seconds": "seconds a step (median)",
    "tokens_per_second": "tokens a second",
    "run_seconds": "whole run",
    "gpu_allocated_bytes": "GPU memory in use",
    "gpu_reserved_bytes": "GPU memory held",
    "host_bytes": "host memory",
}


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
    from dsrun.errors import DsrunError, Problem
    from dsrun.jobs.runs import past_runs
    from dsrun.jobs.runs.compare_runs import compare_runs

    if len(chosen) < 2:
        raise click.UsageError("Name two runs, or more.")
    found, problems = [], list[Problem]()
    for text in chosen:
        try:
            found.append(past_runs.read(past_runs.named(text)))
        except DsrunError as error:
            problems += error.problems
    if problems:
        raise DsrunError(problems)
    if plot is not None:
        from dsrun.cli.common.curves import draw

        draw([(run.path.name, run.losses, run.eval_losses) for run in found], plot)
    seen = compare_runs(found)
    if as_json:
        from dataclasses import asdict

        from dsrun.files import json_text

        shown = {
            "runs": [run.path for run in found],
            **asdict(seen),
            "losses": [run.losses for run in found],
            "eval_losses": [run.eval_losses for run in found],
        }
        click.echo(json_text(shown, indent=2))
        return
    _runs([str(run.path) for run in found], [run.state for run in found])
    _rows("config", seen.config, _json, "the same in all")
    _rows("settings", seen.settings, _json, "the same in all")
    _rows("training loss at step", seen.losses, _loss, "no step that all of them have done")
    for place, agreement in enumerate(seen.agreement, 2):
        click.echo(f"  run {place} and run 1: {_agreement(agreement)}")
    _rows("evaluation loss at step", seen.eval_losses, _loss, "none")
    if seen.scores:
        _rows("scores", seen.scores, lambda value: "-" if value is None else f"{value:.2f}", "")
    click.echo("\nfigures")
    _table({FIGURES[name]: [_figure(name, value) for value in row] for name, row in seen.figures.items()})
    if plot is not None:
        click.echo(f"dsrun: the curves are drawn in {plot}", err=True)


def _runs(paths: Sequence[str], states: Sequence[str]) -> None:
    from dsrun.cli.common.columns import printable

    for place, (path, state) in enumerate(zip(paths, states, strict=True), 1):
        click.echo(f"run {place}: {printable(path)} ({state})")


def _rows(title: str, rows: Mapping[Any, Sequence[Any]], text: Callable[[Any], str], nothing: str) -> None:
    click.echo(f"\n{title}" + ("" if rows else f": {nothing}"))
    _table({str(name): [text(value) for value in row] for name, row in rows.items()})


def _table(rows: Mapping[str, Sequence[str]]) -> None:
    from dsrun.cli.common.columns import columns

    if rows:
        count = len(next(iter(rows.values())))
        titles = ["", *(f"run {place}" for place in range(1, count + 1))]
        for line in columns([titles, *([name, *row] for name, row in rows.items())]):
            click.echo(f"  {line}")


def _json(value: Any) -> str:
    return (
        "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _agreement(found: Agreement) -> str:
    if not found.steps:
        return "no step in common"
    steps = f"{found.steps} step{'s' if found.steps > 1 else ''}"
    if found.equal:
        return f"equal to the last digit at all {steps} that both have"
    if found.difference is None:
        return f"one of them is no number any more at step {found.step} (of {steps} that both have)"
    return f"at most {found.difference:.3g} apart, at step {found.step} (of {steps} that both have)"


def _figure(name: str, value: float | None) -> str:
    from dsrun.words import gib_text, loss_text, span_text

    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return gib_text(value)
    if name.endswith("_loss"):
        return loss_text(value)
    if name == "run_seconds":
        return span_text(value)
    return f"{value:.4g}" if name == "step_seconds" else f"{value:,.0f}"

"""`dsrun board` (runs): a folder of runs live in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsrun.cli.parsing.options import given, options_of
from dsrun.options.commands import BoardOptions


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@options_of(BoardOptions)
def command(folder: Path | None, **values: Any) -> None:
    """Show the runs in FOLDER and below in the browser: a table, a page for each, several over each other.

    It only reads, and is for this machine alone: it listens on the loopback address, and the address that it prints has
    a token. Needs dsrun[board].  [default: runs]

    \b
    dsrun board
    dsrun board /scratch/me/runs --port 9000
    """
    from dsrun.jobs.runs import past_runs
    from dsrun.reports.board.serve import serve

    options = given(BoardOptions, values).options
    chosen = folder.expanduser() if folder else Path(past_runs.HOME)
    serve(chosen, options.port, lambda text: click.echo(f"dsrun: {text}", err=True))

"""A text that a command makes: into a file, or to stdout."""

from __future__ import annotations

from pathlib import Path

import click

from dsrun.files import write_atomic

STDOUT = (None, "-", "/dev/stdout")


def file_of(output: Path | str | None) -> Path | None:
    """The file that -o names; None for stdout."""
    return None if output is None or str(output) in STDOUT else Path(output).expanduser()


def write_out(text: str, file: Path | None, *, overwrite: bool) -> None:
    """Write it, or print it where there is no file. Raises DsrunError as `write_atomic` does."""
    if file is None:
        click.echo(text, nl=False)
    else:
        write_atomic(file, text, overwrite=overwrite)
        click.echo(f"wrote {file}", err=True)

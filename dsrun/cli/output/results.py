"""The result of a command: as JSON on stdout, or as a text in a file or on stdout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dsrun.files import json_text, write_atomic

STDOUT = (None, "-", "/dev/stdout")


def print_json(form: str, value: Mapping[str, Any]) -> None:
    """Print a result to stdout. form: a name in dsrun.json_outputs, whose version it gets."""
    from dsrun.json_outputs import versioned

    click.echo(json_text(versioned(form, value), indent=2))


def file_of(output: Path | str | None) -> Path | None:
    """The file that -o names; None for stdout."""
    return None if output is None or str(output) in STDOUT else Path(output).expanduser()


def write_out(text: str, file: Path | None, *, overwrite: bool) -> None:
    """Write a text, or print it where there is no file. Raises DsrunError as `write_atomic` does."""
    if file is None:
        click.echo(text, nl=False)
    else:
        write_atomic(file, text, overwrite=overwrite)
        click.echo(f"wrote {file}", err=True)

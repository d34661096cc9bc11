"""How commands print a result for machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from dsrun.files import json_text


def print_json(form: str, value: Mapping[str, Any]) -> None:
    """Print a result to stdout. form: a name in dsrun.json_outputs, whose version it gets."""
    from dsrun.json_outputs import versioned

    click.echo(json_text(versioned(form, value), indent=2))

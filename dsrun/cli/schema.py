"""`dsrun schema` (configs): the JSON Schema of deepspeed.json, for editors."""

from __future__ import annotations

import json

import click

from dsrun.cli.output.results import file_of, write_out


@click.command("schema")
@click.option("--deepspeed-version", metavar="X.Y[.Z]", help="0.9 to 0.19.8; the newest if left out.")
@click.option("-o", "--output", metavar="FILE", help="Write it to a file; - is stdout.")
@click.option("--force", is_flag=True, help="Let -o replace a file.")
def command(deepspeed_version: str | None, output: str | None, force: bool) -> None:
    """Print the JSON Schema (2020-12) of deepspeed.json.

    Every key that DeepSpeed reads, with type, range, default and what it does; editors complete and check
    with it.

    \b
    dsrun schema -o deepspeed.schema.json
    dsrun schema --deepspeed-version 0.14
    """
    from dsrun.config.schemas import schema

    known = schema.load(schema.version_of(deepspeed_version) if deepspeed_version else None)
    text = json.dumps(known.root, indent=2) + "\n"
    write_out(text, file_of(output), overwrite=force)

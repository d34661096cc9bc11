"""`dsrun convert` (configs): a DeepSpeed config as accelerate's YAML or FSDP's, and back."""

from __future__ import annotations

from typing import Any

import click

from dsrun.cli.output.results import file_of, write_out
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.errors import DsrunError
from dsrun.options.commands import ConvertOptions
from dsrun.options.declare import select


@click.command("convert", cls=TableCommand)
@click.argument("file")
@options_of(ConvertOptions)
def command(file: str, **values: Any) -> None:
    """Write FILE, a DeepSpeed config or accelerate's YAML, in another form; what that can't say is told on stderr.

    \b
    dsrun convert acc.yaml -o ds.json            what accelerate would build
    dsrun convert ds.json --gpus 8 -o acc.yaml   a YAML that names the config
    dsrun convert acc.yaml --to fsdp             ZeRO as FSDP2, FSDP1 as FSDP2
    dsrun convert fsdp.yaml                      FSDP as ZeRO
    """
    from dsrun.config.accelerate.convert import convert
    from dsrun.config.presets.options import Options
    from dsrun.config.validation.sources import one
    from dsrun.trainers.describe import describe

    options = given(ConvertOptions, values).options
    output = file_of(options.output)
    source = one(file)
    if source.is_yaml and source.path is not None and (what := describe(source.path)).foreign:
        raise DsrunError(
            f"{what.what}; convert is for DeepSpeed's configs, accelerate's and FSDP's",
            where=file,
            hint=what.next_step,
        )
    converted = convert(source, options.to, output, select(Options, options))
    if converted.dropped:
        click.echo(
            f"dsrun: warning: left out, as there is no word for it: {', '.join(converted.dropped)}", err=True
        )
    write_out(converted.text, output, overwrite=options.force)

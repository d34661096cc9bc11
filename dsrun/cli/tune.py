"""`dsrun tune` (jobs): find the fastest settings by short real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dsrun.cli.parsing.completion import models
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import TuneOptions


@click.command("tune", cls=TableCommand, context_settings={"ignore_unknown_options": True})
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="MODEL [RUN.toml] [OPTIONS OF FINETUNE]",
    shell_complete=models,
)
@options_of(TuneOptions)
def command(words: tuple[str, ...], **values: Any) -> None:
    """Find the fastest preset, split of a step and activation checkpointing for a fine-tune by short runs of it.

    All but the options below is `dsrun finetune`'s: its model, data, devices and hosts. What it fixes isn't varied. The
    planner ranks the candidates, and each trial's time corrects it for those that are alike; the faster half is tried
    again and longer. A trial that dies is left behind. The same command goes on where it was stopped.

    \b
    dsrun tune llama-tiny --gpus 2
    dsrun tune run.toml --trials 12 --knob attention=sdpa,flash
    dsrun finetune run.toml --preset tuned/tuned.toml
    """
    from dsrun.cli.planning import tuning

    options = given(TuneOptions, values).options
    if not words:
        raise click.UsageError("Missing argument 'MODEL': `dsrun models` lists those with a name.")
    folder = Path(options.folder).expanduser()
    search = tuning.search_of(list(words), folder, options)
    if not tuning.report(search.run(), as_json=options.as_json):
        raise SystemExit(1)

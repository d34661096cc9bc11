"""`dsrun import` (jobs): another trainer's file as a run file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import echo_folded
from dsrun.cli.output.results import file_of, print_json, write_out
from dsrun.cli.parsing.completion import files
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.options.commands import ImportOptions
from dsrun.words import counted

if TYPE_CHECKING:
    from dsrun.trainers.counterparts import Draft


@click.command("import", cls=TableCommand)
@click.argument("file", shell_complete=files)
@options_of(ImportOptions)
def command(file: str, **values: Any) -> None:
    """Write the run file that FILE comes to: a YAML or JSON of LLaMA-Factory, axolotl, ms-swift, TRL, torchtune or
    accelerate, or the shell or sbatch script that starts one of them.

    Every argument of FILE is in it: as an option, or in a comment that says why there is none. What makes the training
    another one is told on stderr, too. A job that dsrun doesn't do is refused by the argument that asks for it.

    \b
    dsrun import sft.yaml -o run.toml             then: dsrun finetune run.toml
    dsrun import train.sh --gpus 8                for so many ranks
    dsrun import sft.yaml --dataset-dir LF/data   with its dataset_info.json
    """
    from dsrun.trainers import files as foreign
    from dsrun.trainers import run_text

    options = given(ImportOptions, values).options
    output = file_of(options.output)
    if output is not None and output.suffix != ".toml":
        raise click.UsageError(f"-o {output}: a run file's name ends in .toml.")
    run = foreign.read(Path(file).expanduser())
    more = {} if options.dataset_dir is None else {"dataset_dir": str(options.dataset_dir.absolute())}
    draft = foreign.drafted(run, gpus=options.gpus, more=more)
    if options.as_json:
        print_json("import", run_text.summary(draft))
    if not options.as_json or output is not None:
        write_out(run_text.run_text(draft, file, run_text.folder_of(output)), output, overwrite=options.force)
    _tell(draft, output)


def _tell(draft: Draft, output: Path | None) -> None:
    """What makes the training another one, and how many arguments became what, on stderr."""
    from shlex import quote

    from dsrun.trainers.counterparts import DIFFERS, SAME, UNKNOWN
    from dsrun.trainers.run_text import kinds

    for outcome in draft.outcomes.values():
        if outcome.kind in (DIFFERS, UNKNOWN):
            place = f" (line {outcome.line})" if outcome.line else ""
            echo_folded(f"dsrun: {outcome.kind}: {outcome.key}{place}: {outcome.text}", 4, err=True)
    for note in draft.notes:
        echo_folded(f"dsrun: note: {note}", 4, err=True)
    counts = kinds(draft)
    others = ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind != SAME and count)
    text = f"dsrun: {draft.trainer.title}: {counted(counts[SAME], 'argument')} taken over" + (
        f"; {others}" if others else ""
    )
    echo_folded(text, 4, err=True)
    _tell_config(draft)
    if output is not None:
        click.echo(f"Look at it, then: dsrun finetune {quote(str(output))} --dry-run", err=True)


def _tell_config(draft: Draft) -> None:
    """What is wrong with the DeepSpeed config that the file names."""
    from shlex import quote

    from dsrun.config.rules import Setting
    from dsrun.config.validation import report, sources
    from dsrun.config.validation.validate import RuleSelection, validate

    preset = draft.options.get("preset")
    if preset is None or not str(preset.value).endswith(sources.SUFFIXES) or not Path(preset.value).is_file():
        return
    source = sources.one(str(preset.value))
    result = validate(source.data, source.name, Setting(), selection=RuleSelection(level="warning"))
    click.echo(
        f"dsrun: {preset.value}: {report.summary([result])} (dsrun validate {quote(str(preset.value))})",
        err=True,
    )

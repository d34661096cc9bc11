"""MODEL and run files among a command's words, and run files written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.files import write_atomic
from dsrun.options.commands import FinetuneOptions, PlanOptions
from dsrun.options.declare import entries, flag_of
from dsrun.options.layers import Resolved, Source
from dsrun.options.table import LengthOptions

if TYPE_CHECKING:
    from dsrun.jobs.assembly import PlannedJob
    from dsrun.options.declare import Entry
    from dsrun.options.layers import Origin
    from dsrun.options.run_file import RunFile

FOREIGN = (".yaml", ".yml", ".json", ".sh", ".slurm", ".sbatch")
"""Endings of files that are no run file, and may be another trainer's."""
PLACE_OPTIONS = (
    "hosts", "hostfile", "devices", "include", "exclude", "launcher", "master_addr", "master_port",
)  # fmt: skip
"""Options that say where a run file's job runs: another cluster has its own hosts."""


def is_run_file(word: str) -> bool:
    """Whether a word of the command line names a run file."""
    from dsrun.options.run_file import SUFFIX

    return word.endswith(SUFFIX)


def parted(words: Sequence[str]) -> tuple[str | None, RunFile | None]:
    """MODEL and the run file among a command's words: what ends in .toml is the file.

    Raises click.UsageError for more than one of either, DsrunError for what is wrong in the file.
    """
    from dsrun.options import run_file

    _check_foreign(words)
    files = [word for word in words if is_run_file(word)]
    models = [word for word in words if not is_run_file(word)]
    for kind, words_of in (("MODEL", models), ("run file", files)):
        if len(words_of) > 1:
            raise click.UsageError(f"Name one {kind}, not {' and '.join(words_of)}.")
    return next(iter(models), None), run_file.read(Path(files[0]), _meant) if files else None


def _meant(option: str) -> str:
    """The hint for an option in a run file that dsrun lacks, where it is another trainer's; else empty."""
    from dsrun.options.commands import FinetuneOptions
    from dsrun.options.declare import entries
    from dsrun.trainers.other_names import ours, why_none

    known = ours(option, entries(FinetuneOptions).keys())
    return f"Did you mean {known!r}?" if known else why_none(option)


def _check_foreign(words: Sequence[str]) -> None:
    """Raise DsrunError for a word that names a file of another trainer, or of something else, with what takes it."""
    from dsrun.errors import DsrunError

    for word in words:
        path = Path(word).expanduser()
        if path.suffix.lower() in FOREIGN and path.is_file():
            from dsrun.trainers.describe import describe

            told = describe(path)
            raise DsrunError(told.what, where=word, hint=told.next_step)


def with_run_file(
    words: Sequence[str], requested: Resolved[FinetuneOptions]
) -> tuple[str | None, Resolved[FinetuneOptions]]:
    """MODEL, and the options with the run file's where the command line has none.

    --cluster on the command line leads to other hosts than the file's: those don't count then, and a note says so.
    """
    model, file = parted(words)
    if file is None:
        return model, requested
    names, dropped = set(file.values), []
    if requested.source("cluster") == Source.COMMAND_LINE:
        dropped = [flag_of(FinetuneOptions, name) for name in PLACE_OPTIONS if name in names]
        names -= set(PLACE_OPTIONS)
    if dropped:
        click.echo(f"note: {file.path}: {', '.join(dropped)} left out, because of --cluster", err=True)
    return model or file.model, file.into(requested, names)


def for_plan(
    words: Sequence[str], requested: Resolved[PlanOptions]
) -> tuple[list[str], Resolved[PlanOptions]]:
    """The words with MODEL in place of a run file, and plan's options with what the file says of them.

    The examples are as long as the file lets them be, which is what finetune checks before its start; they are not
    measured. What plan doesn't ask (schedule, checkpoints) goes unheard.
    """
    model, file = parted(words) if any(map(is_run_file, words)) else (None, None)
    if file is None:  # several run folders go with --calibrate
        return [*words], requested
    of_plan = entries(PlanOptions).keys() & entries(FinetuneOptions).keys() - {"train_file"}
    values = {name: value for name, value in file.values.items() if name in of_plan}
    preset = file.values.get("preset")
    values["presets"] = (preset,) if preset not in (None, "auto") else None
    if requested.options.seq_len is not None:
        values = {name: value for name, value in values.items() if name not in entries(LengthOptions)}
    if requested.options.purpose == "inference":
        values = {}
    named = model or file.model
    return [named] if named else [], requested.filled(Source.RUN_FILE, values, str(file.path))


def write(planned: PlannedJob[Any], model: str, path: Path, *, overwrite: bool) -> None:
    """Write a planned fine-tune as a run file. model: absolute where it is a path. Raises DsrunError."""
    from shlex import quote

    from dsrun.options import run_file

    if path.suffix != run_file.SUFFIX:
        raise click.UsageError(f"-o {path}: a run file's name ends in {run_file.SUFFIX}.")
    text = text_of(planned, model, path.expanduser().absolute().parent)
    write_atomic(path.expanduser(), text, overwrite=overwrite)
    click.echo(f"written; start it: dsrun finetune {quote(str(path))}", err=True)


def text_of(planned: PlannedJob[Any], model: str, folder: Path, *, of_run: bool = False) -> str:
    """A planned fine-tune as a run file. model: absolute where it is a path; folder: the place of the file.

    of_run: it is the one that the run's folder keeps, from which other runs begin: in folders of their own.
    """
    from dsrun.options import run_file

    rows = (row for row in _rows(planned) if not of_run or row[0].name != "output_dir")
    return run_file.text(model, rows, folder)


def _rows(planned: PlannedJob[Any]) -> Iterator[tuple[Entry, Any, Origin]]:
    """Each option; of a variable with a secret only the name, by which the environment's value is taken."""
    from dsrun.host.hiding import secrets

    for entry, value, origin in planned.resolved.rows() if planned.resolved else ():
        if entry.name == "env":
            pairs = [text.partition("=") for text in value]
            yield entry, tuple(n if secrets({n: v}) else f"{n}{sign}{v}" for n, sign, v in pairs), origin
        else:
            yield entry, value, origin

"""`dsrun diff` (configs): what really differs between two configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.cli.output.columns import indented
from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.completion import presets
from dsrun.errors import DsrunError, Problem, collected, raise_all

if TYPE_CHECKING:
    from dsrun.config.compare import Difference


@click.command("diff")
@click.argument("one", metavar="A", shell_complete=presets)
@click.argument("other", metavar="B", shell_complete=presets)
@click.option(
    "--world-size", type=click.IntRange(min=1), help="All GPUs of the job, to work out the batch sizes."
)
@click.option("--deepspeed-version", metavar="X.Y[.Z]", help="Whose defaults count; the newest if left out.")
@click.option("--json", "as_json", is_flag=True, help="The differences as JSON.")
@click.option("--exit-code", is_flag=True, help="Exit 1 if there is a difference.")
def command(
    one: str,
    other: str,
    *,
    world_size: int | None,
    deepspeed_version: str | None,
    as_json: bool,
    exit_code: bool,
) -> int:
    """Show what really differs between two configs: a key that is left out counts as its default.

    A and B are deepspeed.json files, - for the text from a pipe, or names of presets.

    \b
    dsrun diff old.json new.json
    dsrun diff zero2 ds_config.json --world-size 8
    """
    from dsrun.config import compare
    from dsrun.config.rules import Setting
    from dsrun.config.schemas import schema

    version = schema.version_of(deepspeed_version) if deepspeed_version else None
    configs: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for name in (one, other):
        with collected(problems):
            configs.append(_config(name, world_size))
    raise_all(problems)
    differences = compare.compare(configs[0], configs[1], Setting(world_size=world_size, version=version))
    if as_json:
        rows = [difference.as_dict() for difference in differences]
        print_json("diff", {"differences": rows})
    else:
        _show(differences)
    return int(exit_code and bool(differences))


def _config(name: str, world_size: int | None) -> dict[str, Any]:
    """The config in a file, or of a preset."""
    import os

    from dsrun import catalog
    from dsrun.config.presets.build import Options, build_config
    from dsrun.config.rules.frame import read_config
    from dsrun.config.validation import sources

    presets = catalog.files("presets")
    there = name == sources.STDIN or os.path.lexists(os.path.expanduser(name))  # noqa: PTH111 - never raises
    if name in presets and not there:
        return build_config(name, Options(gpus=world_size or 1, nvme_path="/local_nvme")).ds_config
    if not there:
        names = [*presets, *(path.name for path in Path().glob("*.json"))]
        hint = catalog.suggestion(name, names, "Name a deepspeed.json, or one of `dsrun preset`.")
        raise DsrunError("neither a file nor a preset", where=name, hint=hint)
    source = sources.one(name)
    config: dict[str, Any] = read_config(source.data, source.name, "json").value
    return config


def _show(differences: list[Difference]) -> None:
    for row in differences:
        before = _value(row, row.before, given=row.given_before, known=row.known_before)
        after = _value(row, row.after, given=row.given_after, known=row.known_after)
        click.echo(f"{row.path}: {before} -> {after}")
        if row.does:
            click.echo(indented(row.does))
    if not differences:
        click.echo("dsrun: no difference", err=True)


def _value(row: Difference, value: Any, *, given: bool, known: bool) -> str:
    from dsrun.config.compare import TRIAD

    if not known:
        return "(left out)"
    origin = "worked out" if row.path in TRIAD else "default"
    return json.dumps(value, ensure_ascii=False) + ("" if given else f" ({origin})")

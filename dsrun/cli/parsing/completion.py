"""Completion by the tabulator: names of presets, models, GPUs, runs, rules, keys and columns.

Each function is a `shell_complete` of click's. It runs while somebody types, so it imports little; what can't
be read has no names: a message would land in the middle of the line that is being typed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    Found = list[CompletionItem[str]]
    Completer = Callable[[click.Context, click.Parameter, str], Found]
FILE = "file"
MOST_RUNS = 50


def plain(names: Mapping[str, str] | Iterable[str], incomplete: str) -> Found:
    """The names that go on from what is typed; a mapping has a hint for each."""
    from click.shell_completion import CompletionItem

    hints: Mapping[str, str] = names if isinstance(names, Mapping) else dict.fromkeys(names, "")
    return [
        CompletionItem(name, help=help or None) for name, help in hints.items() if name.startswith(incomplete)
    ]


def any_file(incomplete: str) -> Found:
    """The shell's own completion of file names."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=FILE)]


def or_file(items: Found, incomplete: str) -> Found:
    """Names; where none goes on from what is typed, files."""
    return items or any_file(incomplete)


def quiet(completer: Completer) -> Completer:
    """A completer that has no names where something can't be read."""

    def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> Found:
        try:
            return completer(ctx, param, incomplete)
        except (DsrunError, OSError, ValueError):
            return []

    return names


@quiet
def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    return any_file(incomplete)


@quiet
def presets(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    """Presets by name, the user's folders' too, and `auto`."""
    from dsrun import catalog

    return or_file(plain([*catalog.files("presets"), "auto"], incomplete), incomplete)


@quiet
def models(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    """Models by name, then run files and folders."""
    from dsrun.models import model_files

    return or_file(plain([*model_files.names()], incomplete), incomplete)


@quiet
def gpus(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    from dsrun import catalog
    from dsrun.planner.gpus import KIND

    return plain([*catalog.files(KIND)], incomplete)


@quiet
def clusters(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    from dsrun import catalog
    from dsrun.jobs.launchers.common.cluster_files import KIND

    return or_file(plain([*catalog.files(KIND)], incomplete), incomplete)


@quiet
def runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    """Runs below runs/, the newest first, then folders."""
    from dsrun.jobs.runs.past_runs import HOME, find

    home = Path(HOME)
    folders = find(home) if home.is_dir() else []
    newest = sorted(folders, key=lambda path: path.lstat().st_mtime, reverse=True)
    names = [str(path.relative_to(home)) for path in newest[:MOST_RUNS]]
    return or_file(plain(names, incomplete), incomplete)


@quiet
def rules(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    """Ids of rules with their titles; of a list with commas the last one."""
    from dsrun.config.rules import find_rules

    before, comma, last = incomplete.rpartition(",")
    begun = f"{before}{comma}"
    known = {f"{begun}{rule.id}": rule.about for rule in find_rules()}
    return plain(known, f"{begun}{last.upper()}")


@quiet
def keys(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    """Keys of deepspeed.json: one section at a time."""
    from dsrun.config.schemas import schema

    depth = incomplete.count(".")
    return plain([path for path in schema.load().paths if path.count(".") == depth], incomplete)


def assignments(ctx: click.Context, param: click.Parameter, incomplete: str) -> Found:
    """PATH=VALUE: the path."""
    return [] if "=" in incomplete else keys(ctx, param, incomplete)


@quiet
def explained(ctx: click.Context, param: click.Parameter, incomplete: str) -> Found:
    """Everything that `dsrun explain` takes."""
    if incomplete.upper().startswith("DS"):
        return rules(ctx, param, incomplete)
    from dsrun import versions
    from dsrun.jobs.diagnosis.signatures import find_signatures

    named = plain([*find_signatures(), *versions.combinations(), "signatures", "versions"], incomplete)
    return [*(keys(ctx, param, incomplete) if incomplete else rules(ctx, param, "")), *named]


@quiet
def columns(ctx: click.Context, _param: click.Parameter, incomplete: str) -> Found:
    """The columns of the data files that are named before."""
    from dsrun.data.rows import file_columns, weighted_file

    named = ctx.params.get("train_file") or ()
    names = [name for text in named for name in file_columns(weighted_file(text)[0])]
    return plain(names, incomplete)


BY_OPTION: Mapping[str, Completer] = {
    "preset": presets, "gpu": gpus, "cluster": clusters, "model": models, "overrides": assignments,
    "train_file": files, "prompt_column": columns, "response_column": columns, "history_column": columns,
    "text_column": columns,
}  # fmt: skip
"""The options of the table that have names to complete."""

"""A run as one file: TOML with finetune's options under their names, and `model`.

Keys stand without tables, under comments that name the groups of --help. Paths are relative to the file, so that it
can be checked in and used from anywhere. What a command is to do this time (resume, dry run) is no part of it.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsrun import __version__, catalog
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import read_text
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import FILE_SUFFIXES, LIST_OR_FILE, LIST_SUFFIX, NAME_OR_PATH, PATH, Entry, entries
from dsrun.options.derived import BY_LAYOUT, BY_TOKENS
from dsrun.options.layers import Origin, Resolved, Source, T, problems_of
from dsrun.options.table import AUTO_LAYOUT

SUFFIX = ".toml"
MODEL = "model"
KEPT = "kept"
"""The key that lists options whose values dsrun wrote, and nobody asked for: they hold as the others do, but nothing is
refused because of them."""
MODELS = "presets/models"
SPLIT = ("micro_batch", "grad_accum")
"""Options that say how devices divide a step."""
BY_PLAN = ("preset", "activation_checkpointing", "recompute_every")
"""Options that the planner may choose for the devices."""
REMOTE = re.compile(r"[a-z]{2,}:(?!\d)")
"""The beginning of a name that is in no file system of this machine: hf:NAME."""
OTHER_FILES = {
    "config": "It looks like a preset: dsrun finetune MODEL --preset FILE",
    "extends": "It looks like a preset: dsrun finetune MODEL --preset FILE",
    "architecture": "It looks like a model's file: dsrun finetune NAME, with the file in presets/models",
    "partition": "It looks like a cluster's file: dsrun finetune MODEL --cluster FILE",
}
"""Keys of dsrun's other TOML files, and the hint for a file that has them."""


class RunFile(NamedTuple):
    """The content of a run file. model: None where it names none; values: options by name, paths absolute."""

    path: Path
    model: str | None
    values: dict[str, Any]
    kept: frozenset[str] = frozenset()
    """Names of values that nobody asked for."""

    def into(self, known: Resolved[T], names: Collection[str] | None = None) -> Resolved[T]:
        """A command's options with the file's values. names: those that count; all where None."""
        chosen = (
            self.values
            if names is None
            else {name: self.values[name] for name in names if name in self.values}
        )
        asked = {name: value for name, value in chosen.items() if name not in self.kept}
        kept = {name: value for name, value in chosen.items() if name in self.kept}
        known = known.filled(Source.RUN_FILE, asked, str(self.path))
        return known.filled(Source.KEPT, kept, str(self.path))


def _unknown(_: str) -> str:
    return ""


def read(path: Path, meant: Callable[[str], str] = _unknown) -> RunFile:
    """Read a run file. meant: the hint for an option that is unknown here, where it is another trainer's.

    Raises DsrunError with every key that is unknown or has no place in a file, and every value that can't be.
    """
    table, lines = catalog.read_toml(path), _lines(read_text(path))
    if other := next((hint for key, hint in OTHER_FILES.items() if key in table), None):
        raise DsrunError("is not a run file", where=str(path), hint=other)
    known = {name: entry for name, entry in entries(FinetuneOptions).items() if _is_part(entry)}
    problems: list[Problem] = []
    for key, value in table.items():
        where = f"{path}:{lines[key]}" if key in lines else str(path)
        problems += _problems(key, value, known, where, meant)
    raise_all(problems)
    folder = path.expanduser().absolute().parent
    folder = folder.resolve() if ".." in folder.parts else folder
    model, kept = table.pop(MODEL, None), frozenset(table.pop(KEPT, ()))
    values = {name: _from_folder(known[name], value, folder) for name, value in table.items()}
    return RunFile(path, model and _model(model, folder), values, kept)


def _is_part(entry: Entry) -> bool:
    return not entry.option.command_line_only


def _problems(
    key: str, value: object, known: Mapping[str, Entry], where: str, meant: Callable[[str], str]
) -> Iterator[Problem]:
    if key == MODEL:
        if not isinstance(value, str) or not value:
            yield Problem(f"{MODEL} can't be {value!r}", where, "A name, or a folder's path.")
    elif key == KEPT:
        if not isinstance(value, list) or not all(name in known for name in value):
            hint = "dsrun writes it: take the line out, if the file is yours by now."
            yield Problem(f"{KEPT} is a list of options, not {value!r}", where, hint)
    elif key in known:
        yield from problems_of(known, Source.RUN_FILE, {key: value}, where)
    elif key in entries(FinetuneOptions):
        flag = entries(FinetuneOptions)[key].flag
        yield Problem(f"{key} is for the command line alone", where, f"Say {flag} when you start it.")
    elif isinstance(value, dict):
        yield Problem(f"unknown table [{key}]", where, "The keys stand without tables: lr = 1e-4")
    else:
        hint = meant(key) or catalog.suggestion(key, (*known, MODEL), "")
        yield Problem(f"unknown option {key!r}", where, hint)


def _lines(text: str) -> dict[str, int]:
    """The line where each key stands first."""
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if key := re.match(r"""\s*\[*["']?([\w-]+)["']?\s*[=\].]""", line):
            lines.setdefault(key[1], number)
    return lines


def _from_folder(entry: Entry, value: Any, folder: Path) -> Any:
    """A value whose paths are relative to a folder, made absolute."""
    if isinstance(value, list):
        return [_from_folder(entry, item, folder) for item in value]
    return str(folder / Path(value).expanduser()) if _is_path(entry, value) else value


def _is_path(entry: Entry, value: object) -> bool:
    text = str(value)
    if entry.kind is Path or entry.option.path == PATH:
        return not REMOTE.match(text)
    if entry.option.path == LIST_OR_FILE:
        return text.endswith(LIST_SUFFIX)
    return entry.option.path == NAME_OR_PATH and ("/" in text or text.lower().endswith(FILE_SUFFIXES))


def _model(name: str, folder: Path) -> str:
    """The model: a path where it begins like one or lies beside the file; else the name of a model or a repository."""
    if name in catalog.files(MODELS):
        return name
    path = folder / Path(name).expanduser()
    return str(path) if name.startswith((".", "~", "/")) or path.exists() else name


def text(model: str, rows: Iterable[tuple[Entry, Any, Origin]], folder: Path) -> str:
    """The run file of a run: every option with its origin. folder: the place of the file.

    Comments are dsrun's own defaults, and values that belong to the machine or the cluster (its hosts, its NVMe disk,
    how its devices divide a step) or to one run (its folder). The rest is fixed: the file trains the same elsewhere.
    Raises DsrunError for a path that no text can hold. model: absolute where it is a path.
    """
    groups: dict[str, list[str]] = {}
    parts_of_run = [row for row in rows if _is_part(row[0])]
    values = {entry.name: value for entry, value, _ in parts_of_run}
    worked_out = {
        "output_dir", *SPLIT, *BY_PLAN, *(BY_TOKENS if values.get("tokens_per_batch") else ()),
        *(BY_LAYOUT if values.get("layout") == AUTO_LAYOUT else ()),
    }  # fmt: skip
    for entry, value, origin in parts_of_run:
        line = _line(entry, value, origin, folder, worked_out)
        groups.setdefault(entry.group, []).append(line)
    head = f"# A run of dsrun {__version__}: dsrun finetune FILE. The command line wins over it; lines that begin\n"
    head += "# with # are what holds anyway. Every option: dsrun finetune --help-all\n"
    model = relative(model, folder) if model.startswith("/") else model
    kept = [
        entry.name
        for entry, value, origin in parts_of_run
        if value not in (None, ())
        and _is_fixed(entry, origin, worked_out)
        and origin.source < Source.RUN_FILE
    ]
    parts = [f"{head}\n{MODEL} = {toml(model)}\n", kept_lines(kept)]
    parts += [
        f"\n# --- {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in groups.items()
    ]
    return "".join(parts)


def kept_lines(names: Sequence[str]) -> str:
    """The lines of KEPT; none where nothing is."""
    if not names:
        return ""
    quoted = ", ".join(f'"{name}"' for name in names)
    inside = textwrap.fill(quoted, 110, initial_indent="    ", subsequent_indent="    ")
    why = "# Nobody asked for these values; they are kept, so that the file trains the same elsewhere."
    return f"{why}\n{KEPT} = [\n{inside},\n]\n"


def _line(entry: Entry, value: Any, origin: Origin, folder: Path, worked_out: Collection[str]) -> str:
    if value is None or value == ():
        return f"# {entry.name} ="
    source = "".join(char if char.isprintable() else "?" for char in str(origin))
    return f"{'' if _is_fixed(entry, origin, worked_out) else '# '}{assignment(entry, value, folder)}  # {source}"


def assignment(entry: Entry, value: Any, folder: Path) -> str:
    """An option's line: its name and its value. Paths in the folder are written from there."""
    items = value if isinstance(value, tuple) else (value,)
    values = [relative(str(item), folder) if _is_path(entry, item) else item for item in items]
    return f"{entry.name} = {toml(values if entry.repeated else values[0])}"


def _is_fixed(entry: Entry, origin: Origin, worked_out: Collection[str]) -> bool:
    """Whether the file has the value as a key, and not as a comment. worked_out: options that are worked out for each
    run, where they are not given."""
    if origin.source in (Source.BUILT_IN, Source.CLUSTER_FILE, Source.ENVIRONMENT):
        return False
    by_another_key = origin.through == "overrides"
    return not by_another_key and not (entry.name in worked_out and origin.source == Source.DERIVED)


def relative(path: str, folder: Path) -> str:
    """A path as it is written in the file: relative where it lies in the file's folder."""
    whole, top = os.path.abspath(Path(path).expanduser()), os.path.abspath(folder)  # noqa: PTH100 (no link is followed)
    inside = whole.startswith(top.rstrip("/") + "/")
    return f"./{whole[len(top.rstrip('/')) + 1 :]}" if inside else whole


def toml(value: Any) -> str:
    """A value as TOML writes it; JSON's strings are TOML's but for one character."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if not isinstance(value, (str, Path)):
        return json.dumps(value)
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise DsrunError(f"can't stand in a run file: {str(value)!r} is not UTF-8") from None
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

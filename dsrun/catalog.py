"""The places of templates/, presets/ and launch/.

A name is looked up in every folder of $DSRUN_PATH (colon-separated, each holding templates/, presets/ or
launch/ like the top of a checkout), then in what ships with dsrun; the nearest folder wins.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import read_text

PACKAGE = Path(__file__).resolve().parent


@cache
def shipped_root() -> Path:
    """The folder that holds the shipped templates/, presets/ and launch/.

    A wheel carries them in dsrun/shipped; an editable install and a bare checkout have them beside dsrun/.
    """
    shipped = PACKAGE / "shipped"
    return shipped if (shipped / "presets").is_dir() else PACKAGE.parent


def roots() -> list[Path]:
    """Every folder to search, nearest first. Raises DsrunError for a $DSRUN_PATH entry that is no folder."""
    folders = []
    for entry in os.environ.get("DSRUN_PATH", "").split(os.pathsep):
        if not entry:
            continue
        folder = Path(entry).expanduser()
        if not folder.is_dir():
            raise DsrunError(
                f"no such folder: {entry}",
                where="DSRUN_PATH",
                hint="Each entry is a folder that holds presets/, templates/ or launch/; remove it or make it.",
            )
        folders.append(folder.resolve())
    return [*folders, shipped_root()]


def folders(kind: str) -> list[Path]:
    """The existing folders of one kind ("presets", "presets/models", "templates", ...), nearest first."""
    return [path for root in roots() if (path := root / kind).is_dir()]


def files(kind: str, suffix: str = ".toml") -> dict[str, Path]:
    """Every data file of a kind: name without suffix -> nearest file, sorted by name."""
    paths: dict[str, Path] = {}
    for folder in folders(kind):
        with os.scandir(folder) as entries:  # which knows what is a file without asking again
            for entry in entries:
                if entry.name.endswith(suffix) and entry.is_file():
                    paths.setdefault(entry.name.removesuffix(suffix), folder / entry.name)
    return dict(sorted(paths.items()))


def find(kind: str, name: str, what: str, command: str) -> Path:
    """The nearest file of `name`; an unknown name is answered with the closest one.

    what: the word for such a thing in the message ("preset"); command: what lists them all.
    """
    if os.sep not in name:
        for folder in folders(kind):
            if (path := folder / f"{name}.toml").is_file():
                return path
    raise DsrunError(
        f"unknown {what} {name!r}", hint=suggestion(name, files(kind), f"See them all: {command}")
    )


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """`Did you mean ...?` for the closest of the known names, followed by `otherwise`."""
    match = closest(name, known)
    return f"Did you mean {match!r}? {otherwise}" if match else otherwise


def closest(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known name that is most like `name`, or None where none is near. alike: difflib's ratio, at least."""
    import difflib

    by_fold = {entry.casefold().replace("_", "-"): entry for entry in known}
    matches = difflib.get_close_matches(name.casefold().replace("_", "-"), list(by_fold), n=1, cutoff=alike)
    return by_fold[matches[0]] if matches else None


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's tables. Raises DsrunError with the file and the line where it is not TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DsrunError(f"is not valid TOML: {error}", where=str(path), hint=_other_form(text)) from error


def _other_form(text: str) -> str:
    """A hint at the form of a text that is no TOML, where its lines tell."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if lines and lines[0].lstrip().startswith("{"):
        return 'It looks like JSON: TOML writes key = "value", a line each.'
    if (
        lines
        and sum(re.match(r"\s*[\w-]+:(\s|$)|\s*- ", line) is not None for line in lines) > len(lines) / 2
    ):
        return 'It looks like YAML: TOML writes key = "value". A trainer\'s, as .yaml: dsrun import FILE -o run.toml'
    return ""

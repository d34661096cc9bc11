"""How this machine is asked: files under /proc and /sys, and what programs print.

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def first_number(folder: Path, *names: str) -> int | None:
    """The number in the first of the files that holds one; None where none does."""
    for name in names:
        text = text_of(folder / name).strip()
        if text.isdecimal():
            return int(text)
    return None


def text_of(path: str | Path) -> str:
    """A file's text; empty where it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def pairs_of(text: str, sign: str) -> dict[str, str]:
    """The values of a file like /proc/meminfo, by name."""
    return dict(line.split(sign, 1) for line in text.splitlines() if sign in line)


def link_target(path: Path) -> str:
    """The path that a link leads to; "" where that can't be seen."""
    try:
        return os.readlink(path)  # noqa: PTH115  (Path.readlink is of Python 3.9)
    except OSError:
        return ""


def output_of(*words: str, seconds: float = 10.0, environ: Mapping[str, str] | None = None) -> str:
    """A command's stdout; raises where it fails, or takes longer."""
    done = subprocess.run(
        list(words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=seconds,
        env=None if environ is None else dict(environ),
        check=False,
        cwd="/",  # -c puts the working folder first: a json.py in it would be taken for Python's own
    )
    if done.returncode:
        text = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise OSError(f"{words[0]} ended with {done.returncode}: {text[-300:]}")
    return done.stdout.decode(errors="replace")


def number_of(text: str) -> float | None:
    """A number that a program printed; None where it printed none: [N/A], [Not Supported]."""
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return None


def folders_of(environ: Mapping[str, str], name: str) -> list[Path]:
    """The folders of a variable like LD_LIBRARY_PATH."""
    return [Path(folder) for folder in environ.get(name, "").split(":") if folder]


def nearest_there(path: Path) -> Path:
    """The path, or the nearest of the folders above it that exists."""
    path = path.absolute()
    # One that may not be looked into is not there, either: Path.exists would raise.
    return next(place for place in (path, *path.parents) if os.path.exists(place))  # noqa: PTH110

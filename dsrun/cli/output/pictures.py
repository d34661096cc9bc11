"""--plot FILE: a picture's file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.errors import DsrunError
from dsrun.files import explained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")


def check(file: Path) -> None:
    """Raise DsrunError where no picture can be written."""
    where = f"--plot {file}"
    if file.suffix.lower() not in KINDS:
        raise DsrunError("unknown picture format", where=where, hint=f"One of {', '.join(KINDS)}.")
    if file.is_dir():
        raise DsrunError("is a folder", where=where, hint="Name a file in it.")
    with explained("can't be written", where):
        file.parent.stat()


def save(figure: Figure, file: Path) -> None:
    """Write it. Raises DsrunError."""
    with explained("can't be written", file):
        figure.savefig(file, dpi=150)

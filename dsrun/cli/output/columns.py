"""Text in columns, for names in any script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import click

from dsrun.words import printable, width


def columns(rows: Sequence[Sequence[str]], *, left: Iterable[int] = (0,)) -> list[str]:
    """Lines of padded cells; the columns in `left` are aligned there, the others to the right.

    Cells that are missing at the end of a row leave their columns empty.
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    count = max((len(row) for row in shown), default=0)
    widths = [
        max((width(row[place]) for row in shown if place < len(row)), default=0) for place in range(count)
    ]
    starts = set(left)
    lines = []
    for row in shown:
        padded = []
        for place, cell in enumerate(row):
            space = " " * (widths[place] - width(cell))
            padded.append(cell + space if place in starts else space + cell)
        lines.append("  ".join(padded).rstrip())
    return lines


def without_middle(text: str, most: int) -> str:
    """A text of at most that many columns: of a longer one the start and the end."""
    if width(text) <= most:
        return text
    start, end = "", ""
    for letter, last in zip(text, reversed(text), strict=True):
        if width(start + letter + end) > most - 1:
            break
        start += letter
        if width(start + last + end) > most - 1:
            break
        end = last + end
    return f"{start}…{end}"


def screen_width(*, err: bool = False) -> int | None:
    """Columns of the terminal that stdout is, or stderr; None where it is none: what goes into a file or a pipe stays
    whole.
    """
    import shutil
    import sys

    stream = sys.stderr if err else sys.stdout
    there = stream is not None and stream.isatty()  # it may be closed: >&-
    return shutil.get_terminal_size().columns if there else None


def echo_folded(text: str, indent: int, *, err: bool = False) -> None:
    """Print a line for somebody, folded at words where that stream is a terminal; see `folded`."""
    click.echo(folded(text, screen_width(err=err), indent), err=err)


def indented(text: str) -> str:
    """A paragraph below a line, 4 columns in."""
    import shutil
    import textwrap

    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    return textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ")


def folded(text: str, columns: int | None, indent: int) -> str:
    """A line whose words go on in further lines, indented, where the terminal is narrower than it.

    What stands before the first word stays, and so do two blanks in a row; a word that is wider is not broken.
    """
    if columns is None or width(text) <= columns:
        return text
    lines, line = [], ""
    for piece in re.findall(r"\s*\S+", text):
        if line.strip() and width(line + piece) > columns:
            lines.append(line)
            line = " " * indent + piece.lstrip()
        else:
            line += piece
    return "\n".join([*lines, line])

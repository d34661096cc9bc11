"""Text in columns, for names in any script."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence


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


def width(text: str) -> int:
    """Columns of a terminal that a text takes: Chinese characters are two wide, combining marks none."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def printable(text: str) -> str:
    """A text without what would move the cursor: a folder's name may hold a line break."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)

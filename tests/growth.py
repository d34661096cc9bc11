"""Number of lines that each room may have: growth.toml beside this file, held by tests/test_growth.py.

    python tests/growth.py                    rooms that are above their number, or far below it
    python tests/growth.py --write            lower the numbers, add new rooms, leave out those that are gone
    python tests/growth.py --write "REASON"   also raise those of rooms that grew; REASON stands behind them

A reason behind a number is kept until the next raise. Add it to the commit that grows the room.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
STEP = 50
"""Numbers are rounded up to it, so that a line more or less is no change of the table."""
SLACK = 0.15
"""A room that is smaller than its number by a larger share has a number that says nothing."""
GENERATED = "<!-- Made by docs/generate.py"
LINE = re.compile(r'"([^"\n]+)" = (\d+)(?:  # (.*))?')


class Bound(NamedTuple):
    """Entry of a room in the table."""

    lines: int
    reason: str = ""


def room_of(path: Path) -> str:
    """The room of a file: its folder below dsrun, tests, bench or docs; of dsrun/jobs/ the one in it, as the table of
    test_architecture.py has them."""
    folders = path.relative_to(ROOT).parts[:-1]
    return "/".join(folders[: 3 if folders[:2] == ("dsrun", "jobs") else 2])


def sizes(root: Path = ROOT) -> dict[str, int]:
    """The lines of each room: Python, and in docs/ what is written by hand."""
    found: dict[str, int] = {}
    for top, pattern in (("dsrun", "*.py"), ("tests", "*.py"), ("bench", "*.py"), ("docs", "*.md")):
        for path in sorted((root / top).rglob(pattern)):
            text = path.read_text(encoding="utf-8")
            if GENERATED not in text[:200]:
                room = room_of(ROOT / path.relative_to(root))
                found[room] = found.get(room, 0) + text.count("\n")
    return found


def bounds(text: str) -> dict[str, Bound]:
    """The table's numbers and reasons."""
    return {name: Bound(int(lines), reason or "") for name, lines, reason in LINE.findall(text)}


def rounded(lines: int) -> int:
    """A room's number, of its lines."""
    return -(-lines // STEP) * STEP


def is_above(lines: int, bound: Bound | None) -> bool:
    return bound is None or lines > bound.lines


def is_far_below(lines: int, bound: Bound) -> bool:
    return rounded(lines) < (1 - SLACK) * bound.lines


def problems(found: dict[str, int], table: dict[str, Bound]) -> list[str]:
    """Disagreements between the rooms and the table, with what to do."""
    says = []
    for room in sorted({*found, *table}):
        lines, bound = found.get(room, 0), table.get(room)
        if bound is None:
            says.append(f'{room} has {lines} lines and no number: python tests/growth.py --write "REASON"')
        elif lines > bound.lines:
            says.append(
                f"{room} has {lines} lines, its number is {bound.lines}: remove as you add, or "
                'python tests/growth.py --write "REASON"'
            )
        elif is_far_below(lines, bound):
            says.append(
                f"{room} has {lines} lines, its number is {bound.lines}: python tests/growth.py --write"
            )
    return says


def written(text: str, found: dict[str, int], reason: str = "") -> str:
    """The table's text with the numbers of today. Raises ValueError for rooms that grew, where no reason is given."""
    table = bounds(text)
    grown = [room for room, lines in sorted(found.items()) if is_above(lines, table.get(room))]
    if grown and not reason:
        raise ValueError(f"these grew: {', '.join(grown)}; say why behind --write")
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    rows = []
    for room, lines in sorted(found.items()):
        old = table.get(room, Bound(0))
        why = reason if room in grown else old.reason
        number = rounded(lines) if room in grown or is_far_below(lines, old) else old.lines
        rows.append(f'"{room}" = {number}{f"  # {why}" if why else ""}\n')
    return head + "".join(rows)


def main(arguments: list[str]) -> int:
    text = TABLE.read_text(encoding="utf-8")
    if arguments[:1] == ["--write"] and len(arguments) <= 2:
        try:
            TABLE.write_text(written(text, sizes(), " ".join(arguments[1:])), encoding="utf-8")
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    says = problems(sizes(), bounds(text))
    print("\n".join(says) or "Every room is within its number.")
    return 1 if says else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

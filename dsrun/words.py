"""Words of messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 rank, 2 ranks, 1,200 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

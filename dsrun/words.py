"""Words and numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
"""Bytes of a GiB."""
EXAMPLE_CHARACTERS = 2000
"""Characters of a training example that are shown, at most."""


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks, 1,200 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def listed(words: Sequence[str]) -> str:
    """Words in a row: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def width(text: str) -> int:
    """Columns of a terminal that a text takes: Chinese characters are two wide, marks on others none."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0
        if unicodedata.category(letter) in ("Mn", "Me", "Cf")
        else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def clock(seconds: float) -> str:
    """A time as on a clock: 90 -> "1:30", 7265 -> "2:01:05"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def size_text(size: float) -> str:
    """A number of bytes: "20.1 GiB", "117.1 MiB", "0.5 KiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"


def printable(text: str, most: int | None = None) -> str:
    """A text without what would steer a terminal: its codes in place of those characters. most: characters of it."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def value_text(value: object) -> str:
    """An option's value: "on", "2e-05", "a b"."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def loss_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def gib_text(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"


def time_text(when: float | None) -> str:
    """Seconds since 1970 as the local time."""
    from datetime import datetime

    if when is None:
        return "-"
    try:
        return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "-"


def span_text(seconds: float | None) -> str:
    """A time as on a clock, or "-" where it isn't known."""
    from math import isfinite

    return "-" if seconds is None or not isfinite(seconds) else clock(seconds)


def marked(example: Mapping[str, Any], most: int = EXAMPLE_CHARACTERS) -> str:
    """An example's text with trained parts in double brackets and \\n for line breaks; a long text lacks its middle.

    example: its "parts", each with "text" and whether it is "trained" (`parts_of` in training/data/tokenizing.py).
    """
    text = "".join(f"⟦{part['text']}⟧" if part["trained"] else part["text"] for part in example["parts"])
    text = text.replace("\n", "\\n")
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"

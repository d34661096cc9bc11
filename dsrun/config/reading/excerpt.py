"""An excerpt of a text: the line in which something stands, with a mark under it."""

from __future__ import annotations

from dsrun.config.reading.places import Span
from dsrun.words import width

_WIDTH = 110


def excerpt(text: str, place: Span) -> str:
    """The first line of a place with carets under it."""
    start = text.rfind("\n", 0, place.start) + 1
    end = text.find("\n", start)
    end = len(text) if end < 0 else end
    end -= text[start:end].endswith("\r")
    focus = min(place.start, end)
    begin = _cut_before(text, start, focus, end)
    stop = _cut_after(text, begin, end)
    head, tail = "…" * (begin > start), "…" * (stop < end)
    line = head + "".join(map(_shown, text[begin:stop])) + tail
    blank = " " * len(head) + "".join(c if c == "\t" else " " * width(c) for c in text[begin:focus])
    carets = width(text[focus : min(place.end, stop)])
    return (
        f"{place.line} | {line}".rstrip() + f"\n{'':>{len(str(place.line))}} | {blank}{'^' * max(carets, 1)}"
    )


def _cut_before(text: str, start: int, focus: int, end: int) -> int:
    """The offset to begin a line at so that `focus` can be seen: half the width before it."""
    if end - start <= _WIDTH and width(text[start:end]) <= _WIDTH:
        return start
    room = _WIDTH // 2
    while focus > start and room > 0:
        focus -= 1
        room -= width(text[focus])
    return focus


def _cut_after(text: str, begin: int, end: int) -> int:
    room = _WIDTH
    stop = begin
    # Bounded, for a line may consist of millions of characters without width.
    while stop < end and stop - begin < 2 * _WIDTH:
        room -= width(text[stop])
        if room < 0:
            break
        stop += 1
    return stop


def _shown(char: str) -> str:
    """A character as it may be printed; one that could change the screen (an escape) becomes a question mark."""
    return char if char == "\t" or char.isprintable() or char == " " else "?" * width(char)

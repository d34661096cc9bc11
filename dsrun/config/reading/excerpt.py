"""The lines of a text around a place, for the eye."""

from __future__ import annotations

import unicodedata

from dsrun.config.reading.places import Place

_WIDTH = 110


def excerpt(text: str, place: Place, context: int = 1) -> str:
    """The line of a place with a caret under it, and `context` lines before and after."""
    start = text.rfind("\n", 0, place.start) + 1
    end = _line_end(text, start)
    shown = [*_lines_before(text, start, context), (start, end), *_lines_after(text, end, context)]
    first = place.line - shown.index((start, end))
    gutter = len(str(first + len(shown) - 1))
    rows = []
    for number, (begin, stop) in enumerate(shown, first):
        here = number == place.line
        line, marks = _row(text, begin, stop, place if here else None)
        rows.append(f"{number:>{gutter}} | {line}".rstrip())
        if here:
            rows.append(f"{'':>{gutter}} | {marks}")
    return "\n".join(rows)


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _lines_before(text: str, start: int, wanted: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while start > 0 and len(found) < wanted:
        end = start - 1
        start = text.rfind("\n", 0, end) + 1
        found.append((start, end))
    return found[::-1]


def _lines_after(text: str, end: int, wanted: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    # The line feed at the very end of the text opens no further line.
    while end < len(text) - 1 and len(found) < wanted:
        start = end + 1
        end = _line_end(text, start)
        found.append((start, end))
    return found


def _row(text: str, start: int, end: int, place: Place | None) -> tuple[str, str]:
    """One line of the text, cut to _WIDTH, and the carets under the place."""
    if text[start:end].endswith("\r"):
        end -= 1
    focus = min(place.start, end) if place else start
    begin = _cut_before(text, start, focus, end)
    stop = _cut_after(text, begin, end)
    head = "…" if begin > start else ""
    tail = "…" if stop < end else ""
    line = head + "".join(map(_shown, text[begin:stop])) + tail
    if place is None:
        return line, ""
    blank = "".join(c if c == "\t" else " " * _width(c) for c in text[begin:focus])
    carets = sum(map(_width, text[focus : min(place.end, stop)]))
    return line, " " * len(head) + blank + "^" * max(carets, 1)


def _cut_before(text: str, start: int, focus: int, end: int) -> int:
    """Where to begin a line so that `focus` can be seen: half the width before it."""
    if end - start <= _WIDTH and sum(map(_width, text[start:end])) <= _WIDTH:
        return start
    room = _WIDTH // 2
    while focus > start and room > 0:
        focus -= 1
        room -= _width(text[focus])
    return focus


def _cut_after(text: str, begin: int, end: int) -> int:
    room = _WIDTH
    stop = begin
    # Bounded, for a line may consist of millions of characters without width.
    while stop < end and stop - begin < 2 * _WIDTH:
        room -= _width(text[stop])
        if room < 0:
            break
        stop += 1
    return stop


def _shown(char: str) -> str:
    """A character as it may be printed: escape codes and the like would change the screen."""
    return char if char == "\t" or char.isprintable() or char == " " else "?" * _width(char)


def _width(char: str) -> int:
    """The columns that a character takes on the screen."""
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1

"""The lines of a log that may tell why a job died, out of gigabytes, in one pass and in little memory.

1. A log is read in blocks, and a block is folded at once by `bytes.translate`: small letters, no digits. The steps of a
   training are then a handful of lines, which are called shapes here.
2. Those shapes of a block that were not seen before are searched, all at once, for the texts that signatures can't do
   without (literal_search.py). A shape that holds none needs no second look.
3. A line of a shape with such a text is kept if a signature matches it (or if it begins a traceback), and CONTEXT lines
   around it.

In a log in which hardly a line has the shape of another the second step costs more than the search. So, where there is
a fast one, blocks are first searched whole, and taken apart only if there are many such texts in them.

The first and the last lines are kept in any case: versions, and where a job stands that hangs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from dsrun.jobs.diagnosis.reading.literal_search import FastLiteralSearch, LiteralSearch
from dsrun.jobs.diagnosis.reading.log_lines import LOOSE, WIDE, folded, narrow_bytes

BLOCK = 1 << 20
"""Bytes that are read at a time; also the longest line: what is longer counts as several."""
CONTEXT = 60
"""Lines kept before one that matters, and CONTEXT_AFTER behind it."""
CONTEXT_AFTER = 80
HEAD, TAIL = 120, 300
"""Lines kept of a log's beginning and of its end."""
MOST_OF_A_SHAPE = 48
"""Lines of one shape that are kept: of a warning in each of a million steps the first are enough."""
MOST_SHAPES = 50_000
"""Shapes that are remembered as telling nothing; beyond, all are forgotten, and searched again when they come."""
MOST_LINES = 40_000
"""Lines that are kept of a log."""
ENDING = 64 << 10
"""Bytes at the end of a block without hits that are remembered for the context of a later hit."""
FAST_AFTER = 2
"""Blocks after which the fast search is worth preparing."""
MOST_FOUND = BLOCK // 256
"""Texts in a block from which its shapes are the shorter way ..."""
NOT_WHOLE = 16
"""... and blocks after it that are not searched whole."""


class ByteReader(Protocol):
    """A source of bytes: a file, or a part of one."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most that many; none at the end."""


def blocks(file: ByteReader) -> Iterator[bytes]:
    """A file in blocks of whole lines, UTF-8; a line longer than a block is cut."""
    rest, first = b"", True
    wide = ""
    while piece := file.read(BLOCK):
        if first:
            first, wide = False, _wide_encoding(piece)
        text = rest + piece
        end = (text.rfind(b"\n") if b"\n" in text else text.rfind(b"\r")) + 1
        if not end and len(text) < 2 * BLOCK:
            rest = text
            continue
        end = end or len(text)
        if wide:
            end += (-end) % 2 if wide == "utf-16-le" else -(end % 2)
        rest = text[end:]
        yield _utf8(text[:end], wide)
    if rest:
        yield _utf8(rest, wide)


def _wide_encoding(piece: bytes) -> str:
    """The encoding of a file with two bytes a character, as PowerShell's redirection writes; else empty."""
    if piece.startswith(b"\xff\xfe"):
        return "utf-16-le"
    return "utf-16-be" if piece.startswith(b"\xfe\xff") else ""


def _utf8(text: bytes, wide: str) -> bytes:
    return text.decode(wide, errors="replace").encode("utf-8", errors="replace") if wide else text


class Sieve:
    """Keeps the lines of one log that matter.

    search: finds lines with one of the texts that every line of interest holds; None where no such texts are known.
    matters: whether a line with one of them is kept.
    """

    def __init__(
        self,
        search: LiteralSearch | None,
        matters: Callable[[str], object] = lambda _: True,
        large: bool = False,
    ) -> None:
        """large: whether the log is known to be large."""
        self._search, self._matters = search, matters
        self._fast: FastLiteralSearch | None = None
        self._whole_in = 0 if large else FAST_AFTER
        """Blocks until the next one that is searched whole."""
        self._dull: set[bytes] = set()
        """Shapes without such a text."""
        self._seen: dict[bytes, int] = {}
        self._before: deque[tuple[int, bytes]] = deque(maxlen=CONTEXT)
        self._end: deque[tuple[int, bytes]] = deque(maxlen=TAIL)
        self._skipped = b"", 0
        """The end of the last block without hits, and the number of lines up to there."""
        self._after, self._head = 0, HEAD
        """Lines that are still to be kept, whatever they hold."""
        self.kept: list[tuple[int, bytes]] = []
        self.lines = 0
        """Line ends so far."""

    def read(self, file: ByteReader) -> list[tuple[int, bytes]]:
        """The kept lines with their numbers, from 1, in order."""
        for block in blocks(file):
            self._take(_COLOURS.sub(b"", block) if b"\x1b" in block else block)
        self._catch_up()
        last = self.kept[-1][0] if self.kept else 0
        return [*self.kept, *((number, line) for number, line in self._end if number > last)]

    def _take(self, block: bytes) -> None:
        ends = block.count(b"\n")
        hits = self._hits(block)
        if hits or self._after > 0 or self._head > 0:
            self._keep(block, hits)
        else:
            self._skip(block, ends)
        self.lines += ends

    def _hits(self, block: bytes) -> set[int]:
        """Lines of a block that are kept for their own sake, by their places in it."""
        # Same length, so that a place is the same line below: "\r\n" gives an empty line more, and _numbered the same.
        block = block.replace(b"\r", b"\n") if b"\r" in block else block
        places = self._searched_whole(block)
        if places is None:
            shapes = folded(block).split(b"\n")
            telling = self._telling(set(shapes) - self._dull)
            places = [place for place, shape in enumerate(shapes) if shape in telling] if telling else []
        lines = block.split(b"\n") if places else []
        return {place for place in places if self._counts(lines[place])}

    def _searched_whole(self, block: bytes) -> list[int] | None:
        """Places of a block's lines that hold one of the texts.

        None where the block isn't searched whole: early in a log, with many such texts, or without a fast search.
        """
        self._whole_in -= 1
        if self._whole_in >= 0 or self._search is None:
            return None
        self._fast = self._fast or self._search.fast(WIDE.encode(), LOOSE.encode())
        # The block isn't narrowed, which takes as long as this search: lines where it would matter are hits themselves.
        places = self._fast.lines(block, MOST_FOUND) if self._fast else None
        if places is None:
            self._whole_in = NOT_WHOLE
        return places

    def _telling(self, new: set[bytes]) -> set[bytes]:
        """The shapes that hold one of the texts; the others are remembered."""
        if self._search is None:
            return new
        shapes = list(new)
        numbers = (self._fast or self._search).lines(narrow_bytes(b"\n".join(shapes))) or ()
        telling = {shapes[place] for place in numbers}
        self._remember(new - telling)
        return telling

    def _remember(self, shapes: set[bytes]) -> None:
        if len(self._dull) + len(shapes) > MOST_SHAPES:
            self._dull.clear()
        self._dull |= shapes

    def _skip(self, block: bytes, ends: int) -> None:
        """Pass over a block without hits. Its end is remembered, and split into lines only where a hit follows."""
        if len(block) < ENDING:  # too short for the context by itself: the block before it counts, too
            self._catch_up()
        self._skipped = block[-ENDING:], self.lines + ends

    def _catch_up(self) -> None:
        end, ends = self._skipped
        pieces = list(_numbered(end, ends - end.count(b"\n") + 1))[-TAIL:]
        self._end.extend(pieces)
        self._before.extend(pieces[-CONTEXT:])
        self._skipped = b"", 0

    def _keep(self, block: bytes, hits: set[int]) -> None:
        self._catch_up()
        for place, piece in enumerate(_numbered(block, self.lines + 1)):
            if place in hits:
                self.kept += self._before
                self._before.clear()
                self._after = CONTEXT_AFTER
                self.kept.append(piece)
            elif self._after > 0 or self._head > 0:
                self._after -= 1
                self.kept.append(piece)
            else:
                self._before.append(piece)
            self._head -= 1
            self._end.append(piece)

    def _counts(self, line: bytes) -> bool:
        """Whether a line is worth keeping, and not one more of many that are alike."""
        shape = folded(line)
        if shape in self._dull:
            return False
        if len(self._seen) > MOST_SHAPES:
            self._seen.clear()
        count = self._seen[shape] = self._seen.get(shape, 0) + 1
        if count >= MOST_OF_A_SHAPE:
            self._remember({shape})
        if count > MOST_OF_A_SHAPE or len(self.kept) >= MOST_LINES:
            return False
        return bool(self._matters(line.decode("utf-8", errors="replace")))


_COLOURS = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-z]")


def _numbered(block: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The pieces of a block between line ends and returns, with the number of the line that each is in."""
    lines = block.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    for number, line in enumerate(lines, first):
        yield from ((number, piece) for piece in line.split(b"\r"))

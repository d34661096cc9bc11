"""The lines of a log that may tell why a job died, out of gigabytes, in one pass and in little memory.

1. A log is read in blocks. Of each line the shape is taken: the line without its digits. All of a block's lines are
   done at once, by `bytes.translate`, so that the steps of a training are a handful of shapes.
2. A shape that was seen before and holds none of the signatures' words needs no second look.
3. A line with such a word is kept if a signature matches it (or if it begins a traceback), and CONTEXT lines around it.

Where a log is large and Hyperscan is installed, lines that hold nothing that a signature asks for are passed over
before anything else (literal_search.py): that is for logs in which hardly a line has the shape of another.

The first and the last lines are kept in any case: versions, and where a job stands that hangs.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, count
from typing import Protocol

from dsrun.jobs.diagnosis.reading.literal_search import FoundLine, LiteralSearch
from dsrun.jobs.diagnosis.reading.log_lines import ODD_COLONS, plain

BLOCK = 1 << 20
"""Bytes that are read at a time; also the longest line: what is longer counts as several."""
CONTEXT = 60
"""Lines kept before one with a word of failures, and CONTEXT_AFTER behind it."""
CONTEXT_AFTER = 80
HEAD, TAIL = 120, 300
"""Lines kept of a log's beginning and of its end."""
MOST_OF_A_SHAPE = 48
"""Lines of one shape that are kept: a warning in each of a million steps is none the wiser."""
MOST_SHAPES = 50_000
"""That are remembered as telling nothing; then they are forgotten, and looked at again."""
MOST_LINES = 40_000
"""That are kept of a log."""
LINE_END = b" \x01 "
"""A word of its own, which stands between lines where these are taken apart into words."""
ENDING = 64 << 10
"""Bytes of a block without anything in which its last lines are looked for."""
SEARCH_AFTER = 16
"""Blocks from which a search for literals is worth making, where nobody knows how large a log is."""
MOST_FOUND = BLOCK // 256
"""Literals in a block, from which their lines' shapes are the shorter way ..."""
WITHOUT_SEARCH = 16
"""... and blocks after it that are not searched."""

_RETURNS = bytes.maketrans(b"\r", b"\n")
_DIGITS = b"0123456789"


class ByteReader(Protocol):
    """What bytes are read from."""

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
    """PowerShell's redirection, among others, writes two bytes a character."""
    if piece.startswith(b"\xff\xfe"):
        return "utf-16-le"
    return "utf-16-be" if piece.startswith(b"\xfe\xff") else ""


def _utf8(text: bytes, wide: str) -> bytes:
    return text.decode(wide, errors="replace").encode("utf-8", errors="replace") if wide else text


class Sieve:
    """Keeps what matters of one log.

    words: those of failures, as `plain` makes them. matters: whether a line is to be kept that has one of them, or some
    of the literals. search: makes what finds the lines with literals, after some blocks; None where there is nothing
    faster than the words.
    """

    def __init__(
        self,
        words: frozenset[bytes],
        matters: Callable[[str, Sequence[str]], object] = lambda *_: True,
        search: Callable[[], LiteralSearch | None] = lambda: None,
        search_after: int = SEARCH_AFTER,
    ) -> None:
        self._words, self._matters = words, matters
        self._make_search = search
        self._search: LiteralSearch | None = None
        self._search_in = search_after
        """Blocks until the next one that is searched."""
        self._dull: set[bytes] = set()
        """Shapes without such a word."""
        self._seen: dict[bytes, int] = {}
        self._before: deque[tuple[int, bytes]] = deque(maxlen=CONTEXT)
        self._end: deque[tuple[int, bytes]] = deque(maxlen=TAIL)
        self._skipped = b"", 0
        """The end of the last block that was passed over, and the number of lines up to there."""
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
        """Which lines of a block are to be kept for what they hold."""
        if (found := self._searched(block)) is not None:
            lines = ((one, block[one.begin : one.end]) for one in found)
            return {
                one.number
                for one, line in lines
                if self._counts(line.translate(None, _DIGITS), line, one.texts)
            }
        shapes = block.translate(_RETURNS, _DIGITS).split(b"\n")
        telling = self._telling(set(shapes) - self._dull)
        if not telling:
            return set()
        whole = block.translate(_RETURNS).split(b"\n")
        places = [place for place, its_shape in enumerate(shapes) if its_shape in telling]
        return {place for place in places if self._counts(shapes[place], whole[place])}

    def _searched(self, block: bytes) -> list[FoundLine] | None:
        """The lines of a block that hold a literal; None where it isn't searched: early, or where there are many."""
        self._search_in -= 1
        if self._search_in > 0 or any(colon in block for colon in ODD_COLONS):
            return None
        if self._search is None and (search := self._make_search()):
            self._search = search
        found = self._search.lines(block, MOST_FOUND) if self._search else None
        if found is None:
            self._search_in = WITHOUT_SEARCH if self._search else sys.maxsize
        return found

    def _telling(self, new: set[bytes]) -> set[bytes]:
        """Those of some shapes that hold a word of failures; the others are remembered."""
        telling = set(_with_a_word(list(new), self._words))
        self._remember(new - telling)
        return telling

    def _remember(self, shapes: set[bytes]) -> None:
        if len(self._dull) + len(shapes) > MOST_SHAPES:
            self._dull.clear()
        self._dull |= shapes

    def _skip(self, block: bytes, ends: int) -> None:
        """A block without anything: its end is remembered, and taken apart where that is asked for."""
        if len(block) < ENDING:
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

    def _counts(self, its_shape: bytes, line: bytes, literals: Sequence[str] = ()) -> bool:
        """Whether one more line of a shape is worth keeping."""
        if its_shape in self._dull:
            return False
        if len(self._seen) > MOST_SHAPES:
            self._seen.clear()
        count = self._seen[its_shape] = self._seen.get(its_shape, 0) + 1
        if count >= MOST_OF_A_SHAPE:
            self._remember({its_shape})
        if count > MOST_OF_A_SHAPE or len(self.kept) >= MOST_LINES:
            return False
        return bool(self._matters(line.decode("utf-8", errors="replace"), literals))


def _with_a_word(shapes: Sequence[bytes], words: frozenset[bytes]) -> Iterator[bytes]:
    """Those of some shapes that have one of the words: all of them are taken apart at once, and not each by itself."""
    found = plain(b"\n".join(shapes)).replace(b"\n", LINE_END).split()
    place = shape = 0
    for here in compress(count(), map(words.__contains__, found)):
        shape += found[place:here].count(LINE_END.strip())
        place = here
        yield shapes[shape % len(shapes)]  # one that isn't ASCII comes twice


_COLOURS = re.compile(rb"\x1b\[[0-9;?]{0,20}[A-Za-z]")


def _numbered(block: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The pieces of a block between line ends and returns, with the number of the line that each is in."""
    lines = block.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    for number, line in enumerate(lines, first):
        yield from ((number, piece) for piece in line.split(b"\r"))

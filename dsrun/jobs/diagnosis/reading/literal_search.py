"""Many texts looked for at once in bytes, which are folded (`log_lines.folded`), as the texts are.

Python's own `re` takes a second for 15 MB, however the texts are put; Hyperscan reads nearly a gigabyte in it, whatever
the number of texts, as fast as grep reads for one. It comes with dsrun[train], and by itself as dsrun[logs]. RE2 took
ten times as long.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any


class LiteralSearch:
    """Finds the lines that hold one of some texts, by `re`: a tree of their letters, so that each is read once."""

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = sorted(set(texts))
        pattern = _as_pattern(self._texts)
        self._to_line_end = re.compile(pattern + b"[^\n]*")
        self._anywhere = re.compile(b"(?=(%b))" % pattern)
        self._by_beginning: dict[bytes, list[bytes]] = {}
        """Texts that begin with no other one; below each those that do, and itself."""
        beginning: bytes | None = None
        for text in self._texts:  # what begins with another stands behind it
            if beginning is None or not text.startswith(beginning):
                beginning = text
            self._by_beginning.setdefault(beginning, []).append(text)

    def texts_in(self, text: bytes) -> Iterator[bytes]:
        """Those in a text, one after another, also where they overlap."""
        for hit in self._anywhere.finditer(text):
            yield from (one for one in self._by_beginning[hit[1]] if text.startswith(one, hit.start()))

    def lines(self, text: bytes) -> list[int]:
        """The numbers, from 0, of the lines that hold one, in order."""
        return list(_line_numbers(text, (hit.start() for hit in self._to_line_end.finditer(text))))

    def fast(self) -> FastLiteralSearch | None:
        """The same by Hyperscan, which takes a tenth of a second to prepare; None where it isn't installed."""
        try:
            import hyperscan
        except ImportError:
            return None
        shortest = [text for text in self._texts if list(self.texts_in(text)) == [text]]
        return FastLiteralSearch(shortest, hyperscan)


class FastLiteralSearch:
    """Finds the lines that hold one of some texts, in small letters or others, by Hyperscan."""

    def __init__(self, texts: Sequence[bytes], engine: Any) -> None:
        self._database = engine.Database(mode=engine.HS_MODE_BLOCK)
        flags = [engine.HS_FLAG_CASELESS] * len(texts)
        self._database.compile(expressions=texts, ids=range(len(texts)), flags=flags, literal=True)
        self._ended = engine.ScanTerminated

    def lines(self, text: bytes, most: int = sys.maxsize) -> list[int] | None:
        """The numbers, from 0, of the lines that hold one, in order; None where more than `most` texts are there."""
        ends: list[int] = []

        def note(_number: int, _begin: int, end: int, _flags: int, _context: object) -> bool:
            ends.append(end)
            return len(ends) > most

        try:
            self._database.scan(text, match_event_handler=note)
        except self._ended:
            return None
        return list(dict.fromkeys(_line_numbers(text, sorted(end - 1 for end in ends))))


def _line_numbers(text: bytes, places: Iterable[int]) -> Iterator[int]:
    """The number of the line that each place is in. places: offsets in the text, in order."""
    number = counted = 0
    for place in places:
        number += text.count(b"\n", counted, place)
        counted = place
        yield number


def _as_pattern(texts: Sequence[bytes]) -> bytes:
    """A regular expression of some sorted texts, in which what several begin with stands once."""
    if not texts:
        return b"(?!)"  # matches nothing
    if not texts[0]:
        return b""  # a text ends here; where it stands, longer ones needn't be told from it
    ways = [
        re.escape(letter) + _as_pattern([text[1:] for text in group])
        for letter, group in groupby(texts, key=lambda text: text[:1])
    ]
    return ways[0] if len(ways) == 1 else b"(?:%b)" % b"|".join(ways)

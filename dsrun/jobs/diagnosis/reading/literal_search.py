"""Many texts looked for at once in bytes: by Hyperscan, where it is installed (`pip install 'dsrun[logs]'`).

Hyperscan reads some gigabytes a second whatever the number of texts, as fast as grep reads for one. Python's own `re`
tries one after another, at each letter, and is no help; RE2 took ten times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class FoundLine(NamedTuple):
    """A line in a block that holds some of the texts."""

    number: int
    """From 0; a line drawn over another counts, too."""
    begin: int
    end: int
    """Its first byte, and the one behind its last."""
    texts: tuple[str, ...]


class LiteralSearch:
    """Finds the lines of a block that hold one of some texts, in small letters or others."""

    def __init__(self, texts: Sequence[str], engine: Any) -> None:
        self._texts = texts
        literals = [text.encode() for text in texts]
        self._database = engine.Database(mode=engine.HS_MODE_BLOCK)
        flags = [engine.HS_FLAG_CASELESS] * len(texts)
        self._database.compile(expressions=literals, ids=range(len(texts)), flags=flags, literal=True)
        self._ended = engine.ScanTerminated

    def lines(self, block: bytes, most: int) -> list[FoundLine] | None:
        """The lines between line ends and returns that hold one, in order; None where more than `most` are found."""
        hits: list[tuple[int, int]] = []

        def note(number: int, _begin: int, end: int, _flags: int, _context: object) -> bool:
            hits.append((end, number))
            return len(hits) > most

        try:
            self._database.scan(block, match_event_handler=note)
        except self._ended:
            return None
        return self._in_lines(block, sorted(hits))

    def _in_lines(self, block: bytes, hits: Sequence[tuple[int, int]]) -> list[FoundLine]:
        found: list[FoundLine] = []
        number = counted = 0
        for at, text in hits:
            if found and at <= found[-1].end:
                found[-1] = found[-1]._replace(texts=(*found[-1].texts, self._texts[text]))
                continue
            begin = max(block.rfind(b"\n", counted, at), block.rfind(b"\r", counted, at), counted - 1) + 1
            number += block.count(b"\n", counted, begin) + block.count(b"\r", counted, begin)
            counted = begin
            found.append(FoundLine(number, begin, _line_end(block, at), (self._texts[text],)))
        return found


def _line_end(block: bytes, since: int) -> int:
    end = block.find(b"\n", since)
    end = len(block) if end < 0 else end
    back = block.find(b"\r", since, end)
    return end if back < 0 else back


def search_for(texts: Callable[[], Sequence[str]]) -> LiteralSearch | None:
    """What looks for some texts, which are in small letters; None without Hyperscan, or with nothing to look for."""
    try:
        import hyperscan
    except ImportError:
        return None
    return LiteralSearch(found, hyperscan) if (found := texts()) else None

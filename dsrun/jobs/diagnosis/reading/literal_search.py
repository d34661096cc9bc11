"""Many texts looked for at once in bytes, which are folded (`log_lines.folded`), as the texts are.

Python's own `re` takes a second for 50 MB; Hyperscan reads nearly a gigabyte in it, whatever
the number of texts, as fast as grep reads for one. It comes with dsrun[train], and by itself as dsrun[logs]. RE2 took
ten times as long.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

FOLLOWING = 3
"""Letters that a text should have behind its anchor: fewer stand by chance in too many lines."""
LONGEST_TAIL = 8
"""Letters from the anchor on that the pattern tells; the rest of a text is compared where they stand."""


class LiteralSearch:
    """Finds the lines that hold one of some texts, by `re`.

    Of each text a letter is its anchor, and what follows it its tail. Anchors are chosen so that few letters serve for
    all texts, and seldom ones: `re` runs over all others in a loop in C, and looks for tails (a tree of their letters)
    behind anchors only. Without anchors, each place is a possible beginning, and takes four times as long.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        self._texts = sorted(set(texts))
        self._by_tail: dict[bytes, list[tuple[int, bytes]]] = {}
        """Texts with their anchors' offsets, by the shortest tail with which theirs begin."""
        tails: list[tuple[bytes, int, bytes]] = []
        for text, anchor in zip(self._texts, _anchors(self._texts), strict=True):
            at = text.index(anchor)
            tails.append((text[at : at + LONGEST_TAIL], at, text))
        shortest: bytes | None = None
        for tail, at, text in sorted(tails):  # a tail that begins with another stands behind it
            if shortest is None or not tail.startswith(shortest):
                shortest = tail
            self._by_tail.setdefault(shortest, []).append((at, text))
        self._tail = re.compile(_as_pattern(list(self._by_tail)))

    def _places(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Each of the texts where it stands, with the place of its anchor; in the order of these."""
        hit = self._tail.search(text)
        while hit:
            place = hit.start()
            for at, literal in self._by_tail[hit[0]]:
                if at <= place and text.startswith(literal, place - at):
                    yield place, literal
            hit = self._tail.search(text, place + 1)  # not behind the hit, in which another tail may begin

    def texts_in(self, text: bytes) -> Iterator[bytes]:
        """The texts that stand in another, also where they overlap."""
        return (literal for _, literal in self._places(text))

    def lines(self, text: bytes) -> list[int]:
        """The numbers, from 0, of the lines that hold one, in order."""
        return list(dict.fromkeys(_line_numbers(text, (place for place, _ in self._places(text)))))

    def fast(self, *others: bytes) -> FastLiteralSearch | None:
        """The same by Hyperscan, which takes a tenth of a second to prepare; None where it isn't installed.

        others: texts that it looks for, too.
        """
        try:
            import hyperscan
        except ImportError:
            return None
        shortest = [text for text in self._texts if list(self.texts_in(text)) == [text]]
        return FastLiteralSearch([*shortest, *others], hyperscan)


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


def _anchors(texts: Sequence[bytes]) -> list[bytes]:
    """The anchor of each text: greedily the letter that serves for most texts still without one, beside how often it
    stands in all of them, which are much like the logs."""
    common = Counter(b"".join(texts))
    rare = common.total() / 20  # as if none were rarer: each more letter is one more place to stop at
    possible = {text: frozenset(text[: max(1, len(text) - FOLLOWING)]) for text in texts}
    anchors: dict[bytes, bytes] = {}
    while len(anchors) < len(texts):
        served = Counter(letter for letters in possible.values() for letter in letters)
        best = max(served, key=lambda letter: served[letter] / (common[letter] + rare))
        anchors |= {text: bytes([best]) for text, letters in possible.items() if best in letters}
        possible = {text: letters for text, letters in possible.items() if best not in letters}
    return [anchors[text] for text in texts]


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

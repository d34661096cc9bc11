"""Many texts looked for at once."""

from __future__ import annotations

import random

import pytest

from dsrun.jobs.diagnosis.reading.literal_search import LiteralSearch


def drawn(draw, letters, longest):
    return bytes(draw.choice(letters) for _ in range(draw.randint(1, longest)))


def test_texts_in_a_text_and_lines_that_hold_one():
    """Against Python's own `in`, with few letters, so that texts begin alike, overlap and hold one another."""
    draw = random.Random(0)
    for _ in range(300):
        texts = {drawn(draw, b"ab.", 4) for _ in range(draw.randint(1, 8))}
        text = drawn(draw, b"ab.c\n", 40)
        search = LiteralSearch(texts)
        assert set(search.texts_in(text)) == {one for one in texts if one in text}, (texts, text)
        expected = [at for at, line in enumerate(text.split(b"\n")) if any(one in line for one in texts)]
        assert search.lines(text) == expected
        if fast := search.fast():
            assert fast.lines(text) == expected
            assert fast.lines(text.upper()) == expected


def test_nothing_to_look_for():
    assert not list(LiteralSearch([]).texts_in(b"a"))
    assert LiteralSearch([]).lines(b"a\nb") == []


def test_too_many():
    pytest.importorskip("hyperscan")
    fast = LiteralSearch([b"a"]).fast()
    assert fast.lines(b"a\n" * 9, most=9) == list(range(9))
    assert fast.lines(b"a\n" * 10, most=9) is None

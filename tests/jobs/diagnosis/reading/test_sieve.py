"""The lines that matter, out of large logs."""

from __future__ import annotations

import io
import random

import pytest

from dsrun.jobs.diagnosis import log_files
from dsrun.jobs.diagnosis.reading.literal_search import LiteralSearch
from dsrun.jobs.diagnosis.reading.sieve import (
    BLOCK,
    HEAD,
    MOST_LINES,
    MOST_OF_A_SHAPE,
    TAIL,
    Sieve,
    blocks,
)
from dsrun.jobs.diagnosis.signatures import MESSAGE, SignatureIndex, find_signatures

SEARCH = LiteralSearch([b"error", b"fatal"])
STEP = b"step %d of 100000 loss 2.%d lr 1e-5\n"


def kept(text):
    return Sieve(SEARCH).read(io.BytesIO(text))


def steps(count, first=0):
    return b"".join(STEP % (number, number) for number in range(first, first + count))


def test_a_small_log_is_kept_whole():
    text = b"a\nb\r\nerror: c\nd"
    assert [(number, line.strip()) for number, line in kept(text) if line] == [
        (1, b"a"),
        (2, b"b"),
        (3, b"error: c"),
        (4, b"d"),
    ]


def test_a_line_far_inside_is_found_with_what_stands_around_it():
    text = steps(60_000) + b"Fatal: out\n" + steps(60_000)
    assert len(text) > 2 * BLOCK
    found = kept(text)
    assert (60_001, b"Fatal: out") in found
    numbers = [number for number, _ in found]
    assert numbers == sorted(numbers)
    assert {60_001 - 50, 60_001 + 50, 1, HEAD, 120_001, 120_001 - TAIL + 5} <= set(numbers)
    assert len(found) < 1000


def test_lines_are_numbered_as_editors_do():
    bar = b"\r".join(b"%d%%|##" % number for number in range(40_000))
    found = kept(b"begin\n" + bar + b"\n" + steps(40_000) + b"error: x\n" + bar * 3 + b"\nerror: y\n")
    assert {number for number, line in found if line.startswith(b"error")} == {40_003, 40_005}


def test_a_warning_in_every_step_is_kept_a_few_times():
    found = kept(b"".join(b"error %d, trying again\n" % number for number in range(100_000)) + b"fatal\n")
    assert len(found) < HEAD + TAIL + 2 * MOST_OF_A_SHAPE + 300
    assert (100_001, b"fatal") in found


def new_lines(count):
    """Lines of which none has the shape of another."""
    draw = random.Random(3)
    letters = (b"abcdefghijklmnopqrstuvwxyz    " * 9)[:256]
    return [draw.randbytes(70).translate(letters) for _ in range(count)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_what_is_searched_whole_keeps_what_its_shapes_keep(end, monkeypatch):
    pytest.importorskip("hyperscan")
    lines = new_lines(60_000)
    lines[7], lines[30_000], lines[41_234] = b"ERROR: a", "中文 Error: b".encode(), b"x Fa7tal y Fatal z"
    text = b"\x1b[31m" + end.join(lines) + end
    found = Sieve(SEARCH, large=True).read(io.BytesIO(text))
    monkeypatch.setattr(LiteralSearch, "fast", lambda *_: None)
    assert found == kept(text)
    assert len(found) > 400


def test_without_texts_every_line_is_looked_at():
    """As of a signature whose pattern can't do without no text."""
    text = steps(30_000) + b"x\n" + steps(30_000)
    found = Sieve(None, lambda line: line == "x").read(io.BytesIO(text))
    assert (30_001, b"x") in found
    assert len(found) < 1000


@pytest.mark.parametrize("half", [0, 1])
def test_the_same_lines_with_and_without_hyperscan(tmp_path, monkeypatch, half):
    """Of logs with what every signature prints, far from one another; in two, as one would hold more than is kept."""
    pytest.importorskip("hyperscan")
    index = SignatureIndex(find_signatures())
    searched_for = [one for one in find_signatures().values() if one.kind != MESSAGE]
    examples = [example for one in searched_for for example in one.examples][half::2]
    assert 80 * len(examples) < MOST_LINES
    lines = new_lines(80 * len(examples))
    for number, example in enumerate(examples):
        lines[80 * number + 50] = example.encode()
    path = tmp_path / "train.log"
    path.write_bytes(b"\n".join(lines))
    log = [log_files.named(path)]
    searched = log_files.lines_of(log, index)
    monkeypatch.setattr(LiteralSearch, "fast", lambda *_: None)
    assert log_files.lines_of(log, index) == searched
    assert len(searched) > 79 * len(examples)


def test_a_line_without_an_end_is_cut():
    assert all(len(block) <= 3 * BLOCK for block in blocks(io.BytesIO(b"x" * (5 * BLOCK))))
    assert any(b"fatal" in line for _, line in kept(b"x" * (5 * BLOCK) + b" fatal"))


def test_two_bytes_a_character():
    text = "error: 中文\nnext\n" * 100_000
    for encoding in ("utf-16-le", "utf-16-be"):
        bom = b"\xff\xfe" if encoding == "utf-16-le" else b"\xfe\xff"
        found = kept(bom + text.encode(encoding))
        assert any(line.endswith("error: 中文".encode()) for _, line in found)
        assert found[-1][0] == 200_000


def test_nothing():
    assert kept(b"") == []

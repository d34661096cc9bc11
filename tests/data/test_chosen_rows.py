"""--val-size and --max-samples: which rows are trained on, and which are held out."""

from __future__ import annotations

import json

import pytest

from dsrun.data.chosen_rows import chosen
from dsrun.data.rows import BadRowError, read_rows
from dsrun.errors import DsrunError


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path):
    def write(name, count, broken=()):
        path = tmp_path / name
        lines = [
            "{broken" if place in broken else json.dumps({"n": f"{name} {place} 字"}, ensure_ascii=False)
            for place in range(count)
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def content(path):
    return [row["n"] if isinstance(row, dict) else type(row) for _, row in read_rows(path)]


def test_without_either_the_files_stay(rows):
    path = rows("a.jsonl", 3)
    assert chosen([path], val_size=None, max_samples=None, seed=1) == ((path,), None)


def test_the_first_rows_of_each_file(rows):
    files = [rows("a b.jsonl", 5), rows("c.jsonl", 2)]
    trained, held_out = chosen(files, val_size=None, max_samples=3, seed=1)
    assert held_out is None
    assert [content(path) for path in trained] == [content(files[0])[:3], content(files[1])]


@pytest.mark.parametrize(("size", "count"), [(0.25, 5), (7, 7), (0.01, None), (20, None), (0.5, 10)])
def test_rows_are_held_out_once_and_for_all(rows, size, count):
    files = [rows("a.jsonl", 12), rows("b.jsonl", 8)]
    if count is None:
        with pytest.raises(DsrunError, match="to train on"):
            chosen(files, val_size=size, max_samples=None, seed=3)
        return
    trained, held_out = chosen(files, val_size=size, max_samples=None, seed=3)
    kept = [row for path in trained for row in content(path)]
    every = [row for path in files for row in content(path)]
    assert len(content(held_out)) == count
    assert sorted(kept + content(held_out)) == sorted(every)
    assert [row for row in every if row in kept] == kept
    assert chosen(files, val_size=size, max_samples=None, seed=3) == (trained, held_out)
    assert content(chosen(files, val_size=size, max_samples=None, seed=4)[1]) != content(held_out)


def test_other_content_is_another_file(rows):
    before = chosen([rows("a.jsonl", 10)], val_size=0.2, max_samples=None, seed=3)
    after = chosen([rows("a.jsonl", 11)], val_size=0.2, max_samples=None, seed=3)
    assert before[1] != after[1]


def test_broken_rows_stay_broken_and_counted(rows):
    trained, held_out = chosen([rows("a.jsonl", 20, {3, 4})], val_size=2, max_samples=None, seed=1)
    assert (content(trained[0]) + content(held_out)).count(BadRowError) == 2


def test_half_a_row_and_one_text_are_refused(rows, tmp_path):
    with pytest.raises(DsrunError, match=r"can't be 1\.5"):
        chosen([rows("a.jsonl", 9)], val_size=1.5, max_samples=None, seed=1)
    text = tmp_path / "a.txt"
    text.write_text("hello")
    with pytest.raises(DsrunError, match="has no rows to choose from"):
        chosen([text], val_size=None, max_samples=4, seed=1)

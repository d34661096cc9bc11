"""The shipped advertise data set: current, well formed, its texts true to their attribute lists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "presets" / "datasets" / "advertise"
PAIR = re.compile(r"[^#*\s]+#[^#*\s]+")


def read(name: str) -> list[dict[str, str]]:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", str(folder / "make.py"), *arguments],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def train() -> list[dict[str, str]]:
    return read("train.jsonl")


@pytest.fixture(scope="module")
def dev() -> list[dict[str, str]]:
    return read("dev.jsonl")


def values(row: dict[str, str]) -> list[str]:
    return [pair.split("#")[1] for pair in row["content"].split("*")]


def test_files_are_current():
    done = make(FOLDER, "--check")
    assert done.returncode == 0, done.stderr


def test_check_finds_a_changed_file_and_a_run_mends_it(tmp_path):
    for name in ("make.py", "words.py", "train.jsonl", "dev.jsonl"):
        shutil.copy(FOLDER / name, tmp_path)
    with (tmp_path / "dev.jsonl").open("a", encoding="utf-8") as file:
        file.write("{}\n")
    done = make(tmp_path, "--check")
    assert done.returncode == 1
    assert "dev.jsonl" in done.stderr
    assert "train.jsonl" not in done.stderr
    assert make(tmp_path).returncode == 0
    assert (tmp_path / "dev.jsonl").read_bytes() == (FOLDER / "dev.jsonl").read_bytes()
    assert make(tmp_path, "--check").returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dev.jsonl", "make.py", "train.jsonl", "words.py"]


def test_counts_keys_and_types(train, dev):
    assert (len(train), len(dev)) == (1200, 120)
    for row in train + dev:
        assert list(row) == ["content", "summary"]
        assert all(isinstance(text, str) for text in row.values())


def test_no_row_twice_and_no_dev_row_in_train(train, dev):
    rows = train + dev
    assert len({frozenset(row["content"].split("*")) for row in rows}) == len(rows)
    assert len({row["summary"] for row in rows}) == len(rows)


def test_lengths(train, dev):
    for row in train + dev:
        assert 15 <= len(row["content"]) <= 60, row
        assert 35 <= len(row["summary"]) <= 110, row
        assert 2 <= row["summary"].count("。") <= 4, row


def test_every_pair_is_well_formed_and_no_key_stands_twice(train, dev):
    for row in train + dev:
        pairs = row["content"].split("*")
        assert all(PAIR.fullmatch(pair) for pair in pairs), row
        keys = [pair.split("#")[0] for pair in pairs]
        assert keys[0] == "类型"
        assert len(set(keys)) == len(keys), row


def test_summaries_are_plain_sentences(train, dev):
    for row in train + dev:
        assert re.fullmatch(r"[\u4e00-\u9fffATVH，。]+。", row["summary"]), row
        assert not re.search(r"[，。]{2}", row["summary"]), row


def test_summaries_name_the_values_of_their_contents(train, dev):
    for row in train + dev:
        missing = [value for value in values(row) if value not in row["summary"]]
        assert not missing, row


def test_dev_asks_for_nothing_that_train_lacks(train, dev):
    known = {pair for row in train for pair in row["content"].split("*")}
    assert {pair for row in dev for pair in row["content"].split("*")} <= known


def test_product_types_are_many_and_balanced(train):
    counts: dict[str, int] = {}
    for row in train:
        counts[values(row)[0]] = counts.get(values(row)[0], 0) + 1
    assert len(counts) >= 20
    assert min(counts.values()) >= 25

"""Data sets by name. The library is the real one; what it would fetch is put in its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needed import needs

needs("datasets")

from dsrun.data import hub_data
from dsrun.errors import DsrunError

ROWS = [
    {"instruction": "写一首诗", "input": "", "output": "好的。"},
    {"instruction": "2+2?", "input": "", "output": "4"},
]


@pytest.fixture
def library(monkeypatch, tmp_path):
    """load_dataset's calls; it answers as if the Hub held lab/poems with a train split."""
    import datasets

    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "a cache"))
    calls = []

    def load(name, subset=None, *, split, revision=None):
        calls.append((name, subset, split, revision))
        if name != "lab/poems":
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub.")
        if split != "train":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_a_file_is_itself(tmp_path):
    assert hub_data.local_file(tmp_path / "x.jsonl", "") == tmp_path / "x.jsonl"


def test_a_data_set_becomes_a_file_in_the_cache(library, tmp_path):
    file = hub_data.local_file(Path("hf:lab/poems"), "--train-file")
    assert file.is_relative_to(tmp_path / "a cache")
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == ROWS
    before = file.stat().st_mtime_ns
    assert hub_data.local_file(Path("hf:lab/poems"), "--train-file") == file
    assert file.stat().st_mtime_ns == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("hf:lab/poems", ("lab/poems", None, "train", None)),
        ("hf:lab/poems/short", ("lab/poems", "short", "train", None)),
        ("hf:lab/poems@v2/short#train", ("lab/poems", "short", "train", "v2")),
    ],
)
def test_subset_split_and_revision(library, text, call):
    hub_data.local_file(Path(text), "--train-file")
    assert library == [call]


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("hf:lab/none", "doesn't exist", "hf auth login"), ("hf:lab/poems#test", "Unknown split", "#validation"),
        ("hf:poems", "names no data set", "hf:tatsu-lab/alpaca"), ("hf:", "names no data set", "hf:"),
    ],
)  # fmt: skip
def test_what_to_do_where_there_is_none(library, text, what, hint):
    with pytest.raises(DsrunError) as caught:
        hub_data.local_file(Path(text), "--train-file")
    (problem,) = caught.value.problems
    assert (problem.where, what in problem.what, hint in problem.hint) == ("--train-file", True, True), (
        problem
    )


def test_without_the_library(library, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(DsrunError, match="pip install datasets"):
        hub_data.local_file(Path("hf:lab/poems"), "--train-file")


def test_a_disk_that_is_full_leaves_no_part(library, monkeypatch, tmp_path):
    def full(self, path, **_):
        Path(path).write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("datasets.Dataset.to_json", full)
    with pytest.raises(DsrunError, match="No space left"):
        hub_data.local_file(Path("hf:lab/poems"), "--train-file")
    assert not list((tmp_path / "a cache" / "datasets").iterdir())

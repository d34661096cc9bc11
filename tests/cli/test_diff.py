from __future__ import annotations

import json

import pytest

ONE = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}'
TWO = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "_why": "it fits"}'


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text(ONE)
    (tmp_path / "two.json").write_text(TWO)
    (tmp_path / "folder").mkdir()
    return tmp_path


def test_what_differs(dsrun, files):
    said = dsrun("diff", "one.json", "two.json")
    assert (said.code, said.err) == (0, "")
    first, does = said.out.splitlines()[:2]
    assert first == "zero_optimization.stage: 2 -> 3"
    assert does.startswith("    ")
    assert dsrun("diff", "one.json", "two.json", "--exit-code").code == 1


def test_no_difference(dsrun, files):
    (files / "same.json").write_text(
        '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2} // same'
    )
    said = dsrun("diff", "one.json", "same.json", "--exit-code")
    assert (said.code, said.out) == (0, "")
    assert said.err


def test_json(dsrun, files):
    (row,) = json.loads(dsrun("diff", "one.json", "two.json", "--json").out)["differences"]
    assert row["path"] == "zero_optimization.stage"
    assert (row["before"], row["after"], row["given_before"], row["known_after"]) == (2, 3, True, True)
    assert row["does"]
    assert json.loads(dsrun("diff", "one.json", "one.json", "--json").out)["differences"] == []


def test_presets(dsrun, files):
    assert "zero_optimization.stage: 2 -> 3\n" in dsrun("diff", "zero2", "zero3").out
    said = dsrun("diff", "zero2", "one.json", "--world-size", 4)
    assert "train_batch_size: 16 -> 8" in said.out
    assert 'optimizer.type: "AdamW" -> ' in said.out
    assert "fp16.enabled: " in said.out


def test_a_file_called_as_a_preset(dsrun, files):
    (files / "zero2").write_text(ONE)
    assert dsrun("diff", "zero2", "one.json").out == ""


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("zero22", "Did you mean 'zero2'?"),
        ("onne.json", "Did you mean 'one.json'?"),
        ("folder", "folder"),
        ("broken.json", "broken.json:1:2"),
        ("list.json", "list.json"),
        ("a" * 300, "aaa"),
    ],
)
def test_bad_names(dsrun, files, name, word):
    (files / "broken.json").write_text("{")
    (files / "list.json").write_text("[]")
    said = dsrun("diff", name, "one.json")
    assert (said.code, said.out) == (1, "")
    assert word in said.err


def test_both_names_are_answered(dsrun, files):
    assert dsrun("diff", "no-such", "nor-this").err.count("neither a file nor a preset") == 2


def test_wrong_usage(dsrun, files):
    assert dsrun("diff", "one.json").code == 2
    assert dsrun("diff", "one.json", "two.json", "--world-size", "0").code == 2
    assert dsrun("diff", "one.json", "two.json", "--deepspeed-version", "0.1").code == 1


def test_nothing_heavy_is_imported(imported, files):
    found = imported("diff", str(files / "one.json"), str(files / "two.json"))
    assert not found & {"torch", "deepspeed", "transformers", "yaml", "jinja2"}

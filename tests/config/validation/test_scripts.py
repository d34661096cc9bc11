"""Configs and names in scripts: found at their own lines and columns, judged, and never rewritten."""

from __future__ import annotations

import json

import pytest

from dsrun.config.reading.scripts import configs_of_python, configs_of_shell
from dsrun.config.validation.sources import TELLING

DICT = """\
import deepspeed

def config(n):
    return {
        'train_micro_batch_size_per_gpu': n,  # a comment
        "zero_optimization": {
            "stage": 2, 'overlap_com': True,
        },
        'betas': (0.9, 0.999), "off": None, "big": 500_000_000,
    }
"""
HEREDOC = """\
#!/bin/bash
cat <<-'EOT' > ds.json
{
 "train_batch_size": 8,
 "zero_optimization": {"stage": 2, "offload_optimzer": {"device": "cpu"}}
}
EOT
cat << END
"nothing": 1
END
"""


def test_a_dict_is_json_at_its_own_places():
    (text,) = configs_of_python(DICT, TELLING)
    for line, (theirs, ours) in enumerate(zip(DICT.splitlines(), text.splitlines(), strict=False), 1):
        for key in ("zero_optimization", "overlap_com", "stage"):
            assert (theirs.find(key) == ours.find(key)) or key not in theirs, (line, ours)
    assert json.loads(text) == {
        "train_micro_batch_size_per_gpu": "<n>",
        "zero_optimization": {"stage": 2, "overlap_com": True},
        "betas": [0.9, 0.999],
        "off": None,
        "big": 500000000,
    }


def test_a_dict_without_a_telling_key_is_none():
    assert list(configs_of_python("x = {'stage': 2, 'fp16': {'enabled': True}}", TELLING)) == []


def test_what_is_spread_into_a_dict_is_open():
    (text,) = configs_of_python("x = {'zero_optimization': {'stage': 2}, **rest}", TELLING)
    assert json.loads(text)["train_batch_size"] == "<spread>"


def test_a_here_document_at_its_lines():
    (text,) = configs_of_shell(HEREDOC, TELLING)
    assert text.splitlines()[4] == HEREDOC.splitlines()[4]
    assert json.loads(text)["train_batch_size"] == 8


@pytest.mark.parametrize(
    ("name", "text", "place"), [("train.py", DICT, "train.py:7:25"), ("run.sh", HEREDOC, "run.sh:5:36")]
)
def test_a_slip_is_shown_where_it_stands(dsrun, tmp_path, monkeypatch, name, text, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    said = dsrun("validate", name, "--deepspeed-version", "0.19.8", "--fix", "--unsafe-fixes")
    assert said.code == 1
    assert f"{place}  $.zero_optimization" in said.out
    assert "DS006" in said.out
    assert "[--fix]" not in said.out
    assert (tmp_path / name).read_text(encoding="utf-8") == text


def test_names_of_other_versions(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "from transformers import AdamW\ndef f():\n    import datasets\n    datasets.load_metric\n",
        encoding="utf-8",
    )
    said = dsrun("validate", "train.py", "--with", "transformers==5.1,datasets==3.0.0", "--json")
    assert said.code == 1
    found = [
        (finding["rule"], finding["severity"], finding["line"])
        for finding in json.loads(said.out)["findings"]
    ]
    assert found == [("DS911", "error", 1), ("DS911", "warning", 4)]
    assert dsrun("validate", "train.py", "--with", "transformers==4.49.0,datasets==2.21.0").code == 0


def test_a_shells_script_without_a_config(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text("echo hello\n", encoding="utf-8")
    said = dsrun("validate", "run.sh")
    assert said.code == 1
    assert "holds no DeepSpeed config" in said.err


def test_broken_python(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def f(:\n", encoding="utf-8")
    said = dsrun("validate", "train.py")
    assert said.code == 1
    assert "is not Python" in said.out

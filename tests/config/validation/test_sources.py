"""Which texts stand behind names."""

from __future__ import annotations

import base64
import io
import os
import sys
import threading
from pathlib import Path

import pytest

from dsrun.config.reading.places import MAX_BYTES
from dsrun.config.validation import sources
from dsrun.config.validation.sources import gather
from dsrun.errors import DsrunError

CONFIG = b'{"train_batch_size": 1}'


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(*given: str) -> list[str]:
    texts, problems = gather(given)
    assert problems == []
    return [source.name for source in texts]


@pytest.mark.parametrize(
    ("name", "data", "taken"),
    [
        ("x.json", CONFIG, True),
        ("x.JSON", CONFIG, True),
        ("x.txt", CONFIG, False),
        ("x.json", b'{"zero_optimization": {}}', True),
        ("x.json", b'{"fp16": {"enabled": true}}', False),
        ("ds_config.json", b'{"fp16": {"enabled": true}}', True),
        ("myDeepSpeed.json", b'{"fp16": {"enabled": true}}', True),
        ("zero3.json", b'{"fp16": {"enabled": true}}', True),
        ("zeros.json", b'{"fp16": {"enabled": true}}', False),
        ("ids.json", b'{"fp16": {"enabled": true}}', False),
        ("ds_data.json", b'{"rows": 3}', False),
        ("ds_config.json", b"{broken", True),
        ("ds_config.hjson", b"train_batch_size: 1", True),
        ("ds_config.json", b"[" * 100_000, True),
        ("config.json", b"{broken", False),
        ("config.json", b'["train_batch_size"]', False),
        ("a.yaml", b"deepspeed_config:\n  zero_stage: 2\n", True),
        ("a.yml", b"distributed_type: FSDP\n", False),
        ("ds_config.json", b'{"train_batch_size": 1, "a": "' + b"x" * MAX_BYTES + b'"}', False),
    ],
)
def test_what_looks_like_a_config(folder, name, data, taken):
    (folder / "sub").mkdir()
    (folder / "sub" / name).write_bytes(data)
    texts, problems = gather(["sub"])
    assert [source.name for source in texts] == ([f"sub/{name}"] if taken else [])
    assert bool(problems) != taken


def test_a_named_file_is_taken_whatever_it_is(folder):
    (folder / "x.txt").write_bytes(b"anything")
    (source,), problems = gather(["x.txt"])
    assert (source.name, source.data, source.path, problems) == ("x.txt", b"anything", Path("x.txt"), [])


def test_in_order_and_once(folder):
    for name in ("b.json", "a.json", "sub/ds.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(CONFIG)
    (folder / "link.json").symlink_to("b.json")
    assert names("b.json", "./b.json", "link.json", str(folder / "a.json"), ".") == [
        "b.json",
        str(folder / "a.json"),
        "sub/ds.json",
    ]


def test_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "x.json").write_bytes(CONFIG)
    (source,), _ = gather(["~/x.json"])
    assert source.path == folder / "x.json"


def test_stdin(monkeypatch):
    for data in (CONFIG, base64.urlsafe_b64encode(CONFIG), base64.urlsafe_b64encode(CONFIG) + b"\n"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        (source,), problems = gather(["-", "-"])
        assert (source.name, source.data, source.path, problems) == ("<stdin>", CONFIG, None, [])


@pytest.mark.parametrize(
    "data", [b"", b"train", b"trainbatch", b"abcdefghijkl", b"\xff" * 12, b'"abcdefghij"']
)
def test_stdin_that_is_no_base64(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert gather(["-"])[0][0].data == data


def test_base64_in_a_file_is_no_config(folder):
    """DeepSpeed takes base64 in place of the name only."""
    data = base64.urlsafe_b64encode(CONFIG)
    (folder / "x.json").write_bytes(data)
    assert gather(["x.json"])[0][0].data == data


def test_all_problems_at_once(folder):
    (folder / "empty").mkdir()
    (folder / "good.json").write_bytes(CONFIG)
    texts, problems = gather(["goood.json", "empty", "good.json", "good.json/x", "a" * 300])
    assert [source.name for source in texts] == ["good.json"]
    assert [problem.where for problem in problems] == ["goood.json", "empty", "good.json/x", "a" * 300]
    assert "good.json" in problems[0].hint


def test_no_more_than_a_config_may_have():
    assert len(sources.read(Path("/dev/zero"))) == MAX_BYTES + 1


def test_a_pipe(folder):
    os.mkfifo("pipe")
    assert sources.read(Path("pipe")) == b"", "nobody writes to it"
    keep = os.open("pipe", os.O_RDWR)

    def write() -> None:
        os.write(keep, CONFIG)
        os.close(keep)

    threading.Timer(0.2, write).start()
    assert sources.read(Path("pipe")) == CONFIG


def test_one(folder):
    (folder / "x.json").write_bytes(CONFIG)
    assert sources.one("x.json").data == CONFIG
    for name in (".", "none.json"):
        with pytest.raises(DsrunError):
            sources.one(name)

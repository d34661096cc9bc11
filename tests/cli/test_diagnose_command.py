"""`dsrun diagnose`: its answers and exit codes, and signatures in `dsrun explain`."""

from __future__ import annotations

import gzip
import json

import pytest

FULL = "[rank1]: OSError: [Errno 28] No space left on device: '/out'\n"


@pytest.mark.parametrize(
    ("text", "code", "cause"), [(FULL, 0, "disk_full"), ("exits with return code = 1\n", 3, None)]
)
def test_exit_codes_and_json(dsrun, tmp_path, text, code, cause):
    log = tmp_path / "train.log"
    log.write_text("step 1\n" + text)
    said = dsrun("diagnose", log, "--json")
    found = json.loads(said.out)
    assert (said.code, found["cause"]) == (code, cause)
    assert found["where"] == f"{log}:2" and found["summary"] and found["next_step"]
    assert (found["retry"] is None) == (cause is None)


def test_a_folder_of_logs_a_rank(dsrun, tmp_path):
    (tmp_path / "rank-0.log").write_text("RuntimeError: Connection closed by peer\n")
    (tmp_path / "rank-7.log").write_text(FULL.removeprefix("[rank1]: "))
    said = dsrun("diagnose", tmp_path, "--json")
    assert (said.code, json.loads(said.out)["rank"]) == (0, 7)


def test_wrong_use(dsrun, tmp_path):
    (tmp_path / "empty.log").touch()
    for words in ((), (tmp_path / "none.log",), (tmp_path / "empty.log",)):
        said = dsrun("diagnose", *words)
        assert said.code == 2 and said.out == "" and said.err


def test_a_log_that_was_rotated(dsrun, tmp_path):
    (tmp_path / "train.log.1.gz").write_bytes(gzip.compress(FULL.encode()))
    assert json.loads(dsrun("diagnose", tmp_path, "--json").out)["cause"] == "disk_full"
    (tmp_path / "train.log.1.gz").write_bytes(gzip.compress(FULL.encode())[:30])
    (tmp_path / "train.log.2").write_bytes(b"\xfd7zXZ\x00...")
    for name, word in (("train.log.1.gz", "ended"), ("train.log.2", "xzcat")):
        said = dsrun("diagnose", tmp_path / name)
        assert said.code == 2 and word in said.err


def test_chinese(dsrun, tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    (tmp_path / "a.log").write_text(FULL)
    said = dsrun("diagnose", tmp_path / "a.log").out
    assert "磁盘" in said and "重新启动" in said
    assert not {"cause", "next", "sure", "again"} & {line.split()[0] for line in said.splitlines()}


def test_a_signature_is_explained(dsrun):
    said = dsrun("explain", "disk-full")
    assert said.code == 0 and "disk_full" in said.out and "No space left" in said.out
    assert "disk-full" in dsrun("explain", "signatures").out

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsrun.errors import DsrunError
from dsrun.files import json_text, read_json_object, write_atomic

ROOT = Path(__file__).resolve().parents[1]


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomic(tmp_path / "new", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_an_existing_file_keeps_its_permissions_and_its_link(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o604)
    (tmp_path / "link").symlink_to(path)
    write_atomic(tmp_path / "link", "new 新")
    assert path.read_text(encoding="utf-8") == "new 新"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604
    assert (tmp_path / "link").is_symlink()


def test_a_redirected_stdout_is_not_replaced(tmp_path):
    code = "from dsrun.files import read_json_object, write_atomic; write_atomic('/dev/stdout', 'x')"
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=log, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert "not a regular file" in done.stderr
    assert (tmp_path / "log").read_text() == ""


def test_never_over_another_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(DsrunError, match="exists already"):
        write_atomic(path, "new", overwrite=False)
    assert path.read_text() == "old"
    write_atomic(tmp_path / "fresh", "new", overwrite=False)
    assert (tmp_path / "fresh").read_text() == "new"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half \udc80")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["no/folder/x", ".", "pipe"])
def test_what_is_no_file_is_left_alone(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DsrunError):
        write_atomic(tmp_path / name, "x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 200_000, "3"])
def test_a_file_that_holds_no_json_object_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DsrunError) as caught:
        read_json_object(path)
    assert [problem.where for problem in caught.value.problems] == [str(path)]


def test_json_has_no_nan():
    value = {"loss": float("nan"), "more": [float("-inf"), 1.5, Path("a b")], 3: ("实验", None, True)}
    text = '{"loss": null, "more": [null, 1.5, "a b"], "3": ["实验", null, true]}'
    assert json_text(value) == text

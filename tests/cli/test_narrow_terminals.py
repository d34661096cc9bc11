"""Reports on a terminal of 80 columns: folded at words there, whole in files and pipes; NO_COLOR is respected."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from running import in_terminal

from dsrun.cli.output.columns import folded, width

BAD = '{"train_batch_size": 15, "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}'


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("short", 80, ["short"]),
        ("one two three", None, ["one two three"]),
        ("one two three", 8, ["one two", "    three"]),
        ("state       finished, 6 of 6", 22, ["state       finished,", "    6 of 6"]),
        ("    Set it.  [--fix]", 12, ["    Set it.", "    [--fix]"]),
        (
            "x /a/very/long/path/that/is/not/broken y",
            10,
            ["x", "    /a/very/long/path/that/is/not/broken", "    y"],
        ),
        ("类型 颜色 图案", 10, ["类型 颜色", "    图案"]),
        ("", 80, [""]),
    ],
)
def test_folding(text, columns, lines):
    assert folded(text, columns, 4).split("\n") == lines


def shown(folder: Path, *words: str, **environ: str) -> str:
    """What a command shows on a terminal of 80 columns."""
    given = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process, terminal = in_terminal(
        [sys.executable, "-m", "dsrun", *words], cwd=folder, env={**given, **environ}
    )
    text = b""
    try:
        while piece := os.read(terminal, 65536):
            text += piece
    except OSError:
        pass  # the program has closed its end
    finally:
        process.wait(60)
        os.close(terminal)
    return text.decode("utf-8").replace("\r\n", "\n")


def test_validate(dsrun, tmp_path, monkeypatch):
    """In colour, then without; apart from its line ends the report is that of a pipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(BAD, encoding="utf-8")
    words = ("validate", "ds.json", "--world-size", "2")
    coloured, plain = shown(tmp_path, *words), shown(tmp_path, *words, NO_COLOR="1")
    assert "\x1b[31merror\x1b[0m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    findings = [line for line in plain.splitlines() if " | " not in line]
    assert max(map(width, findings)) <= 80
    piped = dsrun(*words)
    assert piped.out.split() + piped.err.split() == plain.split()
    assert "\x1b" not in piped.out and max(map(len, piped.out.splitlines())) > 80


def test_plan(tmp_path):
    words = ("plan", "llama-7b", "--gpu", "t4")
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    assert "\x1b[31m" in shown(tmp_path, *words, **environ)
    plain = shown(tmp_path, *words, NO_COLOR="1", **environ)
    assert "\x1b" not in plain
    assert max(map(width, plain.splitlines())) <= 80


def test_doctor(tmp_path, monkeypatch):
    """The table of hosts keeps their names, folded where there is no room for them."""
    monkeypatch.setenv("DSRUN_SSH", "false")
    text = shown(tmp_path, "doctor", "--hosts", "gpu[01-02]:8,a-longer-name:8")
    lines = re.sub(r"\x1b\[\d*m", "", text).splitlines()
    assert max(map(width, lines)) <= 80
    table = lines[: lines.index("")]
    first, second, third, *folded = [line.split()[0] for line in table]
    assert (first, second, third, "".join(folded)) == ("host", "gpu01", "gpu02", "a-longer-name")


def test_an_error_is_folded_and_its_next_step_is_not(tmp_path):
    """A path is never broken, and a command that is to be copied stays on its line."""
    (tmp_path / "a.csv").write_bytes("content,summary\n中,文\n".encode("gbk"))
    words = ("finetune", "llama-tiny", "--train-file", "a.csv")
    error, hint = shown(tmp_path, *words, DS_ACCELERATOR="cpu").rstrip().rsplit("\n", 1)
    assert all(width(line) <= 80 or str(tmp_path) in line for line in error.split("\n"))
    assert "iconv" in hint and hint.endswith("a-utf8.csv")


def test_diagnose(tmp_path):
    """Sentences are folded; the log's line and the command to copy are not."""
    error = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB{' of more' * 10}."
    (tmp_path / "job.log").write_text(f"{error}\n", encoding="utf-8")
    rows = shown(tmp_path, "diagnose", "job.log").splitlines()
    assert [row for row in rows if width(row) > 80] == [f"line        {error}"]
    assert sum(row.startswith(" " * 12) for row in rows) >= 2


@pytest.mark.parametrize("what", ["DS101", "signatures", "zero2-small-gradients"])
def test_explain(dsrun, tmp_path, what):
    text = shown(tmp_path, "explain", what)
    assert max(map(width, text.splitlines())) <= 80
    assert text.split() == dsrun("explain", what).out.split()

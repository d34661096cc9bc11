"""Completion by the tabulator: through click as the shells call it, and once in a real bash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import get_completion_class
from running import HEAVY

from dsrun.cli import COMPLETE, cli
from dsrun.cli.completion import PLACES
from dsrun.config.rules import find_rules


def completed(line: str) -> dict[str, str | None]:
    """Completions of a line -> their help; the shell's own files are <file>."""
    words = shlex.split(line)
    incomplete = "" if line.endswith(" ") else words.pop()
    found = get_completion_class("zsh")(cli, {}, "dsrun", COMPLETE).get_completions(words[1:], incomplete)
    return {item.value if item.type == "plain" else f"<{item.type}>": item.help for item in found}


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("dsrun val", {"validate"}),
        ("dsrun hosts ", {"check", "expand"}),
        ("dsrun finetune chatglm2", {"chatglm2-6b", "chatglm2-tiny"}),
        ("dsrun finetune llama-tiny --preset zero3", {"zero3", "zero3-offload", "zero3-nvme"}),
        ("dsrun preset au", {"auto"}),
        ("dsrun plan llama-tiny --gpu v100", {"v100-16g", "v100-32g"}),
        ("dsrun plan llama-tiny --method ql", {"qlora"}),
        ("dsrun finetune llama-tiny --activation-ch", {"--activation-checkpointing"}),
        ("dsrun validate ", {"<file>"}),
        ("dsrun finetune run.to", {"<file>"}),
        ("dsrun finetune llama-tiny --train-file ", {"<file>"}),
        ("dsrun finetune llama-tiny --set zero_optimization.offload_p", {"zero_optimization.offload_param"}),
        ("dsrun finetune llama-tiny --set zero_optimization.stage=", set()),
        ("dsrun explain zero_optimization.overlap", {"zero_optimization.overlap_comm"}),
        ("dsrun explain gpu-oom-b", {"gpu-oom-buckets"}),
        ("dsrun completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_names(line, some, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = completed(line)
    assert some <= found.keys() if some else not found


def test_commands_say_what_they_do():
    assert completed("dsrun finet") == {"finetune": "fine-tune a model"}


def test_rules_come_with_their_titles_also_in_a_list():
    titles = {rule.id: rule.about for rule in find_rules()}
    assert completed("dsrun explain ds221") == {"DS221": titles["DS221"]}
    assert completed("dsrun validate x.json --ignore DS101,DS22")["DS101,DS221"] == titles["DS221"]


def test_columns_are_those_of_the_file_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"question": "1", "answer": "2"}) + "\n", encoding="utf-8")
    Path("b.csv").write_text("frage,antwort\n1,2\n", encoding="utf-8")
    named = "dsrun finetune llama-tiny --train-file a.jsonl:3 --train-file b.csv --prompt-column "
    assert list(completed(named)) == ["question", "answer", "frage", "antwort"]
    assert list(completed(named + "fr")) == ["frage"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"not json"])
def test_a_file_that_cant_be_read_has_no_columns(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("a.jsonl").write_bytes(content)
    assert completed("dsrun finetune llama-tiny --train-file a.jsonl --prompt-column ") == {}


def test_runs_come_newest_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(completed("dsrun show ")) == ["<file>"]
    for age, name in enumerate(("new", "group/old")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "job.json").write_text("{}", encoding="utf-8")
        os.utime(folder, (1e9 - age, 1e9 - age))
    for command in ("show", "logs", "stop", "resume", "compare", "chat"):
        assert list(completed(f"dsrun {command} ")) == ["new", "group/old"]
    assert list(completed("dsrun stop gr")) == ["group/old"]


def test_a_labs_presets_are_completed(tmp_path, monkeypatch):
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "ours.toml").write_text('summary = "ours"\n', encoding="utf-8")
    monkeypatch.setenv("DSRUN_PATH", str(tmp_path))
    assert {"ours", "zero2"} <= completed("dsrun preset ").keys()
    monkeypatch.setenv("DSRUN_PATH", "/nowhere")
    assert completed("dsrun preset ") == {}, "what can't be read has no names"


ASKED = f"""
import os, sys
os.environ.update({COMPLETE}="bash_complete", COMP_WORDS=sys.argv[1], COMP_CWORD=sys.argv[2])
from dsrun.cli import main
try:
    main([])
finally:
    print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("line", ["dsrun finetune x --preset z", "dsrun plan x --gpu a", "dsrun explain DS2"])
def test_nothing_heavy_is_imported(line):
    words = line.split()
    found = subprocess.run(
        [sys.executable, "-c", ASKED, line, str(len(words) - 1)], capture_output=True, text=True, check=True
    )
    assert len(found.stdout.splitlines()) > 3
    assert not set(found.stderr.split()) & (HEAVY - {"jinja2"})


BASH = """
{script}
COMP_WORDS=(dsrun finetune llama-tiny --preset zero3-) COMP_CWORD=4
_dsrun_completion dsrun
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p dsrun
"""


def test_in_bash(dsrun, tmp_path):
    program = tmp_path / "dsrun"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m dsrun "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH.format(script=dsrun("completion", "bash").out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    *found, registered = done.stdout.splitlines()
    assert {"zero3-nvme", "zero3-offload"} <= set(found) and all(one.startswith("zero3-") for one in found)
    assert registered.endswith("_dsrun_completion dsrun")


@pytest.mark.parametrize("shell", PLACES)
def test_install(dsrun, shell, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    said = dsrun("completion", shell, "--install")
    assert said.code == 0
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert str(path) in said.out
    assert path.read_text(encoding="utf-8") == dsrun("completion", shell).out
    assert dsrun("completion", shell, "--install").code == 0, "it is renewed"
    path.write_text("somebody's own", encoding="utf-8")
    refused = dsrun("completion", shell, "--install")
    assert refused.code == 1 and str(path) in refused.err
    assert path.read_text(encoding="utf-8") == "somebody's own"

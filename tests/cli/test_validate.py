from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsrun import catalog
from dsrun.cli import cli
from dsrun.config.rules import find_rules

ROOT = catalog.PACKAGE.parent
GOOD = '{\n  "train_micro_batch_size_per_gpu": 1\n}\n'
BAD = """{
    "_comment": "ours",
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stge": 2, "overlap_comm": "true"}
}
"""
FIXED = BAD.replace("stge", "stage").replace('"true"', "true")
NOTED = BAD.replace("{\n", "{\n    // ours\n", 1)
WARNED = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "pipeline_loading_checkpoint": true}}'
BROKEN = '{\n  "train_batch_size": 1\n'


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty folder with a hostile name, in which the command runs."""
    path = tmp_path / "a lab's 实验室"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return path


@pytest.fixture
def piped(monkeypatch):
    """`piped(text)`: what stands on stdin."""

    def put(data: str | bytes) -> None:
        data = data.encode() if isinstance(data, str) else data
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


def put(name: str, text: str | bytes) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def rules_of(said) -> set[str]:
    return {row["rule"] for row in json.loads(said.out)["findings"]}


def run(*args: str, stdin: bytes = b"", **environ: str) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "dsrun", "validate", *args]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(command, input=stdin, capture_output=True, env=variables, check=False)


# ---------------------------------------------------------------- what is shown


def test_all_findings_at_once(dsrun, folder):
    put("ds.json", BAD)
    said = dsrun("validate", "ds.json")
    assert said.code == 1
    lines = said.out.splitlines()
    (at,) = [index for index, line in enumerate(lines) if "DS006" in line]
    assert lines[at].startswith("ds.json:4:27  $.zero_optimization.stge  DS006  error: ")
    assert lines[at + 1] == '  4 |     "zero_optimization": {"stge": 2, "overlap_comm": "true"}'
    assert lines[at + 2] == "    |                           ^^^^^^"
    assert "zero_optimization.stage" in lines[at + 3]
    assert lines[at + 3].endswith("  [--fix]")
    assert "ds.json:4:38  $.zero_optimization.overlap_comm  DS007  warning: " in said.out
    assert "1 error" in said.err
    assert re.search(r"\b2 \w+ with --fix;", said.err)


def test_nothing_to_say(dsrun, folder):
    put("ds.json", GOOD)
    said = dsrun("validate", "ds.json")
    assert (said.code, said.out) == (0, "")
    assert "in 1 file" in said.err
    assert "for deepspeed" in said.err


def test_json(dsrun, folder):
    put("ds.json", BAD)
    rows = json.loads(dsrun("validate", "ds.json", "--json").out)["findings"]
    (row,) = [row for row in rows if row["rule"] == "DS006"]
    assert row.pop("message")
    assert "zero_optimization.stage" in row.pop("suggestion")
    assert row == {
        "file": "ds.json",
        "line": 4,
        "column": 27,
        "path": "$.zero_optimization.stge",
        "rule": "DS006",
        "severity": "error",
        "effect": "refused",
        "fix": "safe",
    }
    put("good.json", GOOD)
    said = dsrun("validate", "good.json", "--json")
    assert (said.code, json.loads(said.out)["findings"], said.err) == (0, [], "")


def test_github(dsrun, folder):
    put("a,b:c.json", BAD)
    lines = dsrun("validate", "a,b:c.json", "--format", "github").out.splitlines()
    assert all(
        line.startswith(("::error file=a%2Cb%3Ac.json,line=", "::warning ", "::notice ")) for line in lines
    )
    assert any(",line=4,col=27,title=DS006::zero_optimization.stge: " in line for line in lines)


def test_warnings_count_if_asked(dsrun, folder):
    put("ds.json", WARNED)
    assert dsrun("validate", "ds.json").code == 0
    assert dsrun("validate", "ds.json", "--strict").code == 1
    assert dsrun("validate", "ds.json", "--strict", "--ignore", "DS2").code == 0


def test_select_and_ignore(dsrun, folder):
    put("ds.json", BAD)
    as_json = ("validate", "ds.json", "--json")
    assert rules_of(dsrun(*as_json, "--select", "DS006")) == {"DS006"}
    assert rules_of(dsrun(*as_json, "--select", "ds006, DS007")) == {"DS006", "DS007"}
    assert rules_of(dsrun(*as_json, "--select", "DS00", "--ignore", "DS006")) == {"DS007"}
    everything = rules_of(dsrun(*as_json))
    assert rules_of(dsrun(*as_json, "--ignore", "DS006,DS007")) == everything - {"DS006", "DS007"}
    assert dsrun("validate", "ds.json", "--ignore", "DS0,DS2").code == 0


def test_a_file_can_silence_a_rule(dsrun, folder):
    put("ds.json", WARNED.replace("{", '{"_dsrun_ignore": ["DS204"], ', 1))
    put("why.json", WARNED.replace("{", '{"_dsrun_ignore": {"DS204": "stage 3 comes later"}, ', 1))
    for name in ("ds.json", "why.json"):
        assert "DS204" not in rules_of(dsrun("validate", name, "--json"))


def test_world_size(dsrun, folder):
    put(
        "ds.json",
        '{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}',
    )
    assert dsrun("validate", "ds.json", "--world-size", 3).code == 0
    said = dsrun("validate", "ds.json", "--world-size", 8)
    assert said.code == 1
    assert "DS101" in said.out


def test_versions(dsrun, folder):
    put(
        "ds.json",
        '{"train_batch_size": 1, "zero_optimization": {"stage": 3, "stage3_use_all_reduce_for_fetch_params": 1}}',
    )
    old = rules_of(dsrun("validate", "ds.json", "--json", "--deepspeed-version", "0.9"))
    assert old != rules_of(dsrun("validate", "ds.json", "--json", "--deepspeed-version", "0.19"))
    said = dsrun("validate", "ds.json", "--upgrade-to", "0.3")
    assert said.code == 1
    assert "0.9 to 0.19" in said.err


def test_versions_beside_it(dsrun, folder):
    put("ds.json", '{"train_batch_size": 1, "zero_optimization": {"stage": 2}}')
    said = dsrun("validate", "ds.json", "--with", "deepspeed==0.18.1,transformers==5.1")
    assert said.code == 1
    assert "DS910" in said.out and "gradients" in said.out
    assert "DS910" not in dsrun("validate", "ds.json", "--with", "deepspeed==0.19.5").out


def test_upgrade(dsrun, folder):
    put("ds.json", '{"train_batch_size": 1, "zero_optimization": {"stage": 2, "cpu_offload": true}}')
    said = dsrun("validate", "ds.json", "--upgrade-to", "0.19", "--diff", "--unsafe-fixes")
    assert '+{"train_batch_size": 1' in said.out
    assert "offload_optimizer" in said.out


def test_who_reads_it(dsrun, folder):
    put("ds.json", '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}')
    assert "for hf" in dsrun("validate", "ds.json").err
    said = dsrun("validate", "ds.json", "--for", "deepspeed")
    assert "for deepspeed" in said.err
    assert said.code == 1
    put("plain.json", GOOD)
    assert "for hf" in dsrun("validate", "plain.json", "--arg", "learning_rate=1e-4").err


def test_trainer_arguments(dsrun, folder):
    put("ds.json", GOOD.replace("1", '"auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}'))
    assert dsrun("validate", "ds.json", "--arg", "bf16=true").code == 0
    assert dsrun("validate", "ds.json", "--arg", "bf16=false", "--arg", "fp16=true").code == 1


# ---------------------------------------------------------------- which files


def test_stdin(dsrun, folder, piped):
    piped(BAD)
    said = dsrun("validate", "-")
    assert said.code == 1
    assert "<stdin>:4:27  $.zero_optimization.stge" in said.out
    piped(base64.urlsafe_b64encode(BAD.encode()))
    assert "<stdin>:4:27  $.zero_optimization.stge" in dsrun("validate", "-").out


def test_a_folder(dsrun, folder):
    put("sub/ds_config.json", BAD)
    put("sub/deeper/zero3.json", GOOD)
    put("sub/package.json", '{"name": "x", "version": "1"}')
    put("sub/broken_deepspeed.json", BROKEN)
    put("sub/broken.json", BROKEN)
    put("sub/node_modules/ds_config.json", BAD)
    put("sub/.hidden/ds_config.json", BAD)
    Path("sub/again").symlink_to("..")
    Path("sub/ds_loop.json").symlink_to("ds_loop.json")
    os.mkfifo("sub/ds_pipe.json")
    said = dsrun("validate", "sub")
    assert said.code == 1
    assert "sub/ds_config.json:4:27" in said.out
    assert "sub/broken_deepspeed.json:" in said.out
    assert "in 3 files" in said.err


def test_a_folder_without_a_config(dsrun, folder):
    put("sub/package.json", "{}")
    said = dsrun("validate", "sub")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("dsrun: sub: ")


def test_the_same_file_once(dsrun, folder):
    put("ds.json", BAD)
    Path("link.json").symlink_to("ds.json")
    said = dsrun("validate", "ds.json", "./ds.json", folder / "ds.json", "link.json", ".")
    assert said.out.count("DS006") == 1
    assert "in 1 file" in said.err


def test_accelerate_yaml(dsrun, folder):
    put("ds.json", BAD)
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
    put("inline.yaml", text + "deepspeed_config:\n  zero_stage: 7\n")
    put("named.yaml", text + "deepspeed_config:\n  deepspeed_config_file: ds.json\n")
    said = dsrun("validate", "inline.yaml")
    assert said.code == 1
    assert "inline.yaml:6:" in said.out
    said = dsrun("validate", "named.yaml", "--fix")
    assert said.code == 1
    assert "ds.json:4:27  $.zero_optimization.stge" in said.out
    assert Path("ds.json").read_text() == BAD


def test_missing_files(dsrun, folder):
    put("ds_config.json", BAD)
    said = dsrun("validate", "ds_confg.json", "ds_config.json", "nothing/like/it.json")
    assert said.code == 1
    assert "dsrun: ds_confg.json: " in said.err
    assert "'ds_config.json'?" in said.err
    assert "nothing/like/it.json: " in said.err
    assert "DS006" in said.out, "the other files are judged all the same"


@pytest.mark.parametrize(
    "name",
    [
        *("a" * 300, "a" * 5000, "~nobody-of-that-name/ds.json", "ds.json/ds.json", "loop.json", ""),
        base64.urlsafe_b64encode(BAD.encode() * 20).decode(),
    ],
)
def test_names_that_lead_nowhere(dsrun, folder, name):
    put("ds.json", GOOD)
    Path("loop.json").symlink_to("loop.json")
    said = dsrun("validate", "--", name)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("dsrun: ")


def test_what_is_no_file(dsrun, folder):
    os.mkfifo("pipe.json")
    for name in ("/dev/null", "/dev/zero", "pipe.json"):
        said = dsrun("validate", name)
        assert said.code == 1
        assert "DS020" in said.out


def test_a_pipe_with_a_name(folder):
    put("ds.json", BAD)
    line = f"cat ds.json | {sys.executable} -m dsrun validate /dev/fd/0 --json"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", line], capture_output=True, env=environ, check=False)
    assert "DS006" in {row["rule"] for row in json.loads(done.stdout)["findings"]}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_right_to_read(dsrun, folder):
    put("ds.json", GOOD).chmod(0)
    said = dsrun("validate", "ds.json")
    assert said.code == 1
    assert "ds.json: " in said.err


# ---------------------------------------------------------------- fixes


def test_diff_changes_nothing(dsrun, folder):
    path = put("ds.json", BAD)
    said = dsrun("validate", "ds.json", "--diff")
    assert said.code == 1
    assert '+    "zero_optimization": {"stage": 2, "overlap_comm": true}\n' in said.out
    assert "DS006" in said.err
    assert path.read_text() == BAD


def test_fix(dsrun, folder):
    path = put("ds.json", BAD)
    path.chmod(0o640)
    said = dsrun("validate", "ds.json", "--fix")
    assert said.code == 0
    assert said.out.startswith("--- a/ds.json\n+++ b/ds.json\n")
    assert path.read_text() == FIXED
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in folder.iterdir()] == ["ds.json"]
    said = dsrun("validate", "ds.json", "--fix")
    assert (said.code, "---" in said.out) == (0, False)


@pytest.mark.parametrize("name", ["ds.json", "my configs/实验 1.hjson", "../up.json"])
@pytest.mark.parametrize(
    "text",
    [
        NOTED,
        "{\n  # ours\n  train_batch_size: 1\n  zero_optimization: {\n    stge: 2\n  }\n}\n",
        "train_batch_size: 1\r\nzero_optimization: {\r\n  stge: 2,\r\n  overlap_comm: 'true'\r\n}",
    ],
)
def test_what_is_not_plain_json_gets_a_patch(dsrun, folder, name, text):
    """--fix leaves the file alone; what --diff prints is what `patch -p1` takes, and what comes out is valid."""
    path = put(name, text)
    said = dsrun("validate", name, "--fix")
    assert said.code == 1
    assert "--diff" in said.err
    assert path.read_bytes() == text.encode()
    assert rules_of(dsrun("validate", name, "--json")) & {"DS006", "DS007"}
    shown = dsrun("validate", name, "--diff")
    assert said.out.startswith(shown.out)
    if shutil.which("patch") is None:
        pytest.skip("patch is not installed")
    where = ["-d", "/"] if name.startswith("..") else []
    subprocess.run(["patch", "-p1", *where], input=shown.out.encode(), check=True)
    after = dsrun("validate", name, "--json")
    assert after.code == 0
    assert not rules_of(after) & {"DS006", "DS007"}


def test_fix_keeps_the_layout(dsrun, folder):
    text = BAD.replace("    ", "\t").replace("\n", "\r\n")
    path = put("ds.json", text)
    assert dsrun("validate", "ds.json", "--fix").code == 0
    assert path.read_bytes().decode() == text.replace("stge", "stage").replace('"true"', "true")


def test_fix_writes_through_links(dsrun, folder):
    path = put("real/ds.json", BAD)
    Path("link.json").symlink_to("real/ds.json")
    assert dsrun("validate", "link.json", "--fix").code == 0
    assert Path("link.json").is_symlink()
    assert path.read_text() == FIXED


def test_unsafe_fixes_only_if_asked(dsrun, folder):
    text = '{"train_micro_batch_size_per_gpu": 1, "overlap_comm": true, "zero_optimization": {"stage": 2}}'
    path = put("ds.json", text)
    said = dsrun("validate", "ds.json")
    assert "[--unsafe-fixes]" in said.out
    assert re.search(r"\b1 \w+ with --fix --unsafe-fixes", said.err)
    assert dsrun("validate", "ds.json", "--fix").code == 1
    assert path.read_text() == text
    assert dsrun("validate", "ds.json", "--fix", "--unsafe-fixes").code == 0
    assert json.loads(path.read_text())["zero_optimization"] == {"stage": 2, "overlap_comm": True}


def test_fix_leaves_alone_what_cannot_be_read(dsrun, folder):
    path = put("ds.json", BROKEN)
    said = dsrun("validate", "ds.json", "--fix", "--unsafe-fixes")
    assert said.code == 1
    assert "DS020" in said.out
    assert path.read_text() == BROKEN


def test_fix_leaves_alone_what_is_ignored(dsrun, folder):
    path = put("ds.json", BAD)
    dsrun("validate", "ds.json", "--fix", "--ignore", "DS006")
    assert path.read_text() == BAD.replace('"true"', "true")


def test_fix_in_a_pipe(dsrun, folder, piped):
    for text, after, code in ((BAD, FIXED, 0), (GOOD, GOOD, 0), (BROKEN, BROKEN, 1)):
        piped(text)
        said = dsrun("validate", "-", "--fix")
        assert (said.code, said.out) == (code, after)
    piped(BAD)
    said = dsrun("validate", "-", "--diff")
    assert said.out.startswith("--- a/<stdin>\n")


def test_fix_and_json(dsrun, folder):
    put("ds.json", BAD)
    said = dsrun("validate", "ds.json", "--fix", "--json")
    assert "DS006" not in rules_of(said)
    assert said.err.startswith("--- a/ds.json\n")


def test_what_cannot_be_written(dsrun, folder):
    put("good.json", BAD)
    line = f"{sys.executable} -m dsrun validate /dev/fd/0 good.json --fix"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["sh", "-c", line], input=BAD.encode(), capture_output=True, env=environ, check=False
    )
    assert done.returncode == 1
    assert b"dsrun: /dev/fd/0: " in done.stderr
    assert Path("good.json").read_text() == FIXED


# ---------------------------------------------------------------- usage, speed, encodings


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("ds.json", "--format", "xml"),
        ("ds.json", "--world-size", "0"),
        ("ds.json", "--world-size", "x"),
        ("ds.json", "--for", "jax"),
        ("ds.json", "--unsafe-fixes"),
        ("ds.json", "--nonsense"),
    ],
)
def test_wrong_usage(dsrun, folder, args):
    put("ds.json", BAD)
    said = dsrun("validate", *args)
    assert (said.code, said.out) == (2, "")
    assert said.err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--select", "DS999"), "DS999"),
        (("--ignore", "X"), " X"),
        (("--deepspeed-version", "twelve"), "'twelve'"),
        (("--deepspeed-version", "0.1"), "0.9 to 0.19"),
        (("--gpu", "a100-80gb"), "'a100-80g'?"),
        (("--model", "llama-tinny"), "llama-tiny"),
        (("--model", "a" * 300), "aaa"),
        (("--trainer-args", "none.json"), "none.json"),
        (("--arg", "learning_rte=1"), "learning_rte"),
        (("--with", "deepspede==0.19.4"), "'deepspeed'"),
        (("--with", "deepspeed==0.18.1", "--deepspeed-version", "0.19.8"), "0.18.1"),
    ],
)
def test_bad_options(dsrun, folder, args, word):
    put("ds.json", BAD)
    said = dsrun("validate", "ds.json", *args)
    assert (said.code, said.out) == (1, "")
    assert word in said.err


def test_nothing_heavy_is_imported(imported, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(WARNED)
    found = imported("validate", str(path))
    assert not found & {
        "torch",
        "deepspeed",
        "transformers",
        "accelerate",
        "numpy",
        "yaml",
        "rich",
    }


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C"},
    ],
)
def test_any_encoding(folder, environ):
    odd = {"zero_optimization": {"stge": 2, "\ud800": 1}, "实验": 1, "😀": "é", "\x1b[31m\n": 1}
    name = os.fsdecode(b"\xff\xfe.json")
    put(name, json.dumps(odd, ensure_ascii=False).replace("\ud800", "\\ud800"))
    for form in ("--format=text", "--json", "--format=github", "--format=sarif"):
        done = run(name, "missing-实验.json", form, **environ)
        assert done.returncode == 1, done.stderr
        assert b"missing-" in done.stderr
        if form in ("json", "sarif"):
            json.loads(done.stdout)
    done = run("-", "--fix", stdin="{'train_batch_size': '1', '_实验': '😀'}".encode(), **environ)
    assert "'_实验': '😀'".encode() in done.stdout, "the text of a pipe stays UTF-8"


def test_the_examples_of_the_help(folder):
    """The command line of each option exists as the help has it."""
    said = CliRunner().invoke(cli, ["validate", "--help"]).output
    for option in (
        "--world-size",
        "--format",
        "--strict",
        "--select",
        "--ignore",
        "--fix",
        "--unsafe-fixes",
        "--diff",
    ):
        assert option in said
    assert len(find_rules()) > 100


# ---------------------------------------------------------------- pre-commit


def test_the_hook_takes_configs_only():
    text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    fields = dict(
        line.strip(" -").split(": ", 1) for line in text.splitlines() if ": " in line and line[0] != "#"
    )
    assert fields["id"] == "dsrun-validate"
    assert fields["entry"] == "dsrun validate"
    pattern = re.compile(fields["files"].strip("'"))
    taken = [
        "ds_config.json",
        "a/deepspeed.json",
        "conf/ds_config_zero3.json",
        "my-deepspeed-z2.json",
        "DeepSpeed/x.json",
    ]
    taken += ["configs/zero3.json", "ds_z3_offload.json", "zero_stage2.hjson"]
    assert [name for name in taken if not pattern.search(name)] == []
    left = [
        "package.json",
        "config.json",
        "ids_config.json",
        "ds_config.py",
        "deepspeed.md",
        "a.json/deepspeed.txt",
    ]
    assert [name for name in left if pattern.search(name)] == []

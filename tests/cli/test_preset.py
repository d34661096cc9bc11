from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from dsrun import catalog

ROOT = catalog.PACKAGE.parent
HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "datasets", "numpy"}


def test_the_list(dsrun, lab):
    (lab / "presets" / "ours.toml").write_text('summary = "what we use"\n')
    (lab / "presets" / "broken.toml").write_text("summary = \n")
    said = dsrun("preset")
    assert said.code == 0
    assert re.search(r"^zero2-offload +ZeRO-2 with the optimizer on the CPU$", said.out, re.MULTILINE)
    assert "what we use" in said.out
    assert "broken.toml" in said.err
    rows = json.loads(dsrun("preset", "--json").out)["presets"]
    assert {row["name"] for row in rows} == set(catalog.files("presets")) - {"broken"}


def test_a_config_is_json_on_stdout(dsrun):
    said = dsrun("preset", "zero2-offload", "--gpus", 2, "--nodes", 2, "--micro-batch", 3, "--grad-accum", 5)
    assert said.code == 0
    (note,) = said.err.splitlines()
    assert "fp16 with its loss scaling" in note
    config = json.loads(said.out)
    assert config["train_batch_size"] == 60
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_warnings_go_to_stderr(dsrun):
    said = dsrun("preset", "zero2", "--set", "zero_optimization.sub_group_size=1e8")
    assert said.code == 0
    assert "warning: $.zero_optimization.sub_group_size" in said.err
    assert json.loads(said.out)["zero_optimization"]["sub_group_size"] == 100_000_000


@pytest.mark.parametrize(
    "args",
    [
        ("zero2", "--gpus", "0"),
        ("zero2", "--gpus", "-1"),
        ("zero2", "--nodes", "x"),
        ("zero2", "--micro-batch", "0"),
        ("zero2", "--grad-accum", "1.5"),
        ("zero2", "--grad-clip", "-1"),
        ("zero2", "--grad-clip", "nan"),
        ("zero2", "--precision", "int8"),
        ("zero2", "--for", "jax"),
        ("--gpus", "2"),
        ("zero2", "--copy", "x", "--gpus", "2"),
        ("zero2", "--nonsense"),
    ],
)
def test_wrong_usage(dsrun, args):
    said = dsrun("preset", *args)
    assert (said.code, said.out) == (2, "")
    assert said.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("zero2_offload",), "Did you mean 'zero2-offload'?"),
        (("nothing-like-it",), "See them all: dsrun preset"),
        (("no/such/file.toml",), "No such file"),
        (("zero3-nvme",), "--nvme-path"),
        (("zero2", "--set", "stage=1"), "zero_optimization.stage"),
        (("zero2", "--set", "train_batch_size=7", "--gpus", "2"), "$.train_batch_size"),
    ],
)
def test_bad_input(dsrun, args, message):
    said = dsrun("preset", *args)
    assert (said.code, said.out) == (1, "")
    assert message in said.err
    assert "Traceback" not in said.err


def test_all_problems_at_once(dsrun):
    said = dsrun("preset", "zero2", "--set", "stage=1", "--set", "zero_optimization.reduce_bucket_size=0")
    assert said.err.count("dsrun: --set") == 2


@pytest.mark.parametrize(
    "args",
    [("zero3-offload",), ("zero2", "--for", "hf"), ("zero1", "--set", "optimizer.params.weight_decay=0.1")],
)
def test_explain_covers_every_leaf(dsrun, args):
    from dsrun.config import tree

    config = json.loads(dsrun("preset", *args).out)
    rows = json.loads(dsrun("preset", *args, "--explain", "--json").out)["keys"]
    assert {row["path"]: row["value"] for row in rows} == dict(tree.leaves(config))
    assert all(row["origin"] for row in rows)
    assert all(row["does"] for row in rows)
    text = dsrun("preset", *args, "--explain").out
    for row in rows:
        assert f"{row['path']} = {json.dumps(row['value'])}\n    from {row['origin']}" in text


def test_output_is_never_written_over(dsrun, tmp_path):
    path = tmp_path / "it's a 文件.json"
    said = dsrun("preset", "zero1", "-o", path)
    assert (said.code, said.out) == (0, "")
    text = path.read_text(encoding="utf-8")
    assert text == dsrun("preset", "zero1").out
    said = dsrun("preset", "zero2", "-o", path)
    assert said.code == 1
    assert "--force" in said.err
    assert path.read_text(encoding="utf-8") == text
    assert dsrun("preset", "zero2", "-o", path, "--force").code == 0
    assert json.loads(path.read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_output_with_an_explanation(dsrun, tmp_path):
    said = dsrun("preset", "zero1", "-o", tmp_path / "a.json", "--explain")
    assert "zero_optimization.stage = 1" in said.out
    assert json.loads((tmp_path / "a.json").read_text())
    for stdout in ("-", "/dev/stdout"):
        assert json.loads(dsrun("preset", "zero1", "-o", stdout).out)


def test_output_into_no_folder(dsrun, tmp_path):
    said = dsrun("preset", "zero1", "-o", tmp_path / "none" / "a.json")
    assert said.code == 1
    assert "no such folder" in said.err


def test_a_copy_to_edit(dsrun, tmp_path, monkeypatch):
    folder = tmp_path / "our's 组"
    said = dsrun("preset", "zero2", "--copy", folder)
    copy = folder / "presets" / "zero2.toml"
    assert said.code == 0
    assert said.out == f"{copy}\n"
    assert copy.read_text() == (catalog.shipped_root() / "presets" / "zero2.toml").read_text()
    assert dsrun("preset", "zero2", "--copy", folder).code == 1
    copy.write_text(copy.read_text() + "reduce_bucket_size = 1000\n")
    assert dsrun("preset", "zero2", "--copy", folder).code == 1
    assert json.loads(dsrun("preset", copy).out)["zero_optimization"]["reduce_bucket_size"] == 1000
    # The commands that it prints, through a real shell.
    for line in said.err.splitlines()[1:]:
        command = line.strip().replace("dsrun preset", f"{sys.executable} -m dsrun preset", 1)
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, check=True)
        assert json.loads(done.stdout)["zero_optimization"]["reduce_bucket_size"] == 1000, done.stderr
    assert dsrun("preset", "zero2", "--copy", folder, "--force").code == 0


def test_a_copy_of_something_unknown(dsrun, tmp_path):
    assert dsrun("preset", "zero9", "--copy", tmp_path / "x").code == 1
    (tmp_path / "file").write_text("")
    assert dsrun("preset", "zero2", "--copy", tmp_path / "file").code == 1


@pytest.mark.parametrize(
    "args", [("--help",), ("preset",), ("preset", "--help"), ("preset", "zero2-offload", "--gpus", "2")]
)
def test_nothing_heavy_is_imported(imported, args):
    found = imported(*args)
    assert not found & HEAVY
    if "zero2-offload" not in args:
        assert not found & {"jinja2", "jsonschema", "rich"}  # jsonschema is for judging a config


@pytest.mark.parametrize(("gpu", "precision"), [("a100-80g", "bf16"), ("v100-32g", "fp16")])
def test_a_named_card_gets_what_it_does_best(dsrun, gpu, precision):
    said = dsrun("preset", "zero2", "--gpu", gpu)
    assert (said.code, said.err) == (0, "")
    assert json.loads(said.out)[precision]["enabled"] is True


@pytest.mark.parametrize("words", [("--precision", "fp32"), ("--set", "bf16.enabled=true"), ("--for", "hf")])
def test_a_precision_that_is_given_or_left_open_has_no_note(dsrun, words):
    assert "loss scaling" not in dsrun("preset", "zero2", *words).err


def test_the_cards_of_this_machine_count(dsrun, monkeypatch):
    monkeypatch.setattr("dsrun.cli.preset._best_here", lambda: "bf16")
    said = dsrun("preset", "zero3")
    assert said.err == ""
    assert json.loads(said.out)["bf16"]["enabled"] is True

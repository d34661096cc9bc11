"""`dsrun preset auto` and `dsrun finetune --preset auto`: the planner's choice, and nothing but the config it means."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from dsrun import catalog
from dsrun.cluster.devices import Machine
from dsrun.jobs.assembly.planning.search import SIZES

ROOT = catalog.PACKAGE.parent
GIB = 2**30
HEAVY = {"torch", "deepspeed", "transformers", "accelerate", "tokenizers", "numpy", "matplotlib"}


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """An empty folder with a hostile name, on a CPU machine with 64 GiB; nothing of the user's."""
    folder = tmp_path / "a user's 工作"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    machine = Machine("cpu", (), 4, "a machine of paper", 64 * GIB)
    monkeypatch.setattr("dsrun.cluster.devices.detect", lambda environ: machine)
    return folder


def chosen(said) -> str:
    """The preset that the line on stderr names."""
    return said.err.split("preset ", 1)[1].split(":", 1)[0]


PLACES = {
    "a node of A100s": (("--gpu", "a100-80g", "--gpus", 8), "zero1"),
    "two V100s": (("--gpu", "v100-32g", "--gpus", 2, "--host-memory", "256GiB"), "zero2-offload"),
    "3090s": (("--gpu", "rtx-3090", "--gpus", 8, "--seq-len", 128), "zero3"),
    "one 4090": (
        ("--gpu", "rtx-4090", "--host-memory", "256GiB", "--activation-checkpointing", "full"), "zero3-offload"),
    "two nodes": (("--gpu", "a100-80g", "--gpus", 8, "--nodes", 2), "zero1"),
    "a card in numbers": (("--gpu-memory", "200GiB"), "ddp"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_it_is_the_config_of_the_preset_it_names(dsrun, case):
    """The config has the batch and the precision of the plan, spelled out."""
    args, expected = PLACES[case]
    said = dsrun("preset", "auto", "--model", "llama-7b", *args)
    assert said.code == 0, said.err
    name = chosen(said)
    assert name == expected
    config = json.loads(said.out)
    precision = "fp16" if "v100-32g" in args else "bf16"
    counts = [str(arg) for arg in args]
    kept = [
        word for option in ("--gpus", "--nodes") if option in counts
        for word in (option, counts[counts.index(option) + 1])
    ]  # fmt: skip
    plain = dsrun("preset", name, *kept, "--micro-batch", 4, "--grad-accum", 1, "--precision", precision)
    assert said.out == plain.out
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config[precision]["enabled"] is True
    assert "auto" not in said.out


def test_the_choice_is_the_first_plan(dsrun):
    where = ("--gpu", "rtx-3090", "--gpus", 4, "--host-memory", "300GiB", "--micro-batch", 4)
    said = dsrun("plan", "llama-tiny", *where, "--activation-checkpointing", "none", "--json")
    plan = json.loads(said.out)["plans"][0]
    said = dsrun("preset", "auto", "--model", "llama-tiny", *where)
    assert chosen(said) == plan["preset"]
    assert plan["reason"] in said.err


def test_the_reason_goes_to_stderr_alone(dsrun):
    said = dsrun("preset", "auto", "--model", "llama-7b", "--gpu", "a100-80g", "--gpus", 8)
    (line,) = said.err.splitlines()
    assert line.startswith("preset zero1: the fastest of ")
    assert line.endswith("; rows of 1024 tokens, micro batch 4, bf16, activation checkpointing")


def test_options_are_planned_with_and_kept(dsrun):
    said = dsrun(
        "preset", "auto", "--model", "llama-7b", "--gpu", "a100-80g", "--gpus", 8, "--micro-batch", 2, "--grad-accum",
        3, "--precision", "fp16", "--seq-len", 99, "--set", "zero_optimization.reduce_bucket_size=123456",
        "--grad-clip", "0.5",
    )  # fmt: skip
    config = json.loads(said.out)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 3)
    assert config["train_batch_size"] == 2 * 3 * 8
    assert config["fp16"]["enabled"] is True
    assert config["zero_optimization"]["reduce_bucket_size"] == 123456
    assert config["gradient_clipping"] == 0.5
    assert "rows of 99 tokens, micro batch 2, fp16" in said.err


def test_a_larger_batch_may_be_another_preset(dsrun):
    args = ("preset", "auto", "--model", "llama-2-7b", "--gpu", "a100-80g", "--gpus", 8, "--micro-batch")
    assert chosen(dsrun(*args, 1)) != chosen(dsrun(*args, 512))


def test_on_this_machine(dsrun):
    said = dsrun("preset", "auto", "--model", "llama-tiny", "--gpus", 2)
    config = json.loads(said.out)
    assert "fp32" in said.err
    assert "host: " in said.err
    assert not config.get("bf16", {}).get("enabled")


@pytest.mark.parametrize("target", ["hf", "deepspeed"])
@pytest.mark.parametrize("model", ["llama-7b", "llama-tiny"])
def test_for_the_trainer(dsrun, model, target):
    said = dsrun("preset", "auto", "--model", model, "--gpu", "a100-80g", "--gpus", 8, "--for", target)
    assert said.code == 0
    assert json.loads(said.out)["train_micro_batch_size_per_gpu"] == 4


def test_for_the_trainer_the_buckets_are_those_that_were_planned(dsrun):
    """HF Trainer would fill in others where it reads "auto"."""
    args = ("preset", "auto", "--model", "llama-7b", "--gpu", "rtx-3090", "--gpus", 8, "--seq-len", 128)
    plain, read = (json.loads(dsrun(*args, "--for", target).out) for target in ("deepspeed", "hf"))
    keys = [key for key in plain["zero_optimization"] if key in SIZES]
    assert "stage3_prefetch_bucket_size" in keys
    assert {key: read["zero_optimization"][key] for key in keys} == {
        key: plain["zero_optimization"][key] for key in keys
    }
    own = ("--set", "zero_optimization.reduce_bucket_size=777")
    assert json.loads(dsrun(*args, "--for", "hf", *own).out)["zero_optimization"]["reduce_bucket_size"] == 777


def test_to_a_file(dsrun, work):
    said = dsrun(
        "preset", "auto", "--model", "llama-7b", "--gpu", "a100-80g", "--gpus", 8, "-o", "ds 配置.json"
    )
    assert (said.code, said.out) == (0, "")
    assert json.loads((work / "ds 配置.json").read_text(encoding="utf-8"))["zero_optimization"]["stage"] == 1


def test_explained(dsrun):
    args = ("preset", "auto", "--model", "llama-7b", "--gpu", "a100-80g", "--gpus", 8, "--explain", "--json")
    rows = {row["path"]: row for row in json.loads(dsrun(*args).out)["keys"]}
    assert rows["train_micro_batch_size_per_gpu"]["value"] == 4


def test_a_folder(dsrun, work):
    folder = work / "it's a 模型"
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "intermediate_size": 11008, "vocab_size": 32000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = dsrun("preset", "auto", "--model", folder, "--gpu", "a100-80g", "--gpus", 8)
    assert chosen(said) == "zero1"


BAD = {
    "nothing fits": (("llama-7b", "--gpu", "t4", "--host-memory", "64GiB"), ["no preset fits: ", "It fits with: "]),
    "an unknown model": (("lama-7b", "--gpu", "t4"), ["'lama-7b'", "'llama-7b'"]),
    "no such folder": (("./none", "--gpu", "t4"), ["./none: no such folder"]),
    "an unknown GPU": (("llama-7b", "--gpu", "t5"), ["'t5'"]),
    "a size without a unit": (("llama-7b", "--gpu-memory", "32"), ["--gpu-memory", "32GiB"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_message(dsrun, work, case):
    args, words = BAD[case]
    said = dsrun("preset", "auto", "--model", *args, "-o", "x.json")
    assert (said.code, said.out) == (1, "")
    assert all(word in said.err for word in words), said.err
    assert said.err.count("dsrun: ") == 1
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("auto",), "--model"),
        (("zero2", "--seq-len", 9), "--seq-len"),
        (("auto", "--model", "llama-7b", "--copy", "x"), "--copy"),
    ],
)  # fmt: skip
def test_wrong_usage(dsrun, work, args, words):
    said = dsrun("preset", *args)
    assert (said.code, said.out) == (2, "")
    assert words in said.err
    assert list(work.iterdir()) == []


# dsrun finetune


def test_finetune_auto(dsrun, work):
    said = dsrun("finetune", "llama-tiny", "--preset", "auto", "--gpus", 2, "--dry-run", "--json")
    assert said.code == 0, said.err
    job = json.loads(said.out)["job"]
    assert job["preset"] in catalog.files("presets")
    assert re.search(f"note: preset {job['preset']}: (the fastest of|as fast as) ", said.err)
    assert f"-{job['preset']}-" in job["run_dir"]
    assert job["prediction"]["device"] == "cpu"
    assert list(work.iterdir()) == []


@pytest.fixture
def rows(work):
    (work / "rows.jsonl").write_text('{"content": "a", "summary": "b"}\n', encoding="utf-8")


def test_finetune_refuses_what_can_not_fit(dsrun, rows, work):
    said = dsrun("finetune", "chatglm2-6b", "--train-file", "rows.jsonl")
    assert (said.code, said.out) == (1, "")
    assert "preset zero2-offload: out of memory: host: " in said.err
    assert "64.0 GiB" in said.err
    assert "--force starts it all the same" in said.err
    assert [path.name for path in work.iterdir()] == ["rows.jsonl"]


def test_a_dry_run_of_what_can_not_fit_is_a_note(dsrun, rows, work):
    for options in ((), ("--force",)):
        said = dsrun("finetune", "chatglm2-6b", "--train-file", "rows.jsonl", "--dry-run", "--json", *options)
        assert said.code == 0
        assert json.loads(said.out)["job"]["preset"] == "zero2-offload"
        assert "note: " in said.err
        assert "will run out of memory (host: " in said.err
    assert [path.name for path in work.iterdir()] == ["rows.jsonl"]


def test_nothing_heavy_is_loaded(tmp_path):
    code = (
        "import sys, dsrun.cli\n"
        "report = sys.argv.pop(1)\n"
        "try: dsrun.cli.main(sys.argv[1:])\n"
        "finally: open(report, 'w').write(' '.join(sys.modules))"
    )
    command = ["preset", "auto", "--model", "llama-7b", "--gpu", "a100-80g", "--gpus", "8"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "modules"), *command], check=False, capture_output=True,
        text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in (tmp_path / "modules").read_text(encoding="utf-8").split()}
    assert "dsrun" in loaded
    assert not loaded & HEAVY

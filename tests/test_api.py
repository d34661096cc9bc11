"""The Python interface: what the commands say with --json, as dicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dsrun as interface
from dsrun import DsrunError
from dsrun.config.rules import find_rules

LOGS = {
    "memory": "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.65 GiB of which 1.2 GiB is free.\n",
    "a user's own key": "Traceback (most recent call last):\n"
    '  File "train.py", line 3, in <module>\n    a["b"]\nKeyError: \'b\'\n',
    "nothing": "epoch 1 loss 2.0\n",
}
PLANS = [
    (("llama-7b", "--gpu", "v100-32g", "--gpus", "2"), ("llama-7b", {"gpu": "v100-32g", "gpus": 2})),
    (
        ("--params", "6.2e9", "--hidden", "4096", "--layers", "28", "--gpu-memory", "24GiB", "--gpus", "4"),
        (None, {"params": 6.2e9, "hidden": 4096, "layers": 28, "gpu_memory": "24GiB", "gpus": 4}),
    ),
    (
        ("llama-3-8b", "--gpu", "rtx-4090", "--for", "inference"),
        ("llama-3-8b", {"gpu": "rtx-4090", "purpose": "inference"}),
    ),
    (
        ("llama-2-70b", "--gpu", "a100-80g", "--gpus", "8", "--nodes", "2", "--layouts", "--seq-len", "2048"),
        ("llama-2-70b", {"gpu": "a100-80g", "gpus": 8, "nodes": 2, "layouts": True, "seq_len": 2048}),
    ),
]


def examples() -> list[dict]:
    """A bad config of each rule that says nothing of its setting."""
    shown = [
        example for rule in find_rules() for example in rule.bad[:1]
        if isinstance(example, dict) and not any(key.startswith("_") for key in example)
    ]  # fmt: skip
    return shown[::20]


def test_there_are_examples():
    assert len(examples()) > 5


@pytest.mark.parametrize("config", examples(), ids=lambda config: next(iter(config), "empty"))
def test_validate_says_what_the_command_says(dsrun, tmp_path, monkeypatch, config):
    monkeypatch.chdir(tmp_path)
    Path("config").with_suffix(".json").write_text(json.dumps(config), encoding="utf-8")
    words = ("validate", "config.json", "--json", "--world-size", "8", "--level", "note")
    shown = json.loads(dsrun(*words).out)
    for given in (config, json.dumps(config), json.dumps(config).encode(), Path("config.json")):
        said = interface.validate(given, world_size=8, level="note")
        for finding in said["findings"]:
            finding["file"] = "config.json"
        assert said == shown


def test_validate_takes_the_commands_settings():
    config = {"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    assert interface.validate(config, trainer_args={"fp16": True})["version"] == 1
    bf16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    rules = {finding["rule"] for finding in interface.validate(bf16, gpu="v100-32g")["findings"]}
    assert rules and rules == {
        finding["rule"]
        for finding in interface.validate(bf16, gpu="v100-32g", select=list(rules))["findings"]
    }
    assert interface.validate(bf16, gpu="v100-32g", ignore=list(rules))["findings"] == []


@pytest.mark.parametrize(("words", "given"), PLANS, ids=lambda value: str(value[0]))
def test_plan_says_what_the_command_says(dsrun, words, given):
    model, options = given
    assert interface.plan(model, **options) == json.loads(dsrun("plan", *words, "--json").out)


@pytest.mark.parametrize("name", LOGS)
def test_diagnose_says_what_the_command_says(dsrun, tmp_path, name):
    path = tmp_path / "log"
    path.write_text(LOGS[name], encoding="utf-8")
    shown = json.loads(dsrun("diagnose", path, "--json").out)
    assert interface.diagnose(path) == shown
    said = interface.diagnose(LOGS[name])
    assert json.loads(json.dumps(said).replace('"log:', f'"{path}:')) == shown
    assert interface.diagnose(LOGS["nothing"], LOGS["memory"])["where"] == "log 2:1"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: interface.validate(Path("nowhere.json")), "nowhere.json"),
        (lambda: interface.validate({}, gpu="v1000"), "v100"),
        (lambda: interface.validate({}, deepspeed_version="0.18", versions={"deepspeed": "0.19"}), "0.18"),
        (lambda: interface.plan("llama-7c"), "llama-7"),
        (lambda: interface.plan("llama-7b", gpsu=2), "Did you mean"),
        (lambda: interface.plan("llama-7b", gpus="two"), "two"),
        (lambda: interface.plan("llama-7b", beams=2), "--for inference"),
        (lambda: interface.plan("llama-7b", plot="x.svg"), "command line"),
        (interface.plan, "no model"),
        (lambda: interface.diagnose(""), "empty"),
        (lambda: interface.diagnose(Path("nowhere.log")), "nowhere.log"),
    ],
)
def test_what_can_not_be_is_raised_with_its_problems(call, words):
    with pytest.raises(DsrunError) as caught:
        call()
    assert words in str(caught.value)
    assert caught.value.problems


def test_importing_dsrun_imports_nothing_else():
    code = "import sys, dsrun; print([n for n in sys.modules if n.startswith('dsrun.') or n in ('torch', 'click')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
    with pytest.raises(AttributeError, match="no attribute 'traine'"):
        _ = interface.traine

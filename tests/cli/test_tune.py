"""`dsrun tune`: what it tries, keeps and makes; finetune itself is a stand-in but for one test."""

from __future__ import annotations

import json
import subprocess

import pytest

from dsrun.cli.planning import tuning
from dsrun.config.presets.preset import load

PLANNED = {"zero1": 1.0, "zero2": 1.1, "zero3": 1.3, "ddp": 1.05}
TOOK = {"zero1": 2.0, "zero2": 1.5, "zero3": 3.0, "ddp": 2.5}


class Finetune:
    """A stand-in for `dsrun finetune`, run as a command: it plans, refuses, trains, dies."""

    def __init__(self):
        self.trained = []
        self.dead = {}
        self.refused = {}

    def __call__(self, words, knobs, more):
        preset = knobs.get("preset", "zero2")
        if more.get("dry_run"):
            if preset in self.refused:
                return subprocess.CompletedProcess([], 1, "", f"{self.refused[preset]}\n")
            slower = 1.0 if knobs.get("activation_checkpointing", "none") == "none" else 1.3
            job = {
                "accelerator": "cpu", "hosts": [{}], "preset": preset,
                "ds_config": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
                "prediction": {"device": "cpu", "step_seconds": slower * PLANNED[preset], "host_bytes": 1e9},
            }  # fmt: skip
            return subprocess.CompletedProcess([], 0, json.dumps({"job": job}), "")
        self.trained.append((dict(knobs), more["max_steps"]))
        if preset in self.dead:
            return subprocess.CompletedProcess([], 1, "", f"starting\n{self.dead[preset]}\n")
        folder = more["output_dir"]
        folder.mkdir(parents=True)
        slow = 1.0 if knobs.get("activation_checkpointing", "none") == "none" else 1.3
        lines = [
            {"step": step, "loss": 1.0, "seconds": slow * TOOK[preset]} for step in range(more["max_steps"])
        ]
        lines[0]["seconds"] = 99.0
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
        return subprocess.CompletedProcess([], 0, "{}", "")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    found = Finetune()
    monkeypatch.setattr(tuning, "finetune", found)
    monkeypatch.chdir(tmp_path)
    return found


def test_the_fastest_by_trial_becomes_a_preset_with_its_evidence(dsrun, fake, tmp_path):
    said = dsrun("tune", "llama-tiny", "--micro-batch", 2, "--json")
    result = json.loads(said.out)
    assert said.code == 0, said.err
    assert result["knobs"] == {"preset": "zero2", "activation_checkpointing": "none"}
    assert result["seconds_per_step"] == 1.5
    preset = load(str(tmp_path / "tuned" / "tuned.toml"))
    assert preset.chain[0].label and preset.defaults["activation_checkpointing"] == "none"
    text = (tmp_path / "tuned" / "tuned.toml").read_text(encoding="utf-8")
    assert 'extends = "zero2"' in text and "zero1-none" in text and "dsrun finetune llama-tiny" in text
    assert all("micro_batch" not in knobs for knobs, _ in fake.trained)


def test_it_goes_on_where_it_was_stopped(dsrun, fake, tmp_path):
    """Trials that were made are not made again; a line that was cut short is."""
    words = ("tune", "llama-tiny", "--micro-batch", 2, "--trials", 5)
    first = dsrun(*words)
    count = len(fake.trained)
    assert first.code == 0 and count >= 2
    again = dsrun(*words)
    assert again.out == first.out and len(fake.trained) == count
    file = tmp_path / "tuned" / "trials.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([*lines[:-1], lines[-1][:20]]), encoding="utf-8")
    for folder in (tmp_path / "tuned" / "trials").iterdir():
        folder.rename(folder.with_name(f"old-{folder.name}"))
    assert dsrun(*words).code == 0 and len(fake.trained) == count + 1
    assert dsrun(*words, "--lr", 1e-3).code == 0 and len(fake.trained) > count + 1


def test_a_trial_that_dies_and_a_candidate_that_is_refused(dsrun, fake):
    fake.dead["zero1"] = "RuntimeError: a broken kernel"
    fake.refused["ddp"] = "ddp needs more memory"
    said = dsrun("tune", "llama-tiny", "--micro-batch", 2)
    assert said.code == 0
    assert "zero2" in said.out and "a broken kernel" in said.out
    assert "ddp needs more memory" in said.err
    assert sum(knobs["preset"] == "zero1" for knobs, _ in fake.trained) <= 3


def test_where_all_die_it_says_so(dsrun, fake):
    fake.dead = dict.fromkeys(PLANNED, "CUDA out of memory")
    said = dsrun("tune", "llama-tiny", "--micro-batch", 2, "--json")
    result = json.loads(said.out)
    assert (said.code, result["preset"], result["seconds_per_step"]) == (1, None, None)
    assert all(trial["out_of_memory"] for trial in result["trials"])
    assert len(result["trials"]) == 1, "all need as much as the first"


def test_where_none_is_started_it_says_why(dsrun, fake):
    fake.refused = {name: f"{name} does not fit" for name in PLANNED if name != "zero2"}
    said = dsrun("tune", "llama-tiny", "--micro-batch", 2, "--knob", "preset=zero1,zero3")
    assert said.code == 1 and "zero1 does not fit" in said.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--max-steps", 3), "--max-steps"), (("--output-dir", "x"), "--output-dir"), (("--resume",), "--resume"),
        (("--knob", "colour=red"), "colour"), (("--knob", "attention"), "attention"),
        (("--preset", "zero2", "--micro-batch", 2, "--activation-checkpointing", "none"), "fixes all knobs"),
    ],
)  # fmt: skip
def test_what_is_the_trials_own_is_refused(dsrun, fake, words, named):
    said = dsrun("tune", "llama-tiny", *words)
    assert said.code == 2 and named in said.err and not fake.trained


def test_a_knob_of_ones_own(dsrun, fake):
    said = dsrun(
        "tune", "llama-tiny", "--preset", "zero2", "--micro-batch", 2, "--activation-checkpointing", "none",
        "--knob", "packing=true,false", "--json",
    )  # fmt: skip
    assert {knobs["packing"] for knobs, _ in fake.trained} == {"true", "false"}
    assert json.loads(said.out)["knobs"]["packing"] in ("true", "false")


def test_words_of_finetune():
    """A knob's value as finetune takes it: a switch as its side."""
    seen = []

    def run(command, **_):
        seen.append(command[4:])
        return subprocess.CompletedProcess(command, 0, "", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning.subprocess, "run", run)
        tuning.finetune(
            ["llama-tiny"], {"packing": "false", "micro_batch": "4"}, {"dry_run": True, "force": False}
        )
    assert seen == [["llama-tiny", "--no-packing", "--micro-batch", "4", "--dry-run"]]


@pytest.mark.full
@pytest.mark.slow
def test_real_trials(dsrun, tmp_path, monkeypatch):
    """Two candidates on two CPU ranks; the preset starts a fine-tune."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    fixed = (
        "--gpus",
        2,
        "--precision",
        "fp32",
        "--preset",
        "zero1",
        "--force",
        "--set",
        "optimizer.params.torch_adam=true",
    )
    said = dsrun(
        "tune", "llama-tiny", *fixed, "--activation-checkpointing", "none", "--global-batch", 8, "--trials", 2,
        "--trial-steps", 3, "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    result = json.loads(said.out)
    assert result["seconds_per_step"] > 0 and len(result["trials"]) == 2
    again = dsrun(
        "finetune", "llama-tiny", "--gpus", 2, "--force", "--preset", result["preset"], "--dry-run", "--json"
    )
    micro = json.loads(again.out)["job"]["ds_config"]["train_micro_batch_size_per_gpu"]
    assert str(micro) == result["knobs"]["micro_batch"]

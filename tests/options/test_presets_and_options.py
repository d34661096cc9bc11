"""One truth per setting: what a preset says, `dsrun preset` prints and a fine-tune does is the same."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest

PRESET = """summary = "a lab's own"
extends = "{base}"

[config]
{config}
"""
STEP = st.fixed_dictionaries(
    {},
    optional={
        "train_micro_batch_size_per_gpu": st.integers(1, 6),
        "gradient_accumulation_steps": st.integers(1, 4),
        "gradient_clipping": st.sampled_from([0.0, 0.5, 2.0]),
        "lr": st.sampled_from([1e-5, 3e-4, 0.01]),
        "precision": st.sampled_from(["fp32", "bf16"]),
    },
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "--micro-batch": st.integers(1, 6), "--grad-accum": st.integers(1, 4),
        "--grad-clip": st.sampled_from([0.0, 3.0]), "--precision": st.sampled_from(["fp32", "bf16"]),
    },
)  # fmt: skip
SWITCHES = {
    "fp32": ("[config.fp16]", "enabled = false", "[config.bf16]", "enabled = false"),
    "bf16": ("[config.bf16]", "enabled = true"),
}
EXAMPLES = 15


def text_of(base: str, step: dict) -> str:
    lines = [f"{key} = {value}" for key, value in step.items() if key not in ("lr", "precision")]
    if "lr" in step:
        lines += ["[config.optimizer.params]", f"lr = {step['lr']}"]
    lines += SWITCHES.get(step.get("precision", ""), ())
    return PRESET.format(base=base, config="\n".join(lines))


@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(base=st.sampled_from(["ddp", "zero2", "zero3"]), step=STEP, options=OPTIONS)
def test_a_labs_preset_is_the_same_in_preset_and_finetune(dsrun, lab, base, step, options):
    (lab / "presets" / "labx.toml").write_text(text_of(base, step), encoding="utf-8")
    words = [str(word) for pair in options.items() for word in pair]
    if not {"precision"} & set(step) and "--precision" not in options:
        words += ["--precision", "fp32"]  # else the devices decide, which `preset` knows nothing of
    lr = {} if "lr" in step else {"lr": 2e-3}  # the model file's
    printed = json.loads(dsrun("preset", "labx", "--gpus", 2, *words).out)
    said = dsrun("finetune", "llama-tiny", "--preset", "labx", "--gpus", 2, *words, "--dry-run", "--json")
    assert said.code == 0, said.err
    planned = json.loads(said.out)
    job, origins = planned["job"], planned["options"]
    printed["optimizer"]["params"] |= lr
    assert job["ds_config"] == printed
    assert job["training"]["lr"] == job["ds_config"]["optimizer"]["params"]["lr"]
    for name, key in (
        ("micro_batch", "train_micro_batch_size_per_gpu"), ("grad_accum", "gradient_accumulation_steps"),
        ("grad_clip", "gradient_clipping"),
    ):  # fmt: skip
        flag = f"--{name.replace('_', '-')}"
        assert origins[name]["value"] == job["ds_config"][key]
        if flag in options:
            assert origins[name] == {"value": options[flag], "from": "command line"}
        elif key in step:
            assert origins[name]["value"] == step[key]
            assert origins[name]["from"].startswith("lab preset: ")


def test_what_ships_says_strategy_only(dsrun):
    """So that a model's own batch and learning rate count whatever the strategy."""
    from dsrun.config import preset
    from dsrun.options.derived import step_of

    shipped = preset.names()
    assert len(shipped) > 5
    assert not [name for name in shipped if step_of(preset.load(name).merged("deepspeed")[0])]


def test_a_run_file(dsrun, tmp_path):
    path = tmp_path / "a lab's 运行.toml"
    path.write_text(
        'model = "llama-tiny"\nmicro_batch = 2\ngpus = 2\nlr = 1e-3\nmax_steps = 5\n', encoding="utf-8"
    )
    words = ("finetune", path, "--lr", "5e-4", "--dry-run", "--json")
    found = json.loads(dsrun(*words).out)
    assert found["job"]["model"]["name"] == "llama-tiny"
    assert found["options"]["micro_batch"] == {"value": 2, "from": f"run file: {path}"}
    assert found["options"]["lr"] == {"value": 5e-4, "from": "command line"}
    assert found["job"]["training"]["max_steps"] == 5
    path.write_text("micro_bach = 2\n", encoding="utf-8")
    said = dsrun("finetune", path, "llama-tiny", "--dry-run")
    assert said.code == 1
    assert "micro_batch" in said.err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--lr", "1e-4", "--set", "optimizer.params.lr=1e-3"), "--lr"),
        (("--micro-batch", "2", "--set", "train_micro_batch_size_per_gpu=3"), "--micro-batch"),
        (("--precision", "fp32", "--set", "bf16.enabled=true"), "--precision"),
    ],
)
def test_set_and_an_option_that_disagree(dsrun, words, flag):
    said = dsrun("finetune", "llama-tiny", "--gpus", 2, "--dry-run", *words)
    assert said.code == 1
    assert flag in said.err


def test_set_is_heard_by_the_training(dsrun):
    words = (
        "--set",
        "optimizer.params.lr=1e-3",
        "--set",
        "train_micro_batch_size_per_gpu=3",
        "--dry-run",
        "--json",
    )
    found = json.loads(dsrun("finetune", "llama-tiny", "--gpus", 2, *words).out)
    assert found["job"]["training"]["lr"] == 1e-3
    assert found["job"]["ds_config"]["train_batch_size"] == 6


def test_set_in_a_run_file_stands_where_the_run_file_does(dsrun, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "llama-tiny"\noverrides = ["gradient_clipping=0.5"]\n', encoding="utf-8")
    words = ("finetune", path, "--gpus", 2, "--dry-run")
    found = json.loads(dsrun(*words, "--json").out)
    assert found["options"]["grad_clip"] == {"value": 0.5, "from": f"run file: {path}: --set"}
    assert found["job"]["ds_config"]["gradient_clipping"] == 0.5
    said = dsrun(*words, "--grad-clip", "2")
    assert said.code == 1
    assert "--grad-clip" in said.err


def test_a_variable_is_a_source(dsrun, tmp_path, monkeypatch):
    monkeypatch.setenv("DSRUN_NVME_PATH", str(tmp_path))
    words = ("finetune", "llama-tiny", "--gpus", 2, "--explain", "--json")
    expected = {"value": str(tmp_path), "from": "environment: DSRUN_NVME_PATH"}
    assert json.loads(dsrun(*words).out)["nvme_path"] == expected
    given = {"value": "/else", "from": "command line"}
    assert json.loads(dsrun(*words, "--nvme-path", "/else").out)["nvme_path"] == given


def test_explain_says_where_everything_comes_from(dsrun):
    found = json.loads(dsrun("finetune", "llama-tiny", "--gpus", 2, "--explain", "--json").out)
    assert found["lr"]["from"].startswith("model file: ")
    assert found["seed"] == {"value": 42, "from": "built-in default"}
    assert found["precision"]["from"].startswith("derived")
    text = dsrun("finetune", "llama-tiny", "--gpus", 2, "--explain").out
    assert len(text.splitlines()) == len(found)

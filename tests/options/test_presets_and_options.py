"""One truth per setting: what a preset says, `dsrun preset` prints and a fine-tune does is the same."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError
from dsrun.options.commands import FinetuneOptions
from dsrun.options.derived import by_devices, by_loss
from dsrun.options.layers import Resolved, Source
from dsrun.options.table import MICRO_BATCH_MEAN
from dsrun.planner import gpus as kinds

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
        "betas": st.sampled_from([[0.9, 0.95], [0.8, 0.99]]),
        "eps": st.sampled_from([1e-6, 1e-5]),
        "weight_decay": st.sampled_from([0.01, 0.1]),
        "scheduler": st.sampled_from(["WarmupCosineLR"]),
    },
)
PARAMS = ("lr", "betas", "eps", "weight_decay")
SCHEDULER = """[config.scheduler]
type = "{}"
[config.scheduler.params]
total_num_steps = 20
warmup_num_steps = 2"""
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
GIB = 2**30


def text_of(base: str, step: dict) -> str:
    apart = ("precision", "scheduler", *PARAMS)
    lines = [f"{key} = {value}" for key, value in step.items() if key not in apart]
    if params := [f"{key} = {step[key]}" for key in PARAMS if key in step]:
        lines += ["[config.optimizer.params]", *params]
    if "scheduler" in step:
        lines.append(SCHEDULER.format(step["scheduler"]))
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
    printed = dsrun("preset", "labx", "--model", "llama-tiny", "--gpus", 2, *words)
    result = dsrun("finetune", "llama-tiny", "--preset", "labx", "--gpus", 2, *words, "--dry-run", "--json")
    assert result.code == printed.code, result.err
    if result.code:  # a micro batch or accumulation that the step of 8 examples can't be divided by
        assert result.err == printed.err
        assert "The nearest that fits" in result.err
        return
    planned = json.loads(result.out)
    job, origins = planned["job"], planned["options"]
    assert job["ds_config"] == json.loads(printed.out)
    assert job["training"]["lr"] == step.get("lr", 2e-3)
    assert job["training"]["lr_schedule"] == ("config" if "scheduler" in step else "linear")
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


@pytest.mark.parametrize(
    ("gpu", "preset", "split"),
    [("a100-80g", "zero2", (2, 1)), ("rtx-4090", "zero3", (1, 2)), ("v100-16g", "zero2", None)],
)
def test_what_memory_has_no_room_for_is_divided_alike(
    dsrun, monkeypatch, cpu_build, tmp_path, gpu, preset, split
):
    """On GPUs that are here, and from elsewhere by their name."""
    kind = kinds.load(gpu)
    capability = tuple(map(int, kind.compute_capability.split(".")))
    cards = tuple(Gpu(i, kind.nvml[0], f"GPU-{i}", int(kind.memory_gib * GIB), capability) for i in range(8))
    here = Machine("cuda", cards, 16, "of paper", 512 * GIB)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"content": "a", "summary": "b"}\n', encoding="utf-8")
    words = ("--preset", preset, "--gpus", 8, "--train-file", rows, "--dry-run", "--json")
    with monkeypatch.context() as on:
        on.setattr("dsrun.cluster.devices.detect", lambda _: here)
        result = dsrun("finetune", "qwen3-8b", *words)
        printed = dsrun("preset", preset, "--model", "qwen3-8b", "--gpus", 8)
    named = dsrun(
        "preset", preset, "--model", "qwen3-8b", "--gpus", 8, "--gpu", gpu, "--host-memory", "512GiB"
    )
    ran = json.loads(result.out)["job"]["ds_config"]
    assert json.loads(printed.out) == json.loads(named.out) == ran
    if split is None:
        assert "will run out of memory" in printed.err
    else:
        assert (ran["train_micro_batch_size_per_gpu"], ran["gradient_accumulation_steps"]) == split


def test_what_ships_says_strategy_only(dsrun):
    """So that a model's own batch and learning rate count whatever the strategy."""
    from dsrun.config.presets import preset
    from dsrun.options.derived import step_of

    shipped = [name for name in preset.names() if preset.load(name).fsdp is None]
    assert len(shipped) > 5
    usual = {"optimizer": "adamw"}  # its section has to stand there
    assert not [name for name in shipped if step_of(preset.load(name).merged("deepspeed")[0]) != usual]


def test_a_run_file(dsrun, tmp_path):
    path = tmp_path / "a lab's 运行.toml"
    path.write_text(
        'model = "llama-tiny"\nmicro_batch = 2\ngpus = 2\nlr = 1e-3\nmax_steps = 5\n', encoding="utf-8"
    )
    words = ("finetune", path, "--lr", "5e-4", "--dry-run", "--json")
    result = json.loads(dsrun(*words).out)
    assert result["job"]["model"]["name"] == "llama-tiny"
    assert result["options"]["micro_batch"] == {"value": 2, "from": f"run file: {path}"}
    assert result["options"]["lr"] == {"value": 5e-4, "from": "command line"}
    assert result["job"]["training"]["max_steps"] == 5
    path.write_text("micro_bach = 2\n", encoding="utf-8")
    result = dsrun("finetune", path, "llama-tiny", "--dry-run")
    assert result.code == 1
    assert "micro_batch" in result.err


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--lr", "1e-4", "--set", "optimizer.params.lr=1e-3"), "--lr"),
        (("--micro-batch", "2", "--set", "train_micro_batch_size_per_gpu=3"), "--micro-batch"),
        (("--precision", "fp32", "--set", "bf16.enabled=true"), "--precision"),
    ],
)
def test_set_and_an_option_that_disagree(dsrun, words, flag):
    result = dsrun("finetune", "llama-tiny", "--gpus", 2, "--dry-run", *words)
    assert result.code == 1
    assert flag in result.err


def test_set_is_heard_by_the_training(dsrun):
    words = (
        "--set",
        "optimizer.params.lr=1e-3",
        "--set",
        "train_micro_batch_size_per_gpu=2",
        "--dry-run",
        "--json",
    )
    result = json.loads(dsrun("finetune", "llama-tiny", "--gpus", 2, *words).out)
    assert result["job"]["training"]["lr"] == 1e-3
    assert result["job"]["ds_config"]["train_micro_batch_size_per_gpu"] == 2
    assert result["job"]["ds_config"]["train_batch_size"] == 8


def test_set_in_a_run_file_stands_where_the_run_file_does(dsrun, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "llama-tiny"\noverrides = ["gradient_clipping=0.5"]\n', encoding="utf-8")
    words = ("finetune", path, "--gpus", 2, "--dry-run")
    result = json.loads(dsrun(*words, "--json").out)
    assert result["options"]["grad_clip"] == {"value": 0.5, "from": f"run file: {path}: --set"}
    assert result["job"]["ds_config"]["gradient_clipping"] == 0.5
    result = dsrun(*words, "--grad-clip", "2")
    assert result.code == 1
    assert "--grad-clip" in result.err


def test_a_variable_is_a_source(dsrun, tmp_path, monkeypatch):
    monkeypatch.setenv("DSRUN_NVME_PATH", str(tmp_path))
    words = ("finetune", "llama-tiny", "--gpus", 2, "--explain", "--json")
    expected = {"value": str(tmp_path), "from": "environment: DSRUN_NVME_PATH"}
    assert json.loads(dsrun(*words).out)["options"]["nvme_path"] == expected
    given = {"value": "/else", "from": "command line"}
    assert json.loads(dsrun(*words, "--nvme-path", "/else").out)["options"]["nvme_path"] == given


def test_explain_says_where_everything_comes_from(dsrun):
    result = json.loads(dsrun("finetune", "llama-tiny", "--gpus", 2, "--explain", "--json").out)["options"]
    assert result["lr"]["from"].startswith("model file: ")
    assert result["seed"] == {"value": 42, "from": "built-in default"}
    assert result["precision"]["from"].startswith("derived")
    text = dsrun("finetune", "llama-tiny", "--gpus", 2, "--explain").out
    assert len(text.splitlines()) == len(result)


@pytest.mark.parametrize(
    ("ranks", "words", "split"),
    [
        (1, (), (4, 2)),
        (2, (), (4, 1)),
        (4, (), (2, 1)),
        (8, (), (1, 1)),
        (2, ("--micro-batch", 1), (1, 4)),
        (2, ("--global-batch", 24), (4, 3)),
        (2, ("--global-batch", 24, "--grad-accum", 2), (6, 2)),
        (2, ("--micro-batch", 3, "--grad-accum", 5), (3, 5)),
        (3, ("--grad-accum", 2), (4, 2)),
    ],
)
def test_devices_change_the_split_of_a_step_and_not_its_examples(ranks, words, split):
    """8 examples are the model file's, unless the step or all of its parts are asked for."""
    given = {
        str(key)[2:].replace("-", "_"): value for key, value in zip(words[::2], words[1::2], strict=True)
    }
    resolved = Resolved.built_in(FinetuneOptions).filled(Source.MODEL_FILE, {"global_batch": 8}, "m.toml")
    resolved = resolved.filled(Source.COMMAND_LINE, given)
    result = resolved.with_layers(by_devices(resolved, ranks)).options
    assert (result.micro_batch, result.grad_accum) == split
    expected = given.get("global_batch", 8) if "grad_accum" not in given or "global_batch" in given else None
    assert result.global_batch == (expected or split[0] * split[1] * ranks)
    assert result.micro_batch * result.grad_accum * ranks == result.global_batch


def test_a_micro_batch_that_the_loss_depends_on_is_not_divided():
    resolved = Resolved.built_in(FinetuneOptions).filled(Source.MODEL_FILE, {"global_batch": 8}, "m.toml")
    assert by_devices(resolved, 2, fixed_micro_batch=True).values["micro_batch"] == 4
    with pytest.raises(DsrunError, match="micro batches of 4") as caught:
        by_devices(resolved, 4, fixed_micro_batch=True)
    assert "--micro-batch 2" in caught.value.problems[0].hint


def test_a_config_whose_sizes_contradict_each_other_is_told_their_product():
    sizes = {"global_batch": 7, "micro_batch": 2, "grad_accum": 2}
    resolved = Resolved.built_in(FinetuneOptions).filled(Source.LAB_PRESET, sizes, "ds.json")
    with pytest.raises(DsrunError, match="micro batch 2 x accumulation 2 x 2 ranks") as caught:
        by_devices(resolved, 2)
    assert "--global-batch 8" in caught.value.problems[0].hint


def test_another_trainers_name_in_a_run_file_is_answered_with_ours(dsrun, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "llama-tiny"\nper_device_train_batch_size = 4\n', encoding="utf-8")
    answer = dsrun("finetune", path, "--explain")
    assert answer.code and "Did you mean 'micro_batch'?" in answer.err


def test_a_mean_of_micro_batches_is_not_packed():
    resolved = Resolved.built_in(FinetuneOptions).filled(Source.COMMAND_LINE, {"loss": MICRO_BATCH_MEAN})
    assert by_loss(resolved).values == {"packing": False}
    with pytest.raises(DsrunError, match="packed"):
        by_loss(resolved.filled(Source.COMMAND_LINE, {"packing": True}, "--packing"))


@pytest.mark.parametrize(
    ("ranks", "given", "advice"),
    [
        (3, {}, "--global-batch 9"),
        (32, {}, "--global-batch 32"),
        (2, {"micro_batch": 3}, "--micro-batch 2"),
        (2, {"global_batch": 12, "grad_accum": 4}, "--grad-accum 3"),
        (2, {"global_batch": 12, "grad_accum": 2, "micro_batch": 4}, "--micro-batch 3"),
    ],
)
def test_a_step_that_devices_cannot_share(ranks, given, advice):
    resolved = Resolved.built_in(FinetuneOptions).filled(Source.MODEL_FILE, {"global_batch": 8}, "m.toml")
    with pytest.raises(DsrunError) as caught:
        by_devices(resolved.filled(Source.COMMAND_LINE, given), ranks)
    assert advice in caught.value.problems[0].hint

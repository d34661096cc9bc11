"""What a preset of FSDP's comes to, and what it refuses, before anything starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dsrun.config.presets import preset
from dsrun.errors import DsrunError
from dsrun.jobs.build import fsdp
from dsrun.jobs.spec.job import HostDevices
from dsrun.options.commands import FinetuneOptions
from dsrun.options.table import Resolved

SHIPPED = [name for name in preset.names() if preset.load(name).fsdp]


def hosts(*counts: int) -> tuple[HostDevices, ...]:
    return tuple(HostDevices(f"w{number}", tuple(range(count))) for number, count in enumerate(counts))


def spec(name: str, *counts: int, grad_accum: int = 1, freezes: bool = False):
    chosen = preset.load(name).fsdp
    return fsdp.spec_of(chosen, name, hosts(*counts), batch=(1, grad_accum), grad_clip=1.0, freezes=freezes)


def written(folder, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(f'summary = "mine"\nextends = "fsdp"\n[fsdp]\n{text}\n', encoding="utf-8")
    return str(path)


def test_what_ships():
    assert SHIPPED == ["fsdp", "fsdp-hybrid", "fsdp-offload"]
    for name in SHIPPED:
        header = preset.load(name).file.path.read_text(encoding="utf-8").split("\n\n")[0]
        assert f"--preset {name}" in header and "Not " in header


@pytest.mark.parametrize(
    ("name", "counts", "shard_ranks"),
    [
        ("fsdp", (4, 4), 8),
        ("fsdp", (3, 2), 5),
        ("fsdp-hybrid", (4, 4), 4),
        ("fsdp-hybrid", (2,), 2),
        ("fsdp", (), 1),
    ],
)
def test_the_ranks_that_share_a_copy(name, counts, shard_ranks):
    assert spec(name, *counts).shard_ranks == shard_ranks


def test_a_number_of_neighbours(tmp_path):
    mine = written(tmp_path, "shard_over = 2")
    assert spec(mine, 4).shard_ranks == 2
    with pytest.raises(DsrunError, match="doesn't divide the job's 3"):
        spec(mine, 3)


def test_hosts_that_differ_hold_no_equal_copies():
    with pytest.raises(DsrunError, match="hosts have 2 and 4") as caught:
        spec("fsdp-hybrid", 4, 2)
    assert "--preset fsdp" in caught.value.problems[0].hint


def test_gradients_are_whole_only_where_they_are_small_or_asked_for(tmp_path):
    assert not spec("fsdp", 2, grad_accum=4).whole_gradients
    assert spec("fsdp", 2, grad_accum=4, freezes=True).whole_gradients
    assert not spec("fsdp", 2, grad_accum=1, freezes=True).whole_gradients
    assert spec(written(tmp_path, "whole_gradients = true"), 2, grad_accum=4).whole_gradients


REFUSED = {
    "--set": {"overrides": ("zero_optimization.stage=2",)},
    "--nvme-path": {"nvme_path": "/nvme"},
    "--precision": {"precision": "fp16"},
    "--optimizer": {"optimizer": "muon"},
    "--lr-schedule": {"lr_schedule": "config"},
    "--method": {"method": "qlora"},
    "--tp": {"tp": 2},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_deepspeeds_alone(flag):
    asked = Resolved.by_user(FinetuneOptions, REFUSED[flag])
    (found,) = fsdp.refusals(preset.load("fsdp").fsdp, "fsdp", asked)
    assert found.where.startswith(flag) and found.hint


def test_all_of_it_at_once(dsrun, tmp_path):
    said = dsrun(
        "finetune", "llama-tiny", "--preset", "fsdp", "--set", "zero_optimization.stage=2", "--method", "qlora",
        "--optimizer", "muon", "--dry-run", "--output-dir", tmp_path / "run",
    )  # fmt: skip
    assert said.code == 1
    assert all(flag in said.err for flag in ("--set", "--method", "--optimizer"))


def test_the_optimizers_own_parameters(tmp_path):
    mine = preset.load(written(tmp_path, "[fsdp.optimizer]\nweight_decay = 0.1\nlr = 3\nmomentum = 1")).fsdp
    assert fsdp.optimizer_params(preset.load("fsdp").fsdp, "adamw") == {"weight_decay": 0.0}
    found = fsdp.refusals(mine, "mine", Resolved.by_user(FinetuneOptions, {}))
    assert [problem.where.rpartition(".")[2] for problem in found] == ["lr", "optimizer"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shard_ovr = 2", "unknown key 'shard_ovr'"), ("shard_over = 0", "can't be 0"),
        ("shard_over = true", "can't be True"), ('offload = "cpu"', "can't be 'cpu'"),
        ("optimizer = 3", "is not a table"), ("[config.fp16]\nenabled = true", "no use for DeepSpeed's keys"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(tmp_path, text, words):
    with pytest.raises(DsrunError, match=words):
        preset.load(written(tmp_path, text))


def test_no_deepspeed_json_comes_of_it(dsrun):
    for words in ((), ("--model", "llama-tiny")):
        said = dsrun("preset", "fsdp", *words)
        assert said.code == 1 and not said.out
        assert "dsrun finetune MODEL --preset fsdp" in said.err


def test_it_is_planned_where_it_is_named(dsrun):
    import json

    words = ("llama-3.1-8b", "--gpu", "a100-80g", "--gpus", "8", "--seq-len", "2048", "--json")
    named = json.loads(
        dsrun("plan", *words, "--preset", "fsdp", "--preset", "fsdp-offload", "--preset", "zero3").out
    )
    bytes_of = {plan["preset"]: plan for plan in named["plans"]}
    assert set(bytes_of) == {"fsdp", "fsdp-offload", "zero3"}
    unnamed = json.loads(dsrun("plan", *words).out)
    assert not {plan["preset"] for plan in unnamed["plans"]} & set(SHIPPED)


def test_a_checkpoints_pickle_runs_nothing(tmp_path):
    """The metadata of torch's distributed checkpoints are a pickle, which may name any function."""
    pytest.importorskip("torch")
    import pickle

    from dsrun.training.engines import sharded_files

    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(DsrunError, match=r"it names builtins\.print"):
        sharded_files.stored(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(SimpleNamespace))
    with pytest.raises(DsrunError, match=r"types\.SimpleNamespace"):
        sharded_files.stored(tmp_path)

"""What a preset of FSDP's comes to, and what it refuses, before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dsrun.config.presets import preset
from dsrun.errors import DsrunError
from dsrun.job.job import FsdpSpec, HostDevices, Job
from dsrun.jobs.assembly import fsdp, resume
from dsrun.jobs.assembly.planning.setups import of_job
from dsrun.jobs.runs import compare_runs
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved
from dsrun.planner.disk import checkpoint_bytes
from dsrun.planner.gpu_memory import persistent
from dsrun.planner.host_memory import host_memory
from dsrun.planner.setup import Setup
from dsrun.planner.shape import from_numbers

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
    "--muon-lr": {"muon_lr": 0.02},
    "--lr-schedule": {"lr_schedule": "config"},
    "--method": {"method": "qlora"},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_deepspeeds_alone(flag):
    asked = Resolved.by_user(FinetuneOptions, REFUSED[flag])
    (found,) = fsdp.refusals(preset.load("fsdp").fsdp, "fsdp", asked)
    assert found.where.startswith(flag) and found.hint


def test_all_of_it_at_once(dsrun, tmp_path):
    said = dsrun(
        "finetune", "llama-tiny", "--preset", "fsdp", "--set", "zero_optimization.stage=2", "--method", "qlora",
        "--optimizer", "muon", "--tp", "2", "--dry-run", "--output-dir", tmp_path / "run",
    )  # fmt: skip
    assert said.code == 1
    assert all(flag in said.err for flag in ("--set", "--method", "--optimizer", "--tp 2"))


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
    words = ("llama-3.1-8b", "--gpu", "a100-80g", "--gpus", "8", "--seq-len", "2048", "--json")
    named = json.loads(
        dsrun("plan", *words, "--preset", "fsdp", "--preset", "fsdp-offload", "--preset", "zero3").out
    )
    bytes_of = {plan["preset"]: plan for plan in named["plans"]}
    assert set(bytes_of) == {"fsdp", "fsdp-offload", "zero3"}
    unnamed = json.loads(dsrun("plan", *words).out)
    assert not {plan["preset"] for plan in unnamed["plans"]} & set(SHIPPED)


@pytest.fixture
def job(make_job):
    """On four ranks, in pairs that share a copy."""
    return make_job(
        ranks=4,
        preset="fsdp",
        ds_config={},
        fsdp=FsdpSpec(micro_batch=2, grad_accum=4, grad_clip=1.0, shard_ranks=2),
    )


def test_a_job_is_read_back(job):
    assert Job.from_json(job.to_json(), "job.json") == job
    assert (job.micro_batch, job.grad_accum, job.grad_clip, job.step_examples) == (2, 4, 1.0, 32)
    assert job.division == "FSDP, sharded over 2 ranks, 2 copies"


def test_it_goes_on_with_another_division(job):
    moved = replace(job, hosts=hosts(4, 4))
    for preset_name, shared in (("fsdp", 8), ("fsdp-hybrid", 4)):
        again = resume.divided(moved, preset=preset_name, batch=(4, 1))
        assert (again.fsdp.shard_ranks, again.micro_batch, again.grad_accum) == (shared, 4, 1)
        assert (again.ds_config, again.grad_clip) == ({}, 1.0)
    with pytest.raises(DsrunError, match="another engine"):
        resume.divided(job, preset="zero2", batch=(2, 4))


def test_runs_of_two_engines_side_by_side(job, make_job):
    """The keys that one of them has no use for are no difference."""
    both = [job, make_job(ranks=4)]
    assert compare_runs.config_rows(both) == {}
    rows = compare_runs.setting_rows(both)
    assert rows["fsdp.shard_ranks"] == [2, None] and rows["preset"] == ["fsdp", "zero2"]


def test_a_checkpoint_holds_twelve_bytes_a_weight(job):
    """fp32 weights and Adam's two moments, whatever the precision: there is no second copy."""
    for precision in ("fp32", "bf16"):
        setup = Setup(shape=from_numbers(1e9), gpus=4, precision=precision)
        assert checkpoint_bytes(of_job({}, setup, job.fsdp)) == pytest.approx(12e9, rel=0.01)


def test_memory_is_shared_by_the_ranks_of_a_copy(job):
    setup = of_job({}, Setup(shape=from_numbers(1e9), gpus=4, precision="bf16", nodes=2), job.fsdp)
    held = persistent(setup)
    assert held["weights"] + held["moments"] == pytest.approx(12e9 / 2, rel=0.01)
    offloaded = of_job({}, setup, replace(job.fsdp, offload=True))
    assert not any(persistent(offloaded).values())
    on_host = host_memory(offloaded).terms
    assert on_host["weights"] + on_host["moments"] + on_host["gradients"] == pytest.approx(16e9, rel=0.01)

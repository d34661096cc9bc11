"""A run that goes on elsewhere: which batch, which config, and what can't be. As values; the runs are in
tests/test_resume_elsewhere.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from asking import finetune_request

from dsrun.config.presets.build import Options, build_config
from dsrun.errors import DsrunError
from dsrun.job import run_folder
from dsrun.job.job import DataSpec
from dsrun.job.layout import MARK
from dsrun.jobs.assembly import resume
from dsrun.jobs.assembly.checks import disk_check
from dsrun.jobs.assembly.resume import batch_on, divided, resumed
from dsrun.options.table import MICRO_BATCH_MEAN, ParallelismOptions


@pytest.fixture
def started(make_job, tmp_path):
    """`started(preset, **fields)`: a run of two ranks with 16 rows a step that died."""

    def made(preset="zero2", overrides=(), **fields):
        options = Options(
            gpus=2,
            precision="fp32",
            micro_batch=4,
            grad_accum=2,
            lr=2e-3,
            nvme_path="/nvme",
            overrides=overrides,
        )
        config = build_config(preset, options).ds_config
        job = make_job(tmp_path / "run", preset=preset, ds_config=config, **fields)
        with run_folder.held(tmp_path / "run"):
            (tmp_path / "run" / run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
            run_folder.write_state(tmp_path / "run", "failed")
        return job

    return made


def again(job, machine, overrides=(), **given):
    return resumed(
        finetune_request(job.model.name, overrides, output_dir=Path(job.run_dir), **given), machine, {}
    ).job


@pytest.mark.parametrize(
    ("ranks", "batch"), [(1, (4, 4)), (2, (4, 2)), (4, (4, 1)), (8, (2, 1)), (16, (1, 1))]
)
def test_the_rows_of_a_step_stay(started, ranks, batch):
    assert batch_on(started(), ranks) == batch


def test_a_micro_batch_that_does_not_divide(make_job):
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    job = make_job(ranks=1, ds_config=config)
    assert batch_on(job, 2) == (3, 2)
    assert batch_on(job, 3) == (4, 1)


@pytest.mark.parametrize("ranks", [3, 5, 32])
def test_numbers_of_ranks_that_do_not_work(started, ranks):
    with pytest.raises(DsrunError, match=f"which {ranks} ranks can't share") as caught:
        batch_on(started(), ranks)
    assert caught.value.problems[0].hint == "Numbers of ranks that can: 1, 2, 4, 8, 16."


def test_a_mean_of_micro_batches_keeps_them(make_job):
    job = make_job(ranks=2)
    job = replace(job, training=replace(job.training, loss=MICRO_BATCH_MEAN))
    assert [batch_on(job, ranks) for ranks in (1, 2, 4)] == [(4, 4), (4, 2), (4, 1)]
    with pytest.raises(DsrunError, match="in micro batches of 4") as caught:
        batch_on(job, 8)
    assert caught.value.problems[0].hint == "Numbers of ranks that can: 1, 2, 4."


def test_another_number_of_ranks(started, machine):
    before = started()
    job = again(before, machine, gpus=4)
    assert (job.world_size, job.micro_batch, job.grad_accum) == (4, 4, 1)
    changed = {"gradient_accumulation_steps": 1}
    assert job.ds_config == {**before.ds_config, **changed}
    assert again(before, machine, devices="1").world_size == 1


def test_another_preset(started, machine):
    overrides = (
        "optimizer.params.weight_decay=0.1",
        "gradient_clipping=0.5",
        "zero_optimization.overlap_comm=true",
    )
    before = started(overrides=overrides)
    job = again(before, machine, preset="zero3", gpus=1)
    plain = build_config("zero3", Options(gpus=1, precision="fp32", micro_batch=4, grad_accum=4)).ds_config
    assert job.preset == "zero3"
    assert job.ds_config["zero_optimization"] == plain["zero_optimization"], "the division is the preset's"
    assert job.ds_config["optimizer"] == before.ds_config["optimizer"], "all else is the run's"
    assert job.ds_config["gradient_clipping"] == 0.5
    assert job.ds_config["train_batch_size"] == 16


def test_training_files_may_be_said_again(started, machine):
    files = ("/data/a.json:2", "/data/b.json")
    data = DataSpec(
        train_file="/data/a.json",
        eval_file=None,
        prompt_column="content",
        response_column="summary",
        max_source_length=64,
        max_target_length=64,
        more_files=("/data/b.json",),
        weights=(2.0, 1.0),
        data_format="sharegpt",
    )
    before = started(data=data)
    assert again(before, machine, train_file=files, data_format="auto").data == data
    assert again(before, machine, data_format="sharegpt").data == data
    for changed in (
        ("/data/a.json:2",),
        ("/data/a.json", "/data/b.json"),
        ("/data/a.json", "/data/b.json:2"),
        ("/data/a.json:2", "/data/c.json"),
    ):
        with pytest.raises(DsrunError) as caught:
            again(before, machine, train_file=changed)
        (problem,) = caught.value.problems
        assert problem.where == "--train-file"
        assert problem.what.endswith("and the run was started with /data/a.json:2 and /data/b.json")
    with pytest.raises(DsrunError, match="is alpaca, and the run was started with sharegpt"):
        again(before, machine, data_format="alpaca")


def test_an_option_is_called_as_it_is_written(started, machine):
    with pytest.raises(DsrunError) as caught:
        again(started(), machine, keep_checkpoints=9, lr=1.0)
    assert {problem.where for problem in caught.value.problems} == {"--keep", "--lr"}


def test_auto_is_what_was_chosen(started, machine):
    before = started()
    assert again(before, machine, preset="auto") == before


def test_keys_of_another_division(started, machine):
    before = started()
    key = "zero_optimization.sub_group_size=1000000"
    assert (
        again(before, machine, (key,), preset="zero3").ds_config["zero_optimization"]["sub_group_size"]
        == 1_000_000
    )
    with pytest.raises(DsrunError, match="sub_group_size"):
        again(before, machine, (key,))
    with pytest.raises(DsrunError, match="gradient_clipping"):
        again(before, machine, ("gradient_clipping=3",), preset="zero3")


@pytest.mark.parametrize(
    "preset", ["ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-nvme"]
)
@pytest.mark.parametrize("to", ["ddp", "zero2-offload", "zero3"])
def test_every_preset_can_follow_every_other(started, preset, to):
    job = started(preset)
    batch = batch_on(job, 2)
    assert divided(job, preset=to, batch=batch).ds_config["optimizer"] == job.ds_config["optimizer"]


def whole(job, **layout) -> None:
    folder = Path(job.run_dir) / "checkpoints" / "step-4"
    folder.mkdir(parents=True)
    (folder / MARK).write_text(json.dumps({"step": 4, "layout": layout}) if layout else "{}")


def test_swap_files_stay_as_they_are(started, machine):
    job = started("zero3-nvme")
    assert again(job, machine, gpus=1).world_size == 1, "without a checkpoint it begins again"
    whole(job)
    assert again(job, machine) == job
    for given in ({"gpus": 1}, {"preset": "zero3"}):
        with pytest.raises(DsrunError, match="swap files") as caught:
            again(job, machine, **given)
        assert "--preset zero3-nvme --gpus 2" in caught.value.problems[0].hint


def test_what_the_checkpoint_says_goes(started, machine):
    """job.json is of who tried last; that need not be who wrote the checkpoint."""
    job = started("zero3")
    whole(job, zero_optimization={"offload_param": {"device": "nvme"}})
    with pytest.raises(DsrunError, match="swap files"):
        again(job, machine, preset="zero2")


def test_a_disk_without_room(started, machine, monkeypatch):
    job = started()
    job = replace(job, model=replace(job.model, architecture={
        "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2048,
    }))  # fmt: skip
    (Path(job.run_dir) / run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
    monkeypatch.setattr(disk_check, "free_bytes", lambda folder: 1000)
    monkeypatch.setattr(disk_check, "total_steps", lambda job: 10)
    with pytest.raises(DsrunError, match=r"the model of 9\.0 MiB"):
        again(job, machine)


@pytest.mark.parametrize(
    ("typed", "name", "same"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b", True), ("hf:Qwen/Qwen3-8B", "qwen3-8b", True), ("lab/x@v1", "lab/x@v1", True),
        ("Qwen/Qwen3-8B", "qwen3-4b", False), ("lab/x", "lab/y", False), ("qwen3-8b", "qwen3-8b", True),
    ],
)  # fmt: skip
def test_a_repository_is_the_model_that_it_names(make_job, typed, name, same):
    job = make_job()
    assert resume._same_model(typed, replace(job, model=replace(job.model, name=name))) is same


@pytest.mark.parametrize("parallel", [ParallelismOptions(tp=2), ParallelismOptions(sp=2)])
def test_ranks_that_share_their_examples(make_job, parallel):
    """A step is shared out by their groups."""
    job = make_job(ranks=4, parallel=parallel)
    assert job.step_examples == 16
    assert [batch_on(job, ranks) for ranks in (2, 4, 8)] == [(4, 4), (4, 2), (4, 1)]
    assert batch_on(job, 4, 1) == (4, 1)
    with pytest.raises(DsrunError, match="groups of 2") as caught:
        batch_on(job, 3)
    assert "multiple of 2" in caught.value.problems[0].hint


@pytest.mark.parametrize("said", [{"tp": 2}, {"sp": 2}])
def test_other_groups(started, machine, said):
    """The examples of a step stay; what DeepSpeed is told of the groups is theirs; and back."""
    job = started("zero1")
    config = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    job = replace(job, model=replace(job.model, architecture=config))
    Path(job.run_dir, run_folder.JOB).write_text(job.to_json(), encoding="utf-8")
    divided_job = again(job, machine, **said)
    assert (divided_job.parallel, divided_job.step_examples) == (
        ParallelismOptions(**said),
        job.step_examples,
    )
    assert ("tensor_parallel" in divided_job.ds_config) == ("tp" in said)
    assert "train_batch_size" not in divided_job.ds_config
    Path(job.run_dir, run_folder.JOB).write_text(divided_job.to_json(), encoding="utf-8")
    back = again(job, machine, **dict.fromkeys(said, 1))
    assert (back.ds_config, back.parallel) == (job.ds_config, ParallelismOptions())


def test_groups_that_can_not_be(started, machine):
    """As finetune refuses them; a network that nobody knows; and stages are read by no others."""
    with pytest.raises(DsrunError, match="--tp 2 --sp 2"):
        again(started("zero1"), machine, sp=2, tp=2, gpus=4)
    with pytest.raises(DsrunError, match="isn't known"):
        again(started("zero1"), machine, tp=2)
    job = started("zero1", parallel=ParallelismOptions(pp=2))
    whole(job)
    with pytest.raises(DsrunError, match="--pp 2") as caught:
        again(job, machine, gpus=4)
    assert "--gpus 2" in caught.value.problems[0].hint

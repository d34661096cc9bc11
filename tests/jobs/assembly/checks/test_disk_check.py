"""Room on the disk of the run folder, before the first step."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dsrun.job.job import ModelSpec
from dsrun.jobs.assembly.checks import disk_check
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved

SHAPE = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2048,
}  # fmt: skip
CHECKPOINT, MODEL = 37_776_384, 9_444_096
"""zero2 in fp32: 16 bytes a weight, and 4."""


@pytest.fixture
def job(make_job, tmp_path):
    """A run that keeps two checkpoints, and writes more of them."""
    made = make_job(tmp_path / "not" / "yet")
    return replace(
        made,
        model=ModelSpec("llama-tiny", "random", "/x/llama-tiny.toml", "llama-2", SHAPE),
        training=replace(made.training, epochs=None, max_steps=40, save_steps=10, keep_checkpoints=2),
    )


@pytest.fixture
def room(monkeypatch):
    """`room(bytes)`: so much is free."""
    return lambda size: monkeypatch.setattr(disk_check, "free_bytes", lambda folder: size)


def trained(job, **fields):
    return replace(job, training=replace(job.training, **fields))


@pytest.mark.parametrize(
    ("fields", "checkpoints"),
    [
        ({}, 3), ({"keep_checkpoints": 1}, 2), ({"max_steps": 20}, 2), ({"max_steps": 30}, 3), ({"max_steps": 10}, 0),
        ({"max_steps": 11}, 1), ({"save_steps": 1000}, 1), ({"keep_checkpoints": 9}, 4),
        ({"max_steps": 19, "save_steps": 1000}, 0), ({"save_steps": 1000, "last_checkpoint": False}, 0),
        ({"keep_checkpoints": 9, "last_checkpoint": False}, 3),
    ],
)  # fmt: skip
def test_what_lies_there_at_one_time(job, fields, checkpoints):
    """One of the last step stands until the model is written."""
    job = trained(job, **fields)
    need = disk_check.need_of(job, disk_check.setup_of(job), disk_check.total_steps(job))
    assert need == disk_check.Need(CHECKPOINT, MODEL, checkpoints)
    assert need.total == checkpoints * CHECKPOINT + MODEL


def test_it_fits_or_not(job, room):
    room(3 * CHECKPOINT + MODEL)
    assert disk_check.check(job) == []
    room(3 * CHECKPOINT + MODEL - 1)
    (problem,) = disk_check.check(job)
    assert problem.where == job.run_dir
    assert (
        "117.1 MiB free, and the run needs 117.1 MiB: 3 checkpoints of 36.0 MiB and the model of 9.0 MiB"
        in (problem.what)
    )
    assert problem.hint == (
        "--keep 1 needs 81.1 MiB, --save-steps 40 --no-last-checkpoint writes no checkpoint and needs 9.0 MiB, "
        "or choose an --output-dir on a larger disk."
    )


def resolved(**given):
    return Resolved.by_user(FinetuneOptions, given)


@pytest.mark.parametrize(
    ("free", "given", "values"),
    [
        (3 * CHECKPOINT + MODEL, {}, {}),
        (3 * CHECKPOINT + MODEL - 1, {}, {"keep_checkpoints": 1}),
        (2 * CHECKPOINT + MODEL - 1, {}, {"save_steps": 40, "last_checkpoint": False}),
        (MODEL, {}, {"save_steps": 40, "last_checkpoint": False}),
        (MODEL, {"keep_checkpoints": 1}, {}),  # one is asked for
        (MODEL - 1, {}, {}),  # nothing helps
        (3 * CHECKPOINT, {"keep_checkpoints": 2}, {}),  # asked for
        (CHECKPOINT, {"save_steps": 10}, {}),
        (CHECKPOINT, {"last_checkpoint": True}, {}),
        (3 * CHECKPOINT, {"save_steps": 10}, {"keep_checkpoints": 1}),
        (CHECKPOINT, {"max_restarts": 2}, {}),  # it is to go on from one
        (3 * CHECKPOINT, {"max_restarts": 2}, {"keep_checkpoints": 1}),
        (CHECKPOINT, {"save_on_stop": 5}, {}),
    ],
)
def test_fewer_checkpoints_where_the_disk_is_short(job, room, free, given, values):
    """Nobody asked for the number: the run starts with fewer, or with the model alone, and says so."""
    room(free)
    layer = disk_check.fewer(job, resolved(**given))
    assert dict(layer.values) == values
    if values:
        assert disk_check.check(trained(job, **values)) == []
    if values.get("save_steps"):
        assert (
            "no checkpoint is written, only the model: if the run dies, it starts from the beginning"
            in layer.note
        )
        assert "3 checkpoints of 36.0 MiB" in layer.note


def test_a_small_disk(make_job, job, tmp_path):
    """A file system of 60 MB: the model and one checkpoint of 36 MiB fit, and not two of them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=60000000", "tmpfs", disk], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode()}")
    try:
        job = replace(job, run_dir=str(disk / "run"))
        assert disk_check.check(job)
        layer = disk_check.fewer(job, resolved())
        assert dict(layer.values) == {"save_steps": 40, "last_checkpoint": False}
        assert disk_check.check(trained(job, **layer.values)) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_only_what_helps_is_advised(job, room):
    room(CHECKPOINT)
    (problem,) = disk_check.check(job)
    assert "--keep" not in problem.hint
    assert "--save-steps 40" in problem.hint
    room(10)
    (problem,) = disk_check.check(job)
    assert problem.hint == "Choose an --output-dir on a larger disk."
    (problem,) = disk_check.check(trained(job, save_steps=100, last_checkpoint=False))
    assert "needs 9.0 MiB: the model of 9.0 MiB" in problem.what


def test_the_best_model_lies_beside_the_last(job):
    need = disk_check.need_of(trained(job, keep_best=True), disk_check.setup_of(job), 40)
    assert need.model_bytes == 2 * MODEL


def test_a_model_from_a_checkpoint_needs_room_for_itself(job, room, tmp_path):
    room(MODEL)
    assert disk_check.check_export(job, tmp_path) == []
    room(MODEL - 1)
    (problem,) = disk_check.check_export(job, tmp_path)
    assert "needs 9.0 MiB" in problem.what and "-o" in problem.hint


def test_rows_are_counted_only_where_it_matters(job, room, tmp_path):
    train_file = tmp_path / "rows.jsonl"
    rows = ['{"content": "a", "summary": "b"}'] * 80 + ['{"content": "", "summary": "b"}'] * 99
    train_file.write_text("\n".join(rows), encoding="utf-8")
    job = trained(job, epochs=1.5, max_steps=None)
    job = replace(job, data=replace(job.data, train_file=str(train_file)))
    step_rows = job.world_size * job.micro_batch * job.grad_accum
    assert step_rows == 16
    assert disk_check.total_steps(job) == 8  # 120 rows of 16
    room(MODEL)
    assert disk_check.check(job) == [], "ten steps between checkpoints, and eight in all"
    (problem,) = disk_check.check(trained(job, save_steps=5))
    assert "a checkpoint of 36.0 MiB" in problem.what
    train_file.unlink()
    room(10 * CHECKPOINT)
    assert disk_check.check(trained(job, save_steps=5)) == []


def test_what_is_there_already_counts(job, room):
    folder = Path(job.run_dir) / "checkpoints" / "step-10"
    folder.mkdir(parents=True)
    with (folder / "states.pt").open("wb") as file:
        file.truncate(CHECKPOINT)
    room(2 * CHECKPOINT + MODEL)
    assert disk_check.check(job) == []


def test_a_model_of_unknown_shape(job, room):
    room(0)
    unknown = replace(job.model, architecture={"model_type": "mamba"})
    assert disk_check.check(replace(job, model=unknown)) == []


def test_what_is_free(tmp_path):
    assert disk_check.free_bytes(tmp_path / "not" / "yet") == pytest.approx(
        disk_check.free_bytes(tmp_path), rel=0.1
    )
    assert disk_check.free_bytes(tmp_path) > 0


def test_states_of_an_optimizer_that_nobody_knows(job):
    """What a config brings is taken for AdamW, which keeps the most."""
    of_config = disk_check.setup_of(trained(job, optimizer="config"))
    assert disk_check.need_of(job, of_config).checkpoint_bytes == CHECKPOINT

from __future__ import annotations

import dataclasses

import pytest

from dsrun.cluster.devices import Machine
from dsrun.config.build import Options, build_config
from dsrun.jobs.job import DataSpec, HostDevices, Job, ModelSpec, Prepared, TrainingSpec


@pytest.fixture
def machine() -> Machine:
    """A CPU machine with room for four ranks."""
    return Machine("cpu", (), 4, "a machine of paper")


@pytest.fixture
def make_job(tmp_path):
    """`make_job(run_dir, ranks=2, **fields)`: a job that was planned well, with other fields where given."""

    def make(run_dir=None, ranks: int = 2, **fields) -> Job:
        config = build_config("zero2", Options(gpus=ranks, precision="fp32", micro_batch=4, grad_accum=2))
        job = Job(
            run_dir=str(run_dir or tmp_path / "run"),
            model=ModelSpec("llama-tiny", "random", "/x/llama-tiny.toml", "llama-2", {"hidden_size": 8}),
            data=DataSpec("/data/训练.jsonl", "/data/dev.jsonl", "content", "summary", 64, 96),
            training=TrainingSpec(
                lr=2e-3, lr_schedule="linear", warmup_steps=0, epochs=1.5, max_steps=None, seed=42,
                eval_steps=None, save_steps=1000, keep_checkpoints=2, generate_rows=100, score_before=False,
                gradient_checkpointing=False,
            ),
            preset="zero2",
            precision="fp32",
            accelerator="cpu",
            hosts=(HostDevices("localhost", tuple(range(ranks))),),
            ds_config=config.ds_config,
            prepared=Prepared("/cache/models/x", "/cache/rows/a.arrow", "/cache/rows/b.arrow"),
            dsrun_version="0",
        )  # fmt: skip
        return dataclasses.replace(job, **fields)

    return make

"""A run goes on with other groups of ranks that share their examples: --tp and --sp of `dsrun resume`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.jobs.build.checks import optimizers, parallelism
from dsrun.jobs.build.checks.parallelism import ParallelSetup
from dsrun.jobs.spec.job import Job
from dsrun.models import chatglm, resolve
from dsrun.models.tensor_parallel import SECTION
from dsrun.options.groups import ParallelismOptions
from dsrun.options.table import Resolved

MAY_CHANGE = ("tp", "sp")
TOTAL = "train_batch_size"
"""What a config of ranks that share their examples leaves out: DeepSpeed would count each of them."""


def wanted(asked: Resolved[Any], job: Job) -> ParallelismOptions:
    """The run's groups, with what the user says now."""
    said = {name: getattr(asked.options, name) for name in MAY_CHANGE if asked.said(name)}
    return replace(job.parallel, **said)


def regrouped(job: Job, parallel: ParallelismOptions) -> Job:
    """The job with other groups, and its config with what DeepSpeed has to be told of them."""
    if parallel == job.parallel:
        return job
    config = {name: value for name, value in job.ds_config.items() if name not in (SECTION, TOTAL)}
    if parallel.group == 1:
        config[TOTAL] = job.world_size * job.micro_batch * job.grad_accum
    return replace(
        job, parallel=parallel, ds_config=parallelism.with_section(config, _network(job), parallel)
    )


def check(before: Job, again: Job, checkpoint: Path | None) -> None:
    """Raise DsrunError where the run can't go on like that: what finetune refuses, and what no other ranks read."""
    if checkpoint is not None and before.parallel.pp > 1:
        what = f"was written under {before.parallel.words}: its layers fit the same preset on as many ranks alone"
        hint = f"Continue it with --preset {before.preset} --gpus {before.world_size}, as it was started."
        raise DsrunError(what, where=str(checkpoint), hint=hint)
    if before.parallel == again.parallel:
        return
    refused = parallelism.refusals(_setup_of(again))
    if not refused and again.parallel.tp > 1 and _network(again) is None:
        what = "how its layers would be divided isn't known: the run says no network"
        refused = [Problem(what, again.parallel.words, "Leave it out.")]
    if refused:
        raise DsrunError(refused)


def _network(job: Job) -> str | None:
    kind = resolve.architecture(job.model).get("model_type")
    return chatglm.NETWORK if kind == chatglm.MODEL_TYPE else kind


def _setup_of(job: Job) -> ParallelSetup:
    architecture = resolve.architecture(job.model)
    heads, kv_heads = parallelism.heads_of(architecture)
    return ParallelSetup(
        parallel=job.parallel, devices=tuple(len(host.devices) for host in job.hosts), stage=job.zero_stage,
        fsdp=job.fsdp is not None, offload=optimizers.offloads(job.ds_config), method=job.peft.method,
        optimizer=job.training.optimizer, loss=job.training.loss, packing=job.training.packing,
        attention=job.training.attention, official=job.data.official, network=_network(job), heads=heads,
        kv_heads=kv_heads, layers=architecture.get("num_hidden_layers"), window=parallelism.window_of(architecture),
        length=job.data.max_source_length + job.data.max_target_length, precision=job.precision,
        fused_loss=bool(job.training.liger), tiles=bool(job.training.tile_tokens),
        by_tokens=job.training.tokens_per_batch is not None, answers=job.training.generate_rows > 0,
    )  # fmt: skip

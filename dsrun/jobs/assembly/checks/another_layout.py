"""A run goes on with other groups of ranks that share examples or experts: --tp, --sp, --ep of `dsrun resume`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.job.job import Job
from dsrun.jobs.assembly.checks import parallelism
from dsrun.jobs.assembly.checks.parallelism import ParallelSetup
from dsrun.models import resolve
from dsrun.models.chatglm import network_of
from dsrun.models.tensor_parallel import SECTION
from dsrun.options.layers import Resolved
from dsrun.options.table import ParallelismOptions

MAY_CHANGE = ("tp", "sp", "ep")
TOTAL = "train_batch_size"
"""Key that a config leaves out where ranks share their examples: DeepSpeed would count each of them."""


def wanted(resolved: Resolved[Any], job: Job) -> ParallelismOptions:
    """The run's groups, with what the user says now."""
    changes = {name: getattr(resolved.options, name) for name in MAY_CHANGE if resolved.said(name)}
    return replace(job.parallel, **changes)


def regrouped(job: Job, parallel: ParallelismOptions) -> Job:
    """The job with other groups, and its config with what DeepSpeed has to be told of them."""
    if parallel == job.parallel:
        return job
    config = {
        name: value
        for name, value in job.ds_config.items()
        if name not in (SECTION, parallelism.EXPERTS, TOTAL)
    }
    if parallel.group == 1:
        config[TOTAL] = job.world_size * job.micro_batch * job.grad_accum
    network = network_of(resolve.architecture(job.model))
    divided = parallelism.with_section(config, network, parallel, freezes=job.peft.freezes)
    return replace(job, parallel=parallel, ds_config=divided)


def check(before: Job, again: Job, checkpoint: Path | None) -> None:
    """Raise DsrunError where the run can't go on like that: what finetune refuses, and what no other ranks read."""
    if checkpoint is not None and before.parallel.pp > 1:
        fault = f"was written under {before.parallel.words}: its layers fit the same preset on as many ranks alone"
        hint = f"Continue it with --preset {before.preset} --gpus {before.world_size}, as it was started."
        raise DsrunError(fault, where=str(checkpoint), hint=hint)
    if (
        before.parallel == again.parallel and again.parallel.ep == 1
    ):  # whose groups need another number of ranks
        return
    setup = _setup_of(again)
    refused = parallelism.refusals(setup)
    if not refused and again.parallel.tp > 1 and setup.network is None:
        fault = "how its layers would be divided isn't known: the run says no network"
        refused = [Problem(fault, again.parallel.words, "Leave it out.")]
    raise_all(refused)


def _setup_of(job: Job) -> ParallelSetup:
    return parallelism.setup_of(
        job.parallel, job.hosts, job.ds_config, job.training, job.data, method=job.peft.method,
        precision=job.precision, fsdp=job.fsdp is not None, architecture=resolve.architecture(job.model),
    )  # fmt: skip

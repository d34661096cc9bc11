"""Checks that ZeRO has divided the weights among ranks. With nothing divided the losses would be the same.

Where a comment names a file, it is DeepSpeed 0.19's.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from dsrun.ds_config import ZERO, rounding, section
from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.training.engines.expert_parallel import copies

PADDING = 64
"""Elements by which DeepSpeed may fill up a rank's part of a group or a weight, at most; it aligns to 2 and 16."""
STAGE, SECOND_COPY = f"{ZERO}.stage", f"{ZERO}.zero_hpz_partition_size"
HINT = "Train with another preset, and report it with the version of DeepSpeed."


def engaged(job: Job, engine: Any) -> None:
    """Raise TrainingError unless the ranks divide what the job's stage divides.

    Stages 1 and 2 divide the fp32 weights that an optimizer steps, stage 3 every weight. A second copy of the weights
    (hpZ) is shared by smaller groups of ranks. engine: DeepSpeed's own.
    """
    zero = section(job.ds_config, ZERO)
    ranks = job.world_size // (job.parallel.tp * job.parallel.pp)
    if job.zero_stage in (1, 2) and ranks > 1:
        _stepped(job.zero_stage, engine, ranks, job.parallel.ep)
    elif job.zero_stage == 3:
        shard = zero.get("mics_shard_size", -1)
        _held(list(engine.module.parameters()), shard if shard > 0 else ranks, job.parallel.ep)
        if (copies := second_copy_ranks(job)) > 1:
            _groups(list(engine.module.parameters()), copies)
        if "zero_quantized_gradients" in rounding(job.ds_config):
            _hosts(get_accelerator().device_count(), int(os.environ["LOCAL_WORLD_SIZE"]))


def second_copy_ranks(job: Job) -> int:
    """Ranks that share a second copy of the weights; 1: there is none."""
    size = section(job.ds_config, ZERO).get("zero_hpz_partition_size", 1) if job.zero_stage == 3 else 1
    return min(int(size), job.world_size)  # as _create_zero_param_parallel_group in utils/groups.py has it


def check_second_copy(parameters: list[Any], ranks: int) -> None:
    """Raise TrainingError unless, after a forward, released weights have a second copy shared by this many ranks."""
    copies = [weight for weight in parameters if weight.ds_secondary_tensor is not None]
    # Weights that stay gathered after a forward have no second copy.
    trained = (weight for weight in parameters if weight.requires_grad)
    released = [weight for weight in trained if weight.ds_status.name == "NOT_AVAILABLE"]
    parts = ((weight.ds_secondary_tensor.ds_numel, weight.ds_numel_aligned) for weight in copies)
    wrong = [part for part, whole in parts if part * ranks != whole]
    if wrong or (released and not copies):
        what = f"DeepSpeed keeps a second copy of {len(copies)} weights, of which {len(wrong)} are not"
        raise TrainingError(f"{what} shared by {ranks} ranks", where=SECOND_COPY, hint=HINT)


def _stepped(stage: int, engine: Any, ranks: int, ep: int) -> None:
    """Raise TrainingError unless this rank's optimizer steps its share of the trained weights. ep: ranks that divide a
    layer's experts."""
    trained = sum(
        getattr(weight, "ds_numel", weight.numel()) * copies(weight, ep)
        for weight in engine.module.parameters()
        if weight.requires_grad
    )
    optimizer = engine.optimizer
    # In a pipeline in bf16 stage 1 is BF16_Optimizer's (runtime/bf16_optimizer.py).
    parts = getattr(optimizer, "single_partition_of_fp32_groups", None)
    parts = getattr(optimizer, "fp32_groups_flat_partition", []) if parts is None else parts
    stepped = sum(part.numel() for part in parts)
    if not 0 <= stepped * ranks - trained <= PADDING * ranks * len(parts):
        what = f"this rank steps {stepped:,} of {trained:,} weights, which {ranks} ranks should share at ZeRO-{stage}"
        raise TrainingError(what, where=STAGE, hint=HINT)


def _held(parameters: list[Any], ranks: int, ep: int) -> None:
    """Raise TrainingError unless this rank holds its share of every weight. ep: as in `_stepped`."""
    shared = [weight for weight in parameters if hasattr(weight, "ds_tensor")]
    held = sum(weight.ds_tensor.ds_numel for weight in shared)
    total = sum(weight.ds_numel * copies(weight, ep) for weight in shared)
    whole = len(parameters) - len(shared)
    if whole or not 0 <= held * ranks - total <= PADDING * ranks * len(parameters):
        what = (
            f"this rank holds {held:,} of {total:,} elements, and {whole} of {len(parameters)} weights whole, "
            f"which {ranks} ranks should share at ZeRO-3"
        )
        raise TrainingError(what, where=STAGE, hint=HINT)


def _groups(parameters: list[Any], ranks: int) -> None:
    """Raise TrainingError unless groups of this many ranks share the second copies."""
    groups = {weight.ds_zero_param_process_group for weight in parameters}
    sizes = {dist.get_world_size(group) if group else 1 for group in groups}
    if sizes != {ranks}:
        what = f"DeepSpeed shares the second copy of the weights by {sorted(sizes)} ranks, not by {ranks}"
        raise TrainingError(what, where=SECOND_COPY, hint=HINT)


def _hosts(seen: int, ranks: int) -> None:
    """Raise TrainingError unless a rank sees as many GPUs as its host has ranks.

    4-bit gradients go through groups of as many neighbouring ranks as a rank sees GPUs, which are taken for a host's
    (_get_local_all_to_all_group in utils/groups.py): other groups would sum over other ranks.
    """
    if seen != ranks:
        what = f"a rank sees {seen} GPUs, and its host has {ranks} ranks: DeepSpeed would take the one for the other"
        raise TrainingError(what, where=f"{ZERO}.zero_quantized_gradients", hint="Take --preset zero3-qwz.")

"""What ZeRO has divided among ranks, looked at: with nothing divided the losses would be the same.

Where a comment names a file, it is DeepSpeed 0.19's.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dsrun.ds_config import ZERO, section
from dsrun.errors import TrainingError
from dsrun.job.job import Job

PADDING = 64
"""Elements a rank and group, or weight, by which DeepSpeed may fill a part up, at most; it aligns to 2 and 16."""
STAGE, SECOND_COPY = f"{ZERO}.stage", f"{ZERO}.zero_hpz_partition_size"
HINT = "Train with another preset, and report it with the version of DeepSpeed."


def engaged(job: Job, engine: Any) -> None:
    """Raise TrainingError unless the ranks divide what the job's stage says.

    Stages 1 and 2: the fp32 weights that an optimizer steps. Stage 3: every weight; with a second copy of the weights
    (hpZ), the groups that share one. engine: DeepSpeed's own.
    """
    zero = section(job.ds_config, ZERO)
    ranks = job.world_size // (job.parallel.tp * job.parallel.pp)
    if job.zero_stage in (1, 2) and ranks > 1:
        _stepped(job.zero_stage, engine, ranks)
    elif job.zero_stage == 3:
        shard = zero.get("mics_shard_size", -1)
        _held(list(engine.module.parameters()), shard if shard > 0 else ranks)
        if (copies := second_copy_ranks(job)) > 1:
            _groups(list(engine.module.parameters()), copies)


def second_copy_ranks(job: Job) -> int:
    """Ranks that share a second copy of the weights; 1: there is none."""
    size = section(job.ds_config, ZERO).get("zero_hpz_partition_size", 1) if job.zero_stage == 3 else 1
    return min(int(size), job.world_size)  # as _create_zero_param_parallel_group in utils/groups.py has it


def check_second_copy(parameters: list[Any], ranks: int) -> None:
    """After a forward: raise TrainingError unless the weights that are not gathered any more have their second copy,
    shared by this many ranks."""
    copies = [one for one in parameters if one.ds_secondary_tensor is not None]
    released = [one for one in parameters if one.ds_status.name == "NOT_AVAILABLE" and one.requires_grad]
    wrong = [one for one in copies if one.ds_secondary_tensor.ds_numel * ranks != one.ds_numel_aligned]
    if wrong or (released and not copies):
        what = f"DeepSpeed keeps a second copy of {len(copies)} weights, of which {len(wrong)} are not"
        raise TrainingError(f"{what} shared by {ranks} ranks", where=SECOND_COPY, hint=HINT)


def _stepped(stage: int, engine: Any, ranks: int) -> None:
    trained = sum(
        getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters() if one.requires_grad
    )
    optimizer = engine.optimizer
    # In a pipeline in bf16 stage 1 is BF16_Optimizer's (runtime/bf16_optimizer.py).
    parts = getattr(optimizer, "single_partition_of_fp32_groups", None)
    parts = getattr(optimizer, "fp32_groups_flat_partition", []) if parts is None else parts
    own = sum(one.numel() for one in parts)
    if not 0 <= own * ranks - trained <= PADDING * ranks * len(parts):
        what = f"this rank steps {own:,} of {trained:,} weights, which {ranks} ranks should share at ZeRO-{stage}"
        raise TrainingError(what, where=STAGE, hint=HINT)


def _held(parameters: list[Any], ranks: int) -> None:
    whole = [one for one in parameters if not hasattr(one, "ds_tensor")]
    own = sum(one.ds_tensor.ds_numel for one in parameters if hasattr(one, "ds_tensor"))
    total = sum(one.ds_numel for one in parameters if hasattr(one, "ds_tensor"))
    if whole or not 0 <= own * ranks - total <= PADDING * ranks * len(parameters):
        what = (
            f"this rank holds {own:,} of {total:,} elements, and {len(whole)} of {len(parameters)} weights whole, "
            f"which {ranks} ranks should share at ZeRO-3"
        )
        raise TrainingError(what, where=STAGE, hint=HINT)


def _groups(parameters: list[Any], ranks: int) -> None:
    sizes = {
        dist.get_world_size(one.ds_zero_param_process_group) if one.ds_zero_param_process_group else 1
        for one in parameters
    }
    if sizes != {ranks}:
        what = f"DeepSpeed shares the second copy of the weights by {sorted(sizes)} ranks, not by {ranks}"
        raise TrainingError(what, where=SECOND_COPY, hint=HINT)

"""The sizes of ZeRO's buckets, for a model and the memory that is left beside it.

They are constant, and no larger than they have to be (ZeRO-R's constant buffers, arXiv:1910.02054, section 6.2).

A bucket decides how much is sent at once, never what: sums are of the same numbers. Past LARGEST elements messages get
no faster. What is fetched ahead at ZeRO-3 is a layer, so that one is gathered while another computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.plan import TIGHT_FROM
from dsrun.planner.setup import Setup
from dsrun.words import GIB

LARGEST, SMALLEST = 200_000_000, 20_000_000
"""Elements. 0.4 GB of 16 bits; smaller than 40 MB messages cost more than they save."""
USELESS = "messages get no faster beyond it"
STEPS = (LARGEST, LARGEST // 2, LARGEST // 4, SMALLEST)
AHEAD = 1 / 16
"""Share of the memory that is left which may hold weights that are fetched ahead."""


class Size(NamedTuple):
    """A key of zero_optimization, its elements, and why."""

    key: str
    elements: int
    why: str


def bucket_sizes(setup: Setup, gpu_bytes: float) -> Iterator[Size]:
    """Sizes for DeepSpeed's stages 1 to 3 on GPUs with `gpu_bytes` free; none for other engines and stages.

    setup: with the requested micro batch.
    """
    if setup.engine != "deepspeed" or setup.stage == 0:
        return
    usable = TIGHT_FROM * gpu_bytes
    # The whole plan with each size, and not the bucket's bytes alone: a bucket counts twice with overlap_comm, and at
    # another moment than the peak not at all.
    fits = [size for size in STEPS if gpu_memory(setup.changed(reduce_bucket=size)).smi <= usable]
    room = fits[0] if fits else SMALLEST
    bucket = min(room, _even(max(setup.trained, SMALLEST)))
    left = usable - gpu_memory(setup.changed(reduce_bucket=bucket)).smi
    if bucket < room:
        why = f"{setup.trained:.3g} trained weights"
    elif room < LARGEST:
        why = f"{gpu_bytes / GIB:.3g} GiB of a GPU are free"
    else:
        why = USELESS
    yield Size("reduce_bucket_size", bucket, why)
    if setup.stage < 3:
        yield Size("allgather_bucket_size", bucket, why)
        return
    layer = setup.shape.layer_parameters
    most = max(SMALLEST, min(LARGEST, int(AHEAD * max(0.0, left) / setup.weight_bytes)))
    why = USELESS if most == LARGEST else f"{max(0.0, left) / GIB:.3g} GiB are left"
    if layer <= most:
        why = f"a layer's {layer:.3g} weights"
    yield Size("stage3_prefetch_bucket_size", _even(min(max(layer, SMALLEST), most)), why)


def _even(elements: int) -> int:
    """NCCL wants the halves of a buffer aligned (runtime/zero/stage_1_and_2.py)."""
    return elements + elements % 2

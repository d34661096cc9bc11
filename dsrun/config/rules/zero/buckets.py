"""DS201, DS202 and DS214 to DS217: ZeRO's buckets, and how much of the weights is held at once."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import (
    BYTES,
    OPTIMIZER,
    OVERLAP,
    ZERO,
    device,
    set_to,
    value_or_default,
    written,
)
from dsrun.config.rules.examples import bf16, fp16, zero
from dsrun.config.rules.frame import FAILS, Context, Finding, bad, good, rule
from dsrun.words import GIB

LIVE = f"{ZERO}.stage3_max_live_parameters"
PREFETCH = f"{ZERO}.stage3_prefetch_bucket_size"
FEW_ELEMENTS = 10_000
BIG_BUCKET_GIB = 4
FIXED_OVERLAP = (0, 19, 8)


@rule("DS201", FAILS)
@bad(zero(1, allgather_bucket_size=5), zero(2, allgather_bucket_size=500000001))
@good(zero(1, allgather_bucket_size=50000), zero(2, allgather_bucket_size=0))
def odd_allgather_bucket(context: Context) -> Iterator[Finding]:
    """Stages 1 and 2 assert a multiple of NCCL's start alignment, 2 (runtime/zero/stage_1_and_2.py)."""
    path = f"{ZERO}.allgather_bucket_size"
    size = context.integer(path)
    if size is not None and size % 2 and context.stage in (1, 2):
        yield Finding(
            path,
            f"{size} is odd",
            f"Set an even number of elements, such as {size + 1}.",
            set_to(context, path, size + 1, safe=True),
        )


@rule("DS202", "warning")
@bad({"_version": "0.18", **zero(1, overlap_comm=True)}, {"_version": "0.19.2", **zero(2, overlap_comm=True)})
@good(zero(2, overlap_comm=True), {"_version": "0.19.8", **zero(2, overlap_comm=True)})
def overlap_below_stage_3(context: Context) -> Iterator[Finding]:
    """The reduction read buckets that were still being filled (DeepSpeed issues 5523, 5545, 7965 and 8061).

    runtime/zero/stage_1_and_2.py (average_tensor) of 0.19.8 waits for every stream that fills one and keeps the
    buffers alive; the first release that does so isn't known, so for 0.19 this is a note.
    """
    if not (context.flag(OVERLAP) and context.stage in (1, 2)):
        return
    if context.version >= FIXED_OVERLAP:
        return
    if context.version >= FIXED_OVERLAP[:2]:
        yield Finding(
            OVERLAP,
            f"gave wrong gradients at stage {context.stage} up to early 0.19 releases",
            "Use 0.19.8 or newer: https://github.com/deepspeedai/DeepSpeed/issues/8061",
            severity="note",
        )
    else:
        yield Finding(
            OVERLAP,
            f"gives wrong gradients at stage {context.stage}",
            "Set it to false, which is slower but correct: https://github.com/deepspeedai/DeepSpeed/issues/5523",
            set_to(context, OVERLAP, value=False),
        )


@rule("DS214", "warning")
@bad(zero(2, reduce_bucket_size=500), zero(3, reduce_bucket_size=9999))
@good(zero(2, reduce_bucket_size=10000), zero(3, allgather_bucket_size=200))
def tiny_bucket(context: Context) -> Iterator[Finding]:
    """A bucket counts elements, and each full one is sent separately (runtime/zero/stage3.py)."""
    keys = {1: ("reduce", "allgather"), 2: ("reduce", "allgather"), 3: ("reduce",)}
    for key in keys.get(context.stage, ()):
        path = f"{ZERO}.{key}_bucket_size"
        size = context.integer(path)
        if size is not None and 0 <= size < FEW_ELEMENTS:
            yield Finding(
                path,
                f"{size} elements: each weight is sent by itself, which is slow",
                "It counts elements, not MB; 5e7 to 5e8 is usual.",
            )


@rule("DS215", "note")
@bad(
    {**zero(2, reduce_bucket_size=2147483648), **bf16()},
    {"_version": "0.19", **zero(1, reduce_bucket_size=1073741824, overlap_comm=True), **fp16()},
)
@good(
    {**zero(2, reduce_bucket_size=2147483647), **bf16()}, {**zero(3, reduce_bucket_size=1073741824), **bf16()}
)
def big_bucket(context: Context) -> Iterator[Finding]:
    """A contiguous bucket is allocated whole on each GPU (_setup_for_real_optimizer in runtime/zero/stage3.py).

    Stages 1 and 2 keep two when communication overlaps (setup_buckets in runtime/zero/stage_1_and_2.py).
    """
    path = f"{ZERO}.reduce_bucket_size"
    size = context.integer(path)
    if size is None or not context.stage or context.precision is None:
        return
    if context.flag(f"{ZERO}.contiguous_gradients") is False and device(context, OPTIMIZER) is None:
        return
    count, why = 1, ""
    if context.flag(OVERLAP) and context.stage < 3:
        count, why = 2, ", twice as communication overlaps"
    gib = size * BYTES[context.precision] * count / GIB
    if gib >= BIG_BUCKET_GIB:
        yield Finding(
            path,
            f"{size} elements take {gib:.1f} GiB on each GPU{why}",
            "5e7 to 5e8 is usual, and seldom slower.",
        )


@rule("DS216", "warning")
@bad(zero(3, stage3_prefetch_bucket_size=2e9), zero(3, stage3_max_live_parameters=49999999))
@good(zero(3, stage3_prefetch_bucket_size=1e9), zero(3, stage3_max_live_parameters=50000000))
def prefetch_above_max_live_parameters(context: Context) -> Iterator[Finding]:
    """Never more is prefetched than may be live (fetch_sub_module in partitioned_param_coordinator.py)."""
    live, ahead = value_or_default(context, LIVE), value_or_default(context, PREFETCH)
    if context.stage == 3 and live is not None and ahead is not None and ahead > live >= 0:
        path = LIVE if context.has(LIVE) and not context.has(PREFETCH) else PREFETCH
        yield Finding(
            written(context, path),
            f"{ahead:.0f} elements are to be fetched ahead and only {live:.0f} may be live",
            f"Set stage3_prefetch_bucket_size to {live:.0f} or less, or stage3_max_live_parameters to "
            f"{ahead:.0f} or more.",
        )


@rule("DS217", "warning")
@bad(
    zero(3, stage3_model_persistence_threshold=99999),
    zero(3, param_persistence_threshold=11, model_persistence_threshold=10),
)
@good(
    zero(3, stage3_model_persistence_threshold=100000),
    zero(3, param_persistence_threshold=10, model_persistence_threshold=10),
)
def parameter_threshold_above_the_model_threshold(context: Context) -> Iterator[Finding]:
    """A weight above the model's limit is always partitioned (mark_persistent_parameters, parameter_offload.py)."""
    path, limit = f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.stage3_model_persistence_threshold"
    single, whole = value_or_default(context, path), value_or_default(context, limit)
    if context.stage == 3 and single is not None and whole is not None and single > whole:
        yield Finding(
            written(context, limit),
            f"{whole:.0f} for all weights is below stage3_param_persistence_threshold, {single:.0f} for each",
            f"Set it to {single:.0f} or more, or the threshold of one weight to {whole:.0f} or less.",
        )

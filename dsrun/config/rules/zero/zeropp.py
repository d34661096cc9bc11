"""DS24x: ZeRO++ (a second partition, quantised weights and gradients) and MiCS."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import SCATTER, STAGE, ZERO, above_1, divisors, removal, set_to
from dsrun.config.rules.examples import bf16, fp16, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, groups, needs, put, report, without_effect
from dsrun.words import listed

PARTITION = f"{ZERO}.zero_hpz_partition_size"
WEIGHTS = f"{ZERO}.zero_quantized_weights"
FROZEN = f"{ZERO}.zero_quantized_nontrainable_weights"
GRADIENTS = f"{ZERO}.zero_quantized_gradients"
QUANTISED = (WEIGHTS, FROZEN, GRADIENTS)
SHARD = f"{ZERO}.mics_shard_size"
HIERARCHY = f"{ZERO}.mics_hierarchical_params_gather"
NEW = (0, 10)
FIXED_QUANTISER = (0, 19, 6)
LAST_MICS = (0, 19, 6)


def _per_node(context: Context) -> int | None:
    """GPUs of a node; None where that is unknown or uneven."""
    world, nodes = context.world_size, context.setting.nodes
    return world // nodes if world and nodes and world % nodes == 0 else None


def _has_shards(context: Context) -> bool:
    """Whether MiCS is on."""
    return (context.integer(SHARD) or 0) > 0


@rule("DS241", DIFFERS, since=NEW)
@bad(zero(2, zero_hpz_partition_size=2), zero(2, zero_quantized_weights=True))
@good(
    zero(2, zero_hpz_partition_size=1, zero_quantized_weights=False),
    zero(3, zero_hpz_partition_size=2, zero_quantized_weights=True),
)
def zeropp_below_stage_3(context: Context) -> Iterator[Finding]:
    """ZeRO++ belongs to stage 3; below, it is silently ignored (_configure_zero_optimizer in runtime/engine.py)."""
    given = [path for path in QUANTISED if context.flag(path)]
    if above_1(context, PARTITION):
        given.append(PARTITION)
    if context.stage < 3 and given:
        names = listed([path.rpartition(".")[2] for path in given])
        yield Finding(
            given[0],
            f"stage {context.stage} ignores {names}",
            "Set zero_optimization.stage to 3, or remove it.",
            removal(context, *given, safe=False) if context.stage else set_to(context, STAGE, 3),
        )


@rule("DS242", FAILS, since=NEW)
@bad(zero(3, zero_hpz_partition_size=3), {"_world_size": 3, **zero(3, zero_hpz_partition_size=2)})
@good(zero(3, zero_hpz_partition_size=2), zero(3, zero_hpz_partition_size=5))
def partition_does_not_divide_gpus(context: Context) -> Iterator[Finding]:
    """The second partition's groups must divide all ranks (_create_zero_param_parallel_group in utils/groups.py).

    A size above the number of ranks counts as that number.
    """
    size, world = context.integer(PARTITION), context.world_size
    if context.stage == 3 and size and world and world % min(size, world):
        yield Finding(
            PARTITION,
            f"groups of {size} don't divide {world} GPUs",
            f"Set it to one of {divisors(world)}; usually the GPUs of a node.",
        )


@rule("DS243", "warning", since=NEW)
@bad(zero(3, zero_hpz_partition_size=8), {"_nodes": 2, **zero(3, zero_hpz_partition_size=4)})
@good(
    {"_nodes": 1, **zero(3, zero_hpz_partition_size=4)}, {"_nodes": 2, **zero(3, zero_hpz_partition_size=2)}
)
def partition_larger_than_a_node(context: Context) -> Iterator[Finding]:
    """The second partition saves traffic only inside a node (_create_zero_param_parallel_group in utils/groups.py)."""
    size, world, local = context.integer(PARTITION), context.world_size, _per_node(context)
    if context.stage != 3 or size is None or world is None:
        return
    if size > world:
        yield Finding(
            PARTITION,
            f"{size} is more than the {world} GPUs, and counts as {world}",
            f"Set it to the GPUs of a node, {world} at most.",
        )
    elif local and size > local:
        yield Finding(
            PARTITION,
            f"groups of {size} span nodes of {local} GPUs, which saves no traffic between them",
            f"Set it to {local}.",
            set_to(context, PARTITION, local),
        )


@rule("DS244", FAILS, since=NEW)
@bad(
    {"_device": "cpu", **zero(3, zero_quantized_weights=True)},
    {"_device": "cpu", **zero(3, zero_quantized_nontrainable_weights=True)},
)
@good(
    {"_device": "cuda", **zero(3, zero_quantized_weights=True)},
    {"_device": "cpu", **zero(3, zero_quantized_weights=False)},
)
def quantised_on_the_cpu(context: Context) -> Iterator[Finding]:
    """The quantiser is a CUDA kernel (CUDAQuantizer in runtime/zero/partition_parameters.py).

    Gradients only meet it between nodes (__avg_scatter_grads in runtime/zero/stage3.py), and are full size till then.
    """
    if context.stage != 3 or context.setting.device == "cuda":
        return
    for path in filter(context.flag, QUANTISED):
        if context.setting.device is None:
            yield Finding(path, "needs NVIDIA GPUs", "Remove it where it runs on others.", severity="note")
        else:
            yield Finding(
                path,
                "needs NVIDIA GPUs, but there are none",
                "Remove it.",
                removal(context, path, safe=False),
                effect=DIFFERS if path == GRADIENTS else "",
            )


@rule("DS245", "warning", since=NEW)
@bad({"_nodes": 1, **zero(3, zero_quantized_gradients=True)})
@good(
    {"_nodes": 2, **fp16(), **zero(3, zero_quantized_gradients=True)}, zero(3, zero_quantized_gradients=True)
)
def quantised_gradients_on_one_node() -> Table:
    """One node reduces them at full size (num_nodes in __avg_scatter_grads, runtime/zero/stage3.py)."""
    conditions = (when.on(GRADIENTS), when.at_stage(3), lambda context: context.setting.nodes == 1)
    return without_effect(GRADIENTS, " on a single node", conditions)


@rule("DS246", FAILS, since=NEW)
@bad(zero(3, zero_quantized_gradients=True, reduce_scatter=False))
@good(zero(3, zero_quantized_gradients=True, reduce_scatter=True), zero(3, zero_quantized_gradients=True))
def quantised_gradients_without_scatter() -> Table:
    """The all-to-all that carries them needs reduce_scatter, by an assertion (runtime/zero/stage3.py, __init__)."""
    text = "reduce_scatter, which is false. Set reduce_scatter to true, its default."
    return needs(GRADIENTS, text, (when.at_stage(3), when.off(SCATTER)), put(SCATTER, True))


@rule("DS269", DIFFERS, since=NEW)
@bad(
    {"_nodes": 2, **bf16(), **zero(3, zero_quantized_gradients=True)},
    {"_nodes": 2, **fp16(), "communication_data_type": "fp32", **zero(3, zero_quantized_gradients=True)},
)
@good(
    {"_nodes": 2, **fp16(), **zero(3, zero_quantized_gradients=True)},
    {"_nodes": 2, **bf16(), "communication_data_type": "fp16", **zero(3, zero_quantized_gradients=True)},
    {"_nodes": 1, **bf16(), **zero(3, zero_quantized_gradients=True)},
    {"_nodes": 2, **bf16(), **zero(3)},
)
def quantised_gradients_that_are_not_fp16(context: Context) -> Iterator[Finding]:
    """The kernel takes every gradient's bits for fp16 (ds_swizzle_quant in csrc/quantization/pt_binding.cpp).

    Those of bf16 and fp32 come out as other numbers. A gradient is cast to communication_data_type before, which is
    the precision of the training unless it is given (all_to_all_quant_reduce in runtime/comm/coalesced_collectives.py).
    """
    sent = (context.text("communication_data_type") or context.precision or "fp16").lower()
    sends = context.flag(GRADIENTS) and context.stage == 3 and context.setting.nodes != 1
    if sends and sent != "fp16" and not when.on_cpu(context):
        yield Finding(
            GRADIENTS,
            f"reads {sent} gradients as if they were fp16, and trains on other numbers",
            "Remove it, or train in fp16.",
            removal(context, GRADIENTS, safe=False),
            # On one node it does nothing (DS245).
            severity="" if context.setting.nodes else "warning",
        )


@rule("DS270", DIFFERS, since=NEW)
@bad({"_version": "0.18", **bf16(), **zero(3, zero_quantized_weights=True)})
@good(
    {"_version": "0.18", **fp16(), **zero(3, zero_quantized_weights=True)},
    {"_version": "0.19.6", **bf16(), **zero(3, zero_quantized_weights=True)},
)
def quantised_weights_that_are_not_fp16(context: Context) -> Iterator[Finding]:
    """The kernel took every weight's bits for fp16 before 0.19.6 (CUDAQuantizer, runtime/zero/partition_parameters.py).

    Those of bf16 and fp32 came out as other numbers, in fp16, which the next layer refused.
    """
    path = next((path for path in (WEIGHTS, FROZEN) if context.flag(path)), None)
    if (
        path is None
        or context.stage != 3
        or context.version >= FIXED_QUANTISER
        or context.precision in (None, "fp16")
        or when.on_cpu(context)
    ):
        return
    yield Finding(
        path,
        f"reads {context.precision} weights as if they were fp16 before 0.19.6",
        "Use DeepSpeed 0.19.6 or newer, or remove it.",
    )


@rule("DS247", DIFFERS, until=LAST_MICS)
@bad(
    {"_version": "0.18", **zero(2, mics_shard_size=2)},
    {"_version": "0.10", "zero_optimization": {"mics_shard_size": 1}},
)
@good({"_version": "0.18", **zero(3, mics_shard_size=2)}, {"_version": "0.18", **zero(2, mics_shard_size=-1)})
def mics_below_stage_3() -> Table:
    """MiCS is a form of stage 3; below, it is silently ignored (_configure_zero_optimizer in runtime/engine.py)."""
    text = "stage {stage} ignores it. Set zero_optimization.stage to 3, or remove it."
    return report(SHARD, text, (_has_shards, when.below_stage(3)), put(STAGE, 3))


@rule("DS248", FAILS, until=LAST_MICS)
@bad({"_version": "0.18", **zero(3, mics_shard_size=3)}, {"_version": "0.18", **zero(3, mics_shard_size=8)})
@good(
    {"_version": "0.18", **zero(3, mics_shard_size=4)},
    {"_version": "0.18", "_world_size": None, **zero(3, mics_shard_size=3)},
)
def shards_do_not_divide_gpus() -> Table:
    """The shard groups must divide all ranks (_generate_mics_config in runtime/zero/mics_utils.py, up to 0.18)."""
    text = "shards of {value} don't divide {gpus} GPUs. Set it to one of {sizes}."
    return groups(SHARD, text, (when.at_stage(3), _has_shards))


@rule("DS249", "warning", until=LAST_MICS)
@bad({"_version": "0.18", **zero(3, mics_hierarchical_params_gather=True)})
@good(
    {"_version": "0.18", **zero(3, mics_shard_size=2, mics_hierarchical_params_gather=True)},
    {"_version": "0.18", **zero(3, mics_hierarchical_params_gather=False)},
)
def hierarchical_gather_without_shards() -> Table:
    """Gathering in two steps is part of MiCS, which a shard size turns on (runtime/zero/mics.py, up to 0.18)."""
    conditions, advice = (when.on(HIERARCHY), when.unless(_has_shards)), "Set mics_shard_size, or remove it."
    return without_effect(HIERARCHY, " without mics_shard_size", conditions, advice)

"""DS26x: how gradients travel between the GPUs, and who counts the passes."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.batch import SEQUENCE
from dsrun.config.rules.common import BYTES, OVERLAP, SCATTER, ZERO, above_1, named, removal, setting
from dsrun.config.rules.examples import ZERO_1, ZERO_2, bf16, deep, fp16, made, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Hit, rule

PRESCALE = "prescale_gradients"
FACTOR = "gradient_predivide_factor"
OPERATION = "gradient_allreduce_op"
MANAGED = "managed_gradient_accumulation"
DTYPE = "communication_data_type"
SEQUENCE_DTYPE = "seq_parallel_communication_data_type"
NEW = (0, 19)


def _scatters(context: Context) -> bool:
    """Whether reduce_scatter holds; it does where nothing is said."""
    return context.flag(SCATTER) is not False


def _sums(context: Context) -> bool:
    return (context.text(OPERATION) or "").lower() == "sum"


def _factor(context: Context) -> float:
    """gradient_predivide_factor, 1 where it isn't set."""
    return context.number(FACTOR) or 1


@rule(
    "DS261",
    "error",
    FAILS,
    bad=[
        {**ZERO_2, "gradient_predivide_factor": 2.0},
        {**zero(3), "gradient_predivide_factor": 0.5},
        {**zero(2, reduce_scatter=True), "prescale_gradients": True},
        {**zero(3), "prescale_gradients": True},
    ],
    good=[
        {**zero(2, reduce_scatter=False), "prescale_gradients": True},
        {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 2.0},
        {**ZERO_2, "gradient_predivide_factor": 1.0, "prescale_gradients": False},
        {**ZERO_1, "prescale_gradients": True},
        {**zero(0), "gradient_predivide_factor": 2.0},
        {**ZERO_2, "gradient_predivide_factor": 2.0, "gradient_allreduce_op": "sum"},
    ],
)
def scaling_with_reduce_scatter(context: Context) -> Iterator[Hit]:
    """Stages 2 and 3 assert that reduce_scatter divides by itself (runtime/zero/stage_1_and_2.py and stage3.py).

    Gradients that are added up (gradient_allreduce_op) aren't divided, and aren't asked for it.
    """
    if context.stage not in (2, 3) or not _scatters(context) or _sums(context):
        return
    given = {FACTOR: f"{_factor(context):g}"} if _factor(context) != 1 else {}
    given |= {PRESCALE: "true"} if context.flag(PRESCALE) else {}
    for key, value in given.items():
        yield Hit(
            key,
            f"{value} doesn't go with reduce_scatter at stage {context.stage}",
            f"Remove {key}, or set zero_optimization.reduce_scatter to false.",
            removal(context, key, safe=False),
        )


@rule(
    "DS262",
    "error",
    DIFFERS,
    bad=[
        {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 4},
        {"_world_size": 2, **zero(3, reduce_scatter=False), "gradient_predivide_factor": 2.0},
    ],
    good=[
        {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 2},
        {**zero(2, reduce_scatter=False), "gradient_predivide_factor": 4},
        {"_world_size": None, **zero(3, reduce_scatter=False)} | {"gradient_predivide_factor": 4},
        {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 4} | {"prescale_gradients": True},
        {"_world_size": 1, **zero(3, reduce_scatter=False)} | {"gradient_predivide_factor": 1},
    ],
)
def factor_that_is_never_undone(context: Context) -> Iterator[Hit]:
    """Stage 3 multiplies by the factor again unless it is the number of ranks, by which it has divided already.

    So gradients come out that many times too small (__avg_scatter_contiguous_grads in runtime/zero/stage3.py).
    """
    world, factor = context.world_size, _factor(context)
    if context.stage == 3 and not _scatters(context) and not context.flag(PRESCALE) and factor == world != 1:
        yield Hit(
            FACTOR,
            f"{factor:g} is the number of GPUs: stage 3 makes the gradients {factor:g} times too small",
            f"Remove it, or set another factor than {factor:g}.",
            removal(context, FACTOR, safe=False),
        )


@rule(
    "DS263",
    "warning",
    bad=[
        {**ZERO_1, "prescale_gradients": True},
        {**ZERO_1, "gradient_predivide_factor": 8},
        {"prescale_gradients": True, "gradient_predivide_factor": 8},
        {**zero(2, reduce_scatter=False), "prescale_gradients": True, "gradient_predivide_factor": 8},
        {"gradient_allreduce_op": "sum", "prescale_gradients": True},
    ],
    good=[
        {"prescale_gradients": True},
        {"gradient_predivide_factor": 8},
        {**zero(1, reduce_scatter=False), "prescale_gradients": True},
        {**ZERO_1, "prescale_gradients": False, "gradient_predivide_factor": 1},
    ],
)
def scaling_without_effect(context: Context) -> Iterator[Hit]:
    """Stage 1 with reduce_scatter and summed gradients look at neither; prescaling never looks at the factor.

    Source: gradient_reduction_w_predivide and average_tensor in runtime/zero/stage_1_and_2.py, allreduce_bucket in
    runtime/engine.py.
    """
    given = [PRESCALE] if context.flag(PRESCALE) else []
    given += [FACTOR] if _factor(context) != 1 else []
    if _sums(context):
        why = "gradient_allreduce_op is sum, and nothing is divided"
    elif context.stage == 1 and _scatters(context):
        why = "stage 1 divides by itself while reduce_scatter is true"
    elif len(given) == 2 and not (context.stage in (2, 3) and _scatters(context)):
        given, why = [FACTOR], "prescale_gradients divides by the number of GPUs at once"
    else:
        return
    for key in given:
        yield Hit(key, f"has no effect: {why}", "Remove it.", removal(context, key))


@rule(
    "DS264",
    "error",
    REFUSED,
    bad=[
        {**zero(3), "gradient_allreduce_op": "sum"},
        {"gradient_allreduce_op": "SUM", **deep(), **ZERO_1},
        {
            "gradient_allreduce_op": "sum",
            **made("AdamW", lr=1e-4),
            **zero(
                2,
                offload_optimizer={"device": "cpu"},
                zenflow={"select_strategy": "step", "select_interval": 4, "update_interval": 2},
            ),
        },
    ],
    good=[
        {**zero(3), "gradient_allreduce_op": "mean"},
        {**ZERO_2, "gradient_allreduce_op": "sum"},
        {"gradient_allreduce_op": "sum", "compile": {"deepcompile": False}},
    ],
    since=NEW,
)
def sum_where_it_cannot_be(context: Context) -> Iterator[Hit]:
    """Stage 3, ZenFlow and DeepCompile average, always (_do_error_check in runtime/config.py)."""
    if not _sums(context):
        return
    reasons = {
        "stage 3": context.stage == 3,
        "zenflow": isinstance(context.get(f"{ZERO}.zenflow"), dict),
        "deepcompile": bool(context.flag("compile.deepcompile")),
    }
    if given := [name for name, holds in reasons.items() if holds]:
        yield Hit(
            OPERATION,
            f"sum doesn't go with {named(given)}",
            "Set it to mean, and the learning rate to what fits an average.",
            setting(context, OPERATION, "mean"),
        )


@rule(
    "DS265",
    "note",
    bad=[{"gradient_allreduce_op": "sum"}, {"_world_size": None, "gradient_allreduce_op": "SUM"}],
    good=[{"gradient_allreduce_op": "mean"}, {"_world_size": 1, "gradient_allreduce_op": "sum"}],
    since=NEW,
)
def summed_gradients(context: Context) -> Iterator[Hit]:
    """Added up, not averaged: each GPU more makes them larger (gradient_average in runtime/engine.py)."""
    if _sums(context) and context.world_size != 1:
        times = f"{context.world_size} times" if context.world_size else "as many times as there are GPUs"
        yield Hit(
            OPERATION,
            f"sum makes gradients {times} as large as their mean",
            "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
        )


@rule(
    "DS266",
    "error",
    FAILS,
    bad=[
        {**zero(1, overlap_comm=True), "managed_gradient_accumulation": False},
        {"zero_optimization": {"overlap_comm": True}, "managed_gradient_accumulation": False},
    ],
    good=[
        {**zero(2, overlap_comm=True), "managed_gradient_accumulation": False},
        {**zero(1, overlap_comm=False), "managed_gradient_accumulation": False},
        {**ZERO_1, "managed_gradient_accumulation": False},
        {**zero(1, overlap_comm=True), "managed_gradient_accumulation": True},
    ],
    since=NEW,
)
def unmanaged_accumulation_with_overlap(context: Context) -> Iterator[Hit]:
    """The caller counts the passes, and only stage 2 and 3 overlap then (_do_sanity_check in runtime/engine.py)."""
    if context.flag(MANAGED) is False and context.flag(OVERLAP) and context.stage < 2:
        yield Hit(
            MANAGED,
            f"false doesn't go with overlap_comm at stage {context.stage}",
            "Set zero_optimization.overlap_comm to false, or remove managed_gradient_accumulation.",
            setting(context, OVERLAP, value=False),
        )


@rule(
    "DS267",
    "note",
    bad=[
        {**bf16(), "communication_data_type": "fp32"},
        {**fp16(), "communication_data_type": "FP32"},
        {"communication_data_type": "bf16"},
        {"communication_data_type": "fp16"},
        {**bf16(), "communication_data_type": "fp16"},
    ],
    good=[
        {**bf16(), "communication_data_type": "bf16"},
        {"communication_data_type": "FP32"},
        bf16(),
        {**fp16(), "communication_data_type": "bf16"},
    ],
)
def communication_in_another_precision(context: Context) -> Iterator[Hit]:
    """Gradients are converted for the reduction and back (communication_data_type in runtime/engine.py).

    fp16 that nobody scales overflows at 65504: of bf16 or fp32 gradients this is a warning.
    """
    asked, own = (context.text(DTYPE) or "").lower(), context.precision
    if own is None or asked not in BYTES or asked == own:
        return
    if asked == "fp16":
        yield Hit(
            DTYPE,
            f"fp16 overflows above 65504, and {own} training has no loss scale against it",
            f"Set it to {own}, or remove it.",
            removal(context, DTYPE, safe=False),
            severity="warning",
        )
    elif asked == "fp32":
        yield Hit(DTYPE, f"fp32 doubles what {own} gradients take on the way", f"Remove it to send {own}.")
    elif own == "fp32":
        yield Hit(DTYPE, "bf16 rounds fp32 gradients to 8 bits on the way", "Remove it to send fp32.")


@rule(
    "DS268",
    "note",
    bad=[
        {"seq_parallel_communication_data_type": "bf16"},
        {"sequence_parallel_size": 1, "seq_parallel_communication_data_type": "fp16"},
        {"sequence_parallel_size": 2, "data_parallel_size": 2, **bf16(), "communication_data_type": "bf16"},
    ],
    good=[
        {"seq_parallel_communication_data_type": "fp32"},
        {"communication_data_type": "fp32"},
        {
            "sequence_parallel_size": 2,
            "data_parallel_size": 2,
            "seq_parallel_communication_data_type": "bf16",
        },
    ],
    since=(0, 16),
)
def precision_of_sequence_parallelism(context: Context) -> Iterator[Hit]:
    """With sequence parallelism the one dtype takes the place of the other (_configure_distributed_model, engine.py).

    It may come from an mpu instead of the config, so this is a note.
    """
    parallel = above_1(context, SEQUENCE)
    asked = context.text(SEQUENCE_DTYPE)
    if parallel and context.text(DTYPE):
        used = asked or "fp32"
        yield Hit(
            DTYPE,
            f"has no effect with sequence parallelism: {SEQUENCE_DTYPE}, {used}, takes its place",
            f"Set {SEQUENCE_DTYPE} instead.",
        )
    elif not parallel and asked and asked.lower() != "fp32":
        yield Hit(
            SEQUENCE_DTYPE,
            "has no effect without sequence parallelism",
            f"Set {DTYPE} for data parallelism, or remove it.",
        )

"""DS26x: how gradients are sent between the GPUs, and who counts the passes."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import BYTES, DEEP, OVERLAP, SCATTER, ZERO, above_1, no_effect, removal
from dsrun.config.rules.examples import ZERO_1, ZERO_2, bf16, deep, fp16, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, excludes, put, remove, report
from dsrun.config.rules.running.batch import SEQUENCE

PRESCALE = "prescale_gradients"
FACTOR = "gradient_predivide_factor"
OPERATION = "gradient_allreduce_op"
MANAGED = "managed_gradient_accumulation"
DTYPE = "communication_data_type"
SEQUENCE_DTYPE = "seq_parallel_communication_data_type"


def _scatters(context: Context) -> bool:
    """Whether reduce_scatter is on; it is by default."""
    return context.flag(SCATTER) is not False


def _sums(context: Context) -> bool:
    return (context.text(OPERATION) or "").lower() == "sum"


def _factor(context: Context) -> float:
    """gradient_predivide_factor, 1 where it isn't set."""
    return context.number(FACTOR) or 1


@rule("DS261", FAILS)
@bad(
    {**ZERO_2, "gradient_predivide_factor": 2.0}, {**zero(2, reduce_scatter=True), "prescale_gradients": True}
)
@good(
    {**zero(2, reduce_scatter=False), "prescale_gradients": True},
    {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 2.0},
)
def scaling_with_reduce_scatter(context: Context) -> Iterator[Finding]:
    """Stages 2 and 3 assert this, as reduce_scatter averages by itself (runtime/zero/stage_1_and_2.py and stage3.py).

    Summed gradients (gradient_allreduce_op) aren't divided, and aren't checked.
    """
    if context.stage not in (2, 3) or not _scatters(context) or _sums(context):
        return
    given = {FACTOR: f"{_factor(context):g}"} if _factor(context) != 1 else {}
    given |= {PRESCALE: "true"} if context.flag(PRESCALE) else {}
    for key, value in given.items():
        yield Finding(
            key,
            f"{value} can't be combined with reduce_scatter at stage {context.stage}",
            f"Remove {key}, or set zero_optimization.reduce_scatter to false.",
            removal(context, key, safe=False),
        )


@rule("DS262", DIFFERS)
@bad(
    {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 4},
    {"_world_size": 2, **zero(3, reduce_scatter=False), "gradient_predivide_factor": 2.0},
)
@good(
    {**zero(3, reduce_scatter=False), "gradient_predivide_factor": 2},
    {**zero(2, reduce_scatter=False), "gradient_predivide_factor": 4},
)
def predivide_factor_equal_to_gpus() -> Table:
    """Stage 3 multiplies by the factor again unless it equals the number of ranks, by which it already divided.

    So the gradients are too small by that factor (__avg_scatter_contiguous_grads in runtime/zero/stage3.py).
    """
    text = (
        "{factor:g} is the number of GPUs: stage 3 then makes the gradients {factor:g} times too small. "
        "Remove it, or set another factor than {factor:g}."
    )
    conditions = (
        when.at_stage(3),
        when.off(SCATTER),
        when.unless(when.on(PRESCALE)),
        lambda context: _factor(context) == context.world_size != 1,
    )
    return report(FACTOR, text, conditions, remove(FACTOR, safe=False), factor=_factor)


@rule("DS263", "warning")
@bad({**ZERO_1, "prescale_gradients": True}, {"prescale_gradients": True, "gradient_predivide_factor": 8})
@good({"prescale_gradients": True}, {"gradient_predivide_factor": 8})
def scaling_without_effect(context: Context) -> Iterator[Finding]:
    """Stage 1 with reduce_scatter and summed gradients ignore both; prescaling ignores the factor.

    Source: gradient_reduction_w_predivide and average_tensor in runtime/zero/stage_1_and_2.py, allreduce_bucket in
    runtime/engine.py.
    """
    given = [PRESCALE] if context.flag(PRESCALE) else []
    given += [FACTOR] if _factor(context) != 1 else []
    if _sums(context):
        why = "gradient_allreduce_op is sum, so nothing is divided"
    elif context.stage == 1 and _scatters(context):
        why = "stage 1 divides by itself while reduce_scatter is true"
    elif len(given) == 2 and not (context.stage in (2, 3) and _scatters(context)):
        given, why = [FACTOR], "prescale_gradients divides by the number of GPUs at once"
    else:
        return
    for key in given:
        yield no_effect(context, key, f": {why}")


@rule("DS264", REFUSED, since=(0, 19, 6))
@bad({**zero(3), "gradient_allreduce_op": "sum"}, {"gradient_allreduce_op": "SUM", **deep(), **ZERO_1})
@good({**zero(3), "gradient_allreduce_op": "mean"}, {**ZERO_2, "gradient_allreduce_op": "sum"})
def sum_not_supported() -> Table:
    """Stage 3, ZenFlow and DeepCompile always average (_do_error_check in runtime/config.py)."""
    return excludes(
        OPERATION,
        {
            "stage 3": when.at_stage(3),
            "zenflow": when.is_section(f"{ZERO}.zenflow"),
            "deepcompile": when.on(DEEP),
        },
        "sum can't be combined with {others}. "
        "Set it to mean, and adapt the learning rate to averaged gradients.",
        fix=put(OPERATION, "mean"),
        given=_sums,
    )


@rule("DS265", "warning", since=(0, 19, 6))
@bad({"gradient_allreduce_op": "sum"}, {"_world_size": None, "gradient_allreduce_op": "SUM"})
@good({"gradient_allreduce_op": "mean"}, {"_world_size": 1, "gradient_allreduce_op": "sum"})
def summed_gradients(context: Context) -> Iterator[Finding]:
    """Summed, not averaged: each additional GPU makes them larger (gradient_average in runtime/engine.py)."""
    if _sums(context) and context.world_size != 1:
        times = f"{context.world_size} times" if context.world_size else "the number of GPUs times"
        yield Finding(
            OPERATION,
            f"sum makes gradients {times} as large as their mean",
            "Divide the loss by the batch of all GPUs yourself, or set it to mean.",
        )


@rule("DS266", FAILS, since=(0, 19, 4))
@bad(
    {**zero(1, overlap_comm=True), "managed_gradient_accumulation": False},
    {"zero_optimization": {"overlap_comm": True}, "managed_gradient_accumulation": False},
)
@good(
    {**zero(2, overlap_comm=True), "managed_gradient_accumulation": False},
    {**zero(1, overlap_comm=False), "managed_gradient_accumulation": False},
)
def unmanaged_accumulation_with_overlap() -> Table:
    """The caller counts the passes; then only stages 2 and 3 can overlap (_do_sanity_check in runtime/engine.py)."""

    def text(other: str, key: str) -> str:
        return f"false can't be combined with {other}. Set {key} to false, or remove {MANAGED}."

    overlap = text("overlap_comm at stage {stage}", OVERLAP)
    return all_of(
        report(MANAGED, overlap, (when.on(OVERLAP), when.below_stage(2)), put(OVERLAP, False)),
        report(MANAGED, text(DEEP, DEEP), when.on(DEEP)),
        when=when.off(MANAGED),
    )


@rule("DS267", "note")
@bad({**bf16(), "communication_data_type": "fp32"}, {**fp16(), "communication_data_type": "FP32"})
@good({**bf16(), "communication_data_type": "bf16"}, {"communication_data_type": "FP32"})
def gradients_sent_in_another_precision(context: Context) -> Iterator[Finding]:
    """Gradients are converted for the reduction and back (communication_data_type in runtime/engine.py).

    fp16 without a loss scale overflows at 65504: for bf16 or fp32 gradients this is a warning.
    """
    sent, computed = (context.text(DTYPE) or "").lower(), context.precision
    if computed is None or sent not in BYTES or sent == computed:
        return
    if sent == "fp16":
        yield Finding(
            DTYPE,
            f"fp16 overflows above 65504, and {computed} training has no loss scale to prevent it",
            f"Set it to {computed}, or remove it.",
            removal(context, DTYPE, safe=False),
            severity="warning",
        )
    elif sent == "fp32":
        yield Finding(
            DTYPE, f"fp32 doubles the communication of {computed} gradients", f"Remove it to send {computed}."
        )
    elif computed == "fp32":
        yield Finding(
            DTYPE, "bf16 rounds fp32 gradients to 8 bits for communication", "Remove it to send fp32."
        )


@rule("DS268", "note", since=(0, 16))
@bad(
    {"seq_parallel_communication_data_type": "bf16"},
    {"sequence_parallel_size": 2, "data_parallel_size": 2, **bf16(), "communication_data_type": "bf16"},
)
@good({"seq_parallel_communication_data_type": "fp32"}, {"communication_data_type": "fp32"})
def communication_type_of_sequence_parallelism(context: Context) -> Iterator[Finding]:
    """With sequence parallelism the one dtype replaces the other (_configure_distributed_model, engine.py).

    It may come from an mpu instead of the config: without the size this is a note.
    """
    parallel = above_1(context, SEQUENCE)
    sent = context.text(SEQUENCE_DTYPE)
    if parallel and context.text(DTYPE):
        used = sent or "fp32"
        yield Finding(
            DTYPE,
            f"has no effect with sequence parallelism: {SEQUENCE_DTYPE}, {used}, is used instead",
            f"Set {SEQUENCE_DTYPE} instead.",
            severity="warning",
        )
    elif not parallel and sent and sent.lower() != "fp32":
        yield Finding(
            SEQUENCE_DTYPE,
            "has no effect without sequence parallelism",
            f"Set {DTYPE} for data parallelism, or remove it.",
        )

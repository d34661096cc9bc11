"""DS522 to DS524 and DS530: sequence and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import ZERO, above_1, divisors, heads_beside
from dsrun.config.rules.examples import SAVED_3, ZERO_1, ZERO_2, hf, tensor, zero
from dsrun.config.rules.frame import FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, report
from dsrun.config.rules.running.batch import DATA, SEQUENCE, TENSOR


@rule("DS522", "warning")
@bad(
    {"_model": {"attention_heads": 3}, "sequence_parallel_size": 2, "data_parallel_size": 2},
    {"_model": {"attention_heads": 1}, "sequence_parallel_size": 2, "data_parallel_size": 2},
)
@good(
    {"_model": {"attention_heads": 2}, "sequence_parallel_size": 2, "data_parallel_size": 2},
    {"_model": {"attention_heads": 3}, "sequence_parallel_size": 1, "data_parallel_size": 4},
)
def heads_do_not_divide_by_sequence_groups(context: Context) -> Iterator[Finding]:
    """Ulysses gives each rank whole heads (runtime/sequence_parallel/ulysses_sp.py)."""
    if heads := heads_beside(context, SEQUENCE):
        yield Finding(
            SEQUENCE,
            f"{heads} attention heads aren't divisible by {context.integer(SEQUENCE)}",
            f"Use a divisor of the heads: {divisors(heads, ' or ')}.",
        )


@rule("DS523", "warning")
@bad({"_world_size": 4, **tensor(2), "sequence_parallel_size": 2, "data_parallel_size": 2})
@good(
    {**tensor(1), "sequence_parallel_size": 2, "data_parallel_size": 2},
    {**tensor(2), "sequence_parallel_size": 1, "data_parallel_size": 4},
)
def tensor_and_sequence_parallelism(context: Context) -> Iterator[Finding]:
    """AutoTP replaces the mpu by its own groups (_configure_tensor_parallel_states in runtime/engine.py).

    They don't cover sequences: with accelerate's ParallelismConfig the start fails (utils/groups.py).
    """
    size = context.integer(TENSOR)
    if size is None or size <= 1:
        return
    advice = "Choose one of the two."
    if _parallelism(context, "sp_size") > 1:
        text = "can't be combined with the sp_size of parallelism_config"
        yield Finding(TENSOR, text, advice, severity="error", effect=FAILS)
    elif above_1(context, SEQUENCE):
        yield Finding(TENSOR, f"{size} and {SEQUENCE} {context.integer(SEQUENCE)} can't be combined", advice)


@rule("DS524", "warning", since=(0, 17))
@bad(
    {"sequence_parallel_size": 2, "data_parallel_size": 2, **ZERO_2},
    hf({"parallelism_config": {"sp_size": 4}}, **ZERO_1),
)
@good(
    {"sequence_parallel_size": 2, "data_parallel_size": 2, **SAVED_3},
    {"sequence_parallel_size": 1, "data_parallel_size": 4, **ZERO_2},
)
def gradients_of_sequence_groups_below_stage_3(context: Context) -> Iterator[Finding]:
    """Stage 3 averages gradients over all ranks, the others over the data-parallel ones (runtime/engine.py).

    With the loss that DeepSpeed documents for Ulysses (an all_gather over the group, weighted by tokens) they are then
    as many times too large as a group has ranks: measured at stages 0, 1 and 2; exact at stage 3
    (runtime/sequence_parallel/ulysses_sp.py).
    """
    # Without the other size, and without an mpu from code, the key makes no groups (DS106).
    by_key = context.target == "deepspeed" or context.has(DATA)
    size = max((by_key and context.integer(SEQUENCE)) or 1, _parallelism(context, "sp_size"))
    if size > 1 and context.stage < 3:
        path = SEQUENCE if context.has(SEQUENCE) else ZERO
        yield Finding(
            path,
            f"at stage {context.stage} gradients are {size} times too large with DeepSpeed's documented loss for "
            "sequence parallelism",
            f"Use stage 3, or divide the loss by {size}.",
        )


@rule("DS530", "warning")
@bad(
    {"pipeline": {"activation_checkpoint_interval": 1}, **ZERO_2},
    {"pipeline": {"pipe_partitioned": True}, **zero(3)},
)
@good({"pipeline": {"activation_checkpoint_interval": 1}, **ZERO_1}, {"pipeline": {}, **ZERO_2})
def pipeline_with_zero_stage_2_or_3() -> Table:
    """PipelineEngine refuses stages 2 and 3 (runtime/pipe/engine.py); another model doesn't read the section."""
    return report(
        "pipeline",
        "a PipelineModule can't be trained with ZeRO stage {stage}. "
        "Set zero_optimization.stage to 1; or remove the section if the model isn't a PipelineModule.",
        (lambda context: context.section("pipeline"), when.unless(when.below_stage(2))),
    )


def _parallelism(context: Context, name: str) -> int:
    """A size in TrainingArguments' parallelism_config, which is a dict or accelerate's object; 1 if unknown."""
    given = context.argument("parallelism_config")
    size = given.get(name) if isinstance(given, dict) else getattr(given, name, None)
    return size if isinstance(size, int) else 1

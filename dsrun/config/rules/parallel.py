"""DS522, DS523 and DS530: sequence and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.batch import SEQUENCE, TENSOR
from dsrun.config.rules.common import above_1, divisors, heads_beside
from dsrun.config.rules.examples import ZERO_1, ZERO_2, tensor, zero
from dsrun.config.rules.frame import FAILS, Context, Hit, rule


@rule(
    "DS522",
    "warning",
    bad=[
        {"_model": {"attention_heads": 3}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        {"_model": {"attention_heads": 1}, "sequence_parallel_size": 2, "data_parallel_size": 2},
    ],
    good=[
        {"_model": {"attention_heads": 2}, "sequence_parallel_size": 2, "data_parallel_size": 2},
        {"_model": {"attention_heads": 3}, "sequence_parallel_size": 1, "data_parallel_size": 4},
    ],
)
def heads_over_sequence_groups(context: Context) -> Iterator[Hit]:
    """Ulysses gives each rank whole heads (runtime/sequence_parallel/ulysses_sp.py)."""
    if heads := heads_beside(context, SEQUENCE):
        yield Hit(
            SEQUENCE,
            f"{heads} attention heads don't divide by {context.integer(SEQUENCE)}",
            f"Take a divisor of the heads: {divisors(heads, ' or ')}.",
        )


@rule(
    "DS523",
    "warning",
    bad=[{"_world_size": 4, **tensor(2), "sequence_parallel_size": 2, "data_parallel_size": 2}],
    good=[
        {**tensor(1), "sequence_parallel_size": 2, "data_parallel_size": 2},
        {**tensor(2), "sequence_parallel_size": 1, "data_parallel_size": 4},
    ],
)
def tensor_and_sequence_parallelism(context: Context) -> Iterator[Hit]:
    """AutoTP puts its own groups in the place of the mpu (_configure_tensor_parallel_states in runtime/engine.py).

    They know no sequences: with accelerate's ParallelismConfig the start fails (utils/groups.py).
    """
    size = context.integer(TENSOR)
    if size is None or size <= 1:
        return
    advice = "Choose one of the two."
    if _parallelism(context, "sp_size") > 1:
        text = "has no place beside the sp_size of parallelism_config"
        yield Hit(TENSOR, text, advice, severity="error", effect=FAILS)
    elif above_1(context, SEQUENCE):
        yield Hit(TENSOR, f"{size} and {SEQUENCE} {context.integer(SEQUENCE)} don't go together", advice)


@rule(
    "DS530",
    "warning",
    bad=[
        {"pipeline": {"activation_checkpoint_interval": 1}, **ZERO_2},
        {"pipeline": {"pipe_partitioned": True}, **zero(3)},
    ],
    good=[{"pipeline": {"activation_checkpoint_interval": 1}, **ZERO_1}, {"pipeline": {}, **ZERO_2}],
)
def pipeline_with_split_gradients(context: Context) -> Iterator[Hit]:
    """PipelineEngine refuses stages 2 and 3 (runtime/pipe/engine.py); another model doesn't look at the section."""
    if context.section("pipeline") and context.stage >= 2:
        yield Hit(
            "pipeline",
            f"a PipelineModule can't be trained with ZeRO stage {context.stage}",
            "Set zero_optimization.stage to 1; or remove the section, if the model is no PipelineModule.",
        )


def _parallelism(context: Context, name: str) -> int:
    """A size in TrainingArguments' parallelism_config, which is a dict or accelerate's object; 1 if unknown."""
    given = context.argument("parallelism_config")
    size = given.get(name) if isinstance(given, dict) else getattr(given, name, None)
    return size if isinstance(size, int) else 1

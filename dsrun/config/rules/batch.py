"""DS1xx: the batch triad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsrun.config import tree
from dsrun.config.rules.frame import Context, Hit, rule

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def model_parallel_size(config: Mapping[str, Any]) -> int:
    """How many GPUs work on one batch: tensor times sequence parallelism, 1 without either."""
    size = 1
    for path in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        value = tree.get(config, path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            size *= value
    return size


@rule("DS101", "error")
def batch_triad(context: Context) -> Iterator[Hit]:
    """The total is micro batch x accumulation x data-parallel ranks, or the start fails.

    A missing one is worked out by whole division, then checked alike (_set_batch_related_parameters and
    _batch_assertion in runtime/config.py).
    """
    total, micro, accumulation = (context.integer(path) for path in (TOTAL, MICRO, ACCUMULATION))
    ranks = _ranks(context)
    if total is None or ranks is None or total < 1:
        return
    parts = [(MICRO, micro), (ACCUMULATION, accumulation)]
    if any(value is None and context.has(path) for path, value in parts):
        return  # "auto" or no number
    unit = ranks * (micro or 1) * (accumulation or 1)
    exact = micro is not None and accumulation is not None
    if unit < 1 or (total == unit if exact else total % unit == 0):
        return
    product = " x ".join(
        [*(f"{path} {value}" for path, value in parts if value is not None), f"{ranks} ranks"]
    )
    yield Hit(
        TOTAL, f"{total} doesn't agree with {product} = {unit}", _legal(total, micro, ranks, unit, exact)
    )


def _legal(total: int, micro: int | None, ranks: int, unit: int, exact: bool) -> str:
    if not exact:
        lower = total // unit * unit
        return (
            f"The nearest that work: {lower} and {lower + unit}."
            if lower
            else f"The nearest that works: {unit}."
        )
    per_step = (micro or 1) * ranks
    if total % per_step == 0:
        return f"Set {TOTAL} to {unit}, or {ACCUMULATION} to {total // per_step}."
    lower = total // per_step
    near = " or ".join(
        f"{steps * per_step} ({ACCUMULATION} {steps})" for steps in (lower, lower + 1) if steps
    )
    return f"Set {TOTAL} to {unit}, or the nearest to {total}: {near}."


@rule("DS102", "error")
def no_batch_size(context: Context) -> Iterator[Hit]:
    """Without a total or a micro batch the start fails (_set_batch_related_parameters, runtime/config.py)."""
    if context.target == "deepspeed" and not context.has(TOTAL) and not context.has(MICRO):
        yield Hit(MICRO, "there is no batch size", f"Set {MICRO}, say to 4, or {TOTAL}.")


@rule("DS103", "error")
def parallel_sizes(context: Context) -> Iterator[Hit]:
    """Tensor and sequence parallel groups must divide the GPUs evenly (module_inject, utils/groups.py)."""
    size = model_parallel_size(context.plain)
    if context.world_size is not None and context.world_size % size:
        path = (
            "tensor_parallel.autotp_size"
            if context.integer("tensor_parallel.autotp_size")
            else "sequence_parallel_size"
        )
        yield Hit(
            path,
            f"groups of {size} don't divide {context.world_size} GPUs",
            "Take a divisor of the number of GPUs.",
        )


def _ranks(context: Context) -> int | None:
    """Data-parallel ranks; None where the number of GPUs is unknown or nothing divides it."""
    size = model_parallel_size(context.plain)
    if context.world_size is None or context.world_size % size:
        return None
    return context.world_size // size

"""Remarks beside the plans: assumptions, limits, hours and money."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsrun.jobs.assembly.plan_target import USUAL_GPU, PlanTarget
from dsrun.jobs.assembly.planning.search import RankedPlans
from dsrun.jobs.assembly.planning.setups import FREES_INPUTS
from dsrun.jobs.assembly.planning.subjects import PlanSubject
from dsrun.planner.analysis import accuracy
from dsrun.planner.plan import Plan
from dsrun.planner.speed import UNCERTAIN, slow_network

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import SequenceLengths

LOGITS_SHARE = 0.1
"""Share of a card from which on the logits are worth a word."""


def notes(what: PlanSubject, where: PlanTarget, ranked: RankedPlans) -> list[str]:
    """Remarks beside the numbers."""
    lines = [*where.notes]
    if where.room.accelerator == "cpu":
        lines.append(
            "This is for CPUs. Name a GPU with --gpu, as rtx-4090, a100-80g or h100-80g, and how many with --gpus."
        )
    if where.hardware_assumed:
        lines.append(f"Speed is that of {USUAL_GPU}: name the GPU with --gpu for its own.")
    if what.shape.assumed:
        lines.append(f"Assumed for the model: {', '.join(what.shape.assumed)}.")
    if ranked.plans and ranked.plans[0].setup.precision == "bf16" and not where.bf16:
        own = "--precision fp16" if where.fp16 else "--precision fp32: DeepSpeed refuses fp16 on them"
        lines.append(f"These GPUs have no bf16: at best it is emulated. Theirs is {own}.")
    limit = what.shape.positions
    length = ranked.plans[0].setup.seq_len if ranked.plans else 0
    if limit and length > limit:
        lines.append(f"Rows of {length} tokens are longer than the model's {limit} positions.")
    if where.room.host_bytes is None and ranked.plans:
        lines.append("Host memory is not judged: no --host-memory was named.")
    if where.room.nodes > 1 and where.network_assumed:
        rate = 8 * where.room.hardware.network_gb_s
        lines.append(f"{rate:.0f} Gbit/s between nodes are assumed: say --network for theirs.")
    for plan in ranked.plans:
        if warning := slow_network(plan.setup, where.room.hardware):
            lines.append(f"{plan.preset}: {warning}")
    if ranked.plans and ranked.plans[0].gpu.terms["logits"] > LOGITS_SHARE * where.room.gpu_bytes:
        size = ranked.plans[0].gpu.terms["logits"] / 2**30
        lines.append(
            f"The logits take {size:.1f} GiB: a fused cross-entropy (Liger) would save nearly all of it."
        )
    if ranked.plans and ranked.plans[0].setup.keeps_inputs:
        newer = ".".join(map(str, FREES_INPUTS))
        lines.append(f"The bitsandbytes here keeps the inputs of 4-bit matrices; {newer} and later don't.")
    if ranked.plans:
        lines.append(_errors(ranked.plans[0], where))
    return lines


def _errors(plan: Plan, where: PlanTarget) -> str:
    """How far plans of this kind were off published runs, or that no such run is known."""
    kind, pace = accuracy.memory_class(plan.setup), accuracy.seconds_class(plan.setup)
    memory, seconds = accuracy.known("memory", kind), accuracy.known("seconds", pace)
    if where.room.accelerator == "cpu":
        memory, kind = None, "CPU ranks"
    if memory is None:
        of_memory = f"Memory: no published runs of {kind} stand behind it"
    else:
        of_memory = f"Memory: half of {memory.runs} published runs ({kind}) lie within {memory.median:.0%}, "
        of_memory += f"nine of ten within {memory.p90:.0%}"
    if plan.speed.uncertain != UNCERTAIN:
        of_seconds = f"seconds: within a factor of {plan.speed.uncertain:g}, as measured here"
    elif seconds is None or where.room.accelerator == "cpu":
        of_seconds = (
            f"seconds: no published runs of {pace} stand behind them, a factor of {UNCERTAIN:g} at least"
        )
    else:
        of_seconds = (
            f"seconds: half of {seconds.runs} ({pace}) within a factor of {seconds.median:.2g}, nine of ten "
        )
        of_seconds += f"within {seconds.p90:.2g}"
    return f"{of_memory}; {of_seconds}. The order of presets is surer.".replace("%", " %")


@dataclass(frozen=True)
class Cost:
    """Hours and money. epoch_*: of one pass over the train file; None where none was given. price: of all GPUs."""

    seconds_per_million_tokens: float
    price_per_million_tokens: float | None = None
    epoch_examples: int | None = None
    epoch_tokens: float | None = None
    epoch_steps: int | None = None
    epoch_hours: float | None = None
    epoch_price: float | None = None


def cost(plan: Plan, lengths: SequenceLengths | None, price: float | None) -> Cost:
    """Hours and money of a plan's training. price: of a GPU for an hour.

    Packed sequences are taken for full; padded examples cost their batch's longest, which a row of the plan is.
    """
    setup, million = plan.setup, 1e6 * plan.seconds_per_token
    per_hour = None if price is None else price * setup.gpus
    per_million = Cost(million, None if per_hour is None else per_hour * million / 3600)
    if lengths is None:
        return per_million
    tokens = lengths.rows * lengths.mean
    rows = lengths.rows if setup.variable_lengths else tokens / setup.seq_len
    steps = max(1, math.ceil(rows / (setup.micro_batch * setup.grad_accum * setup.gpus)))
    hours = steps * plan.speed.seconds_per_step / 3600
    return replace(
        per_million, epoch_examples=lengths.rows, epoch_tokens=tokens, epoch_steps=steps, epoch_hours=hours,
        epoch_price=None if per_hour is None else per_hour * hours,
    )  # fmt: skip

"""The plans of all presets, the best first; which one is taken, and what small change would be much faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dsrun.cluster.devices import Machine
from dsrun.config.presets.options import Options, with_environment
from dsrun.config.presets.sources import strategy
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.assembly.plan_target import PlanTarget, target
from dsrun.jobs.assembly.planning.setups import (
    NOWHERE,
    Divided,
    all_presets,
    base_setup,
    default_precision,
    preset_fields,
)
from dsrun.jobs.assembly.planning.subjects import subject, with_model
from dsrun.jobs.assembly.planning.words import advice_text, recomputing, title
from dsrun.options import derived
from dsrun.options.commands import PlanOptions, PresetOptions
from dsrun.options.declare import entries, flag_of
from dsrun.options.layers import Resolved
from dsrun.planner.plan import FITS, MOST_ROWS, OUT, Plan, fastest, ranked
from dsrun.planner.setup import DEVICES, Setup

if TYPE_CHECKING:
    from dsrun.planner.advice import Advice

RECOMPUTED = (0, 2, 1)
"""Kinds of activation checkpointing that a plan tries (Setup.checkpointing): nothing, every second layer, every
layer."""
FASTER = 1.25
"""Speed-up from which a small change is worth a remark."""


@dataclass(frozen=True)
class RankedPlans:
    """Plans, the best first. skipped: presets that could not be planned, and why. advice: where none fits."""

    plans: list[Plan]
    skipped: dict[str, str]
    advice: Advice | None


def answer(
    base: Setup,
    where: PlanTarget,
    presets: Iterable[str],
    *,
    recomputed: Sequence[int] = (),
    batches: Sequence[tuple[int, int]] = (),
    overrides: tuple[str, ...] = (),
    never: Collection[str] = (),
    divided: Divided | None = None,
) -> RankedPlans:
    """Every preset's best plan, ranked, and advice where none fits.

    recomputed: Setup.checkpointing's values to try, batches: (micro batch, accumulation); none: the base's. overrides:
    --set's texts. never: kinds of change that are not advised. divided: what preset_fields says, where it is known.
    """
    fields, skipped = divided or preset_fields(presets, where.room, base, overrides=overrides)
    tried = [
        base.changed(checkpointing=again, micro_batch=micro, grad_accum=accum)
        for again in recomputed or (base.checkpointing,)
        for micro, accum in batches or ((base.micro_batch, base.grad_accum),)
    ]
    plans = ranked(
        fastest(name, (setup.changed(**division) for setup in tried), where.room)
        for name, division in fields.items()
    )
    advice = None
    if plans and plans[0].verdict == OUT:
        if not (where.bf16 or where.fp16):
            never = {*never, "precision"}
        from dsrun.planner.advice import advise

        advice = advise(plans[0], fields, where.room, bf16=where.bf16, never=never)
    return RankedPlans(plans, skipped, advice)


def runnable(plan: Plan) -> bool:
    """Whether `dsrun finetune` trains like that: it doesn't shard 4-bit weights."""
    return not (plan.setup.quantized and plan.setup.sharded)


def runnable_first(ranked: RankedPlans) -> RankedPlans:
    """The plans that fit and that finetune runs before those that fit and that it doesn't. The first of each is the one
    to take (`settled`): of those that tie, the surer and simpler."""
    fitting = [plan for plan in ranked.plans if plan.verdict != OUT]
    others = [plan for plan in ranked.plans if plan.verdict == OUT]
    able = [plan for plan in fitting if runnable(plan)]
    unable = [plan for plan in fitting if not runnable(plan)]
    return replace(ranked, plans=[*_settled_first(able), *_settled_first(unable), *others])


def _settled_first(plans: Sequence[Plan]) -> list[Plan]:
    if not plans:
        return []
    first = settled(plans)
    return [first, *(plan for plan in plans if plan is not first)]


def batches(
    resolved: Resolved[PlanOptions], ranks: int
) -> tuple[Resolved[PlanOptions], list[tuple[int, int]], list[str]]:
    """The options with finetune's split of a step, the (micro batch, accumulation) that may take its place, and notes.

    All of them take the same examples a step. Where nobody said how many and the ranks can't share them equally, the
    nearest number is planned. Raises DsrunError where what is asked for can't be divided.
    """
    notes: list[str] = []
    options = resolved.options
    if tokens := options.tokens_per_batch:
        longest = options.longest_example
        resolved = resolved.with_layers(derived.by_tokens(resolved, tokens, longest, ranks))
        sizes = range(resolved.options.micro_batch, 0, -1)
        return resolved, [(size, derived.accumulation(tokens, longest, ranks, size)) for size in sizes], notes
    # Nobody named a number of examples: the default gives way to what the ranks can share, since a plan is asked for
    # many numbers of GPUs. finetune would refuse it, so the note has the option.
    parts = resolved.said("micro_batch") or resolved.said("grad_accum")
    if not resolved.said("global_batch") and not resolved.said("grad_accum"):
        unit = ranks * (options.micro_batch if parts else 1)
        near = max(1, round(options.global_batch / unit)) * unit
        if near != options.global_batch:
            flag = flag_of(PlanOptions, "global_batch")
            notes.append(
                f"{options.global_batch} examples a step can't be split by {ranks} ranks and what is asked: {near} "
                f"are planned. dsrun finetune takes them with {flag} {near}."
            )
            resolved = resolved.settled({"global_batch": near}, f"{ranks} ranks")
    resolved = resolved.with_layers(derived.by_devices(resolved, ranks))
    options = resolved.options
    if parts:
        return resolved, [(options.micro_batch, options.micro_steps)], notes
    share = options.global_batch // ranks
    return resolved, [(size, share // size) for size in _divisors(share)], notes


def _divisors(share: int) -> list[int]:
    """Micro batches that a rank's share of a step can be taken in, the largest first."""
    return [size for size in range(min(share, MOST_ROWS), 0, -1) if share % size == 0]


def faster(
    base: Setup,
    ranked: RankedPlans,
    again: Callable[[Setup], RankedPlans],
    *,
    batch: bool = False,
    checkpointing: bool = False,
) -> list[str]:
    """Small changes with which a plan that fits would be much faster, a line each.

    again: the plans of another base. batch, checkpointing: whether the user fixed how a step is split, and what is
    computed again, so that no plan was made with anything else.
    """
    if not ranked.plans or ranked.plans[0].verdict == OUT:
        return []
    first = ranked.plans[0]
    kinds = [
        {"a fused loss (--liger, with liger-kernel)": base.changed(fused_loss=True)},
        {"flash attention (--attention flash, or sdpa)": base.changed(flash=True)},
        {"--packing": base.changed(variable_lengths=False)},
    ]
    if batch:
        kinds.append(_other_splits(base))
    if checkpointing:
        ways = {"none": 0, "full": 1}
        kinds.append(
            {f"--activation-checkpointing {way}": base.changed(checkpointing=n) for way, n in ways.items()}
        )
    lines = []
    for kind in kinds:
        tried = [(text, again(setup).plans[0]) for text, setup in kind.items() if setup != base]
        fitting = [(plan.seconds_per_token, text, plan) for text, plan in tried if plan.verdict != OUT]
        seconds, text, plan = min(fitting, key=lambda change: change[0], default=(math.inf, "", first))
        if first.seconds_per_token > FASTER * seconds:
            gain = first.seconds_per_token / seconds
            lines.append(f"With {text} {title(plan)} would fit, {gain:.1f} times as fast.")
    return lines


def _other_splits(base: Setup) -> dict[str, Setup]:
    """Words -> the base with another micro batch and as many examples a step."""
    share = base.micro_batch * base.grad_accum
    sizes = [size for size in _divisors(share) if size != base.micro_batch]
    return {
        f"--micro-batch {size} --grad-accum {share // size}": base.changed(
            micro_batch=size, grad_accum=share // size
        )
        for size in sizes
    }


def first_choice(
    resolved: Resolved[PresetOptions], machine: Machine, built: Options
) -> tuple[str, Options, str]:
    """The fastest preset that fits a model, the config's options it was planned with, and a line that says why.

    Raises DsrunError where nothing fits.
    """
    options = resolved.options
    fault = subject(options.model)
    own = {name: value for name, value in resolved.user.items() if name in entries(PlanOptions)}
    own |= {"nvme": "1000TiB"} if with_environment(built)[0].nvme_path else {}
    to_plan = with_model(Resolved.by_user(PlanOptions, own), fault).options
    where = target(to_plan, machine)
    precision = options.precision or default_precision(where)
    if not resolved.said("activation_checkpointing"):
        own_way = fault.defaults.get("activation_checkpointing", to_plan.activation_checkpointing)
        to_plan = replace(to_plan, activation_checkpointing=own_way)
    base = base_setup(fault.shape, where.room, to_plan, precision)
    ranked = answer(base, where, all_presets(where.room.nodes), overrides=options.overrides)
    if to_plan.trace:
        from dsrun.jobs.assembly.planning import traced

        ranked, _ = traced.retraced(ranked, where.room, traced.tracer_for(fault, to_plan, makes=False))
    best, why = best_of(ranked)
    planned = replace(
        built,
        precision=precision,
        micro_batch=to_plan.micro_batch,
        grad_accum=to_plan.micro_steps,
        overrides=(*_planned_sizes(best.preset, built), *options.overrides),
    )
    batch_said = f"rows of {base.seq_len} tokens, micro batch {base.micro_batch}, {precision}"
    batch_said += recomputing(base)
    return best.preset, planned, f"{why}; {batch_said}"


SIZES = (
    "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
)  # fmt: skip
"""Keys that a plan depends on and that HF Trainer fills in by itself where they are "auto"."""


def _planned_sizes(preset: str, options: Options) -> tuple[str, ...]:
    """--set texts that keep the bucket sizes a plan assumed, for a reader that would choose others."""
    if options.target != "hf":
        return ()
    read = strategy(preset, replace(options, nvme_path=options.nvme_path or NOWHERE))
    plain = strategy(preset, replace(options, target="deepspeed", nvme_path=options.nvme_path or NOWHERE))
    zero, numbers = read["zero_optimization"], plain["zero_optimization"]
    return tuple(f"zero_optimization.{key}={numbers[key]}" for key in SIZES if zero.get(key) == "auto")


TIE = 1.05
"""Plans whose times are less than 5 % apart are equally fast as far as a plan can tell."""
SURE = 0.99
"""The chance from which on a plan counts as sure."""


def settled(plans: Sequence[Plan]) -> Plan:
    """The plan to take of those that are ranked: the first, or one that ties with it and is surer, then simpler.

    Simpler: it divides and offloads less, and computes less again.
    """
    first = plans[0]
    if first.verdict == OUT:
        return first
    ties = [
        plan
        for plan in plans
        if plan.verdict != OUT and plan.seconds_per_token <= TIE * first.seconds_per_token
    ]

    def key(plan: Plan) -> tuple[float, int, int, float]:
        setup = plan.setup
        offload = DEVICES.index(setup.optimizer_device) + DEVICES.index(setup.parameter_device)
        return -min(SURE, plan.chance), setup.stage, offload, plan.seconds_per_token

    return min(ties, key=key)


def best_of(ranked: RankedPlans, *, force: bool = False) -> tuple[Plan, str]:
    """The plan to take, and a line that says why it is. Raises DsrunError where none fits, unless it is forced."""
    if not ranked.plans:
        raise DsrunError([Problem(why, f"preset {name}") for name, why in ranked.skipped.items()])
    best = settled(ranked.plans)
    if best.verdict == OUT and force:
        return best, f"preset {best.preset}: none fits, and it comes nearest ({best.reason})"
    if best.verdict == OUT:
        raise DsrunError(
            f"no preset fits: {best.preset} comes nearest ({best.reason})", hint=advice_text(ranked.advice)
        )
    running = [plan for plan in ranked.plans if plan.verdict != OUT]
    many = (
        f"the fastest of {len(running)} presets that fit" if len(running) > 1 else "the only preset that fits"
    )
    if best is not ranked.plans[0]:
        better = "surer" if best.chance > ranked.plans[0].chance else "simpler"
        many = f"as fast as {ranked.plans[0].preset}, and {better}"
    tight = "" if best.verdict == FITS else ", tightly"
    return best, f"preset {best.preset}: {many}{tight} ({best.reason})"


def beside(best: Plan, plans: Sequence[Plan], named: str) -> str:
    """The time of a step by the plan, and with the next preset and with the one that is named."""

    def seconds(plan: Plan) -> str:
        return f"{plan.speed.seconds_per_step:.3g} s"

    others = [plan for plan in plans if plan is not best]
    fitting = [plan for plan in others if plan.verdict != OUT]
    shown = fitting[:1] + [plan for plan in others if plan.preset == named and plan not in fitting[:1]]
    words = [f"{plan.preset} {_prospect(plan, seconds(plan))}" for plan in shown]
    return f"{seconds(best)} a step by the plan" + (f"; {', '.join(words)}" if words else "")


def _prospect(plan: Plan, seconds: str) -> str:
    if plan.verdict == OUT:
        return "does not fit"
    return seconds if plan.verdict == FITS else f"{seconds}, but fits with a chance of {plan.chance:.0%} only"

"""`dsrun plan` for a training: decided first (`decide`), then shown as text or JSON (`report`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.cli.output.results import print_json
from dsrun.cli.planning import plan_text as text
from dsrun.cli.planning.plan_case import (
    PlanCase,
    base_of,
    given_fields,
    own_base,
    recomputed,
    trainer_of,
)
from dsrun.errors import DsrunError, Problem
from dsrun.options.commands import PlanOptions
from dsrun.planner.plan import OUT, TIGHT, Plan
from dsrun.planner.units import significant

if TYPE_CHECKING:
    from dsrun.cli.planning.cards import CardPlan
    from dsrun.jobs.assembly.plan_target import PlanTarget
    from dsrun.jobs.assembly.planning.remarks import Cost
    from dsrun.jobs.assembly.planning.search import RankedPlans
    from dsrun.jobs.assembly.planning.setups import Divided
    from dsrun.options.layers import Resolved
    from dsrun.planner.analysis.knobs import Knob
    from dsrun.planner.analysis.length_curve import LengthCurve
    from dsrun.planner.setup import Setup


@dataclasses.dataclass(frozen=True)
class UsualMachine:
    """The best plan on a usual machine, for users who have no GPU here and named none."""

    name: str
    """Its GPUs: "2 x rtx-4090"."""
    target: PlanTarget
    plan: Plan


@dataclasses.dataclass(frozen=True)
class TrainingPlans:
    """All that is shown of a training's plans."""

    case: PlanCase
    ranked: RankedPlans
    usual: list[UsualMachine]
    cost: Cost | None
    notes: list[str]
    knobs: list[Knob] = dataclasses.field(default_factory=list)
    """What makes the first plan safe, where it is tight."""
    curves: list[LengthCurve] = dataclasses.field(default_factory=list)
    """Memory by the length of an example, with --lengths."""
    cards: list[CardPlan] = dataclasses.field(default_factory=list)
    """The same on the kinds of GPU that --card names."""

    @property
    def best(self) -> Plan | None:
        return self.ranked.plans[0] if self.ranked.plans else None

    def report(self) -> bool:
        """Print the plans, and draw them with --plot. Returns whether one fits. Raises DsrunError for a picture."""
        options = self.case.options
        if options.plot:
            from dsrun.cli.planning import lengths, plot

            if options.lengths:
                lengths.draw(self.curves, self.case.target.room, Path(options.plot))
            else:
                plot.draw(self.ranked.plans, self.case.target.room, Path(options.plot))
        if options.as_json:
            print_json("plan", value_of(self))
        else:
            show(self)
        return self.best is not None and self.best.verdict != OUT


def decide(case: PlanCase) -> TrainingPlans:
    """The plans of every preset, ranked, and remarks on them. Raises DsrunError for a named preset that can't be
    planned."""
    from dsrun.jobs.assembly.planning import remarks, search
    from dsrun.jobs.assembly.planning.setups import NO_4_BIT_SHARDS

    requested, target = case.requested, case.target
    base, plans, split_notes = _search(case, target, requested)
    ranked, trace_notes = _traced(case, plans(base))
    ranked = search.runnable_first(ranked)  # a trace ranks by its own seconds and memory
    usual = _on_usual_machines(case, ranked)
    if case.options.presets and ranked.skipped:
        raise DsrunError([Problem(why, f"--preset {name}") for name, why in ranked.skipped.items()])
    notes = [*case.notes, *split_notes, *trace_notes, *remarks.notes(case.subject, target, ranked)]
    fixed = requested.said("micro_batch") or requested.said("grad_accum")
    checkpointing = requested.said("activation_checkpointing")
    if trainer_of(case).own:
        if shared := [plan.preset for plan in ranked.plans if not search.runnable(plan)]:
            notes.append(f"{', '.join(shared)}: {NO_4_BIT_SHARDS}; other trainers do.")
        notes += search.faster(base, ranked, plans, batch=fixed, checkpointing=checkpointing)
    notes += _by_trainer(case, ranked)
    cost = remarks.cost(ranked.plans[0], case.lengths, case.options.price) if ranked.plans else None
    return TrainingPlans(
        case, ranked, usual, cost, notes, _knobs(case, ranked), _curves(case, ranked), _on_cards(case)
    )


def _knobs(case: PlanCase, ranked: RankedPlans) -> list[Knob]:
    """What makes the first plan safe, where it is tight."""
    from dsrun.jobs.assembly.planning import setups
    from dsrun.planner.analysis.knobs import knobs

    if not ranked.plans or ranked.plans[0].verdict != TIGHT:
        return []
    first, room = ranked.plans[0], case.target.room
    names = [plan.preset for plan in ranked.plans]
    fields, _ = setups.preset_fields(names, room, first.setup)
    trainer = trainer_of(case)
    divided = {name: trainer.divided(each) for name, each in fields.items()}
    return knobs(first, divided, room, bf16=case.target.bf16)


def _curves(case: PlanCase, ranked: RankedPlans) -> list[LengthCurve]:
    """Memory by the length of an example, where --lengths asks for it."""
    from dsrun.cli.planning.lengths import curves_of

    return curves_of(ranked.plans, case.target.room) if case.options.lengths else []


def _on_cards(case: PlanCase) -> list[CardPlan]:
    """The best plan on each kind of GPU that --card names, beside this one's. Raises DsrunError for a wrong name."""
    from dsrun.cli.planning import cards
    from dsrun.jobs.assembly import plan_target

    if not case.options.cards:
        return []
    known: dict[Hashable, Divided] = {}

    def best(card: str) -> Plan | None:
        here = case.target.room.accelerator == "cuda"
        machine = {
            "gpu": card,
            "gpu_memory": None,
            "gpus": case.options.gpus or (case.target.room.gpus if here else 1),
        }
        requested = case.requested.settled(machine, "--card")
        target = plan_target.target(requested.options, None)
        with suppress(DsrunError):  # the requested batch can't be divided, or the card has no such precision
            base, plans, _ = _search(case, target, requested, known)
            return next(iter(plans(base).plans), None)
        return None

    names = cards.named(case.options.cards)
    if case.options.gpu:
        names = {case.options.gpu: case.options.price, **names}
    return cards.compared(names, best, case.lengths)


def _traced(case: PlanCase, ranked: RankedPlans) -> tuple[RankedPlans, list[str]]:
    """The plans with the best of them judged by a trace, where one is wanted and can be had, and notes on it."""
    if not case.options.trace:
        return ranked, []
    from dsrun.jobs.assembly.planning import traced

    return traced.retraced(
        ranked, case.target.room, traced.tracer_for(case.subject, case.options, case.lengths)
    )


def _by_trainer(case: PlanCase, ranked: RankedPlans) -> list[str]:
    """What the trainer's defaults, or of dsrun's own those of a stock Trainer, change in the first plan's memory."""
    from dsrun.planner import trainers

    if not ranked.plans or case.target.room.accelerator != "cuda":
        return []
    trainer, setup, given = trainer_of(case), ranked.plans[0].setup, given_fields(case)
    other = trainers.load(trainers.STOCK) if trainer.own else trainer
    own = setup if trainer.own else own_base(case, case.target, case.options, case.mean_tokens)
    if trainer.own and not case.requested.said("activation_checkpointing"):
        given |= set(trainers.OPTION_FIELDS["activation_checkpointing"])  # which the plan chose
    lines = []
    for each in trainers.differences(setup, other, own, given=given):
        more = "more" if each.more_bytes > 0 else "less"
        assumption = each.assumption
        of = f"{other.title}: with {assumption.says}" if trainer.own else f"With {assumption.says}"
        than = "" if assumption.name == "checkpointing" else " than dsrun finetune's way"
        lines.append(
            f"{of} a GPU needs {text.gib(abs(each.more_bytes))} GiB {more}{than} ({assumption.source})."
        )
    return lines


def _search(
    case: PlanCase,
    target: PlanTarget,
    requested: Resolved[PlanOptions],
    known: dict[Hashable, Divided] | None = None,
) -> tuple[Setup, Callable[[Setup], RankedPlans], list[str]]:
    """The base of a target's plans, the function that ranks the plans of such a base, and notes on how a step is split.

    known: the presets' fields for other machines, by all of a machine that they depend on; filled.
    """
    from dsrun.jobs.assembly.planning import search, setups

    requested, batches, notes = search.batches(requested, target.room.ranks)
    options = requested.options
    base = base_of(case, target, options, case.mean_tokens)
    tried = recomputed(case)
    room, known = target.room, {} if known is None else known
    # Building a preset's config takes longer than planning with it, so that machines which it can't tell apart share
    # it.
    alike = room.gpus, room.nodes, room.nvme_bytes is None, base.precision, base.micro_batch, base.grad_accum
    if alike not in known:
        names = options.presets or setups.presets_for(options.optimizer, base, room)
        fields, skipped = setups.preset_fields(names, room, base, shards_4_bits=True)
        trainer = trainer_of(case)
        able = {name: each for name, each in fields.items() if trainer.runs(each)}
        skipped |= dict.fromkeys(fields.keys() - able.keys(), f"{trainer.title} has no DeepSpeed")
        known[alike] = {name: trainer.divided(each) for name, each in able.items()}, skipped
    divided = known[alike]

    def plans(base: Setup) -> RankedPlans:
        # One split alone is the base's, which a caller may have changed to try another.
        splits = batches if len(batches) > 1 else ()
        ranked = search.answer(base, target, divided[0], recomputed=tried, batches=splits, divided=divided)
        return search.runnable_first(ranked)

    return base, plans, notes


def _on_usual_machines(case: PlanCase, ranked: RankedPlans) -> list[UsualMachine]:
    """The best plan on each of a few usual machines, where this one has no GPU and nothing fits it."""
    from dsrun.jobs.assembly import plan_target

    if case.target.room.accelerator != "cpu" or (ranked.plans and ranked.plans[0].verdict != OUT):
        return []
    machines = []
    known: dict[Hashable, Divided] = {}
    for gpu, gpus in plan_target.USUAL_GPUS:
        machine = {"gpu": gpu, "gpus": gpus, "host_memory": None, "nvme": None}
        requested = case.requested.settled(machine, "a usual machine")
        target = plan_target.target(requested.options, None)
        with suppress(DsrunError):  # the requested batch can't be divided by so many
            base, plans, _ = _search(case, target, requested, known)
            machines += [UsualMachine(f"{gpus} x {gpu}", target, plan) for plan in plans(base).plans[:1]]
    return machines


def value_of(plans: TrainingPlans) -> dict[str, Any]:
    """The plans for machines."""
    from dsrun.cli.planning import cards, lengths

    case = plans.case
    return significant(
        {
            "model": {"name": case.subject.name, **dataclasses.asdict(case.subject.shape)},
            "place": case.target.text,
            "trainer": case.options.trainer,
            "plans": [text.as_value(plan, case.target.room) for plan in plans.ranked.plans],
            "skipped": plans.ranked.skipped,
            "advice": text.advice_value(plans.ranked.advice),
            "usual": [
                {"gpus": usual.name, **text.as_value(usual.plan, usual.target.room)} for usual in plans.usual
            ],
            "cost": plans.cost and dataclasses.asdict(plans.cost),
            "knobs": [dataclasses.asdict(knob) for knob in plans.knobs],
            "lengths": lengths.value_of(plans.curves),
            "timeline": text.timeline_value(plans.best) if case.options.timeline and plans.best else [],
            "cards": cards.value_of(plans.cards),
            "notes": plans.notes,
        }
    )


def show(plans: TrainingPlans) -> None:
    """Print the plans for people: a table, then what follows from it."""
    from dsrun.cli.planning import cards, lengths
    from dsrun.jobs.assembly.planning.search import runnable

    case, best, options = plans.case, plans.best, plans.case.options
    text.heading(case.subject, case.target)
    if best:
        text.say(text.batch_text(best.setup))
        trainer = trainer_of(case)
        runs = trainer.own and runnable(best)
        text.table(plans.ranked.plans, case.target.room, wide=options.wide, runs=runs)
        if best.verdict == OUT:
            text.advice(plans.ranked.advice)
    text.knobs(plans.knobs)
    if options.timeline and best and case.target.room.accelerator == "cuda":
        text.timeline(best)
    lengths.show(plans.curves, case.target.room)
    if plans.cards:
        cards.show(plans.cards, case.lengths)
    text.print_notes(plans.notes)
    text.print_notes(f"{name} is left out: {why}" for name, why in plans.ranked.skipped.items())
    text.usual({usual.name: usual.plan for usual in plans.usual})
    if plans.cost and best and best.verdict != OUT:
        text.cost(plans.cost)
    if options.components and best:
        text.components(best, case.target.room)

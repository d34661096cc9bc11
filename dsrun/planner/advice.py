"""When nothing fits: the shortest list of changes that does, in the order in which the field tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from typing import Any

from dsrun.planner.plan import OUT, Plan, Room, judge
from dsrun.planner.setup import LOGITS, METHODS, Setup, lora_weights
from dsrun.planner.shape import SIZES, from_numbers

MOST_CHANGES = 4
LORA_RANK = 16
SHORTEST = 128
"""Tokens: no row is planned shorter than this."""
SMALLER = 0.8
"""A smaller model has at most this share of the weights."""

Fields = Mapping[str, Mapping[str, Any]]
"""Preset -> what it gives a Setup (setup.zero_fields)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that can be changed, besides the preset.

    kind: of the changes of one kind a list holds at most one. text: what to do. costs: what is given up, in words.
    apply: the set-up with it, None where it changes nothing. grows: factor on the number of nodes.
    """

    kind: str
    text: str
    costs: str
    apply: Callable[[Setup], Setup | None]
    grows: int = 1


@dataclass(frozen=True, slots=True)
class Step:
    """A change of a list that fits. saves_bytes: on each GPU, against the list up to here; slower: factor on time."""

    text: str
    costs: str
    saves_bytes: float
    slower: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The shortest list of changes, and the plan that fits with them. nodes: that it runs on."""

    steps: tuple[Step, ...]
    plan: Plan
    nodes: int


def _precision(bf16: bool) -> Change:
    name = "bf16" if bf16 else "fp16"

    def apply(setup: Setup) -> Setup | None:
        return replace(setup, precision=name) if setup.precision == "fp32" else None

    return Change("precision", f"--precision {name}", "nothing that shows", apply)


def _flash() -> Change:
    def apply(setup: Setup) -> Setup | None:
        return None if setup.flash else replace(setup, flash=True)

    return Change("attention", "flash attention, or torch's SDPA", "nothing", apply)


def _micro_batch(setup: Setup) -> Change:
    accumulation = setup.grad_accum * setup.micro_batch

    def apply(setup: Setup) -> Setup | None:
        return None if setup.micro_batch == 1 else replace(setup, micro_batch=1, grad_accum=accumulation)

    return Change("micro batch", f"--micro-batch 1 --grad-accum {accumulation}", "time, not results", apply)


def _shorter(setup: Setup, factor: int) -> Change:
    length = setup.seq_len // factor

    def apply(setup: Setup) -> Setup | None:
        return replace(setup, seq_len=length) if length >= SHORTEST else None

    return Change("length", f"rows of {length} tokens, not {setup.seq_len}", "longer rows are cut", apply)


def _checkpointing() -> Change:
    def apply(setup: Setup) -> Setup | None:
        return None if setup.checkpointing else replace(setup, checkpointing=True)

    return Change("checkpointing", "--gradient-checkpointing", "backward computes forward again", apply)


def _fused_loss() -> Change:
    def apply(setup: Setup) -> Setup | None:
        fused = LOGITS["fused"]
        return replace(setup, logits_bytes=fused) if setup.logits_bytes > fused else None

    return Change("loss", "a fused linear cross-entropy (Liger)", "one more package", apply)


def _adapters(method: str, costs: str) -> Change:
    def apply(setup: Setup) -> Setup | None:
        if METHODS.index(setup.method) >= METHODS.index(method):
            return None
        quantized = "nf4" if method == "qlora" else None
        weights = setup.adapters or lora_weights(setup.shape, LORA_RANK)
        return replace(setup, method=method, adapters=weights, quantized=quantized)

    return Change("method", f"--method {method}", costs, apply)


def _nodes(setup: Setup, factor: int) -> Change:
    def apply(setup: Setup) -> Setup:
        return replace(setup, gpus=setup.gpus * factor, nodes=setup.nodes * factor)

    text = f"{setup.nodes * factor} nodes like this, not {setup.nodes}"
    return Change("nodes", text, "the nodes", apply, factor)


def _model(size: float) -> Change:
    def apply(setup: Setup) -> Setup | None:
        return replace(setup, shape=from_numbers(size)) if size <= SMALLER * setup.shape.parameters else None

    return Change("model", f"a model of about {size / 1e9:.3g}e9 parameters", "the model", apply)


def changes(setup: Setup, *, bf16: bool) -> list[Change]:
    """All that can be changed but the preset, in the field's order."""
    return [
        _precision(bf16),
        _flash(),
        _micro_batch(setup),
        *(_shorter(setup, factor) for factor in (2, 4)),
        _checkpointing(),
        _fused_loss(),
        _adapters("lora", "the weights stay as they are but for LoRA's"),
        _adapters("qlora", "the same, and they are rounded to 4 bits"),
        *(_nodes(setup, factor) for factor in (2, 4, 8)),
        *(_model(row[0]) for row in reversed(SIZES)),
    ]


def advise(wanted: Plan, presets: Fields, room: Room, *, bf16: bool) -> Advice | None:
    """The shortest list of changes that makes a plan fit; None where none of up to MOST_CHANGES does.

    wanted: the plan that is out of memory. presets: those that may be taken instead, in the field's order; a change
    of preset counts as one change. Of lists of one length the first in the field's order is taken. More GPUs are
    asked for only where nothing else helps, and a smaller model after that.
    """
    possible = [
        change for change in changes(wanted.setup, bf16=bf16) if change.apply(wanted.setup) is not None
    ]
    for without in ({"nodes", "model"}, {"model"}, set[str]()):
        allowed = [change for change in possible if change.kind not in without]
        if found := _shortest(wanted, allowed, presets, room):
            return found
    return None


def _shortest(wanted: Plan, possible: Sequence[Change], presets: Fields, room: Room) -> Advice | None:
    others = [name for name in presets if name != wanted.preset]
    for length in range(1, MOST_CHANGES + 1):
        for chosen, names in (
            *((chosen, [wanted.preset]) for chosen in _lists(possible, length)),
            *((chosen, others) for chosen in _lists(possible, length - 1)),
        ):
            for name in names:
                plan = _with(wanted, chosen, name, presets, room)[-1]
                if plan.verdict != OUT:
                    return _told(wanted, chosen, plan, presets, room)
    return None


def _lists(possible: Sequence[Change], length: int) -> Iterator[tuple[Change, ...]]:
    for chosen in combinations(possible, length):
        if len({change.kind for change in chosen}) == length:
            yield chosen


def _with(wanted: Plan, chosen: Sequence[Change], preset: str, presets: Fields, room: Room) -> list[Plan]:
    """The plan after each change and, at the end, with the preset."""
    setup, plans = wanted.setup, [wanted]
    for change in chosen:
        setup = change.apply(setup) or setup
        room = replace(room, nodes=room.nodes * change.grows)
        plans.append(judge(wanted.preset, setup, room))
    if preset != wanted.preset:
        plans.append(judge(preset, replace(setup, **presets[preset]), room))
    return plans


def _told(wanted: Plan, chosen: Sequence[Change], plan: Plan, presets: Fields, room: Room) -> Advice:
    """The list, with what each step saves and costs."""
    plans = _with(wanted, chosen, plan.preset, presets, room)
    texts = [(change.text, change.costs) for change in chosen]
    if plan.preset != wanted.preset:
        texts.append((f"--preset {plan.preset}, not {wanted.preset}", "its speed"))
    steps = [
        Step(
            text,
            costs,
            before.gpu.allocated - after.gpu.allocated,
            after.seconds_per_token / before.seconds_per_token,
        )
        for (text, costs), (before, after) in zip(texts, pairwise(plans), strict=True)
    ]
    return Advice(tuple(steps), plan, plan.setup.nodes)

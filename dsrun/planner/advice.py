"""When nothing fits: the shortest list of changes that does, in the order in which the field tries them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """One thing that can be changed.

    kind: of the changes of one kind a list holds at most one. text: what to do. costs: what is given up, in words.
    apply: the set-up with it, None where it changes nothing, or does not go together with what is there. preset: the
    one that is taken instead.
    """

    kind: str
    text: str
    costs: str
    apply: Callable[[Setup], Setup | None]
    preset: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A change of a list that fits, against the list up to here.

    saves_bytes: of the scarce memory. slower: the factor on time.
    """

    text: str
    costs: str
    saves_bytes: float
    slower: float


@dataclass(frozen=True, slots=True)
class Advice:
    """The shortest list of changes, and the plan that fits with them.

    nodes: that it runs on. scarce: the memory that was short: GPU, host or NVMe.
    """

    steps: tuple[Step, ...]
    plan: Plan
    nodes: int
    scarce: str


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
        if quantized and not with_4_bits(setup):
            return None
        weights = setup.adapters or lora_weights(setup.shape, LORA_RANK)
        return replace(setup, method=method, adapters=weights, quantized=quantized)

    return Change("method", f"--method {method}", costs, apply)


def _nodes(setup: Setup, factor: int) -> Change:
    def apply(setup: Setup) -> Setup:
        return replace(setup, gpus=setup.gpus * factor, nodes=setup.nodes * factor)

    text = f"{setup.nodes * factor} nodes like this, not {setup.nodes}"
    return Change("nodes", text, "the nodes", apply)


def with_4_bits(setup: Setup) -> bool:
    """Whether 4-bit weights are modelled there: not where they are divided, or on the host."""
    return setup.stage < 3 and setup.parameter_device == "gpu"


def _preset(name: str, fields: Mapping[str, Any]) -> Change:
    def apply(setup: Setup) -> Setup | None:
        divided = replace(setup, **fields)
        return divided if with_4_bits(divided) or not setup.quantized else None

    return Change("preset", f"--preset {name}", "see its speed", apply, preset=name)


def _model(size: float) -> Change:
    def apply(setup: Setup) -> Setup | None:
        if size > SMALLER * setup.shape.parameters:
            return None
        shape = from_numbers(size)
        # LoRA keeps its rank: its weights shrink with the matrices that it is put on.
        adapters = round(setup.adapters * lora_weights(shape, 1) / lora_weights(setup.shape, 1))
        return replace(setup, shape=shape, adapters=adapters)

    return Change("model", f"a model of about {size / 1e9:.3g}e9 parameters", "the model", apply)


def changes(setup: Setup, presets: Fields, *, bf16: bool) -> list[Change]:
    """All that can be changed, in the field's order. presets: those that may be taken instead."""
    return [
        _precision(bf16),
        _flash(),
        _micro_batch(setup),
        *(_shorter(setup, factor) for factor in (2, 4)),
        *(_preset(name, fields) for name, fields in presets.items()),
        _checkpointing(),
        _fused_loss(),
        _adapters("lora", "only LoRA's weights are trained"),
        _adapters("qlora", "the weights are rounded to 4 bits, and only LoRA's are trained"),
        *(_nodes(setup, factor) for factor in (2, 4, 8)),
        *(_model(row[0]) for row in reversed(SIZES)),
    ]


def advise(
    wanted: Plan, presets: Fields, room: Room, *, bf16: bool, never: Collection[str] = ()
) -> Advice | None:
    """The shortest list of changes that makes a plan fit; None where none of up to MOST_CHANGES does.

    wanted: the plan that is out of memory. presets: those that may be taken instead, in the field's order. Of lists of
    one length the first in the field's order is taken. More GPUs are asked for only where nothing else helps, and a
    smaller model after that. never: kinds of change that can't be made.
    """
    others = {name: fields for name, fields in presets.items() if name != wanted.preset}
    possible = changes(wanted.setup, others, bf16=bf16)
    for without in ({"nodes", "model"}, {"model"}, set[str]()):
        allowed = [change for change in possible if change.kind not in {*without, *never}]
        for length in range(1, MOST_CHANGES + 1):
            for chosen in _lists(allowed, length):
                plan = _with(wanted, chosen, room)
                if plan is not None and plan.verdict != OUT:
                    return _told(wanted, chosen, plan, room)
    return None


def _lists(possible: Sequence[Change], length: int) -> Iterator[tuple[Change, ...]]:
    for chosen in combinations(possible, length):
        if len({change.kind for change in chosen}) == length:
            yield chosen


def _with(wanted: Plan, chosen: Sequence[Change], room: Room) -> Plan | None:
    """The plan with all of these; None where they don't go together, or one changes nothing."""
    setup: Setup | None = wanted.setup
    for change in chosen:
        setup = change.apply(setup) if setup else None
    if setup is None:
        return None
    preset = next((change.preset for change in chosen if change.preset), wanted.preset)
    return judge(preset, setup, replace(room, nodes=setup.nodes))


def _told(wanted: Plan, chosen: Sequence[Change], plan: Plan, room: Room) -> Advice:
    """The list, with what each step saves and costs against the steps before it."""
    plans = [wanted, *(_with(wanted, chosen[: count + 1], room) or plan for count in range(len(chosen)))]
    steps = [
        Step(
            change.text,
            change.costs,
            _needed(before, wanted.scarce) - _needed(after, wanted.scarce),
            after.seconds_per_token / before.seconds_per_token,
        )
        for change, (before, after) in zip(chosen, pairwise(plans), strict=True)
    ]
    return Advice(tuple(steps), plan, plan.setup.nodes, wanted.scarce)


def _needed(plan: Plan, memory: str) -> float:
    """Bytes of a memory: of each GPU, or of each node."""
    return {"GPU": plan.gpu.allocated, "host": plan.host.peak, "NVMe": plan.nvme_bytes}[memory]

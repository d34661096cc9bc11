"""When nothing fits: the shortest list of changes that does, in the order in which the field tries them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from dsrun.planner.lora import lora_weights
from dsrun.planner.plan import OUT, MemoryBudget, Plan, is_out, judge
from dsrun.planner.setup import METHODS, Setup
from dsrun.planner.shape import SIZES, from_numbers

MOST_CHANGES = 4
LORA_RANK = 16
SHORTEST = 128
"""Tokens of the shortest example that is advised."""
SMALLER = 0.8
"""A smaller model has at most this share of the weights."""

Fields = Mapping[str, Mapping[str, Any]]
"""Preset -> its fields of a Setup (setup.zero_fields)."""
Judge = Callable[[str, Setup, MemoryBudget], Plan]
"""A preset's name, a setup and the hardware -> the plan (plan.judge)."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that can be changed."""

    kind: str
    """A list of changes holds at most one of a kind."""
    text: str
    """The change, as options or in words."""
    costs: str
    """Its price, in words."""
    apply: Callable[[Setup], Setup | None]
    """The setup with it; None where it changes nothing, or doesn't match what is there."""
    preset: str | None = None
    """The preset that is taken instead."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of a list that fits, compared with the list up to here."""

    text: str
    costs: str
    saves_bytes: float
    """Bytes of the scarce memory that it saves."""
    slower: float
    """Factor on the time of a step."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The shortest list of changes that makes a plan fit."""

    steps: tuple[Step, ...]
    plan: Plan
    """The plan with them."""
    nodes: int
    """Nodes that it runs on."""
    scarce: str
    """The memory that was short: GPU, host or NVMe."""


def _setting(kind: str, text: str, costs: str, **fields: Any) -> Change:
    """A change that sets fields of the setup to values."""

    def apply(setup: Setup) -> Setup | None:
        there = all(getattr(setup, name) == value for name, value in fields.items())
        return None if there else setup.changed(**fields)

    return Change(kind, text, costs, apply)


def _adapters(method: str, costs: str) -> Change:
    def apply(setup: Setup) -> Setup | None:
        if METHODS.index(setup.method) >= METHODS.index(method):
            return None
        quantized = "nf4" if method == "qlora" else None
        if quantized and setup.sharded:
            return None  # dsrun's own trainer can't
        weights = setup.adapters or lora_weights(setup.shape, LORA_RANK)
        return setup.changed(method=method, adapters=weights, quantized=quantized)

    return Change("method", f"--method {method}", costs, apply)


def _preset(name: str, fields: Mapping[str, Any]) -> Change:
    def apply(setup: Setup) -> Setup | None:
        sharded = setup.changed(**fields)
        return None if setup.quantized and sharded.sharded else sharded

    return Change("preset", f"--preset {name}", "see its speed", apply, preset=name)


def _model(size: float) -> Change:
    def apply(setup: Setup) -> Setup | None:
        if size > SMALLER * setup.shape.parameters:
            return None
        shape = from_numbers(size)
        # LoRA keeps its rank: its weights shrink with the matrices that it is put on.
        adapters = round(setup.adapters * lora_weights(shape, 1) / lora_weights(setup.shape, 1))
        return setup.changed(shape=shape, adapters=adapters)

    return Change("model", f"a model of about {size / 1e9:.3g}e9 parameters", "the model", apply)


def changes(setup: Setup, presets: Fields, *, bf16: bool) -> list[Change]:
    """Everything that can be changed, in the field's order. presets: those that may be taken instead."""
    precision, accum = "bf16" if bf16 else "fp16", setup.grad_accum * setup.micro_batch
    possible = [
        _setting("attention", "flash attention, or torch's SDPA", "nothing", flash=True),
        _setting(
            "micro batch",
            f"--micro-batch 1 --grad-accum {accum}",
            "time, not results",
            micro_batch=1,
            grad_accum=accum,
        ),
    ]
    if setup.precision == "fp32":
        half = _setting("precision", f"--precision {precision}", "nothing that shows", precision=precision)
        possible.insert(0, half)
    for length in (setup.seq_len // 2, setup.seq_len // 4):
        if length >= SHORTEST:
            text = f"examples of {length} tokens, not {setup.seq_len}"
            possible.append(_setting("length", text, "longer examples are cut", seq_len=length))
    possible += [_preset(name, fields) for name, fields in presets.items()]
    possible.append(
        _setting("saving", "--no-async-save", "steps wait while a checkpoint is written", async_save=False)
    )
    again = "backward computes forward again"
    possible.append(_setting("checkpointing", "--activation-checkpointing full", again, checkpointing=1))
    liger = "a fused linear cross-entropy (Liger)"
    possible.append(_setting("loss", liger, "one more package", fused_loss=True))
    possible.append(_adapters("lora", "only LoRA's weights are trained"))
    possible.append(_adapters("qlora", "the weights are rounded to 4 bits, and only LoRA's are trained"))
    for factor in (2, 4, 8):
        nodes, gpus = setup.nodes * factor, setup.gpus * factor
        text = f"{nodes} nodes like this, not {setup.nodes}"
        possible.append(_setting("nodes", text, "the nodes", nodes=nodes, gpus=gpus))
    return possible + [_model(size) for size, *_ in reversed(SIZES)]


def advise(
    wanted: Plan,
    presets: Fields,
    budget: MemoryBudget,
    *,
    bf16: bool,
    never: Collection[str] = (),
    judged: Judge = judge,
) -> Advice | None:
    """The shortest list of changes that makes a plan fit; None where none of up to MOST_CHANGES does.

    wanted: the plan that is out of memory. presets: those that may be taken instead, in the field's order. Of lists of
    one length the first in the field's order is taken. More GPUs are advised only where nothing else helps, and a
    smaller model after that. never: kinds of change that can't be made. judged: gives the plan of a changed setup.
    """
    engine = wanted.setup.engine
    others = {
        name: fields
        for name, fields in presets.items()
        if name != wanted.preset and fields.get("engine", "deepspeed") == engine
    }
    possible = changes(wanted.setup, others, bf16=bf16)
    # Three searches, each with one more kind of change. The later two need a change of the new kind in every list:
    # lists
    # without it have been searched.
    for last, without in (("", {"nodes", "model"}), ("nodes", {"model"}), ("model", set[str]())):
        allowed = [change for change in possible if change.kind not in {*without, *never}]
        for length in range(1, MOST_CHANGES + 1):
            for chosen, setup in _lists(wanted.setup, allowed, length, last):
                # The verdict alone, for there are many lists. Layouts have a memory of their own.
                if judged is judge and is_out(setup, _on(budget, setup.nodes)):
                    continue
                plan = _with(wanted, chosen, setup, budget, judged)
                if plan.verdict != OUT:
                    return _explained(wanted, chosen, plan, budget, judged)
    return None


def _lists(
    setup: Setup, possible: Sequence[Change], length: int, kind: str
) -> Iterator[tuple[tuple[Change, ...], Setup]]:
    """Every list of `length` changes, no two of a kind, each of which changes something; and the setup with them.

    kind: the kind that one of them has to be of; empty for any.
    """
    for number, change in enumerate(possible):
        if length == 1 and kind not in ("", change.kind):
            continue
        changed = change.apply(setup)
        if changed is None:
            continue
        if length == 1:
            yield (change,), changed
            continue
        others = [other for other in possible[number + 1 :] if other.kind != change.kind]
        for rest, final in _lists(changed, others, length - 1, "" if change.kind == kind else kind):
            yield (change, *rest), final


def _with(wanted: Plan, chosen: Sequence[Change], setup: Setup, budget: MemoryBudget, judged: Judge) -> Plan:
    """The plan of a setup that has these changes."""
    preset = next((change.preset for change in chosen if change.preset), wanted.preset)
    return judged(preset, setup, _on(budget, setup.nodes))


def _on(budget: MemoryBudget, nodes: int) -> MemoryBudget:
    return budget if nodes == budget.nodes else replace(budget, nodes=nodes)


def _explained(
    wanted: Plan, chosen: Sequence[Change], plan: Plan, budget: MemoryBudget, judged: Judge
) -> Advice:
    """The list, with what each step saves and costs compared with the steps before it."""

    def needed(plan: Plan) -> float:
        """Bytes of the scarce memory: of each GPU, or of each node."""
        sizes = {"GPU": plan.gpu.allocated, "host": plan.host.peak, "NVMe": plan.nvme_bytes}
        return sizes[wanted.scarce]

    plans, setup = [wanted], wanted.setup
    for count, change in enumerate(chosen, 1):
        setup = change.apply(setup) or setup
        plans.append(_with(wanted, chosen[:count], setup, budget, judged))
    steps = (
        Step(
            change.text,
            change.costs,
            saves_bytes=needed(before) - needed(after),
            slower=after.seconds_per_token / before.seconds_per_token,
        )
        for change, (before, after) in zip(chosen, pairwise(plans), strict=True)
    )
    return Advice(tuple(steps), plan, plan.setup.nodes, wanted.scarce)

"""Plans judged again by a trace of the model: recordings are made in a process of its own, once, and cached.

The formulas find the plans, in milliseconds; a trace says what the best of them need. Where there is none (transformers
isn't installed, the model is none of its own, the time is over), the formulas stay. `plan` makes recordings; `finetune`
and `preset` take those that are in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dsrun.errors import DsrunError
from dsrun.jobs.assembly.planning.recordings import TIME_LIMIT_S, cached, key_of, record
from dsrun.jobs.assembly.planning.search import RankedPlans
from dsrun.models import chatglm
from dsrun.planner.gpu_memory import GpuMemory, untracked_gib
from dsrun.planner.plan import OUT, Calibration, MemoryBudget, Plan, judge, ranked
from dsrun.planner.trace.allocator import AllocatorOptions
from dsrun.planner.trace.recording import UnrollError
from dsrun.planner.trace.request import TracedModel, UntraceableError, request_of, traced_memory
from dsrun.planner.trace.schedule import drawn_lengths
from dsrun.words import GIB, counted

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import SequenceLengths
    from dsrun.options.table import PeftOptions
    from dsrun.planner.setup import Setup

MOST_TRACED = 4
"""Plans that are judged again: the best ones by formula, and what comes first after that."""
APART = 0.03
"""The difference between trace and formula from which on it is said."""
MUCH_IN_HOLES = 0.05
"""The share of a card in holes from which on a remark is worth its line."""


@dataclass
class Tracer:
    """The traces of one model."""

    architecture: Mapping[str, Any]
    lora: Mapping[str, Any]
    percentiles: Sequence[int] = ()
    """Lengths of the file's rows, for batches that are padded (SequenceLengths); empty: all are as long as may be."""
    makes: bool = True
    """Whether recordings that the cache lacks are made, which takes seconds."""
    reasons: list[str] = field(default_factory=list)
    """Why some setups have none."""
    _models: dict[str, TracedModel | None] = field(default_factory=dict)

    def model(self, setup: Setup) -> TracedModel | None:
        """The traced model for a setup; None where there is none (`reasons` says why)."""
        self.record([setup])
        try:
            model = self._models.get(key_of(self._request(setup)))
            if model is not None:
                model.check(setup)
        except UntraceableError as reason:
            self._add(str(reason))
            return None
        return model

    def memory(self, setup: Setup, budget: MemoryBudget) -> GpuMemory | None:
        """A setup's memory by its trace; None where there is none."""
        model = self.model(setup)
        if model is None:
            return None
        options = AllocatorOptions(expandable=budget.expandable)
        room = budget.gpu_bytes - untracked_gib(setup.gpus) * GIB
        lengths: Sequence[tuple[int, int]] = ()
        if setup.variable_lengths and self.percentiles:
            lengths = drawn_lengths(self.percentiles, setup.micro_batch, setup.seq_len)
        return traced_memory(setup, model, room=room, options=options, lengths=lengths)

    def record(self, setups: Sequence[Setup]) -> None:
        """Read or make the recordings of these setups."""
        missing: dict[str, dict[str, Any]] = {}
        for setup in setups:
            try:
                request = self._request(setup)
            except UntraceableError as reason:
                self._add(str(reason))
                continue
            key = key_of(request)
            if key not in self._models and not self._take(key, request, cached(key)):
                missing[key] = request
        if missing and self.makes:
            self._make(missing)

    def _request(self, setup: Setup) -> dict[str, Any]:
        return request_of(setup, self.architecture, self.lora)

    def _take(self, key: str, request: Mapping[str, Any], answer: Mapping[str, Any] | None) -> bool:
        """Whether an answer is one, be it the reason why there is no recording."""
        if answer is None:
            return False
        try:
            self._models[key] = TracedModel.of(request, answer)
        except (UntraceableError, UnrollError) as reason:
            self._models[key] = None
            self._add(str(reason))
        return True

    def _make(self, missing: Mapping[str, dict[str, Any]]) -> None:
        """Record what is missing in a process of its own, and keep it."""
        why = record(missing, TIME_LIMIT_S)
        if why:
            self._add(why)
        for key, request in missing.items():
            if not self._take(key, request, cached(key)):
                self._models[key] = None

    def _add(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)


class Traceable(Protocol):
    """What is planned: a model's config, name, and folder where it has one."""

    @property
    def architecture(self) -> Mapping[str, Any]: ...
    @property
    def name(self) -> str: ...
    @property
    def folder(self) -> Path | None: ...


def tracer_for(
    subject: Traceable,
    peft: PeftOptions,
    lengths: SequenceLengths | None = None,
    *,
    makes: bool = True,
) -> Tracer:
    """The tracer of a model. lengths: those of the examples, where they were measured. makes: see Tracer."""
    architecture = dict(subject.architecture)
    if architecture.get("model_type") == chatglm.MODEL_TYPE:
        try:
            architecture = chatglm.glm_fields(architecture, subject.folder or Path(), subject.name)
        except DsrunError:
            architecture = {}
    lora = {"rank": peft.lora_rank, "target": peft.lora_target, "dropout": peft.lora_dropout}
    return Tracer(architecture, lora, lengths.percentiles if lengths else (), makes)


def rejudged(plan: Plan, budget: MemoryBudget, tracer: Tracer) -> Plan:
    """A plan, judged by a trace where there is one.

    It stays for ranks on CPUs, and where this machine's own runs have corrected the formulas.
    """
    if budget.accelerator != "cuda" or budget.calibration != Calibration():
        return plan
    memory = tracer.memory(plan.setup, budget)
    return plan if memory is None else judge(plan.preset, plan.setup, budget, plan.speed, traced=memory)


def retraced(plans: RankedPlans, budget: MemoryBudget, tracer: Tracer) -> tuple[RankedPlans, list[str]]:
    """The plans with the best of them judged by a trace, ranked anew, and notes on what that changed.

    Nothing changes for ranks on CPUs, nor where this machine's own runs have corrected the formulas.
    """
    if budget.accelerator != "cuda" or budget.calibration != Calibration() or not plans.plans:
        return plans, []
    tracer.record([plan.setup for plan in plans.plans[:MOST_TRACED]])
    judged = list(plans.plans)
    traced: dict[str, Plan] = {}
    while len(traced) < MOST_TRACED:
        plan = next((plan for plan in judged[:MOST_TRACED] if plan.preset not in traced), None)
        if plan is None:
            break
        traced[plan.preset] = again = rejudged(plan, budget, tracer)
        judged = ranked([again if other is plan else other for other in judged])
    return replace(plans, plans=judged), [*_notes(judged, budget, tracer), *_failures(tracer)]


def _notes(plans: Sequence[Plan], budget: MemoryBudget, tracer: Tracer) -> list[str]:
    """Lines on plans whose trace differs from the formulas, and on holes."""
    lines = []
    for plan in plans:
        traced = plan.gpu.traced
        if traced is None:
            continue
        difference = plan.gpu.allocated / traced.formula - 1
        if abs(difference) > APART and not plan.setup.shape.assumed:
            lines.append(
                f"{plan.preset}: torch has {plan.gpu.allocated / GIB:.1f} GiB in use by the trace, which counts, and "
                f"{traced.formula / GIB:.1f} by formula ({difference:+.0%})."
            )
    if plans and (line := _holes(plans[0], budget, tracer)):
        lines.append(line)
    return lines


def _holes(plan: Plan, budget: MemoryBudget, tracer: Tracer) -> str:
    """A line on the allocator's holes where they decide about a plan, and what gives them back."""
    traced = plan.gpu.traced
    if traced is None or budget.expandable or plan.verdict not in (OUT, "tight"):
        return ""
    holes = traced.capacity - plan.gpu.needed
    if holes < MUCH_IN_HOLES * budget.gpu_bytes:
        return ""
    other = tracer.memory(plan.setup, replace(budget, expandable=True))
    if other is None or other.traced is None or other.traced.capacity >= traced.capacity:
        return f"{plan.preset}: {holes / GIB:.1f} GiB of it are holes between what torch has in use."
    return (
        f"{plan.preset}: {holes / GIB:.1f} GiB of it are holes between what torch has in use; with "
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {other.traced.capacity / GIB:.1f} GiB are enough for torch."
    )


def _failures(tracer: Tracer) -> list[str]:
    """A line on what could not be traced."""
    if not tracer.reasons:
        return []
    more = f" ({counted(len(tracer.reasons) - 1, 'more reason')})" if len(tracer.reasons) > 1 else ""
    return [f"Planned by formula where no trace is: {tracer.reasons[0]}{more}."]

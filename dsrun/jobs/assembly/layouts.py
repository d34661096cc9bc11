"""The layouts of a job on given machines, each marked: dsrun runs it, or why not and what does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsrun.jobs.assembly.checks import parallelism
from dsrun.jobs.assembly.checks.parallelism import SDPA, ParallelSetup
from dsrun.jobs.assembly.planning import setups
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.options.optimizers import ADAMW
from dsrun.options.table import ParallelismOptions, recomputing
from dsrun.planner import layouts
from dsrun.planner.layouts import RECOMPUTED, Layout, LayoutPlan
from dsrun.planner.plan import MemoryBudget
from dsrun.planner.setup import Setup

PRESETS = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}
"""ZeRO's stage -> the preset of it that offloads nothing."""
OTHER_ENGINES = {
    (True, True): "Megatron-LM",
    (True, False): "DeepSpeed's AutoTP or Megatron-LM",
    (False, True): "DeepSpeed's PipelineModule or Megatron-LM",
    (False, False): "DeepSpeed's Ulysses, in a script",
}
"""Whether a layout has tensor parallelism and a pipeline -> what runs it where dsrun doesn't."""


@dataclass(frozen=True)
class MarkedLayout:
    """A layout's plan, and whether finetune trains like that."""

    plan: LayoutPlan
    refused: str
    """Why finetune doesn't; empty where it does."""

    @property
    def engine(self) -> str:
        """The engine that runs it."""
        layout = self.plan.layout
        return OTHER_ENGINES[layout.tp > 1, layout.pp > 1] if self.refused else "dsrun"

    @property
    def options(self) -> dict[str, Any]:
        """finetune's options for it, by name."""
        layout, plan = self.plan.layout, self.plan
        return {
            "preset": PRESETS[layout.stage],
            **{name: size for name, size in sizes_of(layout).items() if size > 1},
            "micro_batch": plan.micro_batch,
            "grad_accum": plan.grad_accum,
            **recomputing(plan.checkpointing),
        }

    @property
    def command(self) -> str:
        """Its options as they are typed."""
        return " ".join(f"{flag_of(FinetuneOptions, name)} {value}" for name, value in self.options.items())


def sizes_of(layout: Layout) -> dict[str, int]:
    """The sizes that finetune has options for."""
    return {"tp": layout.tp, "sp": layout.sp, "pp": layout.pp, "ep": layout.ep}


def best_layouts(
    base: Setup,
    room: MemoryBudget,
    architecture: Mapping[str, Any],
    *,
    examples: int,
    method: str = "full",
    optimizer: str = ADAMW,
    recomputed: Sequence[int] = RECOMPUTED,
) -> list[MarkedLayout]:
    """The best stage and split of a step of `examples` for each dp x tp x sp x pp, and ep, the fastest first.

    architecture: the transformers config. recomputed: Setup.checkpointing's values to try.
    """
    by_preset, _ = setups.preset_fields(PRESETS.values(), room, base)
    by_stage = {stage: by_preset[name] for stage, name in PRESETS.items() if name in by_preset}
    there = layouts.layouts(base.shape, room.gpus, room.nodes)
    plans = layouts.judge_layouts(
        base, room, there, examples=examples, by_stage=by_stage, recomputed=recomputed
    )
    best: dict[tuple[int, ...], LayoutPlan] = {}
    for plan in plans:
        best.setdefault(tuple(sizes_of(plan.layout).values()), plan)
    setup_of_job = ParallelSetup(
        parallel=ParallelismOptions(), devices=(room.gpus,) * room.nodes, method=method, optimizer=optimizer,
        **parallelism.network_fields(architecture),
    )  # fmt: skip
    return [MarkedLayout(plan, _refused(plan.layout, setup_of_job)) for plan in best.values()]


def _refused(layout: Layout, setup_of_job: ParallelSetup) -> str:
    """Why finetune doesn't train like that, in one line; empty where it does."""
    parallel = ParallelismOptions(**sizes_of(layout))
    if parallel.alone:
        return ""
    setup = replace(setup_of_job, parallel=parallel, stage=layout.stage)
    if layout.pp > 1:  # defaults that give way to it
        setup = replace(setup, packing=False, attention=SDPA)
    return "; ".join(problem.what for problem in parallelism.refusals(setup))

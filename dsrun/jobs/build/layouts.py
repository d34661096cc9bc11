"""The layouts of a job on given machines, each marked: dsrun runs it, or why not and what does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dsrun.jobs.build import planning
from dsrun.jobs.build.checks import parallelism
from dsrun.jobs.build.checks.parallelism import ParallelSetup
from dsrun.jobs.build.plan_target import PlanTarget
from dsrun.models import chatglm
from dsrun.options.commands import PlanOptions
from dsrun.options.groups import FULL, NO_RECOMPUTING, SELECTIVE, ParallelismOptions
from dsrun.planner import layouts
from dsrun.planner.layouts import Layout, LayoutPlan
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
        """What runs it."""
        layout = self.plan.layout
        return OTHER_ENGINES[layout.tp > 1, layout.pp > 1] if self.refused else "dsrun"

    @property
    def options(self) -> str:
        """finetune's options for it."""
        layout, plan = self.plan.layout, self.plan
        sizes = {name: size for name, size in sizes_of(layout).items() if size > 1}
        asked = "".join(f" --{name} {size}" for name, size in sizes.items())
        batch = f"--micro-batch {plan.micro_batch} --grad-accum {plan.grad_accum}"
        return f"--preset {PRESETS[layout.stage]}{asked} {batch} {self.recomputing}"

    @property
    def recomputing(self) -> str:
        """The same for what is computed again."""
        often = self.plan.checkpointing
        way = {0: NO_RECOMPUTING, 1: FULL}.get(often, SELECTIVE)
        return f"--activation-checkpointing {way}" + (
            f" --recompute-every {often}" if way == SELECTIVE else ""
        )


def sizes_of(layout: Layout) -> dict[str, int]:
    """The sizes that finetune has options for."""
    return {"tp": layout.tp, "sp": layout.sp, "pp": layout.pp}


def best_layouts(
    base: Setup, where: PlanTarget, options: PlanOptions, architecture: Mapping[str, Any]
) -> list[MarkedLayout]:
    """Of each dp x tp x sp x pp the best stage and split of options.global_batch examples, the fastest first."""
    room = where.room
    by_preset, _ = planning.preset_fields(PRESETS.values(), room, base)
    by_stage = {stage: by_preset[name] for stage, name in PRESETS.items() if name in by_preset}
    found = layouts.judge_layouts(
        base, room, layouts.layouts(base.shape, room.gpus, room.nodes), examples=options.global_batch,
        by_stage=by_stage,
    )  # fmt: skip
    best: dict[tuple[int, int, int], LayoutPlan] = {}
    for plan in found:
        best.setdefault((plan.layout.tp, plan.layout.sp, plan.layout.pp), plan)
    return [MarkedLayout(plan, _refused(plan.layout, where, options, architecture)) for plan in best.values()]


def _refused(layout: Layout, where: PlanTarget, options: PlanOptions, architecture: Mapping[str, Any]) -> str:
    """What finetune says of it, in one line; empty where it trains like that."""
    known = {field.name for field in fields(ParallelismOptions)}
    asked = {name: size for name, size in sizes_of(layout).items() if size > 1}
    if absent := asked.keys() - known:
        return f"finetune has no --{min(absent)}"
    if not asked:
        return ""
    network = architecture.get("model_type")
    heads, kv_heads = parallelism.heads_of(architecture)
    setup = ParallelSetup(
        parallel=ParallelismOptions(**asked),
        devices=(where.room.gpus,) * where.room.nodes,
        stage=layout.stage,
        method=options.method,
        optimizer=options.optimizer,
        network=chatglm.NETWORK if network == chatglm.MODEL_TYPE else network,
        heads=heads,
        kv_heads=kv_heads,
    )
    return "; ".join(problem.what for problem in parallelism.refusals(setup))

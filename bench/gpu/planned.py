"""Part 3: what the planner says of runs on this GPU, against what they take: memory and seconds a step.

    python bench/gpu/planned.py [--output FOLDER] [--budget 520] [--only NAME ...] [--tiny]

Random Llamas in bf16 under every preset that one GPU tells apart, with micro batches of 1 and 4, with and without
checkpointing. Measured: torch.cuda.max_memory_allocated and max_memory_reserved, and the median step, from each run's
own record. A run that fails is a result too: out of memory is what a plan has to foresee.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import CHECKOUT, Clock, arguments, begin, carry_out, dsrun, wanted
from common import Case as BenchCase

sys.path.insert(0, str(CHECKOUT / "bench"))
from planner_cpu import Case, setup_of, write_model, write_rows

from dsrun.job.job import Job
from dsrun.jobs.assembly.planning.setups import of_job
from dsrun.models.liger import CHUNK_TOKENS
from dsrun.planner import gpus as kinds
from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.host_memory import host_memory
from dsrun.planner.speed import Hardware, speed

PRESETS = ("ddp", "zero2", "zero3", "zero2-offload", "zero3-offload", "fsdp", "fsdp-offload", "zero1")
"""Presets that are measured. zero3-hpz and fsdp-hybrid are another of these on one host, and zero3-nvme's time is its
disk's."""
TOKENS, STEPS, TINY_STEPS = 1024, 6, 3
MODELS = {
    "100m": Case("bench-100m", 768, 2048, 12, 12, 12, 8192, TOKENS, micro_batch=1, steps=6),
    "500m": Case("bench-500m", 1280, 3456, 24, 20, 20, 8192, TOKENS, micro_batch=1, steps=6),
    "1500m": Case("bench-1500m", 2048, 5504, 29, 16, 16, 16384, TOKENS, micro_batch=1, steps=6),
}
TINY = {"tiny": Case("bench-tiny", 64, 128, 2, 4, 4, 2048, 64, micro_batch=1, steps=3)}


@dataclass(frozen=True)
class Run:
    """One set-up: a model, a preset, the micro batch, and whether activations are checkpointed."""

    model: str
    preset: str
    micro_batch: int
    checkpointing: bool

    @property
    def case(self) -> Case:
        """The model, with this run's micro batch."""
        return replace((MODELS | TINY)[self.model], micro_batch=self.micro_batch)

    @property
    def name(self) -> str:
        """Its result's."""
        return f"{self.model}-{self.preset}-{self.micro_batch}" + "-checkpointing" * self.checkpointing


def combinations(
    models: Sequence[str], presets: Sequence[str], micro_batches: Sequence[int]
) -> Iterator[Run]:
    """Every combination; each preset once before any for the second time."""
    for rows, again, model, preset in itertools.product(micro_batches, (False, True), models, presets):
        yield Run(model, preset, rows, again)


def words(run: Run, precision: str, steps: int, rows: Path) -> list[str]:
    """The command of a run, without "dsrun" and its folder."""
    case, half = run.case, run.case.tokens // 2
    return [
        "finetune", case.name, "--preset", run.preset, "--precision", precision, "--gpus", "1",
        "--max-steps", str(steps), "--generate-rows", "0", "--no-score-before",
        "--train-file", str(rows), "--prompt-column", "content", "--response-column", "summary",
        "--max-source-length", str(half), "--max-target-length", str(half), "--warmup-steps", "0",
        "--grad-accum", "1", "--allow-truncation", "--micro-batch", str(run.micro_batch), "--force",
        "--activation-checkpointing", "full" if run.checkpointing else "none",
    ]  # fmt: skip


def judge(run: Run, job: Job, hardware: Hardware | None) -> dict[str, Any]:
    """The plan of a run, in bytes and seconds. hardware: None where it is no known kind."""
    base = replace(
        setup_of(run.case, {}, gpus=1), checkpointing=int(run.checkpointing), precision=job.precision,
        fused_loss=job.training.liger, fused_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    setup = of_job(job.ds_config, base, job.fsdp)
    plan = gpu_memory(setup)
    return {
        "planned_allocated_bytes": plan.allocated, "planned_reserved_bytes": plan.reserved,
        "planned_moment": plan.moment, "planned_host_bytes": host_memory(setup).peak,
        "planned_step_seconds": speed(setup, hardware).seconds_per_step if hardware else None,
    }  # fmt: skip


class About(NamedTuple):
    """Settings of all runs. hardware: the card; None where it is no known kind."""

    precision: str
    steps: int
    hardware: Hardware | None


def measured(run: Run, about: About, folder: Path, seconds: float) -> dict[str, Any]:
    """A run, with its plan beside it and how far apart they are."""
    rows = folder / "rows.jsonl"
    write_rows(rows)
    environ = {"DSRUN_PATH": write_model(run.case, folder)["DSRUN_PATH"]}
    found = dsrun(words(run, about.precision, about.steps, rows), folder, seconds, environ)
    path = folder / "run/job.json"
    if not path.is_file():
        return {"failed": found["failed"] or "it never started"}
    found |= {"model": run.model, "preset": run.preset, "set_up": run.name}
    found |= judge(run, Job.read(path), about.hardware)
    del found["metrics"], found["notes"]
    held = found["gpu_allocated_bytes"]
    return {
        **found,
        "off": found["planned_allocated_bytes"] / held - 1 if held and not found["failed"] else None,
    }


def main() -> None:
    """Run, and write each result as it comes."""
    given = arguments(__doc__)
    results, clock = begin("planned", given), Clock(given.budget)
    kind = None if given.tiny else kinds.recognise(results.where.split(",")[0])
    hardware = Hardware.from_gpu(kind, 1) if kind else None
    models, batches = (tuple(TINY), (1,)) if given.tiny else (tuple(MODELS), (1, 4))
    about = ("fp32", TINY_STEPS) if given.tiny else ("bf16", STEPS)
    runs = combinations(models, PRESETS, batches)
    cases = [BenchCase(run.name, partial(measured, run, About(*about, hardware))) for run in runs]
    with tempfile.TemporaryDirectory(prefix="dsrun-planned-") as name:
        carry_out(wanted(cases, given.only), results, clock, Path(name))


if __name__ == "__main__":
    main()

"""The learning rate of each step: linear warm-up, then the schedule's decay."""

from __future__ import annotations

import math
from fractions import Fraction

from dsrun.job.job import Job, TrainingSpec
from dsrun.options.table import CONFIG
from dsrun.words import counted


def warmup_steps(spec: TrainingSpec, total_steps: int) -> int:
    """Steps until the full learning rate; a share of them is rounded up, as by transformers' get_warmup_steps."""
    if spec.warmup_steps is not None:
        return spec.warmup_steps
    return math.ceil(Fraction(str(spec.warmup_ratio or 0)) * total_steps)


def warmup_note(spec: TrainingSpec, total_steps: int) -> str:
    """A note on a run that ends within its warm-up; empty for others."""
    steps = warmup_steps(spec, total_steps)
    if spec.lr_schedule == CONFIG or steps < total_steps:
        return ""
    highest = spec.lr * (total_steps - 1) / steps
    return (
        f"the warm-up takes {counted(steps, 'step')}, and the run {total_steps}: the learning rate never goes beyond "
        f"{highest:.3g} (--warmup-steps 0 leaves it out)"
    )


def learning_rate(job: Job, step: int, total_steps: int) -> float | None:
    """The learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule's decay to 0.

    None where the scheduler of the job's ds_config decides, which the engine asks after every step.

    As transformers' schedules (optimization.py): step k of a warm-up of W has k/W of the rate, the first one none.
    """
    spec, warmup = job.training, warmup_steps(job.training, total_steps)
    if spec.lr_schedule == CONFIG:
        return None
    if step < warmup:
        return spec.lr * step / warmup
    if spec.lr_schedule == "constant":
        return spec.lr
    done = (step - warmup) / max(1, total_steps - warmup)
    if spec.lr_schedule == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (1 - done)

"""When a loss that is no number ends a run."""

from __future__ import annotations

import math

from dsrun.errors import TrainingError
from dsrun.jobs.spec.job import Job

FP16_STEPS = 5
"""Steps in a row whose loss is not finite, after which fp16 is given up: DeepSpeed skips such steps, and other examples
or a smaller loss scale may be the end of it."""


class LossCheck:
    """Looks at every loss, which all ranks have alike: so they all stop at the same step."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._in_a_row = 0
        fp16 = job.ds_config.get("fp16", {}) if job.precision == "fp16" else None
        self._lowest_scale = None if fp16 is None else float(fp16.get("min_loss_scale", 1))

    def training(self, step: int, loss: float, scale: float | None) -> None:
        """After optimizer step `step` (from 1). scale: the loss scale by now, None where there is none.

        Raises TrainingError where training can't go on.
        """
        self._in_a_row = 0 if math.isfinite(loss) else self._in_a_row + 1
        patient = (
            scale is not None
            and self._lowest_scale is not None
            and scale > self._lowest_scale
            and self._in_a_row < FP16_STEPS
        )
        if self._in_a_row and not patient:
            since = f", for {self._in_a_row} steps by now" if self._in_a_row > 1 else ""
            raise TrainingError(f"step {step}: the loss is {loss}{since}; {self._advice()}")

    def evaluation(self, step: int, loss: float) -> None:
        """After an evaluation: no loss scale has a part in it. Raises TrainingError as `training` does."""
        if not math.isfinite(loss):
            raise TrainingError(f"step {step}: the evaluation loss is {loss}; {self._advice()}")

    def _advice(self) -> str:
        safer = {"fp16": "--precision bf16 or fp32, ", "bf16": "--precision fp32, "}.get(
            self._job.precision, ""
        )
        return (
            f"try a lower --lr (now {self._job.training.lr:g}), a longer warm-up (--warmup-steps), {safer}or look for "
            "broken examples in the data"
        )

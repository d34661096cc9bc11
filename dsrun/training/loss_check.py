"""When a loss or a gradient that is no number ends a run."""

from __future__ import annotations

import math

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.job.layout import NOT_FINITE

PATIENCE = 5
"""Steps in a row without a finite loss or gradient after which a run ends, where the weights have stayed as they were:
until then other examples or a smaller loss scale may help."""


class LossCheck:
    """A judge of every step's loss and gradient. All ranks have the same numbers, and so stop at the same step.

    | precision | the loss is not finite | the gradient is not finite, or the step was skipped |
    | --- | --- | --- |
    | fp32, bf16 | the end | the end; where the engine skipped the step, after PATIENCE |
    | fp16 | after PATIENCE; at the lowest loss scale the end | nothing; at the lowest loss scale after PATIENCE |
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._losses: list[int] = []
        self._gradients: list[int] = []
        self._skipped: int | None = None
        fp16 = job.ds_config.get("fp16", {}) if job.precision == "fp16" else None
        self._lowest_scale = None if fp16 is None else float(fp16.get("min_loss_scale", 1))

    @property
    def since(self) -> int | None:
        """The first of the last steps without a finite loss; None where the last one had one."""
        return self._losses[0] if self._losses else None

    @property
    def troubled(self) -> bool:
        """Whether the last step had no finite loss or gradient: no time for a checkpoint."""
        return bool(self._losses or self._gradients)

    def training(
        self, step: int, loss: float, scale: float | None, *, norm: float | None = None, skipped: int = 0
    ) -> None:
        """After optimizer step `step` (from 1).

        scale: the loss scale by now, None where there is none; norm: of the gradient, None where it isn't known;
        skipped: the steps so far that were not taken. Raises TrainingError where training can't go on.
        """
        was_skipped = self._skipped is not None and skipped > self._skipped
        self._skipped = skipped
        self._losses = [] if math.isfinite(loss) else [*self._losses, step]
        # DeepSpeed has -1 for a norm that is not finite (runtime/utils.py: get_weight_norm).
        bad = was_skipped or not (norm is None or (math.isfinite(norm) and norm >= 0))
        self._gradients = [*self._gradients, step] if bad else []
        can_fall = scale is not None and self._lowest_scale is not None and scale > self._lowest_scale
        if self._losses and len(self._losses) >= (PATIENCE if can_fall else 1):
            raise self._error("loss", self._losses[0], f"it is {loss} in step {step}")
        patience = PATIENCE if self._lowest_scale is not None or was_skipped else 1
        if len(self._gradients) >= patience and not can_fall:
            raise self._error("gradient", self._gradients[0], f"its norm is {norm} in step {step}")

    def given_up(self, step: int) -> TrainingError:
        """The error of a step in which fp16's loss scale would have to go below its lowest value."""
        since = (self._losses or self._gradients or [step])[0]
        return self._error("loss", since, f"fp16's loss scale is at its lowest in step {step}")

    def evaluation(self, step: int, loss: float) -> None:
        """After an evaluation, in which no loss scale has a part. Raises TrainingError where the loss is not finite."""
        if not math.isfinite(loss):
            raise self._error("loss", step, f"the evaluation loss is {loss} in step {step}")

    def weight(self, step: int, name: str) -> TrainingError:
        """The error of a weight that is not finite after a step; it goes into no checkpoint and no model."""
        return self._error("loss", step, f"the weight {name} has a value that is not finite")

    def _error(self, kind: str, since: int, reason: str) -> TrainingError:
        advice = {"fp16": "--precision bf16 or fp32, ", "bf16": "--precision fp32, "}
        hint = (
            f"{reason}; try a lower --lr (now {self._job.training.lr:g}), a longer warm-up (--warmup-steps), "
            f"{advice.get(self._job.precision, '')}or look for broken examples in the data"
        )
        return TrainingError(f"{kind} {NOT_FINITE} {since}", hint=hint)

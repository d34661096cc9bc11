"""The engines that take a model through its optimizer steps: `deepspeed`, `pipeline` and `fsdp`, one module each.

Everything else in dsrun.training calls an engine by the names below and never names one. A new engine is a module with
the functions of `Backend`, and a line in `backend_of` that says which jobs it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dsrun.job.job import Job
from dsrun.training.loss import Loss, StepTotals

if TYPE_CHECKING:
    from dsrun.training.engines.checkpoints.host_copies import Capture
    from dsrun.training.models.weights import Skeleton, Stored


class Engine(Protocol):
    """A model and its optimizer on one rank. Unless it says otherwise, every rank has to make the same calls."""

    @property
    def module(self) -> Any:
        """The transformers model."""

    @property
    def outline(self) -> Any:
        """The model with the layers and names of transformers, by which `full_weights` knows its weights, and which an
        export has; its values don't matter. `module`, unless the engine has put layers of its own into that."""

    @property
    def optimizer(self) -> Any:
        """The optimizer: torch's, or DeepSpeed's around it, which has that as its `optimizer`."""

    @property
    def device(self) -> Any:
        """The torch.device that this rank computes on."""

    def __call__(self, **batch: Any) -> Any:
        """The model's forward; batches are as in dsrun.training.data.batches."""

    def train(self, mode: bool = True) -> Any:
        """Turn dropout on, as torch's modules do."""

    def eval(self) -> Any:
        """Turn dropout off."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of all steps from now on; no communication."""

    def learning_rate(self) -> float:
        """The rate of the next step; no communication."""

    def backward(self, share: Any) -> None:
        """Add a micro batch's gradients to the step's.

        share: a scalar; the shares of all ranks and micro-steps add up to the step's loss. An engine that averages over
        ranks or micro-steps undoes that here.
        """

    def last_micro_step(self, last: bool) -> None:
        """Say, before a micro batch's forward, whether it is the step's last. Needed where steps have other numbers of
        micro batches than grad_accum."""

    def step(self) -> None:
        """Count a micro batch, after its backward; after the step's last one, take the optimizer step.

        The last one is the grad_accum-th, or the one that `last_micro_step` named.
        Raises FloatingPointError, on all ranks, where the step overflows at fp16's lowest loss scale.
        """

    def take_step(
        self, batches: Sequence[Mapping[str, Any]], totals: StepTotals, loss: Loss, *, varies: bool = False
    ) -> Any:
        """Take an optimizer step: forward and backward of a rank's micro batches, and `step`, whose errors it raises.

        loss: one of dsrun.training.loss, called with the engine, a micro batch on its device and the totals.
        varies: steps have other numbers of micro batches than grad_accum (`last_micro_step`).
        Returns this rank's part of the step's loss (a scalar, float32): those of all ranks add up to it.
        """

    def gradient_norm(self) -> Any:
        """L2 norm of the last step's whole gradient before clipping; None where it isn't known.

        A float, or a tensor with one element where reading it would make the host wait for the device.
        """

    def loss_scale(self) -> float | None:
        """The current fp16 loss scale; None in other precisions."""

    def skipped_steps(self) -> int:
        """Optimizer steps that were not taken so far, as their gradient was not finite; of a run that was resumed, or
        since this start."""

    def non_finite(self) -> str | None:
        """A trained weight with a value that is no number, whichever rank holds it; None where there is none."""

    def full_weights(self, names: Sequence[str]) -> dict[str, Any]:
        """Some weights and buffers of the model, whole and on the CPU, on rank 0; an empty dict on the other ranks.

        names: the outline's."""

    def whole(self) -> AbstractContextManager[bool]:
        """While it lasts, `module` answers: each token takes a forward, which would gather partitioned weights.

        True: every rank holds all weights, so ranks need not take as many forwards as one another. False: the weights
        don't fit, and stay partitioned. Nothing may change them meanwhile.
        """

    def save(self, folder: Path, step: int) -> None:
        """Write this rank's files of a checkpoint: trained weights, the optimizer, `step` (steps done)."""

    def capture(self, folder: Path, step: int) -> Capture:
        """Copies in main memory of all that `save` would write; their `write` makes the same files."""

    def load(self, folder: Path, written: Mapping[str, Any]) -> int:
        """Restore what `save` wrote under the layout `written`; returns the steps done.

        Raises DsrunError where it can't be divided over the ranks of this job.
        """


class MicroSteps:
    """`take_step` for engines whose micro batches go through the whole model, one after the other."""

    def take_step(
        self: Engine,
        batches: Sequence[Mapping[str, Any]],
        totals: StepTotals,
        loss: Loss,
        *,
        varies: bool = False,
    ) -> Any:
        """See Engine."""
        import torch

        from dsrun.training.data.batches import on

        whole = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, batch in enumerate(batches, 1):
            if varies:
                self.last_micro_step(number == len(batches))
            share = loss(self, on(self.device, dict(batch)), totals)
            whole += share.detach().float()
            self.backward(share)
            self.step()
        return whole


class Backend(Protocol):
    """An engine's module."""

    NAME: str
    """The engine's name in messages."""

    def connect(self) -> None:
        """Join the job's process group, and take this rank's device. The first call of all."""

    def awareness(self, job: Job) -> Any:
        """An object by which transformers knows, while it lives, that weights are partitioned as they are made."""

    def unaware(self) -> AbstractContextManager[None]:
        """While it lasts, transformers makes whole models, in spite of `awareness`."""

    def held_type(self, job: Job, computed: Any) -> Any:
        """The torch.dtype that a model's weights are held in. computed: the one that is computed with."""

    def fill(self, job: Job, skeleton: Skeleton, stored: Mapping[str, Stored], device: Any) -> None:
        """Give its weights to a model that has only shapes. Each rank keeps the part that the engine wants."""

    def divided(self, job: Job, read: Callable[[], Any], outline: Callable[[], Any], device: Any) -> Any:
        """The model with its weights, as `fill` would divide them, of a kind that only transformers can read.

        read: reads it whole, to the CPU, or divided as `awareness` says; outline: makes it with shapes only.
        """

    def initialize(self, job: Job, model: Any) -> Engine:
        """Put a loaded model under the engine, with the optimizer that the job names."""

    def layout(self, job: Job) -> dict[str, Any]:
        """All that decides how a checkpoint is divided into files: equal layouts read each other's files."""

    def rank_of(self, job: Job, file: Path) -> int:
        """The rank that writes this file of a checkpoint."""

    def check_file(self, file: Path) -> None:
        """Look whether a file of a checkpoint holds values alone, without reading its tensors.

        Raises CodeRefusedError where it asks for code, DsrunError where it is damaged.
        """

    def trained_weights(self, folder: Path) -> Mapping[str, Any]:
        """Every trained weight in a checkpoint, whole, by its name in the model; in one process, on the CPU.

        Divided weights are put together as they are asked for.
        Raises DsrunError where the files are not the engine's, or don't hold the whole weights.
        """


def backend_of(job: Job) -> Backend:
    """The module of the engine that trains this job. Importing it takes seconds."""
    if job.fsdp:
        from dsrun.training.engines import fsdp

        return fsdp
    if job.parallel.pp > 1:
        from dsrun.training.engines import pipeline

        return pipeline
    from dsrun.training.engines import deepspeed

    return deepspeed

"""The optimizer that a job brings itself, where DeepSpeed can't make it from its config."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dsrun.errors import DsrunError
from dsrun.jobs.spec.job import Job

EIGHT_BIT = "adamw-8bit"
GROUP_ELEMENTS = 1 << 30
"""ZeRO-1 and 2 lay the weights of a group in one flat tensor, of which every rank steps its share. bitsandbytes counts
a tensor's elements in 32 bits (backends/cuda/ops.py: ct.c_int32(g.numel())): with a model of 2.1e9 weights and more in
one group it would step a part of them, or none, without an error."""
MOST_ELEMENTS = (1 << 31) - 1


def own_optimizer(job: Job, parameters: Iterable[Any]) -> Any:
    """The optimizer over these weights; None where DeepSpeed makes it from its config. Raises as its maker does."""
    maker = MAKERS.get(job.training.optimizer)
    return maker(job, parameters) if maker else None


def _adamw_8bit(job: Job, parameters: Iterable[Any]) -> Any:
    """bitsandbytes' AdamW with 8-bit states.

    Raises DsrunError where it is not installed, or a single weight is more than it can count.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise DsrunError(
            f"bitsandbytes can't be imported: {error}",
            where=f"--optimizer {EIGHT_BIT}",
            hint="Install it where the ranks run: pip install bitsandbytes",
        ) from error
    groups = grouped(parameters, job.world_size if job.zero_stage else 1)
    return AdamW8bit([{"params": group} for group in groups], **job.training.optimizer_params)


def _sgd(job: Job, parameters: Iterable[Any]) -> Any:
    """torch's SGD."""
    from torch.optim import SGD

    return SGD(parameters, **job.training.optimizer_params)


def _lion(job: Job, parameters: Iterable[Any]) -> Any:
    """Lion in plain torch: DeepSpeed has it for GPUs and for host memory only, where it has to be compiled."""
    from dsrun.training.engines.lion import Lion

    return Lion(parameters, **job.training.optimizer_params)


MAKERS: dict[str, Callable[[Job, Iterable[Any]], Any]] = {EIGHT_BIT: _adamw_8bit, "sgd": _sgd, "lion": _lion}
"""--optimizer -> what makes it, from job.training.optimizer_params. What isn't here is DeepSpeed's, in ds_config."""


def grouped(parameters: Iterable[Any], shares: int, most: int = GROUP_ELEMENTS) -> list[list[Any]]:
    """Weights in groups of at most `most` elements, in their order; a larger one alone.

    shares: in how many parts a weight is stepped. Raises DsrunError where such a part can't be counted.
    """
    groups: list[list[Any]] = []
    room = 0
    for parameter in parameters:
        size = elements(parameter)
        if size > MOST_ELEMENTS * shares:
            raise DsrunError(
                f"a weight has {size:,} elements, and bitsandbytes counts to {MOST_ELEMENTS:,}",
                where=f"--optimizer {EIGHT_BIT}",
                hint="Take --optimizer adamw.",
            )
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(parameter)
        room -= size
    return groups


def elements(parameter: Any) -> int:
    """Of a whole weight; what a rank holds of it under ZeRO-3 is less, or nothing."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())

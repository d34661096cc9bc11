"""The optimizer that a job brings itself: where DeepSpeed can't make it from its config, and always with FSDP."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from dsrun.errors import DsrunError
from dsrun.job.job import Job
from dsrun.options.optimizers import ADAMW, ADAMW_8BIT, OPTIMIZERS

GROUP_ELEMENTS = 1 << 30
"""ZeRO-1 and 2 lay the weights of a group in one flat tensor, of which every rank steps its share. bitsandbytes counts
a tensor's elements in 32 bits (backends/cuda/ops.py: ct.c_int32(g.numel())): with a model of 2.1e9 weights and more in
one group it would step a part of them, or none, without an error."""
MOST_ELEMENTS = (1 << 31) - 1
WHOLE_ELEMENTS = "dsrun_whole_elements"
"""Attribute of a weight of which a rank has a tensor-parallel part: how many elements the whole weight has."""


def own_optimizer(job: Job, parameters: Iterable[Any]) -> Any:
    """The optimizer over these weights, or a function of the weights that makes it; None where DeepSpeed makes it from
    its config.

    Raises DsrunError where its package can't be imported, or a single weight is more than it can count.
    """
    name = job.training.optimizer
    if name not in OPTIMIZERS or not OPTIMIZERS[name].made_by:
        return None
    make = _class_of(name, OPTIMIZERS[name].made_by)
    if job.parallel.ep > 1:
        from deepspeed.moe.utils import configure_moe_param_groups

        # Called with the weights once the experts are divided: these are apart from the others, as ZeRO needs them.
        return lambda weights: make(configure_moe_param_groups(weights), **job.training.optimizer_params)
    if name == ADAMW_8BIT:
        groups = grouped(parameters, job.dp_size if job.zero_stage else 1)
        parameters = [{"params": group} for group in groups]
    return make(parameters, **job.training.optimizer_params)


def sharded_optimizer(job: Job, parameters: Iterable[Any]) -> Any:
    """The optimizer over FSDP's sharded weights; on GPUs AdamW steps all of them in one kernel."""
    name = job.training.optimizer
    make = _class_of(name, OPTIMIZERS[name].fsdp)
    fused = {"fused": True} if name == ADAMW and job.accelerator == "cuda" else {}
    return make(list(parameters), **{"lr": job.training.lr, **fused, **job.training.optimizer_params})


def _class_of(name: str, place: str) -> Any:
    """The class of an optimizer. place: MODULE:CLASS. Raises DsrunError where it can't be imported."""
    module, _, kind = place.partition(":")
    try:
        return getattr(importlib.import_module(module), kind)
    except ImportError as error:
        package = OPTIMIZERS[name].package or module
        what = f"{package} can't be imported: {error}"
        hint = f"Install it where the ranks run: pip install {package}"
        raise DsrunError(what, where=f"--optimizer {name}", hint=hint) from error


def grouped(parameters: Iterable[Any], shares: int, most: int = GROUP_ELEMENTS) -> list[list[Any]]:
    """Weights in groups of at most `most` elements, in their order; a larger one alone.

    shares: the ranks that step a group, each a part. Raises DsrunError where a weight's part can't be counted.
    """
    groups: list[list[Any]] = []
    room = 0
    for parameter in parameters:
        size = elements(parameter)
        if size > MOST_ELEMENTS * shares:
            what = f"a weight has {size:,} elements, and bitsandbytes counts to {MOST_ELEMENTS:,}"
            raise DsrunError(what, where=f"--optimizer {ADAMW_8BIT}", hint="Take --optimizer adamw.")
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(parameter)
        room -= size
    return groups


def elements(parameter: Any) -> int:
    """Elements of a whole weight. A rank may hold fewer: under tensor parallelism, or under ZeRO-3 perhaps none."""
    divided = getattr(parameter, WHOLE_ELEMENTS, None)
    return int(divided or getattr(parameter, "ds_numel", None) or parameter.numel())

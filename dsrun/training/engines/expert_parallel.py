"""Expert parallelism as DeepSpeed does it (AutoEP), and what dsrun has to see to around it.

The ranks of a group have examples of their own, and each has some of every layer's experts: a layer sends its tokens to
the ranks that have the experts chosen for them, and gets them back (two all-to-alls in forward, two in backward). All
other weights are data parallel. Where a comment names a file, it is DeepSpeed 0.19's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.training.engines.checkpoints.experts import DividedExperts
from dsrun.training.engines.on_ranks import all_tensors

KIND = "AutoEPMoELayer"
"""The class that AutoEP puts in the place of a layer's router and experts (module_inject/auto_ep_layer.py)."""
TABLE = "_CAN_RECORD_REGISTRY"
EXPERT_FILE = "_expert_"
"""Part of the name of a checkpoint's file of one expert (_get_expert_ckpt_name in runtime/engine.py)."""
HINT = "Train without it, and report it with the versions of DeepSpeed and transformers."


@contextmanager
def dividing(job: Job) -> Iterator[None]:
    """While DeepSpeed divides the experts, transformers' table of recorded outputs takes names of classes, too.

    AutoEP asks that table by a class's name, and with a value to take where there is none
    (_install_instance_transformers_output_recorders in module_inject/auto_ep_presets/base.py). From 5.23 on
    transformers' table is asked by a model alone (_CanRecordRegistry in utils/output_capturing.py), and AutoEP ends
    with a TypeError. Releases before that have a plain dictionary, and nothing is changed for them.
    """
    recorded = _recorded_outputs() if job.parallel.ep > 1 else None
    table = getattr(recorded, TABLE, None)
    if table is None or type(table) is dict:
        yield
        return
    both = _ByNameOrModel(table)
    setattr(recorded, TABLE, both)
    try:
        yield
    finally:
        setattr(recorded, TABLE, table)
        for name in both.keys() - table.keys():  # classes of models that were made meanwhile
            dict.__setitem__(table, name, both[name])


def _recorded_outputs() -> Any:
    """transformers' module of recorded outputs; None in releases that have none."""
    try:
        from transformers.utils import output_capturing
    except ImportError:
        return None
    return output_capturing


class _ByNameOrModel(dict):  # type: ignore[type-arg]
    """A dictionary by names of classes, in which a model stands for its class's name."""

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(_class_name(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_class_name(key), value)

    def get(self, key: Any, default: Any = None) -> Any:
        """As dict's; the empty dictionary for a model without an entry, as transformers' has it."""
        found = super().get(_class_name(key), default)
        return {} if found is None and not isinstance(key, str) else found


def _class_name(key: Any) -> str:
    return key if isinstance(key, str) else str(key.__class__)


def outline(model: Any) -> Any:
    """The model with shapes alone, on the meta device: for the names and the class that an export has."""
    memo: dict[int, Any] = {}
    for tensor in {**all_tensors(model)}.values():
        shape, dtype = getattr(tensor, "ds_shape", tensor.shape), tensor.dtype
        empty = torch.empty(shape, dtype=dtype, device="meta")
        made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        memo[id(tensor)] = made
    return copy.deepcopy(model, memo)


def experts_of(job: Job, outlined: Any, model: Any) -> DividedExperts | None:
    """The divided experts of a model that DeepSpeed has divided; None without --ep. outlined: as `engaged` has it."""
    if job.parallel.ep == 1:
        return None
    names = (name for name, _ in outlined.named_parameters())
    return DividedExperts.of_layers((name for name, _ in _layers(model)), job.parallel.ep, names)


def engaged(job: Job, outlined: Any, model: Any) -> None:
    """Raise TrainingError unless every layer's experts are divided over the ranks, as the job says.

    Losses are the same where nothing was divided, so that nobody would see it by them. outlined: the model as it was
    before DeepSpeed had it.
    """
    ranks = job.parallel.ep
    if ranks == 1:
        return
    wanted = sum(name.endswith(".experts.gate_up_proj") for name, _ in outlined.named_parameters())
    layers = [layer for _, layer in _layers(model)]
    divided = [
        layer
        for layer in layers
        if layer.ep_size == ranks and dist.get_world_size(layer.ep_group) == ranks
        and all(_whole_shape(weight)[0] * ranks == layer.num_experts for weight in layer.experts.parameters())
    ]  # fmt: skip
    if not divided or len(divided) != wanted:
        what = f"DeepSpeed has divided the experts of {len(divided)} of {wanted} layers over {ranks} ranks"
        raise TrainingError(what, where=f"--ep {ranks}", hint=HINT)


def copies(weight: Any, ep: int) -> int:
    """Ranks among which a weight of the model lies: `ep` for one with a rank's experts, 1 for others."""
    return 1 if getattr(weight, "allreduce", True) else ep


@contextmanager
def without_expert_files(engine: Any) -> Iterator[None]:
    """While it lasts DeepSpeed writes no file for each expert of each layer: ZeRO's files have all of them in fp32.

    engine: DeepSpeed's, every file of which goes through its checkpoint engine.
    """
    checkpoints = engine.checkpoint_engine
    write = checkpoints.save

    def save(state: Any, path: str, *more: Any) -> Any:
        return None if EXPERT_FILE in path.rpartition("/")[2] else write(state, path, *more)

    checkpoints.save = save
    try:
        yield
    finally:
        checkpoints.save = write


def gathered(layer: Any, matrices: list[str]) -> torch.Tensor | None:
    """A layer's matrices of all experts, as transformers has them in one weight: on the CPU of rank 0.

    [experts, rows of all matrices, columns]; None on the other ranks. Every rank has to come here. matrices: their
    names in the layer's `experts`, in their order.
    """
    if dist.get_rank() >= layer.ep_size:
        return None  # another group than rank 0's, which has the same weights
    mine = torch.cat([getattr(layer.experts, name).detach() for name in matrices], dim=1).contiguous()
    first = dist.get_rank() == 0
    parts = [torch.empty_like(mine) for _ in range(layer.ep_size)] if first else None
    dist.gather(mine, parts, dst=0, group=layer.ep_group)
    return torch.cat(parts).cpu() if parts else None


def _layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ == KIND]


def _whole_shape(weight: Any) -> tuple[int, ...]:
    return tuple(getattr(weight, "ds_shape", weight.shape))

"""Questions of several engines. The first two go to all ranks: every rank has to make the same calls."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from dsrun.host.memory import host_ram
from dsrun.options.table import GATHERED_SHARE
from dsrun.training.finite import is_finite


def room_for(wanted: float, device: torch.device) -> bool:
    """Whether every rank has room for that many bytes at once, and as much again for what answers."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = host_ram().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fits = torch.tensor(float(wanted <= free * GATHERED_SHARE), device=device)
    dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    return bool(fits)


def first_not_finite(held: Iterable[tuple[str, Any]], device: torch.device) -> str | None:
    """The first weight with a value that is no number on any rank.

    held: the names of all weights, in the same order on all ranks, and this rank's part of each; None: there is none,
    or none that can be looked at.
    """
    names: list[str] = []
    first = None
    for name, part in held:
        if first is None and part is not None and not is_finite(part):
            first = len(names)
        names.append(name)
    number = torch.tensor(len(names) if first is None else first, device=device)
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return names[int(number)] if int(number) < len(names) else None


def all_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """Weights and buffers of a model, a tied one under each of its names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}

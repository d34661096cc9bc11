"""Presets for FSDP: a table [fsdp] in place of DeepSpeed's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem

JOB, HOST = "job", "host"
"""Words that shard_over takes beside a number of ranks: all ranks of the job; the ranks of each host."""
OPTIMIZER = "optimizer"
"""The table of the optimizer's parameters."""


@dataclass(frozen=True, kw_only=True)
class FsdpPreset:
    """The decisions of an FSDP preset. Batch, clipping, precision, learning rate and optimizer are the job's own."""

    shard_over: str | int = JOB
    """The ranks that share one copy of the model: JOB, HOST, or a number of neighbours."""
    offload: bool = False
    """Weights, gradients and optimizer states are in host memory, and optimizers step there."""
    whole_gradients: bool = False
    """Until the last micro-step of a step each rank keeps whole gradients, and reduces them once."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the optimizer's class, but for the learning rate."""

    def shard_ranks(self, ranks: int, on_a_host: int, where: str) -> int:
        """The number of ranks that share one copy of the model. Raises DsrunError where it doesn't divide the job's."""
        shard = int({JOB: ranks, HOST: on_a_host}.get(str(self.shard_over), self.shard_over))
        if ranks % shard:
            message = f"divides the model over {shard} ranks, which doesn't divide the job's {ranks}"
            near = max(size for size in range(1, min(shard, ranks) + 1) if ranks % size == 0)
            raise DsrunError(message, where=where, hint=f"The nearest that does: fsdp.shard_over = {near}.")
        return shard


def problems(table: Any, label: str) -> Iterator[Problem]:
    """Problems of a file's [fsdp]. label: the file."""
    if not isinstance(table, dict):
        yield Problem("fsdp is not a table", label, '[fsdp], with shard_over = "job", for one.')
        return
    known = tuple(FsdpPreset.__dataclass_fields__)
    for key, value in table.items():
        where = f"{label}: fsdp.{key}"
        if key not in known:
            hint = catalog.suggestion(key, known, f"It holds {', '.join(known)}.")
            yield Problem(f"unknown key {key!r}", f"{label}: fsdp", hint)
        elif key == "shard_over" and not (value in (JOB, HOST) or (type(value) is int and value > 0)):
            yield Problem(f"can't be {value!r}", where, f'"{JOB}", "{HOST}", or how many ranks share a copy.')
        elif key == OPTIMIZER and not isinstance(value, dict):
            yield Problem("is not a table", where, "[fsdp.optimizer], with weight_decay = 0.1, for one.")
        elif key in ("offload", "whole_gradients") and not isinstance(value, bool):
            yield Problem(f"can't be {value!r}", where, "true or false.")

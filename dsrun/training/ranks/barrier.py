"""Collectives beside torch's: a barrier without a time limit, and Python's values from all ranks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch.distributed as dist

FIRST_SLEEP_S, LONGEST_SLEEP_S = 0.01, 1.0
_numbers = itertools.count()


def barrier() -> None:
    """Wait until every rank is here, however long that takes.

    A collective gives up after the process group's timeout, 10 minutes by DeepSpeed's default, and writing a large
    model, scoring, or preparing data on rank 0 takes longer. So the ranks first count themselves:

    1. Each adds 1 to a key in the process group's store (a key a barrier: all ranks call the same barriers in turn).
    2. It looks at the sum, ever more seldom, until it is the number of ranks.
    3. Only then comes the collective barrier, which nobody has to wait long for.

    Where a rank dies, the job's supervision ends the others. Where the rank that holds the store dies, `add` raises.
    """
    store = dist.distributed_c10d._get_default_store()
    key, began = f"dsrun/barrier/{next(_numbers)}", time.monotonic()
    arrived = store.add(key, 1)
    while arrived < dist.get_world_size():
        time.sleep(min(LONGEST_SLEEP_S, FIRST_SLEEP_S + (time.monotonic() - began) / 10))
        arrived = store.add(key, 0)
    dist.barrier()  # the store must not go with its rank before the others have looked into it


def from_all_ranks(value: Any) -> list[Any]:
    """The values that all ranks give, by rank, on every rank. Within the process group's time limit."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

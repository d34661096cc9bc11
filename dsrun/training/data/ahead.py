"""The batches of the next step, made by a thread while a step runs.

A step's examples are a pure function of its number (`BatchPlan.step`), so they may be worked out early: neither their
order nor a resumed run depends on it. One step is made ahead, no more: a host's memory holds two steps' batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def made_ahead(make: Callable[[int], T], steps: range, device: torch.device) -> Generator[T, None, None]:
    """make(step) of each step in turn; while the caller works on one, the next is made.

    An error of `make` is raised when its step is asked for, so that the steps before it are taken. device: the one of
    the thread's CUDA calls (pinning); a thread begins on the first GPU, and would take memory there.
    """
    start = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=start) as thread:
        coming: Future[T] | None = thread.submit(make, steps[0]) if steps else None
        for following in (*steps[1:], None):
            if coming is None:
                return
            ready = coming
            coming = None if following is None else thread.submit(make, following)
            yield ready.result()


def pinned(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch in page-locked memory, which a GPU copies by itself, without a wait; for other devices as it is."""
    if device.type != "cuda":
        return batch
    return {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in batch.items()}

"""What a step allocates and frees, in order."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FLASH_BACKWARD = (
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
)
"""Operators whose CUDA kernels have memory of their own while they run."""
ROUNDED_ROWS, ROUNDED_HEAD = 128, 32
"""Flash attention rounds tokens and a head's width up to multiples of these (flash_api.cpp: mha_bwd)."""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """The allocations and frees of everything that runs while it is entered.

    events: an allocation's number (sizes has its bytes), or ~number where it is freed. marks: (position in events,
    word, number): "forward" and "after" of a layer, "backward" where the gradient of its output is there (-1: that of
    the first layer's input), "gradient" of a weight, with the allocation that holds it behind.
    """

    def __init__(self, known: list[torch.Tensor]) -> None:
        """known: the tensors that were there before, weights and buffers."""
        super().__init__()
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.marks: list[tuple[Any, ...]] = []
        self.stream: list[int] = []
        """Bytes of an element of each layer's input, in the order of their calls."""
        self._live: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator._schema.name.rpartition("::")[2] in FLASH_BACKWARD:
            for size in _workspace(*args[:3]):
                self._passing(size)
        output = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return output

    def mark(self, word: str, number: int, *more: Any) -> None:
        """Put a mark behind what was recorded so far."""
        self.marks.append((len(self.events), word, number, *more))

    def close(self) -> None:
        """End the recording: what is freed from now on, gradients first of all, outlives the step.

        What goes at one time, such as autocast's copies of weights, has no order: it is put into that of its making.
        """
        events, borders = list(self.events), {mark[0] for mark in self.marks}
        start = 0
        for place in range(len(events) + 1):
            if place == len(events) or events[place] >= 0 or place in borders:
                events[start:place] = sorted(events[start:place], reverse=True)
                start = place if place < len(events) and events[place] < 0 else place + 1
        self.events = events

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The allocation that holds a tensor; None for one that was there before."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._known or not storage.nbytes():
            return
        number, events = self._allocated(storage.nbytes()), self.events
        self._live[key] = number

        def freed(_: Any) -> None:
            del self._live[key], self._references[number]
            events.append(~number)

        self._references[number] = weakref.ref(storage, freed)

    def _allocated(self, size: int) -> int:
        self.sizes.append(size)
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def _passing(self, size: int) -> None:
        """Memory that only the operator at hand uses: written down as freed before its outputs come."""
        self.events.append(~self._allocated(size))


def _workspace(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> list[int]:
    """Bytes that flash attention's backward pass takes beside its outputs, [rows, heads, tokens, head] of each.

    The queries' gradient is summed in fp32; with grouped keys those of keys and values come for every head first.
    """
    rows, heads, tokens, head = query.shape
    tokens = -(-tokens // ROUNDED_ROWS) * ROUNDED_ROWS
    width = -(-head // ROUNDED_HEAD) * ROUNDED_HEAD
    sizes = [4 * rows * heads * tokens * width]
    if key.shape[1] != heads:
        sizes += 2 * [gradient.element_size() * rows * heads * key.shape[2] * head]
    return sizes

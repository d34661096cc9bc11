"""Copies in main memory of what a checkpoint holds, so that its files can be written while the training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch


class Capture(Protocol):
    """A rank's part of a checkpoint, as it was when it was taken: no later step changes it."""

    def write(self) -> None:
        """Write the files and let the copies go. In any thread; no collective. Raises OSError, RuntimeError."""

    def close(self) -> None:
        """Write what only all ranks together know. Every rank calls it, once all have written."""


class CapturedFiles:
    """Files that are each written from one value."""

    def __init__(self, save: Callable[[Any, str], Any]) -> None:
        """save: writes a value to a path."""
        self._save = save
        self._files: list[tuple[Any, str]] = []

    def take(self, state_dict: Any, path: str) -> None:
        """Copy a value, which `write` will write to the path."""
        self._files.append((host_copy(state_dict), path))

    def write(self) -> None:
        """See Capture."""
        while self._files:
            self._save(*self._files.pop(0))

    def close(self) -> None:
        """See Capture: nothing is left to write."""


def host_copy(value: Any) -> Any:
    """A copy of a value, with all tensors in main memory. torch.save makes the same bytes of it, on CPUs.

    Tensors that share a storage do so in the copy, which has each storage whole: torch.save writes it whole and once.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    # What deepcopy finds under an object's id it takes for the object's copy: so it makes none of tensors, which it
    # would leave on their device, and copies all else as it is.
    memo: dict[int, Any] = {}
    tensors = list(_tensors(value, set()))
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        memo[id(tensor)] = _over(storages[storage._cdata], tensor)
    for tensor in tensors:  # torch.save writes the attributes that DeepSpeed has given to a tensor
        vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
    return copy.deepcopy(value, memo)


def tensor_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's copy in main memory."""
    return tensor.detach().to("cpu", copy=True)


def _over(storage: torch.UntypedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another, over another storage."""
    empty = torch.empty(0, dtype=tensor.dtype)
    new = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(new, tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in dictionaries, lists, tuples, sets and plain objects, however deep. seen: ids of visited values."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None), type)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        yield from _tensors(vars(value), seen)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _tensors(part, seen)
    else:
        yield from _tensors(getattr(value, "__dict__", None), seen)

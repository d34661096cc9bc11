"""The words of a schedule: what is allocated and freed, and when."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple


class Action(NamedTuple):
    """kind: "allocate" or "free" a block (key), or "phase", whose name key is. size: bytes; owner: whose memory.

    stream: the CUDA stream that allocates; torch gives its blocks to no other one. Empty: that of the computation.
    """

    kind: str
    key: Hashable
    size: float = 0.0
    owner: str = ""
    stream: str = ""


def allocate(key: Hashable, size: float, owner: str, stream: str = "") -> Iterator[Action]:
    """One allocation, where there is anything to allocate."""
    if size > 0:
        yield Action("allocate", key, size, owner, stream)


def free(key: Hashable) -> Iterator[Action]:
    """One free. Blocks without a size were never allocated: the replay passes over them."""
    yield Action("free", key)


def passing(key: Hashable, size: float, owner: str, stream: str = "") -> Iterator[Action]:
    """A block that is gone at once."""
    yield from allocate(key, size, owner, stream)
    yield from free(key)

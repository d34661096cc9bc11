"""What a checkpoint holds, and where in it: flat tensors, and which elements of which weight lie where in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Piece:
    """A run of a weight's elements, as it lies in a flat tensor: tensor[offset : offset + count] is
    weight.view(-1)[first : first + count]."""

    name: str
    """Of the weight."""
    first: int
    """The weight's element that it begins with, of the weight laid flat."""
    offset: int
    """Where in the flat tensor it begins, in elements."""
    count: int
    """Elements."""


@dataclass
class Shard:
    """A flat tensor of one rank, and what lies where in it."""

    weights: torch.Tensor
    """fp32, [elements]."""
    states: dict[str, torch.Tensor]
    """What the optimizer keeps of each element ("exp_avg", "exp_avg_sq"): name -> a tensor of the same shape."""
    pieces: list[Piece]


class Overlap(NamedTuple):
    """Elements that a saved shard and one of this rank's have in common."""

    saved: Shard
    start: int
    """Where they begin in the saved shard's tensors."""
    target: int
    """Where they begin in this rank's."""
    length: int


@dataclass
class Saved:
    """A checkpoint's content."""

    shards: list[Shard]
    adam_steps: int
    """The optimizer's own count, without skipped steps."""
    scaling: dict[str, float]
    """See SCALING; empty but in fp16."""
    counters: dict[str, int]
    """Steps and samples as the engine counts them, and "step": the steps done."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """The state of a config's scheduler; empty where there is none."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the weights, as the ranks that wrote it had them."""
    where: dict[str, list[tuple[Piece, Shard]]] = field(init=False)
    """The pieces of each weight, with their shards."""

    def __post_init__(self) -> None:
        self.where = defaultdict(list)
        for shard in self.shards:
            for piece in shard.pieces:
                self.where[piece.name].append((piece, shard))

    def overlaps(self, wanted: Piece) -> Iterator[Overlap]:
        """What the checkpoint has of a piece, from one shard after another."""
        for piece, shard in self.where.get(wanted.name, ()):
            first = max(piece.first, wanted.first)
            count = min(piece.first + piece.count, wanted.first + wanted.count) - first
            if count > 0:
                yield Overlap(
                    shard, piece.offset + first - piece.first, wanted.offset + first - wanted.first, count
                )

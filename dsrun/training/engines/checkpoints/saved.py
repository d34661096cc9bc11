"""The content of a checkpoint: flat tensors, and the weights' elements that lie in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Piece:
    """A run of a weight's elements, as it lies in a flat tensor: tensor[offset : offset + count] is
    weight.view(-1)[first : first + count]."""

    name: str
    """The weight's name."""
    first: int
    """The piece's first element, counted in the weight laid flat."""
    offset: int
    """The piece's first element, counted in the flat tensor."""
    count: int


@dataclass
class Shard:
    """A flat tensor of one rank, and what lies where in it."""

    weights: torch.Tensor
    """fp32, [elements]."""
    states: dict[str, torch.Tensor]
    """The optimizer's state of each element: name ("exp_avg", "exp_avg_sq") -> a tensor of the same shape."""
    pieces: list[Piece]


class Overlap(NamedTuple):
    """Elements that a saved shard and one of this rank's have in common."""

    saved: Shard
    start: int
    """The first one's place in the saved shard's tensors."""
    target: int
    """The first one's place in this rank's tensors."""
    length: int


@dataclass
class Saved:
    """A checkpoint's content."""

    shards: list[Shard]
    adam_steps: int
    """The optimizer's own count, without skipped steps."""
    scaling: dict[str, float]
    """The loss scaler's numbers (SCALING in `resharding`); empty but in fp16."""
    counters: dict[str, int]
    """Steps and samples as the engine counts them, and "step": the steps done."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """The state of a config's scheduler; empty where there is none."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the weights, as the ranks that wrote the checkpoint had them."""
    where: dict[str, list[tuple[Piece, Shard]]] = field(init=False)
    """The pieces of each weight, with their shards."""

    def __post_init__(self) -> None:
        self.where = defaultdict(list)
        for shard in self.shards:
            for piece in shard.pieces:
                self.where[piece.name].append((piece, shard))

    def overlaps(self, wanted: Piece) -> Iterator[Overlap]:
        """The elements of a piece that the checkpoint has, from one shard after another."""
        for piece, shard in self.where.get(wanted.name, ()):
            # Both are runs of the same weight's elements: what they share begins with the later of the two beginnings.
            first = max(piece.first, wanted.first)
            count = min(piece.first + piece.count, wanted.first + wanted.count) - first
            if count > 0:
                start, target = piece.offset + first - piece.first, wanted.offset + first - wanted.first
                yield Overlap(shard, start, target, count)


def laid_flat(parts: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """All elements of a weight. parts: its pieces, each with the flat tensor that it lies in."""
    flat = torch.empty(sum(piece.count for piece, _ in parts), dtype=parts[0][1].dtype)
    for piece, tensor in parts:
        part = tensor.reshape(-1)[piece.offset : piece.offset + piece.count]
        flat[piece.first : piece.first + piece.count] = part
    return flat


class LazyWeights(Mapping[str, torch.Tensor]):
    """Weights by their names. Each is put together when it is asked for, so that no more than that is in memory."""

    def __init__(self, names: Iterable[str], make: Callable[[str], torch.Tensor]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would put the weight together to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

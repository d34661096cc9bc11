"""Weights of which tensor-parallel ranks have parts: put together out of a checkpoint, and taken apart for others.

What each tensor-parallel rank wrote is, by itself, a checkpoint of its parts, which `resharding` reads. Here the parts
of a weight are joined, its fp32 copy and what the optimizer keeps of it alike, and this rank's part is cut out, one
weight at a time; what each rank holds of it is then for `resharding` again, whatever ZeRO does with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsrun.errors import DsrunError
from dsrun.models.tensor_parallel import divided_along
from dsrun.training.engines.checkpoints.saved import Overlap, Piece, Saved, Shard

ALONG = {"LinearLayer": 0, "LinearAllreduce": 1, "SubParamLinearLayer": 0}
"""Class of DeepSpeed's -> the dimension in which its weight is divided (module_inject/layers.py)."""


@dataclass(frozen=True)
class Division:
    """What a rank has of a weight."""

    shape: tuple[int, ...]
    """Of the whole one."""
    dim: int | None = None
    """Along which it is divided; None: the rank has all of it."""
    layers: int = 1
    """Layers in one, along dimension 0, each of which is divided."""
    sizes: tuple[int, ...] = ()
    """Of all parts of such a layer, along that dimension."""
    index: int = 0
    """This rank's."""

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's, of a tensor with the whole weight's shape."""
        if self.dim is None:
            return whole
        return _by_layer(whole, self.layers).split(self.sizes, dim=self.dim + 1)[self.index].flatten(0, 1)


def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole of a weight, or of what an optimizer keeps of it. parts: those of all tensor-parallel ranks."""
    dim, layers = divided_along(name)
    if dim is None or len(parts) == 1:
        return parts[0]
    return torch.cat([_by_layer(part, layers) for part in parts], dim=dim + 1).flatten(0, 1)


def _by_layer(weight: torch.Tensor, layers: int) -> torch.Tensor:
    """[layers, out of one, ...]."""
    return weight.reshape(layers, weight.shape[0] // layers, *weight.shape[1:])


def divisions(engine: Any) -> dict[str, Division]:
    """What this rank of a DeepSpeedEngine has of each trained weight, by its name."""
    found = {}
    for module in engine.module.modules():
        kind = type(module).__name__
        for own, weight in module.named_parameters(recurse=False):
            if not weight.requires_grad:
                continue
            name = engine.param_names[weight]
            found[name] = Division(tuple(getattr(weight, "ds_shape", weight.shape)))
            # What is added once the ranks' results are summed is whole.
            if kind in ALONG and not (own == "bias" and ALONG[kind] == 1):
                whole = tuple(module._orig_weight_shape if own == "weight" else module._orig_bias_shape)
                layers = divided_along(name)[1]
                sizes = module._partition_sizes if layers == 1 else None
                sizes = sizes or (whole[0] // layers // module.tp_world_size,) * module.tp_world_size
                found[name] = Division(whole, ALONG[kind], layers, tuple(sizes), module.tp_index)
    return found


class WholeWeights(Mapping[str, torch.Tensor]):
    """Weights of which each tensor-parallel rank wrote a part, put together as they are asked for."""

    def __init__(self, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> torch.Tensor:
        return joined(name, [part[name] for part in self._parts])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts[0])

    def __len__(self) -> int:
        return len(self._parts[0])


@dataclass
class Rejoined:
    """A checkpoint of parts, as this rank is to hold it: in the place of a `Saved`."""

    parts: Sequence[Saved]
    """Of each tensor-parallel rank that wrote it."""
    own: Mapping[str, Division]
    folder: Path
    _last: tuple[str, Shard | None] = ("", None)

    def overlaps(self, wanted: Piece) -> Iterator[Overlap]:
        """What the checkpoint has of a piece of this rank's part of a weight: all of it."""
        name, part = self._last
        if part is None or name != wanted.name:
            part = self._part(wanted.name)
            self._last = wanted.name, part
        yield Overlap(part, wanted.first, wanted.offset, wanted.count)

    def _part(self, name: str) -> Shard:
        """This rank's part of a weight and of its states, laid flat."""
        try:
            weights = self._joined(name, None)
            states = self.parts[0].where[name][0][1].states
            joined = {state: self._joined(name, state) for state in states}
        except (KeyError, IndexError, ValueError, RuntimeError) as error:
            raise DsrunError(
                f"holds no whole {name} ({error})",
                where=str(self.folder),
                hint="Was it written by the same model?",
            ) from error
        return Shard(weights, joined, [Piece(name, 0, 0, weights.numel())])

    def _joined(self, name: str, state: str | None) -> torch.Tensor:
        division = self.own[name]
        parts = [_flat(saved, name, state).reshape(saved.shapes[name]) for saved in self.parts]
        whole = joined(name, parts)
        if tuple(whole.shape) != division.shape:
            raise ValueError(f"{tuple(whole.shape)} in place of {division.shape}")
        return division.part(whole).reshape(-1)


def _flat(saved: Saved, name: str, state: str | None) -> torch.Tensor:
    """All elements of a weight (state None), or of what the optimizer keeps of it, that one rank's files have."""
    pieces = [
        (piece, shard.weights if state is None else shard.states[state]) for piece, shard in saved.where[name]
    ]
    found = torch.empty(sum(piece.count for piece, _ in pieces), dtype=pieces[0][1].dtype)
    for piece, tensor in pieces:
        found[piece.first : piece.first + piece.count] = tensor.reshape(-1)[
            piece.offset : piece.offset + piece.count
        ]
    return found

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
from dsrun.training.engines.checkpoints.saved import LazyWeights, Overlap, Piece, Saved, Shard, laid_flat

ALONG = {"LinearLayer": 0, "LinearAllreduce": 1, "SubParamLinearLayer": 0}
"""Class of DeepSpeed's -> the dimension in which its weight is divided (module_inject/layers.py)."""


@dataclass(frozen=True)
class Division:
    """A rank's part of a weight."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    dim: int | None = None
    """The dimension along which it is divided; None: the rank has all of it."""
    layers: int = 1
    """Layers that lie in one weight, along dimension 0 (gate and up); each is divided by itself."""
    sizes: tuple[int, ...] = ()
    """Sizes of all ranks' parts of such a layer, along `dim`."""
    index: int = 0
    """The number of this rank's part."""

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor with the whole weight's shape."""
        if self.dim is None:
            return whole
        return _by_layer(whole, self.layers).split(self.sizes, dim=self.dim + 1)[self.index].flatten(0, 1)


def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A whole weight, or an optimizer's state of it. parts: those of all tensor-parallel ranks, in their order."""
    dim, layers = divided_along(name)
    if dim is None or len(parts) == 1:
        return parts[0]
    return torch.cat([_by_layer(part, layers) for part in parts], dim=dim + 1).flatten(0, 1)


def _by_layer(weight: torch.Tensor, layers: int) -> torch.Tensor:
    """The weight as [layers, rows of one layer, ...]."""
    return weight.reshape(layers, weight.shape[0] // layers, *weight.shape[1:])


def divisions(engine: Any) -> dict[str, Division]:
    """The division of each trained weight of a DeepSpeedEngine, by its name."""
    divisions = {}
    for module in engine.module.modules():
        kind = type(module).__name__
        for attribute, weight in module.named_parameters(recurse=False):
            if not weight.requires_grad:
                continue
            name = engine.param_names[weight]
            divisions[name] = Division(tuple(getattr(weight, "ds_shape", weight.shape)))
            # LinearAllreduce adds its bias once the ranks' results are summed: every rank has all of it.
            if kind in ALONG and not (attribute == "bias" and ALONG[kind] == 1):
                whole = tuple(module._orig_weight_shape if attribute == "weight" else module._orig_bias_shape)
                layers = divided_along(name)[1]
                # `_partition_sizes` are those of a single layer; two in one weight (gate and up) are divided evenly.
                sizes = module._partition_sizes if layers == 1 else None
                sizes = sizes or (whole[0] // layers // module.tp_world_size,) * module.tp_world_size
                divisions[name] = Division(whole, ALONG[kind], layers, tuple(sizes), module.tp_index)
    return divisions


def whole_weights(parts: Sequence[Mapping[str, torch.Tensor]]) -> LazyWeights:
    """Weights of which each tensor-parallel rank wrote a part. parts: the ranks' weights, by their names."""
    return LazyWeights(parts[0], lambda name: joined(name, [part[name] for part in parts]))


@dataclass
class Rejoined:
    """A checkpoint of parts, as this rank is to hold it: in the place of a `Saved`."""

    parts: Sequence[Saved]
    """The files of each tensor-parallel rank that wrote it."""
    divisions: Mapping[str, Division]
    folder: Path
    _last: tuple[str, Shard | None] = ("", None)
    """The weight that was joined last, and this rank's part of it."""

    def overlaps(self, wanted: Piece) -> Iterator[Overlap]:
        """The elements of a piece of this rank's part of a weight: all of them."""
        name, part = self._last
        # A shard asks for one weight's pieces in turn. Only the last weight is kept: all of them would be the model.
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
            hint = "Was it written by the same model?"
            raise DsrunError(f"holds no whole {name} ({error})", where=str(self.folder), hint=hint) from error
        return Shard(weights, joined, [Piece(name, 0, 0, weights.numel())])

    def _joined(self, name: str, state: str | None) -> torch.Tensor:
        """This rank's part of a weight (state None), or of the optimizer's state of it, laid flat."""
        division = self.divisions[name]
        whole = joined(name, [_undivided(saved, name, state) for saved in self.parts])
        if tuple(whole.shape) != division.shape:
            raise ValueError(f"{tuple(whole.shape)} in place of {division.shape}")
        return division.part(whole).reshape(-1)


def _undivided(saved: Saved, name: str, state: str | None) -> torch.Tensor:
    """One tensor-parallel rank's part, whatever ZeRO has divided it into."""
    places = saved.where[name]
    parts = [(piece, shard.weights if state is None else shard.states[state]) for piece, shard in places]
    return laid_flat(parts).reshape(saved.shapes[name])

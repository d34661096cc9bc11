"""Tiles of a long sequence: the output layer with its loss, and the MLPs, take some tokens at a time.

Neither mixes tokens, so the results are the same. Only one tile's tensors are in memory: its logits, which are the
largest tensor of a step, and the inside of an MLP (arXiv:2506.13996, 3.1). Each rank does so by itself, with any
engine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dsrun.errors import TrainingError
from dsrun.job.job import Job
from dsrun.models.liger import fuses_loss
from dsrun.training.models.kernels import fuse_loss, unwrapped

WHERE, HINT = "--tile-tokens", "Train with --tile-tokens 0."
ATTRIBUTE = "dsrun_tiles"


@dataclass
class Tiles:
    """The tiles in which a model's MLPs take their tokens."""

    count: int
    """Tiles of each forward: always as many, for at ZeRO-3 each is a gather, in which all ranks meet."""
    on: bool = True


def take_tiles(model: Any, job: Job) -> str:
    """Put tiles into a loaded model, which has liger-kernel's kernels already; returns a note on it.

    Raises TrainingError where the model has another loss or other MLPs than those that are known.
    """
    tokens = job.training.tile_tokens or 0
    fused_loss = job.training.liger and fuses_loss(unwrapped(model).config.model_type)
    why = "" if fused_loss else fuse_loss(model, functools.partial(tiled_cross_entropy, tile=tokens))
    if why:
        raise TrainingError(f"the loss can't be computed in tiles: {why}", where=WHERE, hint=HINT)
    longest = job.micro_batch * (job.data.max_source_length + job.data.max_target_length + job.data.official)
    tiles = Tiles(math.ceil(longest / (job.parallel.sp * tokens)))
    mlps = dense_mlps(model)
    if not mlps:
        raise TrainingError("no layer has an MLP that is known", where=WHERE, hint=HINT)
    if tiles.count > 1:
        for mlp in mlps:
            mlp.forward = functools.partial(_in_tiles, mlp.forward, tiles)
        setattr(unwrapped(model), ATTRIBUTE, tiles)
    layers = f"{len(mlps)} MLPs in {tiles.count} tiles" if tiles.count > 1 else "MLPs whole: they fit a tile"
    return f"tiles of {tokens} tokens: {'' if fused_loss else 'the loss, '}{layers}"


def dense_mlps(model: Any) -> list[Any]:
    """The MLPs of a model's layers, without mixtures of experts, whose routers count the tokens of a whole forward."""
    layers = getattr(unwrapped(model).base_model, "layers", ())
    mlps = (getattr(layer, "mlp", None) for layer in layers)
    return [mlp for mlp in mlps if type(mlp).__name__.endswith("MLP")]


@contextmanager
def undivided_mlps(model: Any) -> Iterator[None]:
    """While it lasts MLPs take all tokens at once: for answers, which are made token by token."""
    tiles = getattr(unwrapped(model), ATTRIBUTE, None) or Tiles(1)
    before, tiles.on = tiles.on, False
    try:
        yield
    finally:
        tiles.on = before


def _in_tiles(forward: Any, tiles: Tiles, hidden: torch.Tensor) -> torch.Tensor:
    """An MLP's forward, [examples, tokens, hidden] in and out; backward computes each tile again."""
    if not tiles.on:
        return forward(hidden)
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    parts = []
    for part in flat.tensor_split(tiles.count, dim=1):
        if torch.is_grad_enabled():
            # Not re-entrant, so that it is one graph with the rest: an engine must see a weight's gradient once, summed
            # over the tiles. No comparison of what was saved with what is computed again: at ZeRO-3 a weight may have
            # been taken apart in between (see dsrun.training.models.load.recompute).
            parts.append(checkpoint(forward, part, use_reentrant=False, determinism_check="none"))
        else:
            parts.append(forward(part))
    return torch.cat(parts, dim=1).view_as(hidden)


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    tile: int,
    bias: torch.Tensor | None,
    ignore_index: int,
    **same: Any,
) -> torch.Tensor:
    """The summed cross-entropy of hidden @ weight.T, as liger-kernel's function of the same arguments.

    hidden: [tokens, hidden]; targets: int64, [tokens]; tile: tokens whose logits are in memory at a time.
    """
    del same  # "sum", and gradients of the weight that are summed in float32
    loss: torch.Tensor = _TiledCrossEntropy.apply(hidden, weight, bias, targets, ignore_index, tile)
    return loss


class _TiledCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    """Cross-entropy whose gradients are made in forward, while a tile's logits are in memory.

    They are softmax minus the target, times the other factor of the product. Backward only multiplies them by the
    loss's own gradient. Those of the weight are summed in float32.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        """The sum over all targets that are not ignored, in nats, float32. given: as `tiled_cross_entropy` has them."""
        hidden, weight, bias, targets, ignored, tile = given
        wanted = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if wanted[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        for first in range(0, len(hidden), tile):
            some, goals = hidden[first : first + tile], targets[first : first + tile]
            logits = functional.linear(some, weight, bias).float()
            total += functional.cross_entropy(logits, goals, ignore_index=ignored, reduction="sum")
            if not any(wanted):
                continue
            gradient = logits.softmax(-1)
            del logits
            # An ignored target is no row of the vocabulary: 1 is taken from any column, and the whole row becomes zero.
            counted = goals != ignored
            gradient[torch.arange(len(goals), device=goals.device), goals.where(counted, 0)] -= 1
            gradient.mul_(counted[:, None])
            if to_bias is not None:
                to_bias += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if to_hidden is not None:
                torch.mm(gradient, weight, out=to_hidden[first : first + tile])
            if to_weight is not None:
                to_weight += gradient.t() @ some
        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        ctx.types = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients by the loss's own, which is one number."""
        to_hidden, to_weight, to_bias = ctx.saved_tensors
        return (
            None if to_hidden is None else to_hidden * gradient,
            # In place: there may be no room for another one of the vocabulary's size.
            None if to_weight is None else to_weight.mul_(gradient).to(ctx.types),
            None if to_bias is None else to_bias.mul_(gradient).to(ctx.types),
            None, None, None,
        )  # fmt: skip

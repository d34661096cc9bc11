"""Whether a sequence can be computed in tiles as asked, and whether it is where nobody says: --tile-tokens."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.errors import Problem
from dsrun.models.liger import LOSS, fuses_loss
from dsrun.options import derived
from dsrun.options.declare import flag_of
from dsrun.options.table import ComputeOptions

FLAG = flag_of(ComputeOptions, "tile_tokens")


def problems(options: ComputeOptions, network: str | None) -> Iterator[Problem]:
    """Problems of a loss in tiles. network: the model_type; None where nobody knows it yet."""
    if options.tile_tokens and network is not None and not fuses_loss(network):
        fault = f"the loss of {network} is not known to be the output layer's product and nothing else"
        hint = f"Take {FLAG} 0. Networks that have such a one: {', '.join(LOSS)}."
        yield Problem(fault, f"{FLAG} {options.tile_tokens}", hint)


def settled(
    options: ComputeOptions, *, tokens: int, vocabulary: int, network: str | None, fused_loss: bool = False
) -> int:
    """Tokens of a tile; 0: no tiles. tokens: a rank's of an example. fused_loss: there are no logits of all tokens."""
    able = fuses_loss(network) and not fused_loss and not options.compile
    return derived.tile_tokens(options.tile_tokens, tokens, vocabulary if able else 0)

"""How the examples of a micro batch lie in packed sequences: several in one, where that saves padding.

Examples in one sequence don't see one another: their positions start over at 0, and transformers draws the borders from
that, a mask for torch's attention, the kernel for sequences of unequal length with flash-attn. What an example
contributes to the loss is therefore the same wherever it lies, and the choice is one of speed alone. It is made for
every micro batch (`Packing.sequences`):

1. The lengths are spread over 1, 2, 3, ... sequences of about equal length (`balance`), and over one per example.
2. Each way is given a cost (`Packing._cost`): the tokens with their padding, what attention adds to them, which grows
   with the square of a sequence, and the logits.
3. Ways that need more tokens than the padded micro batch, or a mask of more than MASK_ELEMENTS, drop out; the cheapest
   of the rest is taken.

Whether a model keeps examples apart at all is tried on the model itself (`probe`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsrun.training.data.balance import balance, balance_well
from dsrun.training.models import varlen

MASK_ELEMENTS = 1 << 26
"""The largest mask of a micro batch: 64 MiB, and twice that when attention turns it into 16-bit numbers."""
MASKED_WORK = 1.5
"""What an element costs under a mask, in elements of the dense layers: attention then computes the whole square, and
not with the fastest kernel (0.8 on a CPU; a GPU's kernel with a mask is further from what its matrix units can do)."""
PADDED_AT_MOST = 1.25
"""Tokens with padding to tokens without it. Where the mask leaves only ways that pad more, examples that are sharded
by length and not packed pad less (0.64 to 0.91 of their tokens are real: docs/reference/bench-balance.md)."""
REFINED = 3
"""For how many of the cheapest numbers of sequences a more even layout is looked for."""
PROBE = 4
"""Tokens of each example of the probe."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""What rounding may change, beside the largest number of the two."""


@dataclass(frozen=True)
class Packing:
    """What of a model decides how its examples are packed."""

    hidden_size: int
    """Decides what attention costs beside all the rest."""
    varlen: bool = False
    """The attention takes examples of unequal length one after the other, and needs no mask."""
    selects: bool = False
    """The model computes the logits of chosen tokens alone (transformers' logits_to_keep), at the same places of all
    sequences."""
    head: float = 0.0
    """What a token's logits cost, in tokens on their way through all layers."""

    def weight(self, length: int) -> int:
        """What an example costs a rank, in tokens on their way through the dense layers (see `_cost`).

        Under a mask it depends on the whole sequence what attention costs, which is alike for all ranks.
        """
        return length + (length * length // (12 * self.hidden_size) if self.varlen else 0)

    def fits(self, lengths: Sequence[int], room: int) -> bool:
        """Whether examples of these lengths can be packed well: in `room` tokens, most of them not padding."""
        if self.varlen:
            return sum(lengths) <= room
        room = min(room, int(PADDED_AT_MOST * sum(lengths)))
        return any(math.isfinite(self._cost(way, lengths, room, 0)) for way in _ways(lengths))

    def sequences(self, lengths: Sequence[int], room: int, targets: int = 0) -> list[list[int]]:
        """Places of examples of these lengths, sequence by sequence: the cheapest way that takes at most `room` tokens.

        targets: how many of all their tokens are trained on. The lengths must fit (`fits`).
        """
        if self.varlen:
            return [list(range(len(lengths)))]

        def cost(way: list[list[int]]) -> float:
            return self._cost(way, lengths, room, targets)

        best = heapq.nsmallest(REFINED, _ways(lengths), key=cost)
        return min(*best, *(balance_well(lengths, len(way)) for way in best), key=cost)

    def _cost(self, way: list[list[int]], lengths: Sequence[int], room: int, targets: int) -> float:
        """Work in tokens' worth of the dense layers; infinite where it takes too much room.

        A layer has about 12 hidden_size^2 weights, and attention multiplies two hidden_size vectors for each pair of
        tokens: beside the former the latter is width / (6 hidden_size), half of it where attention is merely causal.
        """
        width = max(sum(lengths[place] for place in sequence) for sequence in way)
        tokens = len(way) * width
        # Of one sequence the logits are those of its targets; of several, hardly a place is no target in any.
        logits = self.head * len(way) * (min(width, targets) if self.selects else width)
        if tokens > room:
            return math.inf
        if len(way) == len(lengths):
            return logits + tokens * (1 + width / (12 * self.hidden_size))
        if tokens * width > MASK_ELEMENTS:
            return math.inf
        return logits + tokens * (1 + MASKED_WORK * width / (6 * self.hidden_size))


def _ways(lengths: Sequence[int]) -> Iterator[list[list[int]]]:
    """One example a sequence, then 1, 2, 3, ... sequences: all the small numbers, ever fewer of the large ones.

    The first of several that cost the same is taken: without a mask where that is as good.
    """
    yield [[place] for place in range(len(lengths))]
    count = 1
    while count < len(lengths):
        yield balance(lengths, count)
        count = max(count + 1, count * 5 // 4)


def packing_for(engine: Any) -> Packing | None:
    """How examples are packed for the engine's model; None where it lets those in one sequence see one another.

    Models may not take positions that start over for a border (old or foreign code, a prefix of learned keys), so it is
    tested. Every rank takes part, and all come to the same end.
    """
    import torch
    import torch.distributed as dist

    found = torch.tensor(probe(engine), dtype=torch.float32, device=engine.device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    apart, selects = map(bool, found.tolist())
    if not apart:
        return None
    config = engine.module.config.get_text_config()
    return Packing(
        config.hidden_size,
        varlen=takes_borders(engine.module),
        selects=selects,
        head=config.vocab_size / (12 * config.hidden_size * config.num_hidden_layers),
    )


def takes_borders(model: Any) -> bool:
    """Whether the model's attention is told where the examples of a sequence begin (`borders`), and needs no mask."""
    name = str(model.config.get_text_config()._attn_implementation)
    return name == varlen.ATTENTION or "flash" in name


def probe(model: Any) -> tuple[bool, bool]:
    """Whether an example's logits stay the same with other examples before it in its sequence; `Packing.selects`.

    model: called as one of transformers, or an engine around one.
    """
    import torch

    inner = getattr(model, "module", model)
    if getattr(
        inner, "_is_stateful", False
    ):  # Mamba's state goes on from example to example, if only by a little
        return False, False
    size = inner.config.get_text_config().vocab_size
    example, *others = [[number % size for number in range(first, first + PROBE)] for first in (7, 31, 53)]
    ids = torch.tensor([[*others[0], *example, *others[1], *example]], device=model.device)
    where = torch.arange(len(ids[0]), device=model.device)
    wanted = torch.cat([where[PROBE : 2 * PROBE], where[3 * PROBE :]])
    was_training = inner.training
    model.eval()
    try:
        with torch.no_grad():
            logits = _logits(model, ids, wanted)
    finally:
        model.train(was_training)
    if logits is None:
        return False, False
    selects = len(logits) == len(wanted)
    first, second = (logits if selects else logits[wanted]).float().chunk(2)
    allowed = TOLERANCE.get(str(logits.dtype).removeprefix("torch."), 1e-3) * float(first.abs().max())
    return bool((first - second).abs().max() <= allowed), selects


def _logits(model: Any, ids: Any, wanted: Any) -> Any:
    """Logits ([tokens, vocabulary]) of the `wanted` places of a sequence of examples of PROBE tokens.

    Of all places where the model can't be asked for some; None where it can't be asked at all.
    """
    inner = getattr(model, "module", model)
    sequence = borders([PROBE] * (ids.shape[1] // PROBE), ids.device, unmasked=takes_borders(inner))
    for more in ({"logits_to_keep": wanted}, {}):
        try:
            return model(input_ids=ids, **sequence, **more, use_cache=False).logits[0]
        except (TypeError, ValueError):  # an argument that it does not have
            continue
    return None


def borders(lengths: Sequence[int], device: Any, *, unmasked: bool) -> dict[str, Any]:
    """What tells a model where the examples of one sequence begin.

    position_ids (int64, [1, tokens]): 0, 1, ... from each example's first token on. unmasked: also what its kernel
    asks for: cu_seq_lens_q and _k (int32, [examples + 1]), the examples' borders, and the longest one's tokens; and
    example_lengths, the same for what computes them one by one.
    The kernel's numbers could be found from the positions, but every layer would wait for the GPU to do it
    (transformers/modeling_flash_attention_utils.py, _is_packed_sequence).
    """
    import torch

    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    if not unmasked:
        return {"position_ids": positions}
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {
        "position_ids": positions,
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
        "example_lengths": tuple(lengths),
    }  # fmt: skip

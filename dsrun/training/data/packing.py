"""How the examples of a micro batch lie in packed sequences: several in one, where that saves padding.

Examples in one sequence don't see one another: their positions start over at 0, and transformers draws the borders from
that, a mask for torch's attention, the kernel for sequences of unequal length with flash-attn. What an example
contributes to the loss is therefore the same wherever it lies, and the choice is one of speed alone. It is made for
every micro-step, for all ranks together (`Packing.deal`):

1. Micro batches of 1, 2, 3, ... sequences are filled with the micro-step's examples, the longest first, each where it
   fits (`shard_sequences`), with as little room beyond what they need as does.
2. Each way is given a cost (`Packing.work`), that of its costliest micro batch: the tokens with their padding, what
   attention adds to them, which grows with the square of a sequence, and the logits.
3. Ways that need more tokens than the padded micro batch, or a mask of more than MASK_ELEMENTS, drop out; the cheapest
   of the rest is taken, or padding alone, where that is cheaper still.

Whether a model keeps examples apart at all is tried on the model itself (`probe`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsrun.training.data.balance import shard, shard_padded, shard_sequences
from dsrun.training.models import varlen

MASK_ELEMENTS = 1 << 26
"""The largest mask of a micro batch: 64 MiB, and twice that when attention turns it into 16-bit numbers."""
MASKED_WORK = 1.5
"""What an element costs under a mask, in elements of the dense layers: attention then computes the whole square, and
not with the fastest kernel (0.8 on a CPU; a GPU's kernel with a mask is further from what its matrix units can do)."""
FIRST_SLACK, MOST_SLACK = 0.003, 0.4
"""How much more room than tokens a round's micro batches are given, at first and at most, as a share of them."""
PADDED_BELOW = 0.95
"""What padding alone has to cost beside packing to be preferred: it takes more memory."""
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

    def deal(
        self, lengths: Sequence[int], targets: Sequence[int], *, ranks: int, rounds: int, room: int
    ) -> list[list[list[int]]]:
        """Places of examples of these lengths: micro batches of sequences, all ranks' of a round, then of the next.

        targets: how many tokens of each are trained on. room: tokens that a micro batch may have, padding included;
        more are taken where the examples don't all fit in that.
        """
        if self.varlen:
            return self._one_after_the_other(lengths, ranks, rounds, room)
        padded = [[[place] for place in some] for some in shard_padded(lengths, ranks, rounds)]
        packed: list[list[list[int]]] = []
        sharded = shard(lengths, ranks, rounds)
        for start in range(0, len(sharded), ranks):
            places = list(itertools.chain(*sharded[start : start + ranks]))
            its = [lengths[place] for place in places]
            dealt = self._round(its, [targets[place] for place in places], ranks, room)
            if dealt is None:
                return padded
            packed += [[[places[one] for one in sequence] for sequence in batch] for batch in dealt]
        alone, together = (self._path(found, lengths, targets, ranks) for found in (padded, packed))
        fits = all(padded_tokens(batch, lengths) <= room for batch in padded)
        return padded if fits and alone < PADDED_BELOW * together else packed

    def _one_after_the_other(
        self, lengths: Sequence[int], ranks: int, rounds: int, room: int
    ) -> list[list[list[int]]]:
        """A sequence each, balanced by what they cost, or by their lengths alone where only that fits."""
        found: list[list[int]] = []
        for weight in (self.weight, int):
            found = shard(list(map(weight, lengths)), ranks, rounds)
            if all(sum(lengths[place] for place in some) <= room for some in found):
                break
        return [[some] for some in found]

    def _round(
        self, lengths: Sequence[int], targets: Sequence[int], ranks: int, room: int
    ) -> list[list[list[int]]] | None:
        """A micro batch each for the ranks, the costliest as cheap as it was found; None where the room is too small.

        Numbers of sequences are tried in the order of what they would cost without any padding, until that is more than
        the best that was found; each with ever more slack until the examples fit, and then with less again.
        """
        best: list[list[list[int]]] | None = None
        cost = math.inf
        for least, count in sorted(self._limits(lengths, targets, ranks)):
            low, high = 0.0, math.inf
            while high - low > FIRST_SLACK:
                # Ever more slack until the examples fit at all; from then on the middle of too little and enough.
                slack = FIRST_SLACK + 2 * low if math.isinf(high) else (low + high) / 2
                if slack > MOST_SLACK or least * (1 + slack) >= cost:
                    break
                dealt = shard_sequences(
                    lengths, ranks, count, slack=1 + slack, room=room, square=MASK_ELEMENTS
                )
                if dealt is None:
                    low = slack
                    continue
                high = slack
                if (found := self._path(dealt, lengths, targets, ranks)) < cost:
                    best, cost = dealt, found
        return best

    def _limits(
        self, lengths: Sequence[int], targets: Sequence[int], ranks: int
    ) -> Iterator[tuple[float, int]]:
        """Numbers of sequences of a micro batch, ever fewer of the large ones, and what each costs at least."""
        tokens, wanted = sum(lengths) / ranks, sum(targets) / ranks
        count, most = 1, -(-len(lengths) // ranks)
        while count <= most:
            yield self.work(count, tokens / count, wanted, packed=True), count
            count = min(max(count + 1, count * 3 // 2), most) if count < most else most + 1

    def _path(
        self, dealt: Sequence[list[list[int]]], lengths: Sequence[int], targets: Sequence[int], ranks: int
    ) -> float:
        """Work on the critical path: of every round the costliest micro batch. Infinite where a mask is too large."""
        costs = [self._cost(batch, lengths, targets) for batch in dealt]
        return sum(max(costs[start : start + ranks]) for start in range(0, len(costs), ranks))

    def _cost(self, batch: list[list[int]], lengths: Sequence[int], targets: Sequence[int]) -> float:
        width = max(sum(lengths[place] for place in sequence) for sequence in batch)
        packed = any(len(sequence) > 1 for sequence in batch)
        wanted = sum(targets[place] for sequence in batch for place in sequence)
        return self.work(len(batch), width, wanted, packed=packed)

    def work(self, count: int, width: float, targets: float, *, packed: bool) -> float:
        """Of some sequences of this width, in tokens' worth of the dense layers; infinite where a mask is too large.

        A layer has about 12 hidden_size^2 weights, and attention multiplies two hidden_size vectors for each pair of
        tokens: beside the former the latter is width / (6 hidden_size), half of it where attention is merely causal.
        """
        tokens = count * width
        # Of one sequence the logits are those of its targets; of several, hardly a place is no target in any.
        logits = self.head * count * (min(width, targets) if self.selects else width)
        if packed and tokens * width > MASK_ELEMENTS:
            return math.inf
        attention = MASKED_WORK * width / 6 if packed else width / 12
        return logits + tokens * (1 + attention / self.hidden_size)


def padded_tokens(batch: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Of a micro batch's sequences of places, with their padding."""
    return len(batch) * max((sum(lengths[place] for place in sequence) for sequence in batch), default=0)


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

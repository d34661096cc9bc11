"""Packed sequences: several examples of a micro batch in one, where that saves padding.

Examples in one sequence don't see one another. Their positions start over at 0, and transformers draws the borders from
that: a mask for torch's attention, with flash-attn the kernel for sequences of unequal length. So an example's part of
the loss is the same wherever it lies, and the choice is one of speed alone. It is made for every micro-step, for all
ranks together (`Packing.deal`):

1. Micro batches of 1, 2, 3, ... sequences are filled with the micro-step's examples, the longest first, each where it
   fits (`shard_sequences`), with as little room as all of them fit in.
2. Each way has a cost (`Packing.work`), that of its costliest micro batch: the tokens with their padding, attention,
   which grows with the square of a sequence, and the logits.
3. Ways that need more tokens than the padded micro batch, or a mask of more than MASK_ELEMENTS, drop out. The cheapest
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
"""Elements of the largest mask of a micro batch: 64 MiB, and twice that once attention makes 16-bit numbers of it."""
MASKED_WORK = 1.5
"""The cost of an element under a mask, in elements of the dense layers: attention then computes the whole square, and
not with the fastest kernel (0.8 on a CPU; a GPU's kernel with a mask is further from what its matrix units can do)."""
FIRST_SLACK, MOST_SLACK = 0.003, 0.4
"""Room of a round's micro batches beyond their tokens, at first and at most, as a share of the tokens."""
PADDED_BELOW = 0.95
"""Padding alone is preferred where it costs less than this share of packing: it takes more memory."""
PROBE = 4
"""Tokens of each example of the probe."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Difference of two logits that rounding may make, as a share of the largest one."""
NO_KERNEL = "can't keep packed sequences apart"
"""transformers' words where a layer gets borders, and the package whose kernel takes them is missing."""
EXACT = 1e-6
"""Difference of two logits, as a share of the largest one, where the same kernels compute the same numbers."""
Batches = list[list[list[int]]]
"""Micro batches, each with its sequences, each with the places of its examples: those of all ranks in a round, then
those of the next round."""


@dataclass(frozen=True)
class Packing:
    """A model's properties that decide how its examples are packed."""

    hidden_size: int
    """Decides the cost of attention beside that of the dense layers."""
    varlen: bool = False
    """The attention takes examples of unequal length one after the other, and needs no mask."""
    selects: bool = False
    """The model computes the logits of chosen tokens alone (transformers' logits_to_keep), at the same places of all
    sequences."""
    head: float = 0.0
    """The cost of a token's logits, in tokens on their way through all layers."""
    numbered: bool = False
    """The model also wants each token's example number: convolutions of linear attention keep examples apart by it."""

    def weight(self, length: int) -> int:
        """The cost of an example, in tokens on their way through the dense layers (see `work`).

        Under a mask attention is left out: its cost depends on the whole sequence, and is alike for all ranks.
        """
        return length + (length * length // (12 * self.hidden_size) if self.varlen else 0)

    def deal(
        self, lengths: Sequence[int], targets: Sequence[int], *, ranks: int, rounds: int, room: int
    ) -> Batches:
        """Micro batches of examples of these lengths.

        targets: tokens of each example that are trained on. room: tokens that a micro batch may have, padding included;
        more are taken where the examples don't all fit in that.
        """
        if self.varlen:
            return self._one_sequence_each(lengths, ranks, rounds, room)
        padded = [[[place] for place in places] for places in shard_padded(lengths, ranks, rounds)]
        packed: Batches = []
        # The rounds are divided by tokens first; then each is packed by itself, for ranks wait for one another in each.
        sharded = shard(lengths, ranks, rounds)
        for start in range(0, len(sharded), ranks):
            places = list(itertools.chain(*sharded[start : start + ranks]))
            its = [lengths[place] for place in places]
            batches = self._round(its, [targets[place] for place in places], ranks, room)
            if batches is None:
                return padded
            packed += [[[places[number] for number in sequence] for sequence in batch] for batch in batches]
        padded_cost, packed_cost = (self._path(way, lengths, targets, ranks) for way in (padded, packed))
        fits = all(padded_tokens(batch, lengths) <= room for batch in padded)
        return padded if fits and padded_cost < PADDED_BELOW * packed_cost else packed

    def _one_sequence_each(self, lengths: Sequence[int], ranks: int, rounds: int, room: int) -> Batches:
        """Micro batches of one sequence, balanced by cost, or by length alone where only that fits."""
        sharded: list[list[int]] = []
        for weight in (self.weight, int):
            sharded = shard(list(map(weight, lengths)), ranks, rounds)
            if all(sum(lengths[place] for place in sequence) <= room for sequence in sharded):
                break
        return [[sequence] for sequence in sharded]

    def _round(self, lengths: Sequence[int], targets: Sequence[int], ranks: int, room: int) -> Batches | None:
        """One round's micro batches, one a rank, the costliest as cheap as can be; None where the room is too small.

        Two searches, one inside the other: over the number of sequences in a micro batch, and for each number over the
        slack, which is the room that sequences have beyond their tokens.
        """
        best: Batches | None = None
        best_cost = math.inf
        # The order makes the first cut below bite early: the number that would be cheapest without padding comes first.
        for least, count in sorted(self._limits(lengths, targets, ranks)):
            # The smallest slack in which the examples fit lies between `low`, in which they don't, and `high`, in which
            # they do. Nobody knows a `high` at first: the slack is about doubled until they fit (0.003, 0.009, 0.021,
            # ...), and from then on the interval is halved, until it is as small as the first step was.
            low, high = 0.0, math.inf
            while high - low > FIRST_SLACK:
                slack = FIRST_SLACK + 2 * low if math.isinf(high) else (low + high) / 2
                # Slack is padding, which costs as tokens do: with so much the way can't be cheaper than the best one.
                if slack > MOST_SLACK or least * (1 + slack) >= best_cost:
                    break
                batches = shard_sequences(
                    lengths, ranks, count, slack=1 + slack, room=room, square=MASK_ELEMENTS
                )
                if batches is None:
                    low = slack
                    continue
                high = slack
                # Less slack is cheaper as a rule, not always (the longest sequence decides), so each way is looked at.
                cost = self._path(batches, lengths, targets, ranks)
                if cost < best_cost:
                    best, best_cost = batches, cost
        return best

    def _limits(
        self, lengths: Sequence[int], targets: Sequence[int], ranks: int
    ) -> Iterator[tuple[float, int]]:
        """Numbers of sequences in a micro batch, each after its least cost; few of the large numbers."""
        tokens, wanted = sum(lengths) / ranks, sum(targets) / ranks
        count, most = 1, -(-len(lengths) // ranks)
        while count <= most:
            yield self.work(count, tokens / count, wanted, packed=True), count
            # 1, 2, 3, 4, 6, 9, ... and in the end `most`: one more sequence among many changes little.
            count = min(max(count + 1, count * 3 // 2), most) if count < most else most + 1

    def _path(self, batches: Batches, lengths: Sequence[int], targets: Sequence[int], ranks: int) -> float:
        """Cost of the critical path: every round's costliest micro batch. Infinite where a mask is too large."""
        costs = [self._cost(batch, lengths, targets) for batch in batches]
        return sum(max(costs[start : start + ranks]) for start in range(0, len(costs), ranks))

    def _cost(self, batch: list[list[int]], lengths: Sequence[int], targets: Sequence[int]) -> float:
        width = max(sum(lengths[place] for place in sequence) for sequence in batch)
        packed = any(len(sequence) > 1 for sequence in batch)
        wanted = sum(targets[place] for sequence in batch for place in sequence)
        return self.work(len(batch), width, wanted, packed=packed)

    def work(self, count: int, width: float, targets: float, *, packed: bool) -> float:
        """The cost of `count` sequences of this width, in tokens on their way through the dense layers.

        Infinite where a mask is too large. A layer has about 12 hidden_size^2 weights, and attention multiplies two
        hidden_size vectors for each pair of tokens: that is width / (6 hidden_size) of the former, half of it where
        attention is merely causal.
        """
        tokens = count * width
        # One sequence has logits at its targets alone. Several share their places, nearly all of which are a target in
        # one of them.
        logits = self.head * count * (min(width, targets) if self.selects else width)
        if packed and tokens * width > MASK_ELEMENTS:
            return math.inf
        attention = MASKED_WORK * width / 6 if packed else width / 12
        return logits + tokens * (1 + attention / self.hidden_size)


def padded_tokens(batch: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    """Tokens of a micro batch with their padding."""
    return len(batch) * max((sum(lengths[place] for place in sequence) for sequence in batch), default=0)


def packing_for(engine: Any) -> Packing | None:
    """The packing for the engine's model; None where the model lets examples in one sequence see one another.

    Not every model takes positions that start over for a border (old or foreign code, a prefix of learned keys), so the
    model is tried. Every rank takes part, and all come to the same end.
    """
    import torch
    import torch.distributed as dist

    for numbered in (False, True) if takes_borders(engine.module) else (False,):
        answers = torch.tensor(probe(engine, numbered=numbered), dtype=torch.float32, device=engine.device)
        dist.all_reduce(answers, op=dist.ReduceOp.MIN)
        apart, selects = map(bool, answers.tolist())
        if apart:
            break
    else:
        return None
    config = engine.module.config.get_text_config()
    return Packing(
        config.hidden_size,
        varlen=takes_borders(engine.module),
        selects=selects,
        numbered=numbered,
        head=config.vocab_size / (12 * config.hidden_size * config.num_hidden_layers),
    )


def keeps_states(model: Any) -> bool:
    """Whether some of a model's layers are no attention: they go through a sequence with a state."""
    return bool(getattr(getattr(model, "module", model), "_is_stateful", False))


def takes_borders(model: Any) -> bool:
    """Whether the model's attention takes the borders of a sequence's examples (`borders`), and needs no mask."""
    name = str(model.config.get_text_config()._attn_implementation)
    return name == varlen.ATTENTION or "flash" in name


def probe(model: Any, *, numbered: bool = False) -> tuple[bool, bool]:
    """Whether an example's logits stay the same with other examples before it in its sequence; `Packing.selects`.

    model: called as one of transformers, or an engine around one. numbered: see `Packing`.
    """
    import torch

    inner = getattr(model, "module", model)
    stateful = keeps_states(inner)
    if stateful and not takes_borders(inner):
        return False, False  # a state goes on from example to example, if by little
    size = inner.config.get_text_config().vocab_size
    example, *others = [[number % size for number in range(first, first + PROBE)] for first in (7, 31, 53)]
    # The same example twice, behind other texts: its logits are the same only if it doesn't see what is before it.
    ids = torch.tensor([[*others[0], *example, *others[1], *example]], device=model.device)
    where = torch.arange(len(ids[0]), device=model.device)
    wanted = torch.cat([where[PROBE : 2 * PROBE], where[3 * PROBE :]])
    was_training = inner.training
    model.eval()
    try:
        with torch.no_grad():
            logits = changed = _logits(model, ids, wanted, numbered=numbered)
            if stateful:
                changed = _logits(model, _others_changed(ids, wanted, size), wanted, numbered=numbered)
    finally:
        model.train(was_training)
    if logits is None or changed is None:
        return False, False
    allowed = TOLERANCE.get(str(logits.dtype).removeprefix("torch."), 1e-3)
    selects = len(logits) == len(wanted)
    logits, changed = (found if selects else found[wanted] for found in (logits.float(), changed.float()))
    # A state fades, so that what is left of it could pass for rounding: nothing may be left at all.
    leaks = stateful and float((logits - changed).abs().max()) > EXACT * float(logits.abs().max())
    first, second = logits.chunk(2)
    alike = float((first - second).abs().max()) <= allowed * float(first.abs().max())
    return alike and not leaks, selects


def _others_changed(ids: Any, kept: Any, size: int) -> Any:
    """A sequence with other tokens but at some places. size: tokens of the vocabulary."""
    changed = (ids + 11) % size
    changed[:, kept] = ids[:, kept]
    return changed


def _logits(model: Any, ids: Any, wanted: Any, *, numbered: bool) -> Any:
    """Logits ([tokens, vocabulary]) of the `wanted` places of a sequence of examples of PROBE tokens.

    Those of all places where the model takes no choice of places; None where it doesn't take such a sequence.
    """
    inner = getattr(model, "module", model)
    unmasked = takes_borders(inner)
    sequence = borders([PROBE] * (ids.shape[1] // PROBE), ids.device, unmasked=unmasked, numbered=numbered)
    for more in ({"logits_to_keep": wanted}, {}):
        try:
            return model(input_ids=ids, **sequence, **more, use_cache=False).logits[0]
        except (TypeError, ValueError) as error:
            if NO_KERNEL in str(error):
                return None
            # A model without one of these arguments says which. Anything else is a fault, and no word about packing.
            if not any(f"'{name}'" in str(error) for name in ("use_cache", *sequence, *more)):
                raise
    return None


def borders(lengths: Sequence[int], device: Any, *, unmasked: bool, numbered: bool = False) -> dict[str, Any]:
    """A model's arguments that say where the examples of one sequence begin.

    position_ids (int64, [1, tokens]): 0, 1, ... from each example's first token on. unmasked: also the arguments of the
    kernel: cu_seq_lens_q and _k (int32, [examples + 1]), the examples' borders, and the longest one's tokens; and
    example_lengths, the same for code that computes them one by one. numbered: also seq_idx (int32, [1, tokens]), the
    number of each token's example.
    transformers would find the kernel's numbers from the positions, but every layer would wait for the GPU
    (transformers/modeling_flash_attention_utils.py, _is_packed_sequence).
    """
    import torch

    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    if not unmasked:
        return {"position_ids": positions}
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    numbers = [torch.full((length,), number, dtype=torch.int32) for number, length in enumerate(lengths)]
    return {
        **({"seq_idx": torch.cat(numbers)[None].to(device)} if numbered else {}),
        "position_ids": positions,
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
        "example_lengths": tuple(lengths),
    }  # fmt: skip

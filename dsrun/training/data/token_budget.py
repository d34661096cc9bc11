"""Steps of about equally many tokens: the examples of a step, and their division into micro batches.

Which examples: the stream of all epochs' examples (`batches.epoch_order`) is cut from its beginning, as many a step as
fit in the budget, one at least. That depends on the seed, the lengths and the budget alone, so a step trains on the
same examples on any devices, and a resumed run on those that an undisturbed one would.

How they are divided: over as few micro-steps as hold them, `room` tokens a micro batch at most, with padding. Their
number may be another in each step; it is the same on all ranks. Where a step has fewer examples than there are micro
batches, some are empty: their rank computes an example whose labels are ignored, as others wait for it in collectives.
"""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from dsrun.training.data.balance import shard_padded
from dsrun.training.data.batches import Examples, StepPlan, epoch_order, stream
from dsrun.training.data.packing import Batches, Packing, padded_tokens


class TokenPlan:
    """A plan as `BatchPlan` is, for a budget of tokens a step."""

    def __init__(
        self, examples: Examples, seed: int, dp_size: int, *, tokens: int, room: int, packing: Packing | None
    ) -> None:
        """tokens: those of a step, over all ranks, without padding; room: those of a micro batch, with padding."""
        self.examples, self.seed, self.dp_size = examples, seed, dp_size
        self.tokens, self.room, self.packing = tokens, room, packing
        self._starts = [0]
        self._sums = functools.lru_cache(maxsize=2)(self._counted)

    def total_steps(self, epochs: float | None, max_steps: int | None) -> int:
        """Optimizer steps of the run; one of the two is given."""
        if max_steps is not None:
            return max_steps
        examples = math.ceil(Fraction(str(epochs or 0)) * len(self.examples))
        return next(step for step in itertools.count(1) if self._start(step) >= examples)

    def examples_until(self, step: int) -> int:
        """The count of examples that the steps before this one take."""
        return self._start(step)

    def step(self, step: int, index: int) -> StepPlan:
        """The micro batches of data-parallel rank `index` in optimizer step `step` (from 0)."""
        chosen = stream(self.examples, self.seed, self._start(step), self._start(step + 1))
        lengths = list(map(self.examples.length, chosen))
        targets = list(map(self.examples.target_tokens, chosen))
        batches = self._divided(lengths, targets)[index :: self.dp_size]
        return StepPlan(
            [[[chosen[place] for place in sequence] for sequence in batch] for batch in batches],
            target_tokens=sum(targets),
            tokens=sum(lengths),
            filler=chosen[min(range(len(chosen)), key=lengths.__getitem__)],
        )

    def _start(self, step: int) -> int:
        """The place in the stream where a step begins. Remembered, for each follows from the one before."""
        while len(self._starts) <= step:
            self._starts.append(self._end(self._starts[-1]))
        return self._starts[step]

    def _end(self, start: int) -> int:
        """The place behind a step's last example: the budget may reach over several epochs' orders."""
        (epoch, offset), size, left = divmod(start, len(self.examples)), len(self.examples), self.tokens
        while True:
            # The last place up to which the epoch's tokens, summed from its beginning, are within the budget.
            sums = self._sums(epoch)
            end = int(np.searchsorted(sums, sums[offset] + left, side="right")) - 1
            if end < size:
                return max(epoch * size + end, start + 1)
            left -= int(sums[size] - sums[offset])
            epoch, offset = epoch + 1, 0

    def _counted(self, epoch: int) -> Any:
        """Tokens before each example of an epoch, in its order, and all of them (int64, [examples + 1])."""
        order = epoch_order(len(self.examples), self.seed, epoch)
        return np.concatenate([[0], np.cumsum(self.examples.lengths[order])])

    def _divided(self, lengths: list[int], targets: list[int]) -> Batches:
        """Micro batches of a step's examples, over as few micro-steps as hold them."""
        room = max(self.room, *lengths)
        for rounds in itertools.count(max(1, math.ceil(sum(lengths) / (self.dp_size * room)))):
            batches = self._shared(lengths, targets, rounds, room)
            if all(padded_tokens(batch, lengths) <= room for batch in batches):
                return batches
        raise AssertionError("one example each fits")

    def _shared(self, lengths: list[int], targets: list[int], rounds: int, room: int) -> Batches:
        lists = rounds * self.dp_size
        if lists >= len(lengths):
            order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
            return [[order[number : number + 1]] if number < len(order) else [] for number in range(lists)]
        if self.packing:
            return self.packing.deal(lengths, targets, ranks=self.dp_size, rounds=rounds, room=room)
        return [[[place] for place in places] for places in shard_padded(lengths, self.dp_size, rounds)]

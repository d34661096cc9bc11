"""The tokenised rows, and which rank trains on which of them at which step.

The order is a pure function of (rows, seed, step): no state has to be saved, and a resumed run goes on with exactly
the rows that an undisturbed one would have seen.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

IGNORED = -100
"""The label of a token that is not trained on (torch.nn.functional.cross_entropy's ignore_index)."""


class Rows:
    """The rows of one prepared Arrow file, memory-mapped: nothing is copied until a row is asked for."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
        ids = self._table.column("input_ids").chunk(0)
        self._ids = ids.values.to_numpy()
        self._offsets = ids.offsets.to_numpy()
        self.prompt_tokens = self._table.column("prompt_tokens").to_numpy()

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def length(self, row: int) -> int:
        """Tokens of a row, prompt and response."""
        return int(self._offsets[row + 1] - self._offsets[row])

    def target_tokens(self, row: int) -> int:
        """Tokens of a row that are trained on: the response with its end mark."""
        return self.length(row) - int(self.prompt_tokens[row])

    def ids(self, row: int) -> list[int]:
        """Token ids of a row."""
        return self._ids[self._offsets[row] : self._offsets[row + 1]].tolist()

    def prompt_ids(self, row: int) -> list[int]:
        """Token ids of a row's prompt."""
        return self.ids(row)[: int(self.prompt_tokens[row])]

    def text(self, row: int, column: str) -> str:
        """The text of "prompt" or "response"."""
        return str(self._table.column(column)[row].as_py())


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of one rank.

    micro_batches: row numbers per micro-step; target_tokens: over all ranks and micro-steps, what the step's loss
    is averaged over; tokens: the same for all tokens that are not padding.
    """

    micro_batches: list[list[int]]
    target_tokens: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Deals rows to ranks. One step takes world_size * micro_batch * grad_accum rows.

    The rows of all epochs, each in an order of its own, form one stream that the steps cut: no row is dropped or
    trained on twice in an epoch, and every step is full (the last one runs on into the next epoch's order).
    Within a step the rows are sorted by length before they are dealt, so that a micro batch pads little and all
    ranks have about the same work; the step's gradient does not depend on it.
    """

    rows: Rows
    seed: int
    world_size: int
    micro_batch: int
    grad_accum: int

    @property
    def step_rows(self) -> int:
        """Rows per optimizer step over all ranks."""
        return self.world_size * self.micro_batch * self.grad_accum

    def total_steps(self, epochs: float | None, max_steps: int | None) -> int:
        """Optimizer steps of the run; one of the two is given."""
        if max_steps is not None:
            return max_steps
        # 1.1 epochs of 100 rows are 110 rows, and not the 110.00000000000001 of binary fractions.
        rows = Fraction(str(epochs or 0)) * len(self.rows)
        return max(1, math.ceil(rows / self.step_rows))

    def step(self, step: int, rank: int) -> StepPlan:
        """What `rank` trains on at optimizer step `step` (from 0)."""
        first = step * self.step_rows
        chosen = [self._row_at(place) for place in range(first, first + self.step_rows)]
        chosen.sort(key=self.rows.length, reverse=True)
        micro_batches = []
        for micro_step in range(self.grad_accum):
            start = (micro_step * self.world_size + rank) * self.micro_batch
            micro_batches.append(chosen[start : start + self.micro_batch])
        return StepPlan(
            micro_batches,
            target_tokens=sum(map(self.rows.target_tokens, chosen)),
            tokens=sum(map(self.rows.length, chosen)),
        )

    def _row_at(self, place: int) -> int:
        epoch, offset = divmod(place, len(self.rows))
        return _epoch_order(len(self.rows), self.seed, epoch)[offset]


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311  (not for secrets)
    return order


def shares(rows: Sequence[int], world_size: int, batch: int) -> list[list[list[int]]]:
    """Deal evaluation rows: per rank its batches; every rank gets equally many, some of them may be empty.

    ZeRO-3 gathers weights collectively, so that a rank with nothing left must still take part.
    """
    batches = [list(rows[start : start + batch]) for start in range(0, len(rows), batch)]
    rounds = math.ceil(len(batches) / world_size)
    batches += [[] for _ in range(rounds * world_size - len(batches))]
    return [batches[rank::world_size] for rank in range(world_size)]


def training_batch(rows: Rows, chosen: Sequence[int], pad_id: int) -> dict[str, torch.Tensor]:
    """input_ids and labels of some rows, padded on the right to the longest (int64, [rows, longest]).

    There is no attention mask: attention is causal, so that no token sees the padding to its right, and padding is
    not trained on.
    """
    longest = max(map(rows.length, chosen))
    input_ids = torch.full((len(chosen), longest), pad_id, dtype=torch.long)
    labels = torch.full((len(chosen), longest), IGNORED, dtype=torch.long)
    for place, row in enumerate(chosen):
        ids = torch.tensor(rows.ids(row), dtype=torch.long)
        input_ids[place, : len(ids)] = ids
        start = int(rows.prompt_tokens[row])
        labels[place, start : len(ids)] = ids[start:]
    return {"input_ids": input_ids, "labels": labels}


def prompt_batch(prompts: Sequence[Sequence[int]], pad_id: int) -> dict[str, Any]:
    """input_ids and attention_mask of prompts, padded on the left to the longest (int64, [prompts, longest])."""
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(prompts), longest), dtype=torch.long)
    for place, ids in enumerate(prompts):
        input_ids[place, longest - len(ids) :] = torch.tensor(ids, dtype=torch.long)
        attention_mask[place, longest - len(ids) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}

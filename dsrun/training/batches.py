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

from dsrun.training.packing import Packing, borders, deal

IGNORED = -100
"""The label of a token that is not trained on (torch.nn.functional.cross_entropy's ignore_index)."""


class Rows:
    """The rows of one prepared Arrow file, memory-mapped: nothing is copied until a row is asked for.

    A row of a file that weighs twice as much as the others is there twice (see dsrun.training.prepare).
    """

    def __init__(self, path: Path) -> None:
        import numpy as np
        import pyarrow as pa

        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
        ids = self._table.column("input_ids").chunk(0)
        self._ids = ids.values.to_numpy()
        self._offsets = ids.offsets.to_numpy()
        self._spans = self._table.column("spans") if "spans" in self._table.column_names else None
        self._places = np.repeat(np.arange(len(ids)), _times(self._table))
        self.prompt_tokens = self._table.column("prompt_tokens").to_numpy()[self._places]
        self._target_tokens = self._count_targets()[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def length(self, row: int) -> int:
        """Tokens of a row, prompt and response."""
        place = self._places[row]
        return int(self._offsets[place + 1] - self._offsets[place])

    def target_tokens(self, row: int) -> int:
        """Tokens of a row that are trained on: its responses with their end marks."""
        return int(self._target_tokens[row])

    def ids(self, row: int) -> list[int]:
        """Token ids of a row."""
        place = self._places[row]
        return self._ids[self._offsets[place] : self._offsets[place + 1]].tolist()

    def labels(self, row: int) -> list[int]:
        """Of each token of a row itself, or IGNORED where it is not trained on."""
        ids = self.ids(row)
        labels = [IGNORED] * len(ids)
        for start, end in self.spans(row):
            labels[start:end] = ids[start:end]
        return labels

    def spans(self, row: int) -> list[tuple[int, int]]:
        """What of a row is trained on: where each part begins and ends (in tokens)."""
        flat = [] if self._spans is None else self._spans[int(self._places[row])].as_py()
        if not flat:
            return [(int(self.prompt_tokens[row]), self.length(row))]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def prompt_ids(self, row: int) -> list[int]:
        """Token ids of a row up to its last response."""
        return self.ids(row)[: int(self.prompt_tokens[row])]

    def text(self, row: int, column: str) -> str:
        """The text of "prompt" or "response": the last question and its answer."""
        return str(self._table.column(column)[int(self._places[row])].as_py())

    def _count_targets(self) -> Any:
        """Tokens that are trained on, of each row that is stored."""
        import numpy as np

        found = np.diff(self._offsets) - self._table.column("prompt_tokens").to_numpy()
        if self._spans is not None and len(self._spans):
            spans = self._spans.chunk(0)
            first, last = spans.offsets.to_numpy()[:-1], spans.offsets.to_numpy()[1:]
            summed = np.concatenate([[0], np.cumsum(np.diff(spans.values.to_numpy().reshape(-1, 2)))])
            found = np.where(last > first, summed[last // 2] - summed[first // 2], found)
        return found


def _times(table: Any) -> Any:
    """How often each stored row is a row: by its file's weight, which the schema's metadata hold.

    Of a weight that is no whole number the fraction is taken of the file, evenly from its beginning to its end.
    """
    import json

    import numpy as np

    weights = json.loads((table.schema.metadata or {}).get(b"weights", b"[]"))
    if not weights:
        return 1
    files = table.column("file").to_numpy()
    times = np.ones(len(files), dtype=np.int64)
    for number, weight in enumerate(weights):
        share, places = Fraction(str(weight)), np.flatnonzero(files == number)
        until = [int(share * count) for count in range(len(places) + 1)]
        times[places] = np.diff(until)
    return times


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of one rank.

    micro_batches: per micro-step its lines, and per line its row numbers; target_tokens: over all ranks and
    micro-steps, what the step's loss is averaged over; tokens: the same for all tokens that are not padding.
    """

    micro_batches: list[list[list[int]]]
    target_tokens: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Deals rows to ranks. One step takes world_size * micro_batch * grad_accum rows.

    The rows of all epochs, each in an order of its own, form one stream that the steps cut: no row is dropped or
    trained on twice in an epoch, and every step is full (the last one runs on into the next epoch's order).
    How a step's rows are dealt and laid out changes nothing in its gradient. With `packing` every micro batch of every
    rank gets about the same number of tokens, in lines of several rows, and never more than micro_batch rows of the
    step's longest would take. Without it the rows are sorted by length before they are dealt, so that a micro batch
    pads little; with in_order they are dealt as they come.
    """

    rows: Rows
    seed: int
    world_size: int
    micro_batch: int
    grad_accum: int
    packing: Packing | None = None
    in_order: bool = False

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
        room = self.micro_batch * max(map(self.rows.length, chosen))
        dealt = self._dealt(chosen, room)[rank :: self.world_size]
        micro_batches = [self._lines(some, room) for some in dealt]
        return StepPlan(
            micro_batches,
            target_tokens=sum(map(self.rows.target_tokens, chosen)),
            tokens=sum(map(self.rows.length, chosen)),
        )

    def _dealt(self, chosen: list[int], room: int) -> list[list[int]]:
        """The step's rows in micro batches: every rank's first, then every rank's second."""
        if self.packing and self.packing.takes(room):
            lengths = [self.rows.length(row) for row in chosen]
            return [
                [chosen[place] for place in heap] for heap in deal(lengths, self.world_size * self.grad_accum)
            ]
        if not self.in_order:
            chosen = sorted(chosen, key=self.rows.length, reverse=True)
        return [chosen[start : start + self.micro_batch] for start in range(0, len(chosen), self.micro_batch)]

    def _lines(self, some: list[int], room: int) -> list[list[int]]:
        if self.packing is None:
            return [[row] for row in some]
        targets = sum(map(self.rows.target_tokens, some))
        lines = self.packing.lines([self.rows.length(row) for row in some], room, targets)
        return [[some[place] for place in line] for line in lines]

    def _row_at(self, place: int) -> int:
        epoch, offset = divmod(place, len(self.rows))
        return _epoch_order(len(self.rows), self.seed, epoch)[offset]


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311  (not for secrets)
    return order


def shares(rows: Sequence[int], world_size: int, batch: int) -> list[list[list[int]]]:
    """Deal evaluation rows in batches of so many: per rank its batches, as `in_turn` deals them."""
    return in_turn([list(rows[start : start + batch]) for start in range(0, len(rows), batch)], world_size)


def in_turn(batches: Sequence[list[int]], world_size: int) -> list[list[list[int]]]:
    """Per rank its batches; every rank gets equally many, some of them may be empty.

    ZeRO-3 gathers weights collectively, so that a rank with nothing left must still take part.
    """
    rounds = math.ceil(len(batches) / world_size)
    whole = [*batches, *([] for _ in range(rounds * world_size - len(batches)))]
    return [whole[rank::world_size] for rank in range(world_size)]


def filled(rows: Rows, chosen: Sequence[int], room: int) -> list[list[int]]:
    """Rows in batches: as many, in the order given, as padded to the longest of them fit in `room` tokens."""
    batches: list[list[int]] = []
    longest = 0
    for row in chosen:
        longest = max(longest, rows.length(row))
        if not batches or longest * (len(batches[-1]) + 1) > room:
            batches.append([])
            longest = rows.length(row)
        batches[-1].append(row)
    return batches


def training_batch(rows: Rows, chosen: Sequence[int], pad_id: int) -> dict[str, torch.Tensor]:
    """input_ids and labels of some rows, padded on the right to the longest (int64, [rows, longest]).

    There is no attention mask: attention is causal, so that no token sees the padding to its right, and padding is
    not trained on.
    """
    return _batch(rows, [[row] for row in chosen], pad_id)


def packed_batch(rows: Rows, lines: Sequence[Sequence[int]], pad_id: int, packing: Packing) -> dict[str, Any]:
    """input_ids and labels of lines of rows, padded on the right to the longest line (int64, [lines, longest]).

    Where a line has several rows there is also what keeps them apart (`packing.borders`), and no attention mask,
    beside which transformers would not look at the positions. Where the model selects, logits (and their labels) are
    those before a target alone: prompts need none, and they are the largest tensor of a step.
    """
    batch: dict[str, Any] = _batch(rows, lines, pad_id)
    if packing.selects:
        following = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        wanted = (following != IGNORED).any(dim=0).nonzero().flatten()
        if len(wanted):
            kept = following[:, wanted].contiguous()
            batch |= {"labels": kept, "shift_labels": kept, "logits_to_keep": wanted}
    if all(len(line) == 1 for line in lines):
        return batch
    longest = batch["input_ids"].shape[1]
    if packing.varlen:
        return batch | borders([rows.length(row) for row in lines[0]], "cpu", varlen=True)
    positions = []
    for line in lines:
        lengths = [rows.length(row) for row in line]
        padding = longest - sum(lengths)
        # Padding is like a row of its own: its positions never go beyond those of a row.
        rest = [*lengths, padding] if padding else lengths
        positions.append(borders(rest, "cpu", varlen=False)["position_ids"])
    return batch | {"position_ids": torch.cat(positions)}


def _batch(rows: Rows, lines: Sequence[Sequence[int]], pad_id: int) -> dict[str, torch.Tensor]:
    width = max(sum(map(rows.length, line)) for line in lines)
    input_ids = torch.full((len(lines), width), pad_id, dtype=torch.long)
    labels = torch.full((len(lines), width), IGNORED, dtype=torch.long)
    for number, line in enumerate(lines):
        start = 0
        for row in line:
            end = start + rows.length(row)
            input_ids[number, start:end] = torch.tensor(rows.ids(row), dtype=torch.long)
            labels[number, start:end] = torch.tensor(rows.labels(row), dtype=torch.long)
            labels[number, start] = IGNORED  # what comes before it is another row, or nothing
            start = end
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

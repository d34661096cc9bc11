"""The tokenised examples, and which rank trains on which of them in which step.

The order is a pure function of (examples, seed, step): no state has to be saved, and a resumed run goes on with exactly
the examples that an undisturbed one would have seen.
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

from dsrun.training.data.balance import shard_padded
from dsrun.training.data.packing import Batches, Packing, borders

IGNORED = -100
"""The label of a token that is not trained on (torch.nn.functional.cross_entropy's ignore_index)."""


class Examples:
    """The examples of one prepared Arrow file, memory-mapped: nothing is copied until one is asked for.

    An example of a file that weighs twice as much as the others is there twice (see dsrun.training.prepare).
    """

    def __init__(self, path: Path) -> None:
        import numpy as np
        import pyarrow as pa

        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
        ids = self._table.column("input_ids").chunk(0)
        self._ids, self._offsets = _numbers(ids.values), _numbers(ids.offsets)
        self._spans = _Spans(self._table.column("spans")) if "spans" in self._table.column_names else None
        self._places = np.repeat(np.arange(len(ids)), _times(self._table))
        self.prompt_tokens = self._column("prompt_tokens")[self._places]
        self._target_tokens = self._count_targets()[self._places]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def with_question(self) -> list[int]:
        """The numbers of the examples that have a question: windows of plain text have none."""
        has_question = self._table.column("prompt").is_valid().to_pylist()
        return [example for example, place in enumerate(self._places) if has_question[place]]

    @property
    def answers(self) -> list[str]:
        """The last answer of each example with a question, in their order."""
        column = self._table.column("response").to_pylist()
        return [column[int(self._places[example])] for example in self.with_question]

    @property
    def lengths(self) -> Any:
        """Tokens of every example (int64, [examples])."""
        import numpy as np

        return np.diff(self._offsets).astype(np.int64)[self._places]

    def length(self, example: int) -> int:
        """Tokens of an example, prompt and response."""
        place = self._places[example]
        return int(self._offsets[place + 1] - self._offsets[place])

    def target_tokens(self, example: int) -> int:
        """Tokens of an example that are trained on: its responses with their end marks."""
        return int(self._target_tokens[example])

    def ids(self, example: int) -> Any:
        """Token ids of an example: a numpy array, of the file itself."""
        place = self._places[example]
        return self._ids[self._offsets[place] : self._offsets[place + 1]]

    def labels(self, example: int) -> Any:
        """The label of each token of an example: its id, or IGNORED where it is not trained on. A numpy array."""
        import numpy as np

        ids = self.ids(example)
        labels = np.full_like(ids, IGNORED)
        for start, end in self.spans(example):
            labels[start:end] = ids[start:end]
        return labels

    def spans(self, example: int) -> list[tuple[int, int]]:
        """The parts of an example that are trained on: begin and end of each (in tokens)."""
        flat = [] if self._spans is None else self._spans.of(int(self._places[example]))
        if not flat:
            return [(int(self.prompt_tokens[example]), self.length(example))]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def prompt_ids(self, example: int) -> list[int]:
        """Token ids of an example up to its last response."""
        ids: list[int] = self.ids(example)[: int(self.prompt_tokens[example])].tolist()
        return ids

    def text(self, example: int, column: str) -> str:
        """The text of "prompt" or "response": the last question and its answer."""
        return str(self._table.column(column)[int(self._places[example])].as_py())

    def _column(self, name: str) -> Any:
        return _numbers(self._table.column(name).chunk(0))

    def _count_targets(self) -> Any:
        """Tokens that are trained on, of each stored example."""
        import numpy as np

        counts = np.diff(self._offsets) - self._column("prompt_tokens")
        if self._spans is not None:
            # An example without spans has one, from its prompt's end to its own. For the others the lengths of all
            # spans are summed once, and an example's are a difference of two sums: no loop over millions of examples.
            first, last = self._spans.offsets[:-1], self._spans.offsets[1:]
            summed = np.concatenate([[0], np.cumsum(np.diff(self._spans.values.reshape(-1, 2)))])
            counts = np.where(last > first, summed[last // 2] - summed[first // 2], counts)
        return counts


def _numbers(array: Any) -> Any:
    """Arrow's numbers as numpy's, without a copy. Arrow's own to_numpy imports pandas: time in every rank."""
    import numpy as np

    return np.from_dlpack(array)


class _Spans:
    """A column of lists as two numpy arrays: a batch is made of many, and the GPU waits for it."""

    def __init__(self, column: Any) -> None:
        lists = column.combine_chunks()
        lists = lists.chunk(0) if hasattr(lists, "chunk") else lists
        self.values, self.offsets = _numbers(lists.values), _numbers(lists.offsets)

    def of(self, place: int) -> list[int]:
        """The begins and ends of an example's spans, one after the other."""
        flat: list[int] = self.values[self.offsets[place] : self.offsets[place + 1]].tolist()
        return flat


def _times(table: Any) -> Any:
    """The number of times that each stored example counts: its file's weight, which the schema's metadata hold.

    A weight with a fraction takes that share of the file once more, evenly from its beginning to its end.
    """
    import json

    import numpy as np

    weights = json.loads((table.schema.metadata or {}).get(b"weights", b"[]"))
    if not weights:
        return 1
    files = _numbers(table.column("file").chunk(0))
    times = np.ones(len(files), dtype=np.int64)
    for number, weight in enumerate(weights):
        share, places = Fraction(str(weight)), np.flatnonzero(files == number)
        until = [int(share * count) for count in range(len(places) + 1)]
        times[places] = np.diff(until)
    return times


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step of one data-parallel rank."""

    micro_batches: list[list[list[int]]]
    """The sequences of each micro-step, each with its examples' numbers."""
    target_tokens: int
    """Targets over all ranks and micro-steps: the step's loss is their mean."""
    tokens: int
    """Tokens over all ranks and micro-steps, without padding."""
    filler: int = 0
    """The example that stands in a micro batch without any; its labels are ignored."""


@dataclass(frozen=True)
class BatchPlan:
    """Shards examples over data-parallel ranks. One step takes dp_size * micro_batch * grad_accum examples.

    The examples of all epochs, each in an order of its own, form one stream that the steps cut: no example is dropped
    or trained on twice in an epoch, and every step is full (the last one runs on into the next epoch's order).

    How a step's examples are sharded and laid out changes nothing in its gradient:

    - With `packing` every micro batch of every rank gets about the same number of tokens, in sequences of several
      examples, and never more than micro_batch examples of the step's longest would take.
    - Without it, and where a micro batch can't be packed in that room, neighbours by length share a micro batch, and
      short ones come in larger numbers, so that all are padded to about as many tokens, and to few.
    - With in_order they are sharded as they come.
    """

    examples: Examples
    seed: int
    dp_size: int
    micro_batch: int
    grad_accum: int
    packing: Packing | None = None
    in_order: bool = False

    @property
    def step_examples(self) -> int:
        """Rows per optimizer step over all ranks."""
        return self.dp_size * self.micro_batch * self.grad_accum

    def total_steps(self, epochs: float | None, max_steps: int | None) -> int:
        """Optimizer steps of the run; one of the two is given."""
        if max_steps is not None:
            return max_steps
        # 1.1 epochs of 100 examples are 110 examples, and not the 110.00000000000001 of binary fractions.
        examples = Fraction(str(epochs or 0)) * len(self.examples)
        return max(1, math.ceil(examples / self.step_examples))

    def examples_until(self, step: int) -> int:
        """The count of examples that the steps before this one take."""
        return step * self.step_examples

    def step(self, step: int, index: int) -> StepPlan:
        """The micro batches of data-parallel rank `index` in optimizer step `step` (from 0)."""
        first = step * self.step_examples
        chosen = stream(self.examples, self.seed, first, first + self.step_examples)
        batches = self._dealt(chosen)[index :: self.dp_size]
        return StepPlan(
            [[[chosen[place] for place in sequence] for sequence in batch] for batch in batches],
            target_tokens=sum(map(self.examples.target_tokens, chosen)),
            tokens=sum(map(self.examples.length, chosen)),
        )

    def _dealt(self, chosen: list[int]) -> Batches:
        """All ranks' micro batches of the first micro-step, then of the second, ..., of places in `chosen`."""
        if self.in_order:
            places = range(len(chosen))
            return [
                [[place] for place in places[first : first + self.micro_batch]]
                for first in places[:: self.micro_batch]
            ]
        lengths = [self.examples.length(example) for example in chosen]
        if self.packing is None:
            batches = shard_padded(lengths, self.dp_size, self.grad_accum)
            return [[[place] for place in places] for places in batches]
        targets = [self.examples.target_tokens(example) for example in chosen]
        return self.packing.deal(
            lengths, targets, ranks=self.dp_size, rounds=self.grad_accum, room=self.micro_batch * max(lengths)
        )


def stream(examples: Examples, seed: int, first: int, end: int) -> list[int]:
    """The examples' numbers at places first to end - 1 of the stream, in which epoch follows epoch."""
    places = (divmod(place, len(examples)) for place in range(first, end))
    return [epoch_order(len(examples), seed, epoch)[offset] for epoch, offset in places]


@functools.lru_cache(maxsize=2)
def epoch_order(examples: int, seed: int, epoch: int) -> list[int]:
    """The examples' numbers in the order in which an epoch (from 0) has them."""
    order = list(range(examples))
    random.Random(f"{seed}:{epoch}").shuffle(order)  # noqa: S311  (not for secrets)
    return order


def shares(examples: Sequence[int], ranks: int, batch: int) -> list[list[list[int]]]:
    """The batches of each rank, of `batch` evaluation examples each, as `in_turn` shares them out."""
    return in_turn([list(examples[start : start + batch]) for start in range(0, len(examples), batch)], ranks)


def in_turn(batches: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
    """The batches of each rank. Every rank gets equally many, some of which may be empty.

    ZeRO-3 gathers weights collectively, so that a rank with nothing left must still take part.
    """
    rounds = math.ceil(len(batches) / ranks)
    whole = [*batches, *([] for _ in range(rounds * ranks - len(batches)))]
    return [whole[rank::ranks] for rank in range(ranks)]


def filled(examples: Examples, chosen: Sequence[int], room: int) -> list[list[int]]:
    """Examples in batches, in their order: each as many as fit in `room` tokens, padded to the longest of them."""
    batches: list[list[int]] = []
    longest = 0
    for example in chosen:
        longest = max(longest, examples.length(example))
        if not batches or longest * (len(batches[-1]) + 1) > room:
            batches.append([])
            longest = examples.length(example)
        batches[-1].append(example)
    return batches


def training_batch(examples: Examples, chosen: Sequence[int], pad_id: int) -> dict[str, torch.Tensor]:
    """input_ids and labels of some examples, padded on the right to the longest (int64, [examples, longest]).

    There is no attention mask: attention is causal, so that no token sees the padding to its right, and padding is
    not trained on.
    """
    return _batch(examples, [[example] for example in chosen], pad_id)


def packed_batch(
    examples: Examples, sequences: Sequence[Sequence[int]], pad_id: int, packing: Packing
) -> dict[str, Any]:
    """A micro batch of packed sequences, padded on the right to the longest one.

    - input_ids, labels: int64, [sequences, longest].
    - Where a sequence has several examples, or attention takes no mask, what keeps them apart (`packing.borders`):
      position_ids, int64, [sequences, longest], and more for such an attention. There is no attention mask, beside
      which transformers would not look at the positions.
    - Where the model selects, logits_to_keep (int64, [kept]): the places before a target of any sequence; labels and
      shift_labels are then [sequences, kept]. Prompts need no logits, and these are the largest tensor of a step.
    """
    batch: dict[str, Any] = _batch(examples, sequences, pad_id)
    if packing.selects:
        batch |= _selected(_following(batch["labels"]))
    if packing.varlen:
        # For one example, too: the kernel would look for borders, and wait for the GPU in every layer.
        lengths = [examples.length(example) for example in sequences[0]]
        return batch | borders(lengths, "cpu", unmasked=True, numbered=packing.numbered)
    if all(len(sequence) == 1 for sequence in sequences):
        return batch
    longest = batch["input_ids"].shape[1]
    positions = []
    for sequence in sequences:
        lengths = [examples.length(example) for example in sequence]
        padding = longest - sum(lengths)
        # Padding is like an example of its own: its positions never go beyond those of an example.
        rest = [*lengths, padding] if padding else lengths
        positions.append(borders(rest, "cpu", unmasked=False)["position_ids"])
    return batch | {"position_ids": torch.cat(positions)}


def sequence_share(
    examples: Examples, chosen: Sequence[int], pad_id: int, *, ranks: int, index: int, selects: bool
) -> dict[str, Any]:
    """A rank's tokens of one packed sequence, which `ranks` neighbours share: the `index`-th of equal runs of it.

    The keys are those of `packed_batch`, but:

    - The whole sequence is padded to a multiple of `ranks`, by an example of its own.
    - labels and shift_labels are the same, each token's following one: after the cut the last token's is on another
    rank. - The borders of examples are the whole sequence's: attention sees all of it.
    """
    lengths = [examples.length(example) for example in chosen]
    padding = -sum(lengths) % ranks
    whole = borders([*lengths, padding] if padding else lengths, "cpu", unmasked=True)
    batch = _batch(examples, [chosen], pad_id)
    fill = torch.nn.functional.pad
    tokens = {
        "input_ids": fill(batch["input_ids"], (0, padding), value=pad_id),
        "labels": fill(_following(batch["labels"]), (0, padding), value=IGNORED),
        "position_ids": whole["position_ids"],
    }
    share = {name: whole_row.chunk(ranks, dim=1)[index].contiguous() for name, whole_row in tokens.items()}
    share["shift_labels"] = share["labels"]
    return {**whole, **share, **(_selected(share["labels"]) if selects else {})}


def _following(labels: torch.Tensor) -> torch.Tensor:
    """The target at each place: the next token's label."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _selected(following: torch.Tensor) -> dict[str, torch.Tensor]:
    """The places before a target of any sequence, and their targets; an empty dict where there is none."""
    wanted = (following != IGNORED).any(dim=0).nonzero().flatten()
    if not len(wanted):
        return {}
    kept = following[:, wanted].contiguous()
    return {"labels": kept, "shift_labels": kept, "logits_to_keep": wanted}


def _batch(examples: Examples, sequences: Sequence[Sequence[int]], pad_id: int) -> dict[str, torch.Tensor]:
    import numpy as np

    width = max(sum(map(examples.length, sequence)) for sequence in sequences)
    input_ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    labels = np.full((len(sequences), width), IGNORED, dtype=np.int64)
    for number, sequence in enumerate(sequences):
        start = 0
        for example in sequence:
            end = start + examples.length(example)
            input_ids[number, start:end] = examples.ids(example)
            labels[number, start:end] = examples.labels(example)
            labels[number, start] = IGNORED  # what comes before it is another example, or nothing
            start = end
    return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def real_tokens(examples: Examples, sequences: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """A mask of the tokens that are no padding, of sequences padded on the right to `width` (bool, [sequences,
    width])."""
    lengths = torch.tensor([sum(map(examples.length, sequence)) for sequence in sequences])
    return torch.arange(width) < lengths[:, None]


def prompt_batch(prompts: Sequence[Sequence[int]], pad_id: int) -> dict[str, Any]:
    """input_ids and attention_mask of prompts, padded on the left to the longest (int64, [prompts, longest])."""
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(prompts), longest), dtype=torch.long)
    for place, ids in enumerate(prompts):
        input_ids[place, longest - len(ids) :] = torch.tensor(ids, dtype=torch.long)
        attention_mask[place, longest - len(ids) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def on(device: torch.device, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch with its tensors on a device. Pinned ones are copied while the caller goes on."""
    return {
        name: value.to(device, non_blocking=True) if torch.is_tensor(value) else value
        for name, value in batch.items()
    }

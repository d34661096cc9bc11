"""How the rows of a micro batch lie in its lines: several in one line, where that saves padding.

Rows in one line don't see one another. Their positions begin anew at 0, and transformers draws the borders from
that: a mask for torch's attention, the kernel for sequences of unequal length with flash-attn. What a row
contributes to the loss is therefore the same wherever it lies.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MASK_ELEMENTS = 1 << 26
"""The largest mask of a micro batch: 64 MiB, and twice that when attention turns it into 16-bit numbers."""
MASKED_WORK = 1.5
"""Attention under a mask computes the whole square, and not with the fastest kernel: so much dearer is an element than
one of the dense layers (0.8 on a CPU; a GPU's kernel with a mask is further from what its matrix units can do)."""
PROBE = 4
"""Tokens of each row of the probe."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""What rounding may change, beside the largest number of the two."""
AMPERE = (8, 0)
"""The first GPUs that flash-attn 2 has kernels for: not V100 and T4."""


def deal(weights: Sequence[int], heaps: int) -> list[list[int]]:
    """The places of `weights` in so many lists of about equal sum: the heaviest first, each to the lightest list.

    With n * heaps weights no sum exceeds n times the largest weight: as long as a place is left to deal, some list
    has fewer than n, and the lightest is no heavier than that one.
    """
    found: list[list[int]] = [[] for _ in range(heaps)]
    lightest = [(0, number) for number in range(heaps)]
    for place in sorted(range(len(weights)), key=lambda place: -weights[place]):
        weight, number = lightest[0]
        found[number].append(place)
        heapq.heapreplace(lightest, (weight + weights[place], number))
    return found


@dataclass(frozen=True)
class Packing:
    """hidden_size: of the model, which decides what attention costs beside all the rest.

    varlen: the attention kernel takes rows of unequal length one after the other (flash-attn), and needs no mask.
    selects: the model computes the logits of chosen tokens alone (transformers' logits_to_keep), the same places of
    all lines. head: what a token's logits cost beside its way through all layers.
    """

    hidden_size: int
    varlen: bool = False
    selects: bool = False
    head: float = 0.0

    def takes(self, tokens: int) -> bool:
        """Whether so many tokens can be one line."""
        return self.varlen or tokens * tokens <= MASK_ELEMENTS

    def lines(self, lengths: Sequence[int], room: int, targets: int = 0) -> list[list[int]]:
        """Places of rows of these lengths, line by line: the cheapest way that takes at most `room` tokens.

        targets: how many of all their tokens are trained on.
        room must hold either the rows padded to the longest, or one line of them that this packing takes.
        """
        if self.varlen:
            return [list(range(len(lengths)))]
        ways = [deal(lengths, count) for count in _counts(len(lengths))]
        costs = [self._cost(way, lengths, room, targets) for way in ways]
        return ways[costs.index(min(costs))]

    def _cost(self, way: list[list[int]], lengths: Sequence[int], room: int, targets: int) -> float:
        """Work in tokens' worth of the dense layers; infinite where it takes too much room.

        A layer has about 12 hidden_size^2 weights, and attention multiplies two hidden_size vectors for each pair of
        tokens: beside the former the latter is width / (6 hidden_size), half of it where attention is merely causal.
        """
        width = max(sum(lengths[place] for place in line) for line in way)
        tokens = len(way) * width
        # Of one line the logits are those of its targets; of several, hardly a place is no target in any.
        logits = self.head * len(way) * (min(width, targets) if self.selects else width)
        if tokens > room:
            return math.inf
        if len(way) == len(lengths):
            return logits + tokens * (1 + width / (12 * self.hidden_size))
        if tokens * width > MASK_ELEMENTS:
            return math.inf
        return logits + tokens * (1 + MASKED_WORK * width / (6 * self.hidden_size))


def _counts(rows: int) -> Iterator[int]:
    """Numbers of lines that are looked at: all the small ones, ever fewer of the large ones, and a line for each row.

    The first of several that cost the same is taken: without a mask where that is as good.
    """
    yield rows
    count = 1
    while count < rows:
        yield count
        count = max(count + 1, count * 5 // 4)


def attention_for(folder: str, precision: str) -> str:
    """The attention to load a model folder with: flash-attn's where it is there for this GPU, precision and model.

    Beside it torch's own can only mask, and computes what the mask then takes away.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, utils

    if precision == "fp32" or not utils.is_flash_attn_2_available():
        return "sdpa"
    if torch.cuda.get_device_capability() < AMPERE:
        return "sdpa"
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(AutoConfig.from_pretrained(folder)), None)
    return "flash_attention_2" if getattr(kind, "_supports_flash_attn", False) else "sdpa"


def packing_for(engine: Any) -> Packing | None:
    """How rows are packed for the engine's model; None where it lets rows in one line see one another.

    What a model makes of positions that begin anew is its own affair (old or foreign code, a prefix of learned keys),
    so it is tried instead of believed. Every rank takes part, and all come to the same end.
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
        varlen="flash" in str(config._attn_implementation),
        selects=selects,
        head=config.vocab_size / (12 * config.hidden_size * config.num_hidden_layers),
    )


def probe(model: Any) -> tuple[bool, bool]:
    """Whether a row's logits stay the same when it has other rows before it in its line; `Packing.selects`.

    model: called as one of transformers, or an engine around one.
    """
    import torch

    inner = getattr(model, "module", model)
    size = inner.config.get_text_config().vocab_size
    row, *others = [[number % size for number in range(first, first + PROBE)] for first in (7, 31, 53)]
    ids = torch.tensor([[*others[0], *row, *others[1], *row]], device=model.device)
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
    """The logits of a line of rows of PROBE tokens; where it can't be asked for these alone, all; None for no way."""
    line = borders([PROBE] * (ids.shape[1] // PROBE), ids.device, varlen=False)
    for more in ({"logits_to_keep": wanted}, {}):
        try:
            return model(input_ids=ids, **line, **more, use_cache=False).logits[0]
        except (TypeError, ValueError):  # an argument that it does not have
            continue
    return None


def borders(lengths: Sequence[int], device: Any, *, varlen: bool) -> dict[str, Any]:
    """What tells a model where the rows of one line begin: position_ids, and with varlen what its kernel asks for.

    The kernel's numbers could be found from the positions, but every layer would wait for the GPU to do it
    (transformers/modeling_flash_attention_utils.py, _is_packed_sequence).
    """
    import torch

    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    if not varlen:
        return {"position_ids": positions}
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return {
        "position_ids": positions,
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip

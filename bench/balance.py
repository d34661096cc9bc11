"""Share of a step's longest rank that is useful tokens, for data of several length distributions. No model, no GPU.

    python bench/balance.py [--steps 40] [--write]

Ranks meet in every micro-step, so a step takes as long as the sum, over its micro-steps, of the micro batch with the
most tokens (padding included) on any rank. The useful share is a rank's mean number of real tokens over that sum. No
plan does better than the bound: a step can't be shorter than its longest example, nor than the mean over the ranks.

The same is shown in work, by the cost that the dealing goes by (dsrun/training/data/packing.py): tokens on their way
through the dense layers, and what attention adds, which under a mask is that of the whole sequence. There the bound is
made of what every example costs by itself.

before    equal numbers of neighbours by length; packed sequences under a mask only where a micro batch of the longest
          examples is one sequence that the mask has room for
padded    `--no-packing`
masked    packed sequences under a mask (torch's own attention)
varlen    packed sequences with a kernel for unequal lengths, which needs no mask
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NamedTuple

from dsrun.training.data import packing
from dsrun.training.data.balance import balance
from dsrun.training.data.batches import BatchPlan
from dsrun.training.data.packing import Packing

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/bench-balance.md"
RANKS, HIDDEN, SEED = 8, 4096, 1
LENGTHS = {"to 2048": (6, 0.8, 2048), "to 8192": (6, 1.0, 8192), "to 128": (4.2, 0.5, 128)}
"""Lognormal: mu, sigma and the longest; the shortest has 16 tokens."""
CASES = [
    ("to 2048", 4, 1), ("to 2048", 8, 1), ("to 2048", 16, 1), ("to 2048", 8, 4),
    ("to 8192", 4, 1), ("to 8192", 16, 1), ("to 128", 128, 1),
]  # fmt: skip
"""Lengths, micro batch, accumulation."""
MASKED, VARLEN = Packing(HIDDEN, selects=True), Packing(HIDDEN, varlen=True, selects=True)
TEXT = """# Useful tokens on the critical path

Made by `python bench/balance.py --write` on {day}: {ranks} ranks, {steps} steps. The useful share is a rank's mean
number of real tokens over the most (padding included) that any rank has, summed over the micro-steps; in brackets how
much of the bound that is. The bound: a step is no shorter than its longest example, nor than the mean over the ranks.

{tokens}

*before* is the masked way when every rank got equal numbers of examples. *padded* has its own limit: examples of
unequal length share a micro batch, and no split into neighbours by length pads less. *masked* takes on some padding
where shorter sequences save more in attention than the padding costs. Where examples are as long as the largest mask, a
rank with one of them has room for nothing else, and the others have more than the mean.

## In work

The same share of the bound, in work instead of tokens: what a token costs on its way through the dense layers of a
model of hidden size 4096, and attention beside that. The bound takes attention as causal, and each example's by itself.

{works}

What *masked* lacks is attention over the whole of a packed sequence, not padding.
"""
WAYS = {"padded": None, "masked": MASKED, "varlen": VARLEN}


@dataclass
class Drawn:
    """Examples of given lengths, two thirds of each trained on."""

    lengths: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def length(self, example: int) -> int:
        return self.lengths[example]

    def target_tokens(self, example: int) -> int:
        return self.lengths[example] * 2 // 3


def drawn(mu: float, sigma: float, longest: int) -> Drawn:
    """20,000 examples."""
    draw = random.Random(SEED)
    return Drawn([min(longest, max(16, int(draw.lognormvariate(mu, sigma)))) for _ in range(20_000)])


Batches = list[list[list[int]]]
"""Micro batches of their sequences' lengths, all ranks' of the first micro-step, then of the second, ..."""


def planned(plan: BatchPlan, step: int) -> Batches:
    """A step as the plan has it."""
    ranks = [plan.step(step, rank).micro_batches for rank in range(RANKS)]
    return [
        [list(map(plan.examples.length, sequence)) for sequence in ranks[rank][number]]
        for number in range(plan.grad_accum)
        for rank in range(RANKS)
    ]


def before(plan: BatchPlan, step: int) -> Batches:
    """The same step sharded in equal numbers."""
    lengths = [length for batch in planned(plan, step) for sequence in batch for length in sequence]
    room, size = plan.micro_batch * max(lengths), plan.micro_batch
    if room * room > packing.MASK_ELEMENTS:
        ordered = sorted(lengths, reverse=True)
        heaps = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    else:
        heaps = [[lengths[place] for place in heap] for heap in balance(lengths, RANKS * plan.grad_accum)]
    laid = [MASKED.deal(heap, heap, ranks=1, rounds=1, room=room)[0] for heap in heaps]
    return [
        [[heap[place] for place in sequence] for sequence in batch]
        for heap, batch in zip(heaps, laid, strict=True)
    ]


def work(batch: list[list[int]], packing: Packing | None) -> float:
    """A micro batch's, without logits."""
    if packing is VARLEN:
        return sum(map(VARLEN.weight, batch[0]))
    packed = any(len(sequence) > 1 for sequence in batch)
    return MASKED.work(len(batch), max(map(sum, batch)), 0, packed=packed)


class Share(NamedTuple):
    """useful: of the tokens on the critical path; of_bound, work_of_bound: the bound over the path, in tokens and work,
    which mean something without accumulation only."""

    useful: float
    of_bound: float
    work_of_bound: float


def share(
    plan: BatchPlan, steps: int, way: Callable[[BatchPlan, int], Batches], packing: Packing | None
) -> Share:
    """Useful share of some steps."""
    useful = path = bound = work_path = work_bound = 0.0
    for step in range(steps):
        batches = way(plan, step)
        costs = [len(batch) * max(map(sum, batch)) for batch in batches]
        works = [work(batch, packing) for batch in batches]
        for start in range(0, len(costs), RANKS):
            path += max(costs[start : start + RANKS])
            work_path += max(works[start : start + RANKS])
        lengths = [length for batch in batches for sequence in batch for length in sequence]
        useful += sum(lengths) / RANKS
        bound += max(sum(lengths) / RANKS, *lengths)
        own = list(map(VARLEN.weight, lengths))
        work_bound += max(sum(own) / RANKS, *own)
    return Share(useful / path, bound / path, work_bound / work_path)


def tables(steps: int) -> tuple[str, str]:
    """The page's: tokens, and work."""
    tokens = [
        "| lengths, mean | micro batch x accumulation | bound | before | padded | masked | varlen |",
        "|---|---|---|---|---|---|---|",
    ]
    works = ["| lengths, mean | micro batch | padded | masked | varlen |", "|---|---|---|---|---|"]
    for name, micro_batch, accum in CASES:
        rows = drawn(*LENGTHS[name])
        plans = {
            way: BatchPlan(rows, 42, RANKS, micro_batch, accum, packing=packs)  # type: ignore[arg-type]
            for way, packs in WAYS.items()
        }
        found = {way: share(plan, steps, planned, WAYS[way]) for way, plan in plans.items()}
        was = share(plans["masked"], steps, before, MASKED).useful
        cells = [
            f"{one.useful:.2f}" + (f" ({one.of_bound:.2f})" if accum == 1 else "") for one in found.values()
        ]
        limit = f"{found['varlen'].useful / found['varlen'].of_bound:.2f}" if accum == 1 else ""
        data = f"{name}, {sum(rows.lengths) / len(rows):.0f}"
        tokens.append(f"| {data} | {micro_batch} x {accum} | {limit} | {was:.2f} | {' | '.join(cells)} |")
        if accum == 1:
            shares = " | ".join(f"{one.work_of_bound:.2f}" for one in found.values())
            works.append(f"| {data} | {micro_batch} | {shares} |")
    return "\n".join(tokens), "\n".join(works)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    tokens, works = tables(arguments.steps)
    print(tokens, works, sep="\n\n")
    if arguments.write:
        PAGE.write_text(
            TEXT.format(day=date.today(), ranks=RANKS, steps=arguments.steps, tokens=tokens, works=works),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()

"""How much of a step's longest rank is useful tokens, for data of several length distributions. No model, no GPU.

    python bench/balance.py [--steps 40] [--write]

Ranks meet in every micro-step, so a step takes as long as the sum, over its micro-steps, of the micro batch with the
most tokens (padding included) on any rank. The useful share is a rank's mean number of real tokens over that sum. No
plan does better than the bound: a step can't be shorter than its longest example, nor than the mean over the ranks.

before    equal numbers of neighbours by length; packed sequences under a mask only where a micro batch of the longest
          examples is one sequence that the mask has room for
padded    `--no-packing`
masked    packed sequences under a mask (torch's own attention); some padding is taken on where it makes attention
          cheaper by more
varlen    packed sequences with a kernel for unequal lengths, which needs no mask
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

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
MASKED = Packing(HIDDEN, selects=True)
WAYS = {"padded": None, "masked": MASKED, "varlen": Packing(HIDDEN, varlen=True, selects=True)}


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
    return [
        [[heap[place] for place in sequence] for sequence in MASKED.sequences(heap, room)] for heap in heaps
    ]


def share(plan: BatchPlan, steps: int, way: Callable[[BatchPlan, int], Batches]) -> tuple[float, float]:
    """The useful share, and the share of the bound (of which the latter means something without accumulation only)."""
    useful = path = bound = 0.0
    for step in range(steps):
        batches = way(plan, step)
        costs = [len(batch) * max(map(sum, batch)) for batch in batches]
        path += sum(max(costs[start : start + RANKS]) for start in range(0, len(costs), RANKS))
        mean = sum(sum(map(sum, batch)) for batch in batches) / RANKS
        useful += mean
        bound += max(mean, *(length for batch in batches for sequence in batch for length in sequence))
    return useful / path, bound / path


def table(steps: int) -> str:
    """The page's table."""
    lines = [
        "| lengths, mean | micro batch x accumulation | bound | before | padded | masked | varlen |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, micro_batch, accum in CASES:
        rows = drawn(*LENGTHS[name])
        plans = {
            way: BatchPlan(rows, 42, RANKS, micro_batch, accum, packing=packs)  # type: ignore[arg-type]
            for way, packs in WAYS.items()
        }
        found = {way: share(plan, steps, planned) for way, plan in plans.items()}
        was = share(plans["masked"], steps, before)[0]
        useful, of_bound = found["varlen"]
        cells = [
            f"{share:.2f}" + (f" ({of_bound:.2f})" if accum == 1 else "")
            for share, of_bound in found.values()
        ]
        limit = f"{useful / of_bound:.2f}" if accum == 1 else ""
        mean = sum(rows.lengths) / len(rows)
        lines.append(
            f"| {name}, {mean:.0f} | {micro_batch} x {accum} | {limit} | {was:.2f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    text = table(arguments.steps)
    print(text)
    if arguments.write:
        head = (
            "# Useful tokens on the critical path\n\n"
            f"Made by `python bench/balance.py --write` on {date.today()}: {RANKS} ranks, {arguments.steps} steps. The "
            "useful share is a rank's mean number of real tokens over the most (padding included) that any rank has, "
            "summed over the micro-steps; in brackets how much of the bound that is. The bound: a step is no shorter "
            "than its longest example, nor than the mean over the ranks.\n\n"
        )
        tail = (
            "\n\n*before* is the masked way when every rank got equal numbers of examples. *padded* has its own limit:"
            " examples of unequal length share a micro batch, and no split into neighbours by length pads less."
            " *masked* takes on some padding where shorter sequences save more in attention than the padding costs.\n"
        )
        PAGE.write_text(head + text + tail, encoding="utf-8")


if __name__ == "__main__":
    main()

"""`dsrun plan --card NAME[=PRICE]...`: the same training on several kinds of GPU, in one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dsrun.cli.planning import plan_text as text
from dsrun.errors import DsrunError, Problem
from dsrun.planner import gpus
from dsrun.planner.plan import OUT, Plan

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import SequenceLengths

ALL = "all"


@dataclasses.dataclass(frozen=True)
class CardPlan:
    """The best plan on a kind of GPU."""

    card: str
    gpus: int
    """In all."""
    preset: str | None
    """None where nothing is planned."""
    verdict: str
    chance: float
    seconds_per_step: float | None
    hours: float | None
    """Hours for an epoch of --train-file; without one, for 10^9 tokens."""
    price: float | None
    """The price of these hours on all GPUs."""
    kilowatt_hours: float | None
    """The energy of these hours with each GPU at its board's power; None where that isn't known."""


def named(cards: Sequence[str]) -> dict[str, float | None]:
    """Kind of GPU -> the price of an hour, where it is given. Raises DsrunError with all that can't be right."""
    from dsrun import catalog

    found: dict[str, float | None] = {}
    problems = []
    for word in cards:
        name, _, price = word.partition("=")
        known = [*catalog.files(gpus.KIND)] if name == ALL else [name]
        if name != ALL and name not in catalog.files(gpus.KIND):
            hint = catalog.suggestion(name, catalog.files(gpus.KIND), "See them: docs/reference/gpus.md")
            problems.append(Problem(f"unknown GPU {name!r}", f"--card {word}", hint))
            continue
        hour = _price(price) if price else None
        if price and hour is None:
            problems.append(
                Problem(f"{price!r} is no price", f"--card {word}", "As in --card a100-80g=1.80.")
            )
            continue
        found |= dict.fromkeys(known, hour)
    if problems:
        raise DsrunError(problems)
    return found


def _price(text: str) -> float | None:
    """A price; None for a text that is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def compared(
    cards: dict[str, float | None], best: Callable[[str], Plan | None], lengths: SequenceLengths | None
) -> list[CardPlan]:
    """A row for each kind, the cheapest first where prices are known, else the fastest; what doesn't fit last.

    best: the best plan on a kind, None where none can be made.
    """
    from dsrun.jobs.assembly.planning import remarks

    rows = []
    for card, price in cards.items():
        plan = best(card)
        if plan is None:
            rows.append(CardPlan(card, 0, None, "can't be planned", 0.0, None, None, None, None))
            continue
        cost = remarks.cost(plan, lengths, price)
        hours = cost.epoch_hours
        hours = 1e3 * cost.seconds_per_million_tokens / 3600 if hours is None else hours
        fits, watts = plan.verdict != OUT, gpus.load(card).watts
        rows.append(
            CardPlan(
                card, plan.setup.gpus, plan.preset, plan.verdict, plan.chance, plan.speed.seconds_per_step,
                hours if fits else None,
                None if price is None or not fits else price * plan.setup.gpus * hours,
                None if watts is None or not fits else watts * plan.setup.gpus * hours / 1000,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: (row.hours is None, row.price is None, row.price or row.hours or 0.0))


def show(rows: Sequence[CardPlan], lengths: SequenceLengths | None) -> None:
    """The table."""
    of = f"an epoch of {lengths.rows:,} examples" if lengths else "10^9 tokens"
    text.say(f"\nThe same on other GPUs; hours, price and energy of {of}, each GPU at its board's power:")

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    text.aligned(
        {
            "card": [row.card for row in rows],
            "preset": [row.preset or "-" for row in rows],
            "verdict": [row.verdict for row in rows],
            "s/step": [shown(row.seconds_per_step, ".2g") for row in rows],
            "hours": [shown(row.hours, ".3g") for row in rows],
            "price": [shown(row.price, ",.2f") for row in rows],
            "kWh": [shown(row.kilowatt_hours, ".3g") for row in rows],
        }
    )


def value_of(rows: Sequence[CardPlan]) -> list[dict[str, Any]]:
    """The rows for machines."""
    return [dataclasses.asdict(row) for row in rows]

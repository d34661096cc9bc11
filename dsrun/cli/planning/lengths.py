"""`dsrun plan --lengths`: memory against the length of an example, in the terminal and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dsrun.cli.output import pictures
from dsrun.cli.planning import plan_text as text
from dsrun.planner.analysis.length_curve import LengthCurve, length_curve, longest, usual_lengths
from dsrun.planner.plan import MemoryBudget, Plan
from dsrun.words import GIB

BAR = 40
"""Characters of the longest bar."""


def curves_of(plans: Sequence[Plan], room: MemoryBudget) -> list[LengthCurve]:
    """A curve for each plan, all at the same lengths."""
    if not plans:
        return []
    lengths = usual_lengths(plans[0].setup.seq_len, max(longest(plan, room) for plan in plans))
    return [length_curve(plan, room, lengths) for plan in plans]


def show(curves: Sequence[LengthCurve], room: MemoryBudget) -> None:
    """A table of all presets, and the first one's curve against the card's line."""
    if not curves:
        return
    limit = _limit(room)
    lengths = [length for length, _ in curves[0].points]
    of = "a GPU" if room.accelerator == "cuda" else "the node"
    click.echo(f"\nGiB of {of}, of {limit / GIB:.1f}, by tokens of an example")
    text.aligned(
        {
            "preset": [curve.preset for curve in curves],
            "rows": [str(curve.micro_batch) for curve in curves],
            **{
                f"{length}": [text.gib(curve.points[place][1]) for curve in curves]
                for place, length in enumerate(lengths)
            },
            "longest": [str(curve.longest or "none") for curve in curves],
            "1 row +ckpt": [str(curve.longest_recomputed or "none") for curve in curves],
        }
    )
    widest = max(limit, *(size for _, size in curves[0].points if size <= 2 * limit))
    click.echo(f"{curves[0].preset}, | is where the memory ends:")
    for length, size in curves[0].points:
        click.echo(f"  {length:>8}  {_bar(size, limit, widest)} {text.gib(size)}")


def _bar(size: float, limit: float, widest: float) -> str:
    """A bar with a mark where the memory ends; one that is longer than the picture ends with >."""
    filled, mark = round(BAR * min(size, widest) / widest), round(BAR * limit / widest)
    cells = ["█" if place < filled else " " for place in range(BAR + 1)]
    if size > widest:
        cells[-1] = ">"
    cells.insert(mark, "|")
    return "".join(cells)


def draw(curves: Sequence[LengthCurve], room: MemoryBudget, file: Path) -> None:
    """A line for each preset, and the card's. Raises DsrunError where it can't be drawn or written."""
    pictures.check(file)
    from dsrun.packages import needed

    with needed("matplotlib", "--plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    limit = _limit(room) / GIB
    for curve in curves:
        lengths = [length for length, _ in curve.points]
        fits = f"up to {curve.longest}" if curve.longest else "no length"
        axes.plot(lengths, [size / GIB for _, size in curve.points], "o-", label=f"{curve.preset}: {fits}")
    axes.axhline(limit, color="black", linestyle="--", label=f"there is {limit:.1f} GiB")
    axes.set(
        xlabel="tokens of an example", ylabel="GiB of a GPU" if room.accelerator == "cuda" else "GiB of the node",
        xscale="log", ylim=(0, 2 * limit),
    )  # fmt: skip
    axes.set_xticks([length for length, _ in curves[0].points] if curves else [])
    axes.get_xaxis().set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    pictures.save(figure, file)


def _limit(room: MemoryBudget) -> float:
    return room.gpu_bytes if room.accelerator == "cuda" else room.host_bytes or 0.0


def value_of(curves: Sequence[LengthCurve]) -> list[dict[str, Any]]:
    """The curves for machines."""
    return [
        {
            **dataclasses.asdict(curve),
            "points": [{"seq_len": length, "bytes": size} for length, size in curve.points],
        }
        for curve in curves
    ]

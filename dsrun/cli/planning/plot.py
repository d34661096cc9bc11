"""`dsrun plan --plot FILE`: the plans as stacked bars against the card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsrun.cli.output import pictures
from dsrun.jobs.assembly.planning.words import title
from dsrun.planner.gpu_memory import untracked_gib
from dsrun.planner.plan import MemoryBudget, Plan
from dsrun.words import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {"start": "what starting makes", "flat": "the flat copy"}


def draw(plans: Sequence[Plan], room: MemoryBudget, file: Path) -> None:
    """One bar a preset: what is held, and what the peak adds. Raises DsrunError where it can't be drawn or written."""
    pictures.check(file)
    from dsrun.packages import needed

    with needed("matplotlib", "--plot"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    cuda = room.accelerator == "cuda"
    figure = Figure(figsize=(11 if cuda else 8, 2.2 + 0.45 * len(plans)), layout="constrained")
    axes = figure.subplots(
        1, 2 if cuda else 1, squeeze=False, sharey=True, width_ratios=[3, 1] if cuda else [1]
    )[0]
    # There are more terms than matplotlib's usual ten colours.
    axes[0].set_prop_cycle(color=[colormaps["tab20"](number) for number in range(20)])
    names = [f"{title(plan)}\n{plan.verdict}, {100 * plan.chance:.0f} %" for plan in plans]
    left = [0.0] * len(plans)
    for label, sizes in layers(plans, room).items():
        axes[0].barh(names, sizes, left=left, label=label)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    if cuda:
        _limit(axes[0], "GiB on each GPU at the peak", room.gpu_bytes)
        axes[1].barh(names, [plan.host.peak / GIB for plan in plans], color="grey")
    _limit(axes[-1], "GiB of host memory", room.host_bytes)
    axes[0].invert_yaxis()
    figure.legend(fontsize="small", loc="outside lower center", ncols=5)
    pictures.save(figure, file)


def _limit(axes: Axes, label: str, size: float | None) -> None:
    """An axis with a line where the memory ends."""
    axes.set_xlabel(label)
    if size is not None:
        axes.axvline(size / GIB, color="black", linestyle="--")
        axes.set_title(f"there is {size / GIB:.1f} GiB", fontsize="small")


def layers(plans: Sequence[Plan], room: MemoryBudget) -> dict[str, list[float]]:
    """Layer -> its size in every bar, in GiB: the terms that are there at the peak. They add up to it."""
    if room.accelerator == "cpu":
        return {"host memory": [plan.host.peak / GIB for plan in plans]}
    parts = [plan.at_peak for plan in plans]
    names = dict.fromkeys(name for part in parts for name in part)
    sizes_of = {NAMES.get(name, name): [part.get(name, 0.0) / GIB for part in parts] for name in names}
    sizes_of["CUDA and NCCL"] = [untracked_gib(plan.setup.gpus) for plan in plans]
    return {name: sizes for name, sizes in sizes_of.items() if any(sizes)}

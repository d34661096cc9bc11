"""`dsrun plan --plot FILE`: the plans as stacked bars against the card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.planner.gpu_memory import untracked_gib
from dsrun.planner.plan import MemoryBudget, Plan

GIB = 2**30
KINDS = (".png", ".svg", ".pdf")


def draw(plans: Sequence[Plan], room: MemoryBudget, file: Path) -> None:
    """One bar a preset: what is held, and what the peak adds. Raises DsrunError where it can't be drawn or written."""
    if file.suffix.lower() not in KINDS:
        raise DsrunError("unknown picture format", where=f"--plot {file}", hint=f"One of {', '.join(KINDS)}.")
    if file.is_dir():
        raise DsrunError("is a folder", where=f"--plot {file}", hint="Name a file in it.")
    if not file.absolute().parent.is_dir():
        raise DsrunError("no such folder", where=str(file.absolute().parent))
    from dsrun.packages import install

    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise DsrunError(
            "drawing needs matplotlib", where="--plot", hint=f"Install it: {install('matplotlib')}"
        ) from None
    figure = Figure(figsize=(9, 1.2 + 0.55 * len(plans)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [plan.preset + (" + checkpointing" if plan.setup.checkpointing else "") for plan in plans]
    left = [0.0] * len(plans)
    for label, sizes in layers(plans, room).items():
        axes.barh(names, sizes, left=left, label=label)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    limit = (room.gpu_bytes if room.accelerator == "cuda" else room.host_bytes or 0) / GIB
    axes.axvline(limit, color="black", linestyle="--", label=f"there is {limit:.1f} GiB")
    axes.invert_yaxis()
    axes.set_xlabel(
        "GiB on each GPU at the peak" if room.accelerator == "cuda" else "GiB of a node's memory at the peak"
    )
    axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise DsrunError(f"can't be written: {error.strerror}", where=str(file)) from error


def layers(plans: Sequence[Plan], room: MemoryBudget) -> dict[str, list[float]]:
    """Layer -> its size in every bar, in GiB. The layers of a bar add up to its peak."""
    if room.accelerator == "cpu":
        return {"host memory": [plan.host.peak / GIB for plan in plans]}
    held = ("weights", "adapters", "master", "moments")
    found: dict[str, list[float]] = {
        name: [plan.gpu.terms.get(name, 0.0) / GIB for plan in plans] for name in held
    }
    counted = [sum(sizes) for sizes in zip(*found.values(), strict=True)]
    standing = [plan.gpu.held / GIB - done for plan, done in zip(plans, counted, strict=True)]
    found["gradients and buffers that stay"] = standing
    # The peak may be at the start, before some of what is held is made.
    found["at the peak"] = [max(0.0, (plan.gpu.allocated - plan.gpu.held) / GIB) for plan in plans]
    found["CUDA and NCCL"] = [untracked_gib(plan.setup.gpus) for plan in plans]
    return {name: sizes for name, sizes in found.items() if any(sizes)}

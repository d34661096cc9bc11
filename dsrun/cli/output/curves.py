"""`dsrun compare --plot FILE`: the runs' losses over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dsrun.cli.output import pictures

Curve = tuple[str, Mapping[int, float], Mapping[int, float]]
"""A run's name, its training losses and its evaluation losses by step."""


def draw(curves: Sequence[Curve], file: Path) -> None:
    """A line for each run's training loss, and dots for its evaluations, in one colour.

    Raises DsrunError where it can't be drawn or written.
    """
    pictures.check(file)
    from dsrun.packages import needed

    with needed("matplotlib", "--plot"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    # A run's name may hold a dollar sign, which would begin a formula.
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        for place, (name, losses, evals) in enumerate(curves, 1):
            colour = f"C{(place - 1) % 10}"
            label = f"{place}: {name}"
            # Equal curves lie on one another: the earlier ones look out from below.
            wide = 0.9 * max(0, min(len(curves), 5) - place)
            axes.plot(list(losses), list(losses.values()), color=colour, linewidth=1.2 + wide, label=label)
            axes.plot(list(evals), list(evals.values()), "o", color=colour, markersize=4 + wide)
        axes.set(xlabel="optimizer step", ylabel="loss (nats per token); dots: evaluation")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        pictures.save(figure, file)

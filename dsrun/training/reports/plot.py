"""The loss curve as a picture."""

from __future__ import annotations

import json
from pathlib import Path

from dsrun.job.layout import METRICS

PICTURE = "loss.png"


def plot_losses(run_dir: Path) -> Path:
    """Draw run_dir/loss.png from metrics.jsonl: training loss per step, evaluation loss as dots."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for key, style, label in (("loss", "-", "training"), ("eval_loss", "o--", "evaluation")):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1.2, markersize=4)
    name = run_dir.absolute().name
    # matplotlib's own font has no Chinese, and says so once a letter; a dollar begins a formula.
    axes.set_title(name if name.isascii() else "loss", parse_math=False)
    axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run_dir / PICTURE, dpi=120)
    return run_dir / PICTURE

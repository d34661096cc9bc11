"""A run's curves, its ranks' memory and its data's lengths as figures: pictures, legends, numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from dsrun.jobs.runs.metrics_file import StepColumns, calmed, has, number, thinned
from dsrun.reports import charts
from dsrun.words import GIB

MOST_ROWS = 12
"""Rows of a figure's table of numbers."""
CALM_FROM = 200
"""Steps from which on a curve is drawn with its mean."""
AXES = {"step": "optimizer step", "tokens": "tokens trained on, all ranks", "time": "seconds of training"}
"""Axes of curves, with their labels."""


@dataclass(frozen=True)
class Legend:
    """An entry of a legend. sign: the CSS class of its sign; colour: from 1 to 8, 0 for what is no curve."""

    text: str
    colour: int = 0
    sign: str = "line"


@dataclass(frozen=True)
class Figure:
    """A picture and what stands around it."""

    title: str
    unit: str
    """Unit of the y axis."""
    svg: str
    narrow: str = ""
    """The picture for narrow screens, where `svg` is for wide ones."""
    legend: Sequence[Legend] = ()
    note: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """The numbers of the picture, for who can't see it."""

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        return bool(self.narrow)


def of_training(columns: StepColumns, events: Iterable[Mapping[str, Any]], by: str = "step") -> list[Figure]:
    """Loss, learning rate, gradient norm and speed, those of them that were written. by: a key of AXES."""
    axis = columns.axis(by)
    figures = [_loss(columns, axis, events, by)] if columns.steps or columns.evals else []
    more = {
        "Learning rate": (columns.columns["lr"], ""),
        "Gradient norm": (columns.columns["grad_norm"], "before clipping"),
        "Speed": (columns.tokens_per_second, "tokens a second, all ranks, without padding"),
        "Memory of rank 0": ([size / GIB for size in columns.columns["memory_bytes"]], "GiB, peak so far"),
    }
    figures += [
        _curve(title, axis, list(values), by, unit)
        for title, (values, unit) in more.items()
        if any(map(isfinite, values))
    ]
    return figures


def _loss(columns: StepColumns, axis: list[float], events: Iterable[Mapping[str, Any]], by: str) -> Figure:
    places = dict(zip(columns.steps, axis, strict=True))
    saved = {
        int(event["step"]) for event in events if event.get("event") == "checkpoint" and has(event, "step")
    }
    at_saved = [places[step] for step in sorted(saved) if step in places]
    skipped = [places[step] for step in columns.skipped]
    losses, evals = columns.columns["loss"], columns.eval_points(by)
    lines = _lines(axis, losses, 1, charts.MOST_POINTS)
    legend = [Legend(f"training{_calm_words(losses)}", 1)]
    if evals:
        lines.append(charts.Line([x for x, _ in evals], [y for _, y in evals], 2, dots=True))
        legend.append(Legend("evaluation", 2, "dot"))
    marks = []
    if at_saved:
        marks.append(charts.Marks(at_saved))
        legend.append(Legend("checkpoint", sign="saved"))
    if skipped:
        marks.append(charts.Marks(skipped, "x", bad=True))
        legend.append(Legend(f"skipped step ({len(skipped):,})", sign="skipped"))
    note = ""
    if columns.not_finite is not None:
        marks.append(charts.Marks([places[columns.not_finite]], "|", bad=True))
        note = f"The loss is not finite from step {columns.not_finite:,} on."
    name = f"Training loss over {AXES[by]}: {_in_words(losses)}. {note}".strip()
    wide, narrow = (
        charts.curves(lines, x_label=AXES[by], marks=marks, size=size, name=name)
        for size in (charts.WIDE, charts.NARROW)
    )
    head, rows = _numbers(columns)
    return Figure("Loss", "nats per token", wide, narrow, legend, note, head, rows)


def _curve(title: str, axis: list[float], values: list[float], by: str, unit: str) -> Figure:
    svg = charts.curves(
        _lines(axis, values, 1, charts.MOST_POINTS // 2),
        x_label=AXES[by],
        name=f"{title} over {AXES[by]}: {_in_words(values)}",
    )
    return Figure(title, unit, svg)


def _lines(xs: list[float], values: Sequence[float], colour: int, most: int) -> list[charts.Line]:
    """A curve; one of many steps faint, with its mean over some of them in front."""
    if (window := _window(values)) < 2:
        return [charts.Line(*thinned(xs, values, most), colour)]
    calm = calmed(values, window)
    return [
        charts.Line(*thinned(xs, values, most), colour, faint=True),
        charts.Line(*thinned(xs, calm, most // 2), colour),
    ]


def _window(values: Sequence[float]) -> int:
    """Steps of a mean: an eightieth of the curve. None where it is short, or as smooth as a schedule already."""
    if len(values) <= CALM_FROM:
        return 0
    finite = [value for value in values if isfinite(value)]
    # A noisy curve turns at nearly every step, a schedule hardly ever: it needs no mean.
    turns = sum((b - a) * (c - b) < 0 for a, b, c in zip(finite, finite[1:], finite[2:], strict=False))
    return len(values) // 80 if turns > len(finite) / 10 else 0


def _calm_words(values: Sequence[float]) -> str:
    window = _window(values)
    return f" (in front: mean of {window:,} steps)" if window > 1 else ""


def _in_words(values: Sequence[float]) -> str:
    finite = [value for value in values if isfinite(value)]
    if not finite:
        return "no finite value"
    return (
        f"first {finite[0]:.4g}, last {finite[-1]:.4g}, lowest {min(finite):.4g}, highest {max(finite):.4g}"
    )


def _numbers(columns: StepColumns) -> tuple[list[str], list[list[str]]]:
    """Loss, evaluation loss, learning rate and gradient norm at a few steps."""
    count = len(columns.steps)
    places = (
        sorted({round(place * (count - 1) / (MOST_ROWS - 1)) for place in range(MOST_ROWS)}) if count else []
    )
    data = columns.columns
    rows = [
        [
            f"{columns.steps[place]:,}", _text(data["loss"][place]),
            _text(columns.evals.get(columns.steps[place])), _text(data["lr"][place]), _text(data["grad_norm"][place]),
        ]
        for place in places
    ]  # fmt: skip
    return ["step", "loss", "evaluation", "learning rate", "gradient norm"], rows


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isfinite(value) else "not finite"


def of_memory(rows: Iterable[Mapping[str, Any]], planned: float | None, *, on_gpu: bool) -> Figure | None:
    """Each rank's peak beside the plan. rows: with "rank" and "bytes"; None where no rank has written its peak."""
    heights = [row["bytes"] / GIB for row in rows if number(row["bytes"])]
    if not heights:
        return None
    place = "allocated on its GPU" if on_gpu else "resident in the host's memory"
    limit = planned / GIB if planned else None
    beside = f"; planned: {limit:.2f} GiB" if limit else ""
    svg = charts.bars(
        heights, x_label="rank", limit=limit,
        name=f"Peak memory of {len(heights)} ranks: {min(heights):.2f} to {max(heights):.2f} GiB{beside}",
    )  # fmt: skip
    legend = [Legend("measured", 1, "bar"), *([Legend("planned", 2, "dash")] if limit else [])]
    return Figure("Memory of each rank", f"GiB {place}, at its peak", svg, legend=legend)


def of_lengths(report: Mapping[str, Any]) -> Figure | None:
    """The lengths of rows in data.json; None where it has no histogram, as in older caches."""
    histogram = report.get("histogram")
    if not isinstance(histogram, Mapping) or not has(histogram, "width") or not histogram.get("counts"):
        return None
    counts, width = histogram["counts"], histogram["width"]
    svg = charts.bars(
        counts,
        edges=[place * width for place in range(len(counts) + 1)],
        x_label="tokens of a row",
        name=f"Rows by length: {report.get('rows', sum(counts)):,} rows, the longest {report.get('longest')} tokens",
    )
    return Figure("Lengths of the data", "rows", svg)


def of_several(runs: Sequence[tuple[str, StepColumns]], by: str = "step") -> list[Figure]:
    """The curves of several runs over each other. by: a key of AXES."""
    drawn = [(name, place, columns) for place, (name, columns) in enumerate(runs, 1) if columns.steps]
    if not drawn:
        return []
    legend = [Legend(name, (place - 1) % len(charts.SERIES) + 1) for name, place, _ in drawn]
    losses = [
        line
        for _, place, columns in drawn
        for line in _lines(columns.axis(by), columns.columns["loss"], place, charts.MOST_POINTS)
    ]
    evals = [
        charts.Line([x for x, _ in points], [y for _, y in points], place, dots=True)
        for _, place, columns in drawn
        if (points := columns.eval_points(by))
    ]
    summary = "; ".join(f"{name}: {_in_words(columns.columns['loss'])}" for name, _, columns in drawn)
    wide, narrow = (
        charts.curves(
            [*losses, *evals], x_label=AXES[by], size=size,
            name=f"Training losses over {AXES[by]}: {summary}",
        )
        for size in (charts.WIDE, charts.NARROW)
    )  # fmt: skip
    return [
        Figure("Losses", "nats per token; dots: evaluation", wide, narrow, legend),
        *_others(drawn, legend, by),
    ]


def _others(
    drawn: Sequence[tuple[str, int, StepColumns]], legend: Sequence[Legend], by: str
) -> Iterable[Figure]:
    kinds: dict[str, Callable[[StepColumns], Iterable[float]]] = {
        "Learning rates": lambda columns: columns.columns["lr"],
        "Gradient norms": lambda columns: columns.columns["grad_norm"],
        "Tokens a second": lambda columns: columns.tokens_per_second,
    }
    for title, values_of in kinds.items():
        lines = [
            line
            for _, place, columns in drawn
            for line in _lines(columns.axis(by), list(values_of(columns)), place, charts.MOST_POINTS // 2)
        ]
        if any(isfinite(y) for line in lines for y in line.ys):
            svg = charts.curves(lines, x_label=AXES[by], name=f"{title} over {AXES[by]}")
            yield Figure(title, "", svg, legend=legend)

"""Charts as SVG that stands inside a page: its colours and its font are the page's, in light, in dark and on paper.

matplotlib draws them, because it is there where models are trained, writes text as text, and a curve of 100,000 steps
takes some 20 kB; the libraries that draw in the browser put 1 to 5 MB of JavaScript into every file. Colours are drawn
as placeholders, for which the page's CSS variables are put in afterwards. What a chart says stands beside it, as its
legend and as a table, in HTML.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from math import isfinite, nan
from typing import TYPE_CHECKING, Any
from zlib import crc32

from dsrun.packages import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 1600
"""Points of a curve: about two for each column of pixels of the widest chart."""
MOST_MARKS = 240
"""Checkpoints and skipped steps that are drawn."""
WIDE, NARROW = (11.4, 3.5), (5.6, 2.9)
"""Width and height in inches of 72 units: over the whole page, and in one of two columns (or on a phone)."""
MARGINS = (0.72, 0.56, 0.16, 0.12)
"""Inches left of, below, right of and above the plot, for numbers of six digits: fixed, so that charts below each other
begin at one line, and drawn in half the time."""
INK, GRID = "#010203", "#040506"
SERIES = tuple(f"#0708{number:02x}" for number in range(1, 9))
"""Placeholders: `var(--ink-2)`, `var(--line)`, and `var(--c1)` to `var(--c8)`."""
BAD = "#0a0b0c"
"""`var(--bad)`"""
FONT = 11
SPREAD = 300
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dsrun",
    "font.family": "DejaVu Sans",
    "font.size": FONT,
    "text.parse_math": False,  # a run's name may hold a dollar sign
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.unicode_minus": False,
    "axes.xmargin": 0.01,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "lines.linewidth": 1.6,
    "lines.solid_joinstyle": "round",
    "path.simplify_threshold": 0.2,
}
_drawing = threading.Lock()
"""rc_context changes what is matplotlib's for all threads."""


@dataclass(frozen=True)
class Line:
    """A curve, or dots. A y that is not finite breaks it. colour: from 1 to 8."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 1
    dots: bool = False
    faint: bool = False
    """Whether it is drawn behind its own mean."""


@dataclass(frozen=True)
class Marks:
    """Places along the x axis: a row of small signs on it, or lines from top to bottom."""

    xs: Sequence[float]
    sign: str = "^"
    """matplotlib's marker; "|" for lines from top to bottom."""
    bad: bool = False


def curves(
    lines: Sequence[Line],
    *,
    x_label: str,
    marks: Sequence[Marks] = (),
    size: tuple[float, float] = NARROW,
    name: str,
) -> str:
    """Lines over a common axis. Logarithmic where the values are far apart.

    name: the text that is read out in place of the picture. Raises DsrunError where matplotlib is missing.
    """

    def draw(axes: Axes) -> None:
        values = [y for line in lines for y in line.ys if isfinite(y)]
        if values and min(values) > 0 and max(values) / min(values) > SPREAD:
            axes.set_yscale("log")
        for line in lines:
            colour = SERIES[(line.colour - 1) % len(SERIES)]
            if line.dots:
                axes.plot(line.xs, line.ys, "o", color=colour, markersize=5, zorder=3)
            else:
                style = {"alpha": 0.35, "linewidth": 1.0} if line.faint else {}
                axes.plot(line.xs, [y if isfinite(y) else nan for y in line.ys], color=colour, **style)  # type: ignore[arg-type,unused-ignore]
                alone = list(_alone(line))
                axes.plot([x for x, _ in alone], [y for _, y in alone], "o", color=colour, markersize=4)
        for mark in marks:
            _mark(axes, mark)
        axes.set(xlabel=x_label)
        _number(axes)

    return _svg(draw, size, name)


def _alone(line: Line) -> Iterator[tuple[float, float]]:
    """Points without a neighbour, of which a line would show nothing."""
    whole = [False, *map(isfinite, line.ys), False]
    for place, (x, y) in enumerate(zip(line.xs, line.ys, strict=True), 1):
        if whole[place] and not whole[place - 1] and not whole[place + 1]:
            yield x, y


def bars(
    heights: Sequence[float],
    *,
    x_label: str,
    name: str,
    edges: Sequence[float] = (),
    limit: float | None = None,
    size: tuple[float, float] = NARROW,
) -> str:
    """Bars side by side: from edge to edge where edges are given, else numbered from 0. limit: a dashed line."""

    def draw(axes: Axes) -> None:
        if edges:
            widths = [end - start for start, end in pairwise(edges)]
            axes.bar(edges[:-1], heights, [0.94 * width for width in widths], align="edge", color=SERIES[0])
        else:
            axes.bar(range(len(heights)), heights, min(0.7, 0.15 * len(heights)), color=SERIES[0])
            axes.set_xlim(-0.6, max(len(heights) - 0.4, 0.6))
        if limit is not None:
            axes.axhline(limit, color=SERIES[1], linestyle=(0, (4, 3)))
            axes.set_ylim(0, 1.12 * max(limit, *heights))
        axes.set(xlabel=x_label)
        _number(axes)

    return _svg(draw, size, name)


def _mark(axes: Axes, mark: Marks) -> None:
    """Marks stand at the lower edge, wherever the axis begins."""
    colour = BAD if mark.bad else INK
    places = list(mark.xs)
    places = places[:: -(-len(places) // MOST_MARKS)] if len(places) > MOST_MARKS else places
    if mark.sign == "|":
        for x in places:
            axes.axvline(x, color=colour, linewidth=1.2, linestyle=(0, (3, 3)))
        return
    heights = [0.03] * len(places)
    to_edge = axes.get_xaxis_transform()
    axes.plot(places, heights, mark.sign, color=colour, markersize=5, transform=to_edge, clip_on=False)


def _number(axes: Axes) -> None:
    """Few ticks, with short numbers: 250, 1,500, 20k, 2M; 0.0005, 1e-06."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    first, last = axes.get_xlim()
    if last - first < 1:
        axes.set_xlim((first + last - 1) / 2, (first + last + 1) / 2)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(value: float) -> str:
    for least, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= abs(value) < 1e12:
            return f"{value / unit:g}{letter}"
    return f"{value:,.6g}"


def _svg(draw: Callable[[Axes], None], size: tuple[float, float], name: str) -> str:
    with needed("matplotlib", "charts"):
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    with _drawing, rc_context(STYLE):
        figure = Figure(figsize=size, facecolor="none")
        FigureCanvasSVG(figure)
        left, bottom, right, top = (inches / size[place % 2] for place, inches in enumerate(MARGINS))
        axes = figure.add_axes((left, bottom, 1 - left - right, 1 - bottom - top), facecolor="none")
        draw(axes)
        file = StringIO()
        figure.savefig(file, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    return _for_a_page(file.getvalue(), name)


def _for_a_page(svg: str, name: str) -> str:
    """The picture alone, with the page's colours, its font, and only those ids that it refers to itself."""
    from markupsafe import escape

    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # Ids are the page's, where several charts stand: each chart's get a prefix that follows from its content, so that
    # the same run always makes the same page.
    needed_ids = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg))
    prefix = f"c{crc32(svg.encode()):x}-"
    svg = re.sub(
        r' id="([^"]*)"', lambda match: f' id="{prefix}{match[1]}"' if match[1] in needed_ids else "", svg
    )
    svg = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{prefix}", svg)
    colours = {INK: "var(--ink-2)", GRID: "var(--line)", BAD: "var(--bad)"}
    colours |= {colour: f"var(--c{number})" for number, colour in enumerate(SERIES, 1)}
    # matplotlib takes no CSS variables, so that it draws in colours that nobody would choose, which are replaced here.
    for colour, variable in colours.items():
        svg = svg.replace(colour, variable)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg))
    svg = re.sub(r"<path d=\"[^\"]*\" style=\"fill: none\"/>", "", svg)  # grounds of figure and axes
    svg = re.sub(r"<defs>\s*</defs>|(?<=\n)\s+", "", svg)
    view = re.search(r'viewBox="[^"]*"', svg)
    opening = f'<svg class="chart" role="img" aria-label="{escape(name)}" {view[0] if view else ""}'
    xlink = 'xmlns:xlink="http://www.w3.org/1999/xlink" xmlns="http://www.w3.org/2000/svg"'
    return re.sub(r"<svg[^>]*>", lambda _: f"{opening} {xlink}>", svg, count=1)

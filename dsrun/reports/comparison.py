"""Runs side by side on a page: what differs, their curves over each other, their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.jobs.runs import past_runs
from dsrun.jobs.runs.compare_runs import FIGURES, agreement_text, compare_runs, figure_text, value_text
from dsrun.jobs.runs.metrics_file import StepColumns
from dsrun.jobs.runs.past_runs import Run
from dsrun.reports import figures
from dsrun.reports.figures import Figure


@dataclass(frozen=True)
class ComparisonPage:
    """The content of a page of several runs. settings, numbers: rows of a name and a text for each of `names`."""

    names: list[str]
    settings: list[list[str]]
    figures: list[Figure]
    numbers: list[list[str]]
    notes: list[str]

    @property
    def compared(self) -> bool:
        """Whether there were two whose settings could be compared."""
        return len(self.names) > 1


def compared(runs: Sequence[tuple[Path, str, StepColumns]], by: str = "step") -> ComparisonPage:
    """Runs side by side: folder, name and metrics of each. Those that can't be read, or are a script's, are left out,
    with a note. by: what curves are drawn over (figures.AXES)."""
    readable: list[tuple[str, Run]] = []
    notes = []
    for path, name, columns in runs:
        try:
            run = past_runs.read(path, columns)
            _ = run.job
            readable.append((name, run))
        except DsrunError as error:
            notes.append(f"{name} is not compared: {error.problems[0].what.splitlines()[0]}")
    if len(readable) < 2:
        return ComparisonPage([name for name, _ in readable], [], [], [], notes)
    names = [name for name, _ in readable]
    comparison = compare_runs([run for _, run in readable])
    differs = {**comparison.config, **comparison.settings}
    rows = [[key, *map(value_text, values)] for key, values in differs.items()]
    numbers = [
        [FIGURES[key], *(figure_text(key, value) for value in values)]
        for key, values in comparison.figures.items()
    ]
    numbers += [
        [key, *("-" if value is None else f"{value:.2f}" for value in values)]
        for key, values in comparison.scores.items()
    ]
    notes += [
        f"{name} and {names[0]}: {agreement_text(agreement)}."
        for name, agreement in zip(names[1:], comparison.agreement, strict=True)
    ]
    drawn = figures.of_several([(name, run.columns) for name, run in readable], by)
    return ComparisonPage(names, rows, drawn, numbers, notes)

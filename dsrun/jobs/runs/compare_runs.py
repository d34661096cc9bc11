"""Runs side by side: what differs in their configs and settings, and their curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan
from statistics import median
from typing import Any

from dsrun.config import compare, tree
from dsrun.config.rules import Setting
from dsrun.host.hiding import shown_value
from dsrun.job.job import Job, devices_text
from dsrun.jobs.runs.past_runs import Run
from dsrun.words import counted, gib_text, loss_text, span_text

STEPS = 12
"""Number of steps at which the curves are shown."""
BESIDE = ("run_dir", "ds_config", "prepared", "prediction", "format", "hosts", "origins")
"""Fields of job.json that are no settings, or are told in another form."""

FIGURES = {
    "steps": "steps",
    "last_loss": "last loss",
    "last_eval_loss": "last evaluation loss",
    "step_seconds": "seconds a step (median)",
    "tokens_per_second": "tokens a second",
    "run_seconds": "whole run",
    "gpu_allocated_bytes": "GPU memory in use",
    "gpu_reserved_bytes": "GPU memory held",
    "host_bytes": "host memory",
}
"""The figures of a comparison, for people."""


@dataclass(frozen=True)
class RunComparison:
    """Rows by name, with a value for each run in order; None where a run has none.

    config, settings: only what differs. losses, eval_losses: step -> the losses there. agreement: how far each run's
    losses are from the first one's.
    """

    config: dict[str, list[Any]]
    settings: dict[str, list[Any]]
    losses: dict[int, list[float | None]]
    eval_losses: dict[int, list[float | None]]
    scores: dict[str, list[float | None]]
    figures: dict[str, list[float | None]]
    agreement: list[Agreement]


@dataclass(frozen=True)
class Agreement:
    """Training losses of two runs at the steps that both have. step: where they are furthest apart (of equal ones
    the first step); difference: how far, None if they have no step in common or one of the losses is no number."""

    steps: int
    equal: bool
    step: int | None
    difference: float | None


def compare_runs(runs: Sequence[Run]) -> RunComparison:
    """The differences between runs, and what is to be seen side by side. A setting in the config is not shown twice."""
    jobs = [run.job for run in runs]
    config = config_rows(jobs)
    in_config = [(path.rpartition(".")[2], values) for path, values in config.items()]
    return RunComparison(
        config=config,
        settings={
            path: values
            for path, values in setting_rows(jobs).items()
            if (path.rpartition(".")[2], values) not in in_config
        },
        losses=_rows([run.losses for run in runs], common=True, most=STEPS),
        eval_losses=_rows([run.eval_losses for run in runs], common=False, most=STEPS),
        scores=_score_rows(runs),
        figures=_figures(runs),
        agreement=[_agreement(runs[0].losses, run.losses) for run in runs[1:]],
    )


def config_rows(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """The keys of ds_config in which the jobs differ, DeepSpeed's defaults where a key is left out.

    None where one of them is trained with FSDP: what it has instead is among the settings.
    """
    first, *others = jobs
    if any(job.fsdp for job in jobs):
        return {}
    by_path: dict[str, dict[int, compare.Difference]] = {}
    for place, job in enumerate(others, 1):
        for row in compare.compare(first.ds_config, job.ds_config, Setting()):
            by_path.setdefault(row.path, {})[place] = row
    rows = {}
    for path, by_place in by_path.items():
        before = next(iter(by_place.values())).before
        values = [by_place[place].after if place in by_place else before for place in range(len(jobs))]
        rows[path] = [shown_value(path, value) for value in values]
    return rows


def setting_rows(jobs: Sequence[Job]) -> dict[str, list[Any]]:
    """Other differences between the jobs: model, data, training, devices."""
    sides = [_settings(job) for job in jobs]
    if len({job.model.name for job in jobs}) > 1:  # all else about them differs, too, and the name says it
        sides = [
            {path: value for path, value in side.items() if not path.startswith("model.")} for side in sides
        ]
        sides = [{"model": job.model.name, **side} for job, side in zip(jobs, sides, strict=True)]
    paths = dict.fromkeys(path for side in sides for path in side)
    rows = {path: [side.get(path) for side in sides] for path in paths}
    differ = {path: values for path, values in rows.items() if any(value != values[0] for value in values)}
    return {path: [shown_value(path, value) for value in values] for path, values in differ.items()}


def _settings(job: Job) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(job).items() if name not in BESIDE}
    return {**dict(tree.leaves(fields)), "ranks": job.world_size, "devices": devices_text(job.hosts)}


def _rows(curves: Sequence[Mapping[int, float]], *, common: bool, most: int) -> dict[int, list[float | None]]:
    """Step -> every curve's value there, at up to `most` steps, the first and the last among them.

    common: only steps that all of the curves have that have any.
    """
    drawn = [set(curve) for curve in curves if curve]
    if not drawn:
        return {}
    steps = sorted(set.intersection(*drawn) if common else set.union(*drawn))
    if len(steps) > most:
        steps = [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]
    return {step: [curve.get(step) for curve in curves] for step in steps}


def _score_rows(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    sides = [
        {f"{name} {when}": value for when, scores in run.scores.items() for name, value in scores.items()}
        for run in runs
    ]
    return {
        name: [side.get(name) for side in sides]
        for name in dict.fromkeys(name for side in sides for name in side)
    }


def _figures(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    """Steps, losses, speed and memory in numbers: seconds, tokens per second, bytes."""
    rows: dict[str, list[float | None]] = {}
    peaks = [run.peaks or {} for run in runs]
    rows["steps"] = [len(run.losses) for run in runs]
    rows["last_loss"] = [next(reversed(run.losses.values()), None) for run in runs]
    rows["last_eval_loss"] = [next(reversed(run.eval_losses.values()), None) for run in runs]
    rows["step_seconds"] = [_median_of(run, "seconds") for run in runs]
    rows["tokens_per_second"] = [run.tokens_per_second for run in runs]
    rows["run_seconds"] = [run.seconds for run in runs]
    for name in ("gpu_allocated_bytes", "gpu_reserved_bytes", "host_bytes"):
        rows[name] = [peak.get(name) for peak in peaks]
    return {name: values for name, values in rows.items() if any(value is not None for value in values)}


def _median_of(run: Run, name: str) -> float | None:
    finite = [value for value in run.columns.columns[name] if isfinite(value)]
    return median(finite) if finite else None


def _agreement(first: Mapping[int, float], other: Mapping[int, float]) -> Agreement:
    steps = [step for step in first if step in other]
    if not steps:
        return Agreement(0, equal=False, step=None, difference=None)
    # Two that are NaN are as equal as can be said; of one alone nothing is further apart.
    apart = {
        step: 0.0 if isnan(first[step]) and isnan(other[step]) else abs(first[step] - other[step])
        for step in steps
    }
    broken = next((step for step, value in apart.items() if not isfinite(value)), None)
    if broken is not None:
        return Agreement(len(steps), equal=False, step=broken, difference=None)
    worst = max(apart, key=lambda step: apart[step])
    return Agreement(len(steps), equal=apart[worst] == 0, step=worst, difference=apart[worst])


def value_text(value: Any) -> str:
    """A value of a config or a setting."""
    return (
        "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def agreement_text(agreement: Agreement) -> str:
    """The difference of two runs' losses, in words."""
    if not agreement.steps:
        return "no step in common"
    steps = counted(agreement.steps, "step")
    if agreement.equal:
        return f"equal to the last digit at all {steps} that both have"
    if agreement.difference is None:
        return f"one of them is no number any more at step {agreement.step} (of {steps} that both have)"
    return f"at most {agreement.difference:.3g} apart, at step {agreement.step} (of {steps} that both have)"


def figure_text(name: str, value: float | None) -> str:
    """A figure with its unit."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return gib_text(value)
    if name.endswith("_loss"):
        return loss_text(value)
    if name == "run_seconds":
        return span_text(value)
    return f"{value:.4g}" if name == "step_seconds" else f"{value:,.0f}"

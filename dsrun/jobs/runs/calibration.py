"""Corrections of the planner's constants that finished runs suggest, kept for the machines they ran on.

A run's job.json holds what was predicted, and its state/rank-N.json what each rank took. The factors between the two
(the median over the runs) are written to planner.toml in the user's config folder, one table for each kind of device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun import catalog
from dsrun.errors import BOUNDLESS, DsrunError, Problem, collected, raise_all
from dsrun.files import explained, read_inside, write_atomic
from dsrun.job.layout import JOB, state_file
from dsrun.json_numbers import is_finite
from dsrun.planner.plan import Calibration
from dsrun.words import GIB

if TYPE_CHECKING:
    from dsrun.job.job import Job
    from dsrun.planner.plan import Plan

FILE = "planner.toml"
PREDICTED = ("gpu_held_bytes", "gpu_allocated_bytes", "gpu_reserved_bytes", "host_bytes", "step_seconds")
"""Fields of a prediction beside its device: see dsrun.jobs.assembly.checks.memory_check.prediction."""
SIGNED = ("process_gib", "gpu_gib")
"""Constants that may be below 0."""
LEAST, MOST = 0.25, 4.0
"""A factor outside is no constant of a machine: something else was measured."""


@dataclass(frozen=True)
class MeasuredRun:
    """One run: what was predicted and what was measured. Bytes of one GPU (None on CPUs), bytes of a node, seconds."""

    path: str
    device: str
    predicted: Mapping[str, float]
    measured: Mapping[str, float | None]
    ranks: int


@dataclass(frozen=True)
class DeviceCalibration:
    """The calibration of a kind of device."""

    device: str
    calibration: Calibration
    runs: int
    """Number of runs behind it."""
    errors: dict[str, tuple[float, float]]
    """Quantity -> median error before and after, as shares."""


def config_file() -> Path:
    """$XDG_CONFIG_HOME/dsrun/planner.toml, or the same under ~/.config."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser().absolute() / "dsrun" / FILE


def known(device: str) -> Calibration:
    """The calibration of a kind of device; the defaults where there is none. Raises DsrunError for a broken file."""
    path = config_file()
    if not path.is_file():
        return Calibration()
    table = _tables(path).get(device, {})
    values = {field.name: table[field.name] for field in fields(Calibration) if field.name in table}
    wrong = [name for name, value in values.items() if not is_finite(value)]
    if wrong:
        raise DsrunError(
            f"[{device}]: {', '.join(wrong)} must be numbers", where=str(path), hint="Or delete the file."
        )
    low = [name for name, value in values.items() if name not in SIGNED and value <= 0]
    if low:
        raise DsrunError(
            f"[{device}]: {', '.join(low)} must be above 0", where=str(path), hint="Or delete the file."
        )
    return Calibration(**values)


def _tables(path: Path) -> dict[str, Mapping[str, Any]]:
    """The user's file: device -> what is known. Raises DsrunError where it is something else."""
    tables = catalog.read_toml(path)
    if wrong := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise DsrunError(f"{wrong[0]} is no table", where=str(path), hint="Or delete the file.")
    return tables


def read(path: Path) -> MeasuredRun:
    """A run's folder. Raises DsrunError for one that holds no prediction, or that did not finish."""
    from dsrun.job.job import Job

    job = Job.read_shown(path / JOB)
    if job.prediction is None:
        raise DsrunError("holds no prediction", where=str(path), hint="It was started by an older dsrun.")
    predicted = {name: value for name, value in job.prediction.items() if is_finite(value)}
    if not set(PREDICTED) <= set(predicted) or not isinstance(job.prediction.get("device"), str):
        raise DsrunError("holds another dsrun's prediction", where=str(path))
    nodes = len(job.hosts)
    return MeasuredRun(
        str(path), str(job.prediction["device"]), predicted, measured(path, job), job.world_size // nodes
    )


def measured(path: Path, job: Job) -> dict[str, float | None]:
    """Peaks of a finished run's ranks, the largest of each kind: bytes of a GPU (None on CPUs), of a node; seconds.

    Raises DsrunError for a run that did not finish.
    """
    states = []
    for rank in range(job.world_size):
        file = path / state_file(rank)
        try:
            states.append(json.loads(read_inside(path, state_file(rank))))
        except (OSError, ValueError, *BOUNDLESS) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise DsrunError(f"can't be read: {why}", where=str(file), hint="Did the run finish?") from error
    if not all(map(_finished, states)):
        raise DsrunError("did not finish, or was run by an older dsrun", where=str(path))
    peaks = [state["peaks"] for state in states]
    return {
        "gpu_allocated_bytes": _most(peaks, "gpu_allocated_bytes"),
        "gpu_reserved_bytes": _most(peaks, "gpu_reserved_bytes"),
        "host_bytes": sum(peak["host_peak_bytes"] for peak in peaks) / len(job.hosts),
        "step_seconds": _most(peaks, "step_seconds"),
    }


def _finished(state: Any) -> bool:
    """Whether a rank's state is that of a run that came to its end, with what it took."""
    peaks = state.get("peaks") if isinstance(state, dict) and state.get("status") == "finished" else None
    return isinstance(peaks, dict) and is_finite(peaks.get("host_peak_bytes"))


def _most(peaks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known_peaks = [peak[name] for peak in peaks if peak.get(name) is not None]
    return float(max(known_peaks)) if known_peaks else None


def learn(runs: Sequence[MeasuredRun]) -> list[DeviceCalibration]:
    """A calibration for each kind of device among the runs."""
    devices = list(dict.fromkeys(run.device for run in runs))
    return [_learn(device, [run for run in runs if run.device == device]) for device in devices]


def _median(values: Sequence[float]) -> float:
    from statistics import median  # slow to import, and plans need none of it

    return median(values)


def _learn(device: str, runs: Sequence[MeasuredRun]) -> DeviceCalibration:
    moving = _factor(runs, lambda run: _ratio(run, "gpu_allocated_bytes", run.predicted["gpu_held_bytes"]))
    reserved = _factor(runs, _holes)
    seconds = _factor(runs, lambda run: _ratio(run, "step_seconds", 0.0))
    more = [
        (run.measured["host_bytes"] - run.predicted["host_bytes"]) / run.ranks / GIB
        for run in runs
        if run.measured["host_bytes"] is not None
    ]
    calibration = Calibration(moving, reserved, round(_median(more), 3) if more else 0.0, seconds)
    errors = {}
    for name in ("gpu_allocated_bytes", "gpu_reserved_bytes", "host_bytes", "step_seconds"):
        pairs = [(run, value) for run in runs if (value := run.measured[name])]
        if pairs:
            before = _median([abs(run.predicted[name] / value - 1) for run, value in pairs])
            after = _median([abs(_after(run, calibration)[name] / value - 1) for run, value in pairs])
            errors[name] = (before, after)
    return DeviceCalibration(device, calibration, len(runs), errors)


def _after(run: MeasuredRun, calibration: Calibration) -> dict[str, float]:
    """The run's prediction with what was learnt (dsrun.planner.plan does the same to a plan)."""
    predicted = run.predicted
    held = predicted["gpu_held_bytes"]
    allocated = held + calibration.moving * (predicted["gpu_allocated_bytes"] - held)
    return {
        "gpu_allocated_bytes": allocated,
        "gpu_reserved_bytes": allocated
        + calibration.reserved * (predicted["gpu_reserved_bytes"] - predicted["gpu_allocated_bytes"]),
        "host_bytes": predicted["host_bytes"] + calibration.process_gib * GIB * run.ranks,
        "step_seconds": predicted["step_seconds"] * calibration.seconds,
    }


def _ratio(run: MeasuredRun, name: str, held: float) -> float | None:
    measured, predicted = run.measured[name], run.predicted[name]
    return None if measured is None or predicted <= held else (measured - held) / (predicted - held)


def _holes(run: MeasuredRun) -> float | None:
    reserved, allocated = run.measured["gpu_reserved_bytes"], run.measured["gpu_allocated_bytes"]
    predicted = run.predicted["gpu_reserved_bytes"] - run.predicted["gpu_allocated_bytes"]
    return (
        None
        if reserved is None or allocated is None or predicted <= 0
        else (reserved - allocated) / predicted
    )


def _factor(runs: Sequence[MeasuredRun], ratio: Callable[[MeasuredRun], float | None]) -> float:
    """The median ratio of the runs that have one, within reason; 1 where none has."""
    ratios = [value for value in map(ratio, runs) if value is not None]
    return round(min(MOST, max(LEAST, _median(ratios))), 4) if ratios else 1.0


def of_two(
    plans: Sequence[Plan], took: Sequence[Mapping[str, float | None]], *, cpu: bool = False
) -> Calibration:
    """The calibration from two runs of one set-up, the second with more rows a micro batch.

    cpu: the ranks train on CPUs, where all is in the node's memory, and one constant a process is learnt.

    Bytes of both are constant + rows x slope, and so are the plans'. What doesn't grow in a plan, because its peak is
    in the optimizer's step, says nothing of the slope. Raises DsrunError where no GPU memory was measured.
    """
    (small, large), (first, second) = plans, took
    if cpu:
        more = _median(
            [(run["host_bytes"] or 0.0) - plan.host.peak for plan, run in zip(plans, took, strict=True)]
        )
        ranks = small.setup.ranks_per_node
        return Calibration(seconds=_pace(plans, took), process_gib=round(more / ranks / GIB, 3))
    sizes = [measured_run["gpu_allocated_bytes"] for measured_run in (first, second)]
    if not sizes[0] or not sizes[1]:
        raise DsrunError(
            "the ranks counted no GPU memory", where="--measure", hint="Did they train on a GPU?"
        )
    grows = large.gpu.allocated - small.gpu.allocated
    lengths = min(MOST, max(LEAST, (sizes[1] - sizes[0]) / grows)) if grows > 0 else 1.0
    rows = small.setup.micro_batch / (large.setup.micro_batch - small.setup.micro_batch)
    beside = sizes[0] - (small.gpu.allocated + (lengths - 1) * grows * rows)
    return Calibration(seconds=_pace(plans, took), lengths=round(lengths, 4), gpu_gib=round(beside / GIB, 3))


def _pace(plans: Sequence[Plan], took: Sequence[Mapping[str, float | None]]) -> float:
    """Measured by predicted seconds of a step."""
    seconds = [
        run["step_seconds"] / plan.speed.seconds_per_step
        for plan, run in zip(plans, took, strict=True)
        if run["step_seconds"]
    ]
    return round(_median(seconds), 4) if seconds else 1.0


def save(learnt: Sequence[DeviceCalibration]) -> Path:
    """Write what was learnt into the user's file; tables of other devices stay as they are."""
    path = config_file()
    tables = _tables(path) if path.is_file() else {}
    for result in learnt:
        values = {field.name: getattr(result.calibration, field.name) for field in fields(Calibration)}
        tables[result.device] = {**values, "runs": result.runs}
    lines = [
        "# Written by `dsrun plan --calibrate`: what finished runs say of these devices. Delete it to forget."
    ]
    for device, table in tables.items():
        lines += ["", f"[{json.dumps(device, ensure_ascii=False)}]"]
        lines += [f"{name} = {json.dumps(value)}" for name, value in table.items() if is_finite(value)]
    with explained("can't be made", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n".join(lines) + "\n", overwrite=True)
    return path


def read_all(paths: Sequence[Path]) -> list[MeasuredRun]:
    """Every run's folder. Raises DsrunError with the problems of all that can't be used."""
    runs, problems = [], list[Problem]()
    for path in paths:
        with collected(problems):
            runs.append(read(path))
    raise_all(problems)
    return runs

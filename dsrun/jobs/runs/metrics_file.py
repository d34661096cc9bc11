"""The content of metrics.jsonl: its lines, its newest ones, and its training steps as columns of numbers.

A run may have written 100,000 steps, and may be writing the next one: a half line is left out, what is no number is
passed over, and columns grow by what was added since they were last read.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Any, TypeGuard

from dsrun.files import open_inside, read_inside
from dsrun.job.layout import METRICS
from dsrun.job.run_folder import MOST_LINES_BYTES, Follower, json_objects
from dsrun.json_numbers import is_number

BLOCK = 1 << 14
"""Bytes at a file's end that are read for its newest lines: some 60 steps."""
LARGEST = 1 << 62
"""The largest whole number of steps, tokens or bytes that is believed: JSON may hold larger ones than any float."""
PLAIN: frozenset[Any] = frozenset((int, float))
OF_A_STEP = ("loss", "lr", "grad_norm", "tokens", "seconds", "skipped", "memory_bytes")
"""Fields of a step's line that are kept as columns; docs/reference/run-folder.md says what they are."""


def number(value: object) -> TypeGuard[float]:
    """Whether a value of a JSON file is a number that a float can hold; NaN is."""
    return is_number(value, largest=LARGEST)


def has(line: Mapping[str, Any], name: str) -> bool:
    """Whether a line has a number under that name."""
    return number(line.get(name))


def value_of(line: Mapping[str, Any], name: str) -> float | None:
    """A number of a line of metrics.jsonl. One that is not finite is null there, with its name under "not_finite"."""
    strange = line.get("not_finite")
    if isinstance(strange, Mapping) and strange.get(name) in ("nan", "inf", "-inf"):
        return float(strange[name])
    return float(line[name]) if has(line, name) else None


def read_bytes(run_dir: Path, name: str) -> bytes:
    """The content of a run's file; nothing where it can't be read. Raises UnfitFileError."""
    try:
        return read_inside(run_dir, name)
    except OSError:
        return b""


def time_of(path: Path) -> float | None:
    """When a file was written, in seconds since 1970; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def backwards(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON lines among the last BLOCK bytes of a run's file, newest first. Raises DsrunError as `read_bytes`."""
    try:
        with open_inside(path.parent, path.name, most=MOST_LINES_BYTES) as file:
            start = max(0, file.seek(0, os.SEEK_END) - BLOCK)
            file.seek(start)
            content = file.read()
    except OSError:
        return
    whole = content.partition(b"\n")[2] if start else content
    yield from reversed(json_objects(whole))


class StepColumns:
    """The training steps of a run as columns, 8 bytes a number, and its evaluations.

    What is missing is NaN; `not_finite` has the first step whose loss was.
    """

    def __init__(self, run_dir: Path) -> None:
        self._follower = Follower(run_dir / METRICS)
        self._forget()

    def _forget(self) -> None:
        self.steps = array("q")
        self.columns = {name: array("d") for name in OF_A_STEP}
        self._appends = [column.append for column in self.columns.values()]
        self.evals: dict[int, float] = {}
        """Optimizer step -> evaluation loss; step 0 is before training."""
        self.not_finite: int | None = None

    def read(self) -> StepColumns:
        """Add what was written since the last time; from the beginning where the file was written again."""
        blocks = self._follower.blocks()
        if self._follower.began_again:
            self._forget()
        for block in blocks:
            for line in block:
                step: Any = line.get("step")
                if number(step) and isfinite(step):
                    self._add(int(step), line)
        return self

    def _add(self, step: int, line: Mapping[str, Any]) -> None:
        if "eval_loss" in line and (loss := value_of(line, "eval_loss")) is not None:
            self.evals[step] = loss
        value: Any = line.get("loss")
        if value.__class__ not in PLAIN and value_of(line, "loss") is None:
            return
        row = []
        for name in OF_A_STEP:
            value = line.get(name)
            if value.__class__ not in PLAIN:  # nearly always it is: a long run has a million of them
                number = value_of(line, name)
                value = nan if number is None else number
            row.append(value)
        try:
            numbers = array("d", row)
        except OverflowError:  # a whole number that no float holds
            return
        while self.steps and self.steps[-1] >= step:  # done twice: the later one counts
            self.steps.pop()
            for column in self.columns.values():
                column.pop()
            if self.not_finite is not None and self.not_finite >= step:
                self.not_finite = None
        self.steps.append(step)
        for append, value in zip(self._appends, numbers, strict=True):
            append(value)
        if self.not_finite is None and not isfinite(self.columns["loss"][-1]):
            self.not_finite = step

    @property
    def losses(self) -> dict[int, float]:
        """Optimizer step -> training loss, in order; of a step that was done twice the later one."""
        return dict(zip(self.steps, self.columns["loss"], strict=True))

    def axis(self, by: str) -> list[float]:
        """The steps' places: by "step", by "tokens" or by "time", the latter two summed up from the first step.

        time: seconds of training, without pauses and evaluations. A step without a number adds nothing.
        """
        if by == "step":
            return list(map(float, self.steps))
        places, total = [], 0.0
        for value in self.columns[{"tokens": "tokens", "time": "seconds"}[by]]:
            total += value if isfinite(value) else 0.0
            places.append(total)
        return places

    def eval_points(self, by: str) -> list[tuple[float, float]]:
        """The evaluations along the same axis; one of a step that is not there stands at the last one before it."""
        from bisect import bisect_right

        axis = self.axis(by)
        points = []
        for step, loss in sorted(self.evals.items()):
            place = bisect_right(self.steps, step)
            points.append((float(step) if by == "step" else axis[place - 1] if place else 0.0, loss))
        return points

    @property
    def skipped(self) -> list[int]:
        """The steps that were skipped because of an overflow (fp16)."""
        counts = self.columns["skipped"]
        return [
            step
            for place, step in enumerate(self.steps)
            if counts[place] > (counts[place - 1] if place else 0)
        ]

    @property
    def tokens_per_second(self) -> list[float]:
        """Tokens per second of each step, all ranks together; NaN where it isn't known."""
        pairs = zip(self.columns["tokens"], self.columns["seconds"], strict=True)
        return [tokens / seconds if seconds > 0 else nan for tokens, seconds in pairs]


def calmed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the `window` values around each; what is not finite is left out, and stays what it is itself."""
    sums, counts = [0.0], [0]
    for value in values:
        finite = isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    means = []
    for place, value in enumerate(values):
        first, last = max(0, place - window // 2), min(len(values), place + window // 2 + 1)
        count = counts[last] - counts[first]
        means.append((sums[last] - sums[first]) / count if isfinite(value) and count else value)
    return means


def thinned(xs: list[float], ys: Iterable[float], most: int) -> tuple[list[float], list[float]]:
    """A curve with at most about `most` points: of each stretch the lowest and the highest, so that no spike is lost.

    The first and the last point stay. A stretch in which a value is not finite keeps one such value, which breaks the
    line there.
    """
    values = list(ys)
    if len(xs) <= most:
        return xs, values
    kept = {0, len(xs) - 1}
    stretch = -(-2 * len(xs) // most)
    for start in range(0, len(xs), stretch):
        places = range(start, min(start + stretch, len(xs)))
        finite = [place for place in places if isfinite(values[place])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(places):
            kept.add(next(place for place in places if not isfinite(values[place])))
    order = sorted(kept)
    return [xs[place] for place in order], [values[place] for place in order]

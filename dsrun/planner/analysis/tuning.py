"""The search of `dsrun tune`: the planner ranks, short trials decide.

A candidate is a choice for each knob, with the seconds and the memory that the planner predicts. What a trial took,
beside what was predicted of it, says something of every candidate that shares a knob with it: the logarithm of
measured by predicted is a sum of an offset and a part for each knob's value, all unknown at first and normal around 0
(a linear model; its posterior is exact). So a planner that takes one preset for too fast is corrected for all
candidates with that preset after a trial or two.

1. Short trials, of SHORT of the budget: each is of the candidate whose optimistic seconds are least.
2. The faster half of those is tried again with twice the steps, and so on (successive halving).
3. The search is over when the leader is sure: no other candidate's optimistic seconds are below the leader's by more
   than CLOSE. What is left of the budget goes to candidates that might be.

A trial that dies is data: it is never tried again, and, if it ran out of memory, nothing that needs as much is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHORT = 0.625
"""Share of the budget for short trials."""
CLOSE = 0.03
"""Seconds that are nearer than this are equal."""
OFFSET = 1.0
"""Standard deviation of the logarithm of the planner's error that all candidates share: a machine's own speed."""
PART = 0.25
"""The same of what a knob's value adds to it."""
NOISE = 0.05
"""The same of a short trial's seconds, at least; one of twice the steps has 1 / sqrt(2) of it."""
OPTIMISM = 1.0
"""Standard deviations that an optimistic guess lies below the mean."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to train."""

    name: str
    knobs: Mapping[str, Any]
    """Option -> value."""
    seconds: float
    """Predicted, a step of as many examples as all others'."""
    needs: float = 0.0
    """Bytes of the scarce memory, as predicted."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The end of a trial. seconds: a step's; None where it died. reason: why."""

    seconds: float | None
    reason: str = ""
    out_of_memory: bool = False
    noise: float = 0.0
    """Relative standard deviation of the seconds, as far as the trial's own steps tell; NOISE at least."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial of a search."""

    candidate: Candidate
    steps: int
    outcome: TrialOutcome


@dataclass(frozen=True, slots=True)
class Tuned:
    """The end of a search."""

    leader: Candidate | None
    """None where every trial died."""
    seconds: float
    """The leader's, as measured with the most steps."""
    trials: tuple[Trial, ...]
    sure: bool
    """Whether no other candidate may be faster by more than CLOSE, as far as the trials tell."""


Measure = Callable[[Candidate, int], TrialOutcome]
"""A candidate and the steps of its trial -> the outcome."""


def tune(candidates: Sequence[Candidate], measure: Measure, *, trials: int, steps: int) -> Tuned:
    """The best candidate that this number of trials finds. steps: of a short one."""
    found: list[Trial] = []

    def take(candidate: Candidate, count: int) -> None:
        found.append(Trial(candidate, count, measure(candidate, count)))

    for _ in range(max(1, round(SHORT * trials))):
        if (chosen := _next(candidates, found)) is None:
            break
        take(chosen, steps)
    rung = steps
    while len(found) < trials and not _sure(candidates, found):
        rung *= 2
        # The faster half of this rung's, the leader among them, again and longer.
        half = _fastest(found, rung // 2)
        for candidate in half[: max(1, -(-len(half) // 2))]:
            if len(found) < trials:
                take(candidate, rung)
        if len(half) <= 1 and len(found) < trials and (chosen := _next(candidates, found)) is not None:
            take(chosen, steps)
        if not half:
            break
    best = leader(found)
    if best is None:
        return Tuned(None, math.inf, tuple(found), sure=False)
    return Tuned(best, measured(found)[best.name], tuple(found), _sure(candidates, found))


def measured(trials: Sequence[Trial]) -> dict[str, float]:
    """Candidate's name -> its seconds, in the mean over its trials by their steps."""
    weights: dict[str, float] = {}
    sums: dict[str, float] = {}
    for trial in trials:
        if trial.outcome.seconds is not None:
            name = trial.candidate.name
            weights[name] = weights.get(name, 0.0) + trial.steps
            sums[name] = sums.get(name, 0.0) + trial.steps * trial.outcome.seconds
    return {name: sums[name] / weight for name, weight in weights.items()}


def leader(trials: Sequence[Trial]) -> Candidate | None:
    """The fastest candidate, as measured; None where every trial died. One that died once is out."""
    seconds = measured(trials)
    dead = {trial.candidate.name for trial in trials if trial.outcome.seconds is None}
    alive = [trial.candidate for trial in trials if trial.outcome.seconds is not None]
    return min(
        (each for each in alive if each.name not in dead), key=lambda each: seconds[each.name], default=None
    )


def _fastest(trials: Sequence[Trial], steps: int) -> list[Candidate]:
    """The candidates that were tried with this number of steps, the fastest first; where there is none, all."""
    seconds = measured(trials)
    dead = {trial.candidate.name for trial in trials if trial.outcome.seconds is None}
    of_rung = {trial.candidate.name: trial.candidate for trial in trials if trial.steps == steps}
    every = of_rung or {trial.candidate.name: trial.candidate for trial in trials}
    alive = [candidate for name, candidate in every.items() if name not in dead]
    return sorted(alive, key=lambda candidate: seconds[candidate.name])


def _open(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> list[Candidate]:
    """The candidates that were not tried, less those that need as much memory as one that had too little."""
    tried = {trial.candidate.name for trial in trials}
    limit = min((trial.candidate.needs for trial in trials if trial.outcome.out_of_memory), default=math.inf)
    return [candidate for candidate in candidates if candidate.name not in tried and candidate.needs < limit]


def _next(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> Candidate | None:
    """The candidate to try next: the one whose optimistic seconds are least."""
    guess = _Posterior(candidates, trials).optimistic
    return min(
        _open(candidates, trials), key=lambda candidate: (guess(candidate), candidate.name), default=None
    )


def _sure(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> bool:
    """Whether no candidate that is open may beat the leader by more than CLOSE."""
    best = leader(trials)
    if best is None:
        return not _open(candidates, trials)
    guess, seconds = _Posterior(candidates, trials).optimistic, measured(trials)
    noise = max([NOISE, *(trial.outcome.noise for trial in trials)])
    others = [seconds[name] for name in seconds if name != best.name]
    longest = max(trial.steps for trial in trials if trial.candidate == best)
    beaten = all(other >= (1 + CLOSE + OPTIMISM * noise) * seconds[best.name] for other in others)
    twice = longest > min(trial.steps for trial in trials)
    least = (1 - CLOSE) * seconds[best.name]
    return (beaten or twice) and all(guess(each) >= least for each in _open(candidates, trials))


class _Posterior:
    """What the trials say of every candidate's seconds: a Bayesian linear regression of ln(measured / predicted)."""

    def __init__(self, candidates: Sequence[Candidate], trials: Sequence[Trial]) -> None:
        values = sorted({(knob, repr(value)) for each in candidates for knob, value in each.knobs.items()})
        self._columns = {pair: place + 1 for place, pair in enumerate(values)}
        precision = [1 / OFFSET**2] + [1 / PART**2] * len(values)
        matrix = [
            [value if row == column else 0.0 for column, _ in enumerate(precision)]
            for row, value in enumerate(precision)
        ]
        vector = [0.0] * len(precision)
        least = min((trial.steps for trial in trials), default=1)
        for trial in trials:
            if trial.outcome.seconds is None:
                continue
            weight = trial.steps / least / max(NOISE, trial.outcome.noise) ** 2
            error = math.log(trial.outcome.seconds / trial.candidate.seconds)
            places = self._places(trial.candidate)
            for row in places:
                vector[row] += weight * error
                for column in places:
                    matrix[row][column] += weight
        self._covariance = _inverse(matrix)
        self._mean = [sum(a * b for a, b in zip(row, vector, strict=True)) for row in self._covariance]

    def _places(self, candidate: Candidate) -> list[int]:
        """The columns of the model that a candidate has a 1 in."""
        return [0, *(self._columns[knob, repr(value)] for knob, value in candidate.knobs.items())]

    def optimistic(self, candidate: Candidate) -> float:
        """Seconds that a candidate may take at best, OPTIMISM standard deviations below its mean.

        The offset that all share doesn't count as a doubt: it moves all alike.
        """
        places = self._places(candidate)
        mean = sum(self._mean[place] for place in places)
        variance = sum(self._covariance[row][column] for row in places[1:] for column in places[1:])
        return candidate.seconds * math.exp(mean - OPTIMISM * math.sqrt(max(0.0, variance)))


def _inverse(matrix: list[list[float]]) -> list[list[float]]:
    """The inverse of a positive definite matrix, by Gauss and Jordan."""
    size = len(matrix)
    rows = [
        [*row, *(float(row_place == place) for place in range(size))] for row_place, row in enumerate(matrix)
    ]
    for place in range(size):
        pivot = max(range(place, size), key=lambda row: abs(rows[row][place]))
        rows[place], rows[pivot] = rows[pivot], rows[place]
        rows[place] = [value / rows[place][place] for value in rows[place]]
        for row in range(size):
            if row != place and rows[row][place]:
                factor = rows[row][place]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[place], strict=True)]
    return [row[size:] for row in rows]

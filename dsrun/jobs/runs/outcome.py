"""What came of a fine-tune besides its numbers: whether it made the model worse, and how the model answers now."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from dsrun.files import open_inside
from dsrun.job.run_folder import json_object

AFTER, BEFORE = "generated_predictions.jsonl", "before_training.generated_predictions.jsonl"
ANSWERS_BYTES = 1 << 20
"""Bytes of the answers' file that are read for the first of them, at most."""
MAIN_SCORES, MAJORITY = ("accuracy", "rouge-l"), "majority"
"""The score of classes and that of texts; the share of the commonest class, which a classifier has to beat."""
MOST_COMPARED = 10
"""Steps at each end of a run whose losses are compared, at most; a quarter of a short run's."""
CLEARLY = 1.1
"""A run too short for two steps at each end is worse where its loss has grown by this factor."""


@dataclass(frozen=True)
class Answer:
    """A prompt, the answer in the file, and the model's before and after training."""

    prompt: str
    expected: str
    before: str | None
    after: str


@dataclass(frozen=True)
class Score:
    """A score of answers, in percent."""

    name: str
    value: float
    majority: float | None
    """What always giving the commonest class would score; None for texts."""

    @property
    def beside(self) -> str:
        """What the value is to be held against, in words; empty where there is nothing."""
        return "" if self.majority is None else f"majority {self.majority:.2f}"


def answers(run_dir: Path, most: int) -> list[Answer]:
    """The first answers to held-out prompts, those of the untrained model beside them where there are any.

    Raises UnfitFileError where their file is not one to be read.
    """
    before = {line.get("prompt"): line.get("predict") for line in _lines(run_dir / BEFORE)}
    return [
        Answer(
            prompt=str(line.get("prompt", "")),
            expected=str(line.get("labels", "")),
            before=str(before[line.get("prompt")]) if line.get("prompt") in before else None,
            after=str(line.get("predict", "")),
        )
        for line in _lines(run_dir / AFTER)[:most]
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines at the start of a run's file; none where it isn't there. Raises UnfitFileError."""
    try:
        with open_inside(path.parent, path.name, most=sys.maxsize) as file:
            content = file.read(ANSWERS_BYTES)
    except OSError:
        return []
    return [value for line in content.split(b"\n")[:-1] if (value := json_object(line))]


def main_score(scores: Mapping[str, float]) -> Score:
    """The score that a reader looks for first. scores: those of dsrun/training/metrics.py, one at least."""
    name = next((name for name in MAIN_SCORES if name in scores), next(iter(scores)))
    shown = name.upper() if name.startswith("rouge") else name
    return Score(shown, scores[name], scores.get(MAJORITY))


def is_worse(losses: Sequence[float | None], eval_losses: Sequence[float | None]) -> bool:
    """Whether a run ended worse than it began, by losses in the order of their steps (None: not finite).

    The held-out rows decide where they were looked at twice. Training losses differ from batch to batch: there a run
    is worse only where each of its last losses is above each of its first ones.
    """
    if len(eval_losses) > 1:
        return _above(eval_losses[-1:], eval_losses[:1])
    count = min(MOST_COMPARED, len(losses) // 4)
    if count > 1:
        return _above(losses[-count:], losses[:count])
    return len(losses) > 1 and _above(losses[-1:], losses[:1], CLEARLY)


def _above(last: Sequence[float | None], first: Sequence[float | None], factor: float = 1.0) -> bool:
    """Whether each last loss is above each first one times the factor; one that is not finite is above all."""
    highest = max((loss for loss in first if loss is not None and isfinite(loss)), default=inf)
    return all(loss is None or not loss <= factor * highest for loss in last) and highest < inf

"""Predictions beside measurements: a row for each case, and what comes of the rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from dsrun import catalog
from dsrun.planner import gpus
from dsrun.planner.gpu_memory import GIB, gpu_memory
from dsrun.planner.plan import demand
from published.peers import Peers
from published.reading import UnreadableError, read

TOOLS = ("dsrun", "deepspeed", "accelerate")
METRICS = ("allocated", "reserved", "smi")


@dataclass(frozen=True, slots=True)
class Row:
    """A case and what was predicted for it.

    said: tool -> GiB on a GPU, None where it has no answer. fits: tool -> whether it says that it fits, None alike.
    moment: when dsrun sees the peak. notes: what was guessed, or why there is no prediction.
    """

    case: Mapping[str, Any]
    said: Mapping[str, float | None]
    fits: Mapping[str, bool | None]
    moment: str
    notes: tuple[str, ...]
    used: float | None = None
    """dsrun's share of the card."""

    @property
    def measured_gib(self) -> float | None:
        """What was measured, where it can be compared: a known metric, of a GPU."""
        if self.case.get("host_only") or self.case.get("metric") not in METRICS:
            return None
        value = self.case.get("measured_gpu_gib")
        return float(value) if value else None

    @property
    def held(self) -> bool:
        """Whether the measurement itself is doubtful: shown, not scored."""
        return bool(self.case.get("hold"))

    @property
    def full(self) -> bool:
        """Whether all weights are trained."""
        return not self.case.get("lora")

    @property
    def specified(self) -> bool:
        """Whether the source says everything that the prediction depends on."""
        return bool(self.case.get("spec", "full") == "full")

    def error(self, tool: str) -> float | None:
        """(said - measured) / measured."""
        measured, said = self.measured_gib, self.said.get(tool)
        return None if measured is None or said is None else said / measured - 1

    def verdict(self, tool: str) -> bool | None:
        """Whether the tool is right about whether it fits."""
        true, said = self.case.get("fits"), self.fits.get(tool)
        if true is None or said is None or self.case.get("host_only"):
            return None
        return said is bool(true)


GROUPS: dict[str, Callable[[Row], bool]] = {
    "full fine-tuning, fully specified": lambda row: row.full and row.specified,
    "full fine-tuning, all": lambda row: row.full,
    "LoRA, fully specified": lambda row: not row.full and row.specified,
    "LoRA, all": lambda row: not row.full,
}


@dataclass(frozen=True, slots=True)
class Score:
    """|error| over some rows. n: rows that the tool answers."""

    n: int
    median: float | None
    p90: float | None


def predict(case: Mapping[str, Any], peers: Peers | None = None) -> Row:
    """The row of a case; without peers, dsrun's prediction alone."""
    try:
        given = read(case)
    except UnreadableError as reason:
        return Row(case, {}, {}, "", (f"no prediction: {reason}",))
    notes = given.notes
    before = bool(case.get("opt_before_states"))
    memory = gpu_memory(given.setup, optimizer_states=not before)
    metric = case.get("metric") if case.get("metric") in METRICS else "allocated"
    if case.get("metric") not in (None, *METRICS):
        notes += (f"metric {case['metric']!r} is unknown: not scored",)
    said: dict[str, float | None] = {"dsrun": getattr(memory, str(metric)) / GIB}
    card = float(case.get("gpu_mem_gib") or 0)
    used = (
        demand(given.setup, memory, expandable=bool(case.get("expandable"))) / (usable(case) * GIB)
        if card
        else None
    )
    fits: dict[str, bool | None] = {"dsrun": None if used is None else used <= 1}
    for name in TOOLS[1:] if peers else ():
        answer = getattr(peers, name)(given.setup)
        said[name] = None if answer is None else answer / GIB
        fits[name] = None if answer is None or not card else answer <= card * GIB
    return Row(case, said, fits, memory.moment, notes, used)


@cache
def cards() -> dict[str, gpus.GpuModel]:
    """The kinds of GPU that dsrun ships."""
    return {name: gpus.load(name) for name in catalog.files(gpus.KIND)}


def usable(case: Mapping[str, Any]) -> float:
    """GiB of its card that torch sees, where the case says what is on the box: 80 GB are 79.25 GiB.

    The card is the one that the case's source names, else the smallest of that size.
    """
    said = float(case["gpu_mem_gib"])
    same = [card for card in cards().values() if card.memory_gb == said]
    text = f"{case.get('gpu_kind')} {case.get('source')}".lower()
    named = [card.memory_gib for card in same if card.name.split("-")[0] in text]
    return min(named or [card.memory_gib for card in same] or [said])


def score(rows: Iterable[Row], tool: str) -> Score:
    """The median and the 90th percentile of a tool's |error| over the rows that count."""
    errors = [abs(error) for row in rows if not row.held for error in (row.error(tool),) if error is not None]
    if not errors:
        return Score(0, None, None)
    p90 = statistics.quantiles(errors, n=10, method="inclusive")[8] if len(errors) > 1 else errors[0]
    return Score(len(errors), statistics.median(errors), p90)


def verdicts(rows: Iterable[Row], tool: str, fits: bool | None = None) -> tuple[int, int]:
    """How often a tool is right about what fits, and how often it was asked; `fits`: only the cases that did so."""
    given = [
        row.verdict(tool)
        for row in rows
        if not row.held and (fits is None or row.case.get("fits") is fits) and row.verdict(tool) is not None
    ]
    return sum(bool(right) for right in given), len(given)


def worst(rows: Sequence[Row], tool: str = "dsrun", count: int = 8) -> list[str]:
    """The rows that a tool is furthest off with, a line each."""
    scored = [(abs(error), row) for row in rows if not row.held and (error := row.error(tool)) is not None]
    scored.sort(key=lambda pair: -pair[0])
    return [
        f"{row.case['id']}: {row.measured_gib:.2f} GiB measured, {row.said[tool]:.2f} predicted "
        f"({row.error(tool):+.1%}, {row.moment})"
        for _, row in scored[:count]
    ]

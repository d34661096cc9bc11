"""Predictions beside measurements: a row for each case, and what comes of the rows."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dsrun.planner.analysis import accuracy
from dsrun.planner.gpu_memory import GIB, gpu_memory, untracked_gib
from dsrun.planner.host_memory import host_memory
from dsrun.planner.plan import FITS, OUT, TIGHT, TIGHT_FROM, chance, demand
from dsrun.planner.setup import Setup
from dsrun.planner.speed import Hardware, speed
from dsrun.planner.trace.request import UntraceableError
from published import tracing
from published.peers import Peers
from published.reading import read
from published.words import METRICS, UnknownWordError, UnreadableError, card

TOOLS = ("dsrun", "deepspeed", "accelerate", "fitcheck")
TRACE = "trace"
"""dsrun's trace, a tool beside its formulas: it answers where --traced was asked for, and the network can be traced."""


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
    pace: float | None = None
    """Predicted by measured seconds of a step."""
    host: float | None = None
    """(said - measured) / measured of a node's main memory."""
    said_smi_gib: Mapping[str, float] = field(default_factory=dict)
    """dsrun's figures for nvidia-smi, whatever was read: by formula, and by trace where there is one."""
    refused: UnreadableError | None = None
    """Why there is no prediction."""
    mixture: bool = False
    """Whether the model is a mixture of experts."""
    setup: Setup | None = None
    """The case as the planner takes it."""
    used_by_trace: float | None = None
    """The share of the card by trace."""
    untraced: str = ""
    """Why there is no trace, where one was asked for."""

    @property
    def smi_gib(self) -> float | None:
        """What nvidia-smi showed: beside another metric, or as the metric."""
        if self.case.get("host_only"):
            return None
        value = self.case.get("smi_gib")
        return float(value) if value else self.measured_gib if self.case.get("metric") == "smi" else None

    def smi_error(self, tool: str = "dsrun") -> float | None:
        """(said - measured) / measured of nvidia-smi's figure."""
        measured, said = self.smi_gib, self.said_smi_gib.get(tool)
        return None if measured is None or said is None else said / measured - 1

    def error_of(self, metric: str, tool: str) -> float | None:
        """The same of one of torch's counters; None where another one was read."""
        return self.error(tool) if self.case.get("metric") == metric else None

    @property
    def measured_gib(self) -> float | None:
        """Measured memory, where it can be compared: a known metric, of a GPU."""
        if self.case.get("host_only") or self.case.get("metric") not in METRICS:
            return None
        value = self.case.get("measured_gpu_gib")
        return float(value) if value else None

    @property
    def held(self) -> bool:
        """Whether the measurement itself is doubtful: shown, not scored."""
        return bool(self.case.get("hold") or self.case.get("outside"))

    @property
    def sharded(self) -> bool:
        """Whether ranks share anything of the model's states."""
        return int(float(self.case.get("gpus") or 1)) > 1 or "zero" in str(self.case.get("strategy")).lower()

    @property
    def unseen(self) -> bool:
        """Whether no constant was chosen with the row at hand: it has the day on which it was written down."""
        return self.case.get("added") is not None

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
    "LoRA on 16-bit weights": lambda row: not row.full and not row.case.get("quant"),
    "QLoRA": lambda row: not row.full and bool(row.case.get("quant")),
}


def _allocated(row: Row, tool: str) -> float | None:
    return row.error_of("allocated", tool)


def _reserved(row: Row, tool: str) -> float | None:
    return row.error_of("reserved", tool)


CLASSES: dict[str, tuple[Callable[[Row], bool], Callable[[Row, str], float | None]]] = {
    "full, one GPU, allocated": (lambda row: row.full and not row.sharded, _allocated),
    "full, ZeRO and FSDP, allocated": (lambda row: row.full and row.sharded, _allocated),
    "LoRA, allocated": (GROUPS["LoRA on 16-bit weights"], _allocated),
    "QLoRA, allocated": (GROUPS["QLoRA"], _allocated),
    "full, reserved": (lambda row: row.full, _reserved),
    "LoRA, reserved": (GROUPS["LoRA on 16-bit weights"], _reserved),
    "QLoRA, reserved": (GROUPS["QLoRA"], _reserved),
    "full, nvidia-smi": (lambda row: row.full, Row.smi_error),
    "LoRA, nvidia-smi": (GROUPS["LoRA on 16-bit weights"], Row.smi_error),
    "QLoRA, nvidia-smi": (GROUPS["QLoRA"], Row.smi_error),
    "nvidia-smi, all": (lambda _: True, Row.smi_error),
}
"""Class -> the rows that belong to it, and their relative error. What torch had allocated and what nvidia-smi showed
are kept apart: holes and the CUDA context are in the one alone."""
PACED: dict[str, Callable[[Row], bool]] = {
    "dense": lambda row: not row.mixture,
    "mixtures of experts": lambda row: row.mixture,
}
"""Class -> the rows whose seconds belong to it."""


@dataclass(frozen=True, slots=True)
class Score:
    """|error| over some rows. n: rows that the tool answers."""

    n: int
    median: float | None
    p90: float | None


def predict(case: Mapping[str, Any], peers: Peers | None = None, *, trace: bool = False) -> Row:
    """The row of a case; without peers, dsrun's prediction alone. trace: by dsrun's trace, too."""
    try:
        given = read(case)
    except UnreadableError as reason:
        return Row(case, {}, {}, "", (f"no prediction: {reason}",), refused=reason)
    notes = given.notes
    before = bool(case.get("opt_before_states"))
    memory = gpu_memory(given.setup, optimizer_states=not before)
    metric = case.get("metric") or "allocated"
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
    paced, host = pace(case, given.setup), host_error(case, given.setup)
    smi, used_by_trace, untraced = {"dsrun": memory.smi / GIB}, None, ""
    if trace:
        room = usable(case) * GIB - untracked_gib(given.setup.gpus) * GIB if card else math.inf
        try:
            by_trace = tracing.traced(case, given.setup, room)
        except UntraceableError as reason:
            untraced = str(reason)
        else:
            said[TRACE], smi[TRACE] = getattr(by_trace, str(metric)) / GIB, by_trace.smi / GIB
            used_by_trace = demand(given.setup, by_trace) / (usable(case) * GIB) if card else None
            fits[TRACE] = None if used_by_trace is None else used_by_trace <= 1
    return Row(
        case,
        said,
        fits,
        memory.moment,
        notes,
        used,
        paced,
        host,
        smi,
        mixture=given.setup.shape.experts is not None,
        setup=given.setup,
        used_by_trace=used_by_trace,
        untraced=untraced,
    )


def usable(case: Mapping[str, Any]) -> float:
    """GiB of its card that torch sees, where the case says what is on the box: 80 GB are 79.25 GiB."""
    said, found = float(case["gpu_mem_gib"]), card(case)
    return found.memory_gib if found and found.memory_gb == said else said


def seconds(case: Mapping[str, Any], setup: Setup) -> float | None:
    """Measured time of a step: seconds, from whatever the source gives."""
    if case.get("s_it"):
        return float(case["s_it"])
    if case.get("samples_s"):
        return setup.micro_batch * setup.grad_accum * setup.gpus / float(case["samples_s"])
    return setup.tokens * setup.grad_accum / float(case["tok_s_gpu"]) if case.get("tok_s_gpu") else None


def pace(case: Mapping[str, Any], setup: Setup) -> float | None:
    """Predicted by measured seconds; None where one is not known."""
    measured, found = seconds(case, setup), card(case)
    if measured is None or found is None:
        return None
    return speed(setup, Hardware.from_gpu(found, setup.ranks_per_node)).seconds_per_step / measured


HOST_READ = ("used", "delta_used", "used_before_grads")
"""host_kind: what a process or a node held; less what it held before."""


def host_error(case: Mapping[str, Any], setup: Setup) -> float | None:
    """(said - measured) / measured of a node's main memory, where what was read is what is predicted."""
    kind, measured = case.get("host_kind"), case.get("host_ram_gib")
    if kind not in HOST_READ or not measured:
        return None
    found = host_memory(setup)
    said = found.peaks["training"]
    if kind == "delta_used":
        said -= found.terms["processes"]  # they were there before
        # Less than the optimizer's states, which have to be there: what it was compared with held more than they say.
        if float(measured) * GIB < found.terms.get("master", 0.0) + found.terms.get("moments", 0.0):
            return None
    return said / GIB / float(measured) - 1


def score(rows: Iterable[Row], tool: str) -> Score:
    """The median and the 90th percentile of a tool's |error| over the rows that count."""
    errors = (row.error(tool) for row in rows if not row.held)
    return _score([abs(error) for error in errors if error is not None])


def spread(rows: Iterable[Row], tool: str = "dsrun") -> float:
    """The standard deviation of ln(said / measured) if it is normal: the median of its size by 0.6745."""
    errors = [row.error(tool) for row in rows if not row.held]
    return statistics.median(abs(math.log1p(error)) for error in errors if error is not None) / 0.6745


def _score(errors: list[float]) -> Score:
    if not errors:
        return Score(0, None, None)
    p90 = statistics.quantiles(errors, n=10, method="inclusive")[8] if len(errors) > 1 else errors[0]
    return Score(len(errors), statistics.median(errors), p90)


def by_class(rows: Sequence[Row], tool: str = "dsrun") -> dict[str, tuple[Score, float | None]]:
    """Class -> the score of its rows, and the median of their errors with their signs."""
    found = {}
    for name, (belongs, error) in CLASSES.items():
        errors = [
            each for row in rows if not row.held and belongs(row) and (each := error(row, tool)) is not None
        ]
        found[name] = _score([abs(each) for each in errors]), statistics.median(errors) if errors else None
    return found


def by_plans_class(rows: Iterable[Row]) -> dict[str, dict[str, Score]]:
    """Part -> the class that a plan names (planner/analysis/accuracy.py) -> its score, by whatever counter."""
    memory: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for row in rows:
        if row.held or row.setup is None:
            continue
        if (error := row.error("dsrun")) is not None:
            memory.setdefault(accuracy.memory_class(row.setup), []).append(abs(error))
        if row.pace:
            seconds.setdefault(accuracy.seconds_class(row.setup), []).append(max(row.pace, 1 / row.pace))
    parts = {"memory": memory, "seconds": seconds}
    return {
        part: {name: _score(errors) for name, errors in sorted(found.items())}
        for part, found in parts.items()
    }


def brier(rows: Iterable[Row], tool: str = "dsrun") -> float | None:
    """Mean squared difference of the chance that was told and what happened (Brier score); None without a verdict."""
    used = ((row.used_by_trace if tool == TRACE else row.used, row) for row in judged(rows))
    squares = [(chance(share) - bool(row.case["fits"])) ** 2 for share, row in used if share is not None]
    return statistics.fmean(squares) if squares else None


def refused(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The rows without a prediction, each with the field and the word that is at fault where it is one."""
    found = []
    for row in rows:
        if (reason := row.refused) is None:
            continue
        word = {"field": reason.field, "word": reason.word} if isinstance(reason, UnknownWordError) else {}
        found.append({"id": str(row.case.get("id")), **word, "reason": str(reason)})
    return found


def verdicts(rows: Iterable[Row], tool: str, fits: bool | None = None) -> tuple[int, int]:
    """Times that a tool is right about what fits, and that it was asked; `fits`: only the cases that did so."""
    given = [
        row.verdict(tool)
        for row in rows
        if not row.held and (fits is None or row.case.get("fits") is fits) and row.verdict(tool) is not None
    ]
    return sum(bool(right) for right in given), len(given)


def judged(rows: Iterable[Row]) -> list[Row]:
    """The rows of which it is known whether they ran, and that dsrun judges."""
    return [row for row in rows if row.verdict("dsrun") is not None and not row.held and row.used is not None]


def word(row: Row) -> str:
    """dsrun's verdict of a row that is judged."""
    used = row.used or 0.0
    return OUT if used > 1 else TIGHT if used > TIGHT_FROM else FITS


BINS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 1.01)
"""Bins of chances."""


def calibration(rows: Iterable[Row]) -> list[tuple[float, float, int, int]]:
    """(From, below, rows with such a chance, those of them that ran)."""
    found = [(chance(row.used or 0.0), bool(row.case["fits"])) for row in judged(rows)]
    return [
        (low, high, len(ran := [fits for value, fits in found if low <= value < high]), sum(ran))
        for low, high in pairwise(BINS)
    ]


def paces(rows: Iterable[Row]) -> Score:
    """Factors between predicted and measured seconds, up or down."""
    found = [max(row.pace, 1 / row.pace) for row in rows if row.pace and not row.held]
    return _score(found)


def hosts(rows: Iterable[Row]) -> Score:
    return _score([abs(row.host) for row in rows if row.host is not None and not row.held])


def source_of(row: Row) -> str:
    """The project that published a row."""
    return re.split(r"[ #@]", str(row.case.get("source")))[0]


def without_one_source(rows: Sequence[Row], tool: str = "dsrun") -> Score:
    """The median and the 90th percentile at their worst, if the rows of any one source are left out."""
    sources = {source_of(row) for row in rows}
    scores = [score([row for row in rows if source_of(row) != source], tool) for source in sorted(sources)]
    known = [one for one in scores if one.median is not None]
    worst = max(known, key=lambda one: one.median or 0.0, default=Score(0, None, None))
    return Score(worst.n, worst.median, max((one.p90 or 0.0 for one in known), default=None))


def worst(rows: Sequence[Row], tool: str = "dsrun", count: int = 8) -> list[str]:
    """The rows that a tool is furthest off with, a line each."""
    scored = [(abs(error), row) for row in rows if not row.held and (error := row.error(tool)) is not None]
    scored.sort(key=lambda pair: -pair[0])
    return [
        f"{row.case['id']}: {row.measured_gib:.2f} GiB measured, {row.said[tool]:.2f} predicted "
        f"({row.error(tool):+.1%}, {row.moment})"
        for _, row in scored[:count]
    ]

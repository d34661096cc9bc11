"""What has to be traced for a setup, and the memory that a recording then gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from dsrun.planner.gpu_memory import GpuMemory, gpu_memory, untracked_gib
from dsrun.planner.setup import LOGITS, Setup
from dsrun.planner.trace.actions import Action
from dsrun.planner.trace.allocator import AllocatorOptions
from dsrun.planner.trace.recording import Event, Recording
from dsrun.planner.trace.replay import Replay, least_capacity, replay
from dsrun.planner.trace.schedule import actions
from dsrun.words import GIB

ROWS = (2, 3)
"""Rows of the recorded micro batches: a line through two gives all others but one row, which has views where more rows
have copies and is recorded for itself."""
DTYPES = {"fp32": "float32", "amp": "float32", "fp16": "float16", "bf16": "bfloat16", "pure": "bfloat16"}
"""A setup's precision -> torch's name for that of the weights."""
SHORTEST = 64
"""Tokens below which rows of other lengths are taken for the longest."""
SAFE = 0.85
"""Share of the card below which what torch would reserve with more room fits in any case."""
ALIKE = 0.01
"""Most that the traced model's count of weights may differ from the shape's."""


class UntraceableError(Exception):
    """A setup that a trace doesn't describe; the text says why."""


def request_of(
    setup: Setup, architecture: Mapping[str, Any], lora: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The request for a setup's recording, as JSON. Raises UntraceableError.

    architecture: the model's config. lora: rank, target and dropout, as PeftOptions names them (without "lora_"). It
    doesn't depend on the micro batch, nor on the ranks, so that many setups share one.
    """
    if why := _untraceable(setup, architecture):
        raise UntraceableError(why)
    rows_recorded = (1,) if setup.micro_batch == 1 else ROWS
    lengths = [setup.seq_len]
    if setup.variable_lengths and setup.seq_len >= SHORTEST:
        lengths += [setup.seq_len // 2, setup.seq_len // 4][: 4 - len(rows_recorded)]
    points = [(rows, length) for length in lengths for rows in rows_recorded]
    sharded = setup.engine == "fsdp"
    # FSDP casts what it gathers; with fp32 norms around 4-bit matrices trainers compute under autocast.
    autocast = (setup.precision == "amp" and not sharded) or setup.kbit_casts or setup.fp32_stream
    precision = "bf16" if setup.precision == "amp" and sharded else setup.precision
    return {
        "config": dict(architecture),
        "method": setup.method,
        "lora": dict(lora) if setup.method != "full" and lora else None,
        "fp32_adapters": setup.adapter_bytes == 4,
        "fp32_frozen": setup.kbit_casts,
        "fp32_embedding": setup.fp32_stream,
        "weights": DTYPES[precision],
        "autocast": "bfloat16" if autocast else "",
        "checkpointing": setup.checkpointing,
        "reentrant": bool(setup.checkpointing) and setup.recomputes_all,
        "flash": setup.flash,
        "masked": setup.variable_lengths and setup.flash,
        "loss": not (setup.fused_loss or setup.loss_tokens) and setup.logits_bytes == LOGITS["hf"],
        "reduce": True,
        "points": points,
    }


def _untraceable(setup: Setup, architecture: Mapping[str, Any]) -> str:
    """The reason why there is no trace of a setup; empty where there is one."""
    if not architecture:
        return "the model has no config"
    if setup.tile:
        return "tiles of the MLPs are planned by formula"
    if setup.activations_device != "gpu":
        return "activations on the host are planned by formula"
    if setup.method != "full" and setup.targets == ():
        return "a prefix is planned by formula"
    if setup.quantized not in (None, "nf4", "nf4-single") or setup.quantized_head or setup.keeps_inputs:
        return "these quantized matrices are planned by formula"
    if (setup.scores_bytes is not None and setup.keeps_scores) or setup.looped_experts:
        return "another release's or trainer's code is planned by formula"
    if setup.fp8 or setup.quantized_gather or setup.quantized_reduce:
        return "8-bit products and exchanges are planned by formula"
    if setup.copies:
        return "modules trained as copies are planned by formula"
    return ""


@dataclass(frozen=True)
class TracedModel:
    """A recording, and the step of the whole model that follows from it."""

    recording: Recording
    events: Sequence[Event]

    @classmethod
    def of(cls, request: Mapping[str, Any], answer: Mapping[str, Any]) -> TracedModel:
        """The model of a request and its answer. Raises UntraceableError for one without a recording."""
        if "recording" not in answer:
            raise UntraceableError(str(answer.get("error")))
        recording = Recording.of(answer["recording"], request["points"])
        return cls(recording, recording.unrolled())

    def check(self, setup: Setup) -> None:
        """Raises UntraceableError where the traced model isn't the one that is planned."""
        full = setup.method == "full"
        traced = sum(weight.elements for weight in self.recording.weights if full or not weight.trained)
        planned = setup.shape.parameters
        if abs(traced / planned - 1) > ALIKE:
            raise UntraceableError(f"its config has {traced:.4g} weights, and {planned:.4g} are planned")


def traced_memory(
    setup: Setup,
    model: TracedModel,
    *,
    room: float = math.inf,
    lengths: Sequence[tuple[int, int]] = (),
    options: AllocatorOptions | None = None,
    optimizer_states: bool = True,
) -> GpuMemory:
    """The GPU memory of a setup by its trace, replayed.

    room: bytes for what torch allocates. lengths: (rows, tokens) of the micro batches to be replayed. optimizer_states:
    False up to the first step alone. The terms stay those of the formulas.
    """
    formula = gpu_memory(setup, room=room, optimizer_states=optimizer_states)
    # Without room for the flat copy beside the weights it is made by way of the host.
    if not formula.peaks["flat"]:
        setup = setup.changed(flattens_on_gpu=False)

    def replayed(setup: Setup) -> list[Action]:
        steps = actions(setup, model.recording, model.events, lengths)
        return list(steps if optimizer_states else takewhile(lambda action: action.key != "step", steps))

    steps = replayed(setup)
    unlimited = replay(steps, options=options)
    needed = unlimited.reserved
    if needed > SAFE * room:
        steps = replayed(setup.changed(flattens_on_gpu=False))
        needed = least_capacity(steps, replay(steps, options=options), options)
    return replace(
        formula,
        peaks={name: float(size) for name, size in unlimited.peaks.items()},
        reserved=float(unlimited.reserved),
        smi=unlimited.reserved + untracked_gib(setup.gpus) * GIB,
        traced=TraceResult(unlimited, float(needed), formula.allocated),
    )


@dataclass(frozen=True, slots=True)
class TraceResult:
    """What a trace adds to a setup's memory. Bytes."""

    replay: Replay
    """On a card without an end."""
    capacity: float
    """The least that torch has to have."""
    formula: float
    """The largest peak by formula."""

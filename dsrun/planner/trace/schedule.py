"""The allocations and frees of a training, from its start over a few steps.

Forward and backward are the trace's; what the engine adds stands between its segments (dsrun.planner.trace.engines).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from dsrun.planner.activations import logits
from dsrun.planner.setup import Setup
from dsrun.planner.trace.actions import Action, allocate, free, passing
from dsrun.planner.trace.engines import Whole, engine_of
from dsrun.planner.trace.recording import BACKWARD, BEFORE, FORWARD, REST, TURN, Event, Recording, Segment

CUBLAS = 8_519_680
"""Bytes of cuBLAS's workspace, which torch's allocator holds (CUDABlas.cpp: ":4096:2:16:8")."""
STEPS = 3
"""Steps that are replayed with examples of one length: the states are made in the first, the others settle."""
MICRO_STEPS = 2
"""Micro steps that are replayed of a step: every further one is like the second."""
DRAWN = 12
"""Micro batches of other lengths that are replayed where rows are padded."""
OWNERS = {BEFORE: "activations", FORWARD: "activations", TURN: "logits"}
"""The kind of a segment -> whose memory it makes; of the others: the layer's that is at work."""


def actions(
    setup: Setup, recording: Recording, unrolled: Sequence[Event], lengths: Sequence[tuple[int, int]] = ()
) -> Iterator[Action]:
    """A training's actions.

    lengths: (rows, tokens) of each micro batch that is replayed; empty: STEPS steps of the setup's own.
    """
    engine = engine_of(setup, recording)
    micro_steps = min(setup.grad_accum, MICRO_STEPS)
    batches = list(lengths) or [(setup.micro_batch, setup.seq_len)] * (STEPS * micro_steps)
    yield Action("phase", "start")
    yield from allocate("cublas", CUBLAS, "workspace")
    yield from engine.start()
    for number, (rows, tokens) in enumerate(batches):
        if number % micro_steps == 0:
            yield from engine.begin_step()
        yield from _micro_step(setup.changed(micro_batch=rows, seq_len=tokens), recording, unrolled, engine)
        if number % micro_steps == micro_steps - 1:
            yield Action("phase", "step")
            yield from engine.step(first=number < micro_steps)


def drawn_lengths(percentiles: Sequence[int], rows: int, longest: int) -> list[tuple[int, int]]:
    """(Rows, tokens) of DRAWN micro batches of rows drawn from a file, each padded to its longest, and one as long as
    may be among them: what it needs has to fit between what the others left.

    percentiles: SequenceLengths.percentiles. The same file gives the same batches.
    """
    draw = random.Random(0).choice  # noqa: S311 - no secret
    batches = [(rows, min(longest, max(draw(percentiles) for _ in range(rows)))) for _ in range(DRAWN)]
    return [*batches[: DRAWN // 2], (rows, longest), *batches[DRAWN // 2 :]]


def _micro_step(
    setup: Setup, recording: Recording, unrolled: Sequence[Event], engine: Whole
) -> Iterator[Action]:
    """One forward and backward pass."""
    sizes = recording.sizes_at(setup.micro_batch, setup.seq_len)
    yield Action("phase", "turn")
    engine.micro_step += 1
    serial, kept = engine.micro_step, set[int]()
    segment = Segment(BEFORE, -1)
    last = len(recording.kinds) - 1
    for event in unrolled:
        block = (serial, event.block)
        if event.kind == "allocate":
            yield Action("allocate", block, sizes[event.source], OWNERS.get(segment.kind, "layer"))
            kept.add(event.block)
        elif event.kind == "free":
            yield Action("free", block)
            kept.discard(event.block)
        elif event.kind == "gradient":
            kept.discard(event.block)
            yield from engine.ready(block, (event.segment.layer, event.weight), sizes[event.source])
        else:
            if event.segment.kind != BEFORE:
                yield from engine.leave(segment)
            segment = event.segment
            if segment == Segment(BACKWARD, last):
                yield Action("phase", "middle")
            elif segment.kind == REST:
                yield Action("phase", "end")
            yield from engine.enter(segment)
            if segment.kind == TURN and not recording.loss:
                yield from _loss(setup, engine)
    yield from engine.leave(segment)
    yield from engine.end()
    for number in sorted(kept):  # what a model keeps beyond a step it makes anew in the next
        yield from free((serial, number))


def _loss(setup: Setup, engine: Whole) -> Iterator[Action]:
    """A loss that the trace doesn't have: a fused one, or another library's (activations.logits)."""
    yield from passing("loss", logits(setup), "logits")
    if setup.method == "full" and not setup.shape.tied:
        block, size = ("head", engine.micro_step), float(setup.computed_bytes * setup.shape.embedding)
        yield from allocate(block, size, "gradients")
        yield from engine.ready(block, "head", size)

"""Published cases by the planner's trace: their networks, their recordings, and the memory that follows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dsrun.jobs.assembly.planning import recordings
from dsrun.jobs.assembly.planning.traced import Tracer
from dsrun.planner import lora, shapes
from dsrun.planner.gpu_memory import GpuMemory
from dsrun.planner.setup import Setup
from dsrun.planner.shape import config_of
from dsrun.planner.trace.allocator import AllocatorOptions
from dsrun.planner.trace.recording import UnrollError
from dsrun.planner.trace.request import UntraceableError, request_of, traced_memory
from published import reading

TIME_LIMIT_S = 3600.0


def tracer_of(case: Mapping[str, Any], setup: Setup) -> Tracer:
    """The tracer of a case's network. Raises UntraceableError for one that transformers doesn't have."""
    fields = shapes.find(str(case.get("model"))) or {}
    config = fields.get("config") or config_of(setup.shape, fields.get("like", "llama"))
    if config is None:
        raise UntraceableError("its blocks are no network's of transformers")
    roles = [part for role in setup.targets or () for part in role.split("+")]
    names = "all" if setup.targets is None else ",".join(f"{role}_proj" for role in roles)
    rank = setup.adapters // max(1, lora.lora_weights(setup.shape, 1, setup.targets)) or 8
    return Tracer(config, {"rank": rank, "target": names, "dropout": setup.lora_dropout})


def record_all(setups: Iterable[tuple[Tracer, Setup]]) -> None:
    """Make the recordings that are not in the cache, all in one process."""
    requests = {}
    for tracer, setup in setups:
        with suppress(UntraceableError):
            request = request_of(setup, tracer.architecture, tracer.lora)
            requests[recordings.key_of(request)] = request
    missing = {key: request for key, request in requests.items() if not recordings.cached(key)}
    if missing and (why := recordings.record(missing, TIME_LIMIT_S)):
        print(why, file=sys.stderr)


def record_cases(cases: Sequence[Mapping[str, Any]]) -> None:
    """The same for published cases; those without a set-up or a network are passed over."""

    def readable() -> Iterator[tuple[Tracer, Setup]]:
        for case in cases:
            with suppress(UntraceableError, reading.UnreadableError):
                setup = reading.read(case).setup
                yield tracer_of(case, setup), setup

    record_all(readable())


def traced(case: Mapping[str, Any], setup: Setup, room: float) -> GpuMemory:
    """A case's memory by trace, as a plan has it. room: bytes that torch may have. Raises UntraceableError."""
    tracer = tracer_of(case, setup)
    model = tracer.model(setup)
    if model is None:
        raise UntraceableError(tracer.reasons[-1])
    try:
        return traced_memory(
            setup, model, room=room, optimizer_states=not case.get("opt_before_states"),
            options=AllocatorOptions(expandable=bool(case.get("expandable"))),
        )  # fmt: skip
    except (UnrollError, ValueError) as error:
        raise UntraceableError(str(error)) from error

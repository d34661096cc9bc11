"""torch.compile of a model's decoder layers, each by itself: `--compile`.

A layer's forward is compiled inside of all hooks: those of FSDP, which gathers weights around it, and of activation
checkpointing, which calls it twice. So a layer keeps its class and its weights keep their names, in checkpoints and
exports.

All layers of a kind share a graph, whose inputs are the weights. Lengths differ from step to step, so sizes are symbols
from the start (`dynamic`). torch still compiles again for cases that it tells apart (one row or several, a mask or
none), up to `torch._dynamo.config.recompile_limit`; the rest is computed without, and a note says so.

Attention that takes the borders of packed examples (flash-attn, varlen) stays outside: its lists of lengths would be
constants, and each step a new graph. Evaluation and answers have other shapes, and are not compiled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from dsrun.errors import TrainingError
from dsrun.training.models.kernels import REPEATED
from dsrun.training.models.layers import layers_of

BACKEND = "inductor"
INSIDE = ("sdpa", REPEATED, "eager")
"""Attention that is compiled with the layer."""
LOGGER, LIMIT = "torch._dynamo.convert_frame", "hit config."
"""The logger of torch's warning that it compiles a function no further, and a part of its text; no counter has it."""


def compile_layers(model: Any, *, backend: str = BACKEND) -> None:
    """Have every layer's forward compiled when it is first called. Raises TrainingError for a model that names none.

    With `fallback_random` dropout draws what it draws without.
    """
    layers = layers_of(model)
    if not layers:
        what = f"{type(model).__name__} doesn't say which of its modules are layers"
        raise TrainingError(what, where="--compile")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = model.config._attn_implementation
    if attention not in INSIDE:  # a layer's graph ends before it, and another begins behind it
        ALL_ATTENTION_FUNCTIONS[attention] = torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention])
    torch._inductor.config.fallback_random = True
    for layer in layers:
        _compile(layer, backend)


def _compile(layer: Any, backend: str) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    kind = type(layer)
    # Since transformers 5.1x the forward itself checkpoints, around the one that was written; before, __call__ did.
    by_forward = "__call__" not in vars(GradientCheckpointingLayer)
    checkpoints = by_forward and isinstance(layer, GradientCheckpointingLayer)
    written = (kind.forward.__wrapped__ if checkpoints else kind.forward).__get__(layer)
    compiled = torch.compile(written, dynamic=True, backend=backend)

    @functools.wraps(written)
    def forward(*inputs: Any, **more: Any) -> Any:
        if not layer.training:
            return written(*inputs, **more)
        if checkpoints and layer.gradient_checkpointing:
            return layer._gradient_checkpointing_func(partial(compiled, **more), *inputs)
        return compiled(*inputs, **more)

    layer.forward = forward


class Compilation:
    """torch's own counts of what it has compiled so far in this process (torch._dynamo.utils.counters)."""

    def __init__(self) -> None:
        self._graphs = 0
        self._limits = _Limits()
        logging.getLogger(LOGGER).addHandler(self._limits)

    def notes(self) -> Iterator[str]:
        """Notes on what a step has compiled. Raises TrainingError where nothing was compiled at all."""
        from torch._dynamo.utils import counters

        graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
        if not graphs:
            raise TrainingError("torch.compile has compiled no layer", where="--compile")
        if graphs != self._graphs:
            where = sorted({reason.strip().splitlines()[0] for reason in breaks})
            ends = f", which end at: {'; '.join(where)}" if where else ", whole layers"
            yield f"torch.compile: {graphs} graphs{' by now' * bool(self._graphs)}{ends}"
        self._graphs = graphs
        if self._limits.new:
            self._limits.new = False
            yield "torch.compile has come to its limit of graphs: some layers are computed as without it"


class _Limits(logging.Handler):
    """Remembers that torch has warned of its limit."""

    new = False

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self.new |= LIMIT in record.getMessage()

"""torch.compile of a model's decoder layers, each by itself: `--compile`.

What is compiled is a layer's forward, inside of all hooks: of FSDP, which gathers weights around it, and of activation
checkpointing, which calls it twice. So a layer keeps its class and its weights keep their names, in checkpoints and
exports.

All layers of a kind share a graph, as weights are inputs of it. Lengths differ from step to step: sizes are symbols
from the start (`dynamic`), and what is left to compile again is what torch tells apart (one row or several, a mask or
none). It stops at `torch._dynamo.config.recompile_limit` of those, and computes the rest as it stands: that is told.

Attention that takes the borders of packed examples (flash-attn, varlen) stays outside: its lists of lengths would be
constants, and each step a new graph. Evaluation and answers are computed as without: their shapes are others.
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
"""Who warns where torch compiles a function no further, and what of; no counter tells it."""


def compile_layers(model: Any, *, backend: str = BACKEND) -> None:
    """Have every layer's forward compiled when it is first called. Raises TrainingError for a model that names none.

    With `fallback_random` dropout draws what it draws without.
    """
    layers = layers_of(model)
    if not layers:
        raise TrainingError(
            f"{type(model).__name__} doesn't say which of its modules are layers", where="--compile"
        )
    _leave_attention_out(model.config._attn_implementation)
    torch._inductor.config.fallback_random = True
    for layer in layers:
        _compile(layer, backend)


def _compile(layer: Any, backend: str) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    kind = type(layer)
    # Since transformers 5.1x the forward itself checkpoints, around the one that was written; before, __call__ did.
    checkpoints = isinstance(layer, GradientCheckpointingLayer) and "__call__" not in vars(
        GradientCheckpointingLayer
    )
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


def _leave_attention_out(name: str) -> None:
    """Have a layer's graph end before this attention, and another begin behind it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name not in INSIDE:
        ALL_ATTENTION_FUNCTIONS[name] = torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name])


class Compilation:
    """What torch has compiled so far in this process, as it tells it itself (torch._dynamo.utils.counters)."""

    def __init__(self) -> None:
        self._graphs = 0
        self._limits = _Limits()
        logging.getLogger(LOGGER).addHandler(self._limits)

    def told(self) -> Iterator[str]:
        """After a step: what is new, in words. Raises TrainingError where nothing was compiled at all."""
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

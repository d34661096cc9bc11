"""Whether activations can be computed again as asked: --activation-checkpointing and --recompute-every."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsrun.errors import Problem
from dsrun.models import transformers_code
from dsrun.options.declare import flag_of
from dsrun.options.layers import Resolved, Source
from dsrun.options.table import NO_RECOMPUTING, SELECTIVE, ComputeOptions


def problems(
    resolved: Resolved[Any], accelerator: str | None, architecture: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """Problems of recomputing on this device and model. accelerator: "cuda" or "cpu"; None where nobody knows;
    architecture: the model's."""
    options: ComputeOptions = resolved.options
    way = options.activation_checkpointing
    flag = flag_of(ComputeOptions, "activation_checkpointing")
    if options.offloads_activations and accelerator == "cpu":
        fault = "activations are in host memory already: this job trains on CPUs, which pin no memory"
        yield Problem(fault, f"{flag} {way}", f"Take {flag} full.")
    if resolved.source("recompute_every") >= Source.LAB_PRESET and way != SELECTIVE:
        every = flag_of(ComputeOptions, "recompute_every")
        fault = f"is for {flag} {SELECTIVE}, and it is {way}"
        yield Problem(fault, every, f"Take {flag} {SELECTIVE}, or leave it out.")
    kind = (architecture or {}).get("model_type")
    if (
        way != NO_RECOMPUTING
        and kind
        and transformers_code.supports(kind, "supports_gradient_checkpointing") is False
    ):
        fault = f"transformers' class for a model of type {kind} has no activation checkpointing"
        yield Problem(fault, f"{flag} {way}", f"Take {flag} {NO_RECOMPUTING}.")

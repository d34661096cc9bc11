"""Every pair of finetune's techniques, asked of the code that plans a run: what goes together, and what is refused."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.cluster.devices import Gpu, Machine
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.assembly.finetune import FinetuneRequest, configured
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved

MODEL, RANKS = "llama-tiny", 2
TRIED = Path(__file__).resolve().parents[1] / "bench/results/pairs.json"
HOST = Machine(
    "cuda", tuple(Gpu(number, "NVIDIA A100", f"GPU-{number}", 80 << 30, (8, 0)) for number in range(RANKS)), 32,
    f"{RANKS} x NVIDIA A100",
)  # fmt: skip
AXES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tensor parallelism": {"--tp 2": {"tp": 2}},
    "sequence parallelism": {"--sp 2": {"sp": 2}},
    "pipeline parallelism": {"--pp 2": {"pp": 2}},
    "preset": {
        f"--preset {name}": {"preset": name}
        for name in ("ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "fsdp")
    },
    "method": {f"--method {name}": {"method": name} for name in ("lora", "ptuning")},
    "optimizer": {f"--optimizer {name}": {"optimizer": name} for name in ("sgd", "muon")},
    "loss": {"--loss micro-batch-mean": {"loss": "micro-batch-mean"}, "--official": {"official": True}},
    "batch": {"--tokens-per-batch 4096": {"tokens_per_batch": 4096}},
    "attention": {f"--attention {name}": {"attention": name} for name in ("sdpa", "varlen")},
    "packing": {"--no-packing": {"packing": False}},
    "precision": {"--precision fp16": {"precision": "fp16"}},
    "activations": {"--activation-checkpointing full": {"activation_checkpointing": "full"}},
    "tiles": {"--tile-tokens 4096": {"tile_tokens": 4096}},
    "compiled": {"--compile": {"compile": True}},
}  # fmt: skip
"""What can be combined: a setting of one axis with those of the others. What needs a package is not here."""


@dataclass(frozen=True)
class Pair:
    """Two settings, and what is said against them together; nothing if they go together."""

    one: str
    other: str
    problems: tuple[Problem, ...]


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """All of them, each once."""
    return tuple(_pairs())


def tried() -> list[dict[str, str]]:
    """What bench/pairs.py has trained, and what came of it."""
    return list(json.loads(TRIED.read_text(encoding="utf-8")))


def _pairs() -> Iterator[Pair]:
    for (_, first), (_, second) in itertools.combinations(AXES.items(), 2):
        for (one, here), (other, there) in itertools.product(first.items(), second.items()):
            yield Pair(one, other, tuple(problems({**here, **there})))


def problems(options: Mapping[str, Any]) -> list[Problem]:
    """What a fine-tune with these options is refused for."""
    request = FinetuneRequest(MODEL, Resolved.by_user(FinetuneOptions, dict(options)))
    try:
        configured(request, HOST, {}, gpus=RANKS, nodes=1)
    except DsrunError as error:
        return error.problems
    return []

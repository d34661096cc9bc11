"""The states of mixed-precision training alone, as the ZeRO paper counts them (arXiv 1910.02054, section 3.1)."""

from __future__ import annotations

from dsrun.planner.gpu_memory import persistent, temporary
from dsrun.planner.setup import Setup
from dsrun.planner.shape import Shape

HELD = ("weights", "master", "moments", "gradient_shard")


def zero_states(parameters: float, ranks: int, stage: int) -> float:
    """Bytes on one rank of weights, gradients and Adam's states (the paper's K = 12), without buffers and activations.

    They are gpu_memory's own terms, for a network that is nothing but its parameters.
    """
    shape = Shape(
        round(parameters), layers=1, hidden=0, intermediate=0, heads=1, kv_heads=1, head_dim=0, vocab=0
    )
    setup = Setup(shape, gpus=ranks, stage=stage, precision="fp16")
    held = persistent(setup)
    return sum(held.get(name, 0.0) for name in HELD) + temporary(setup)["gradients"]

"""What the estimators that come with DeepSpeed and accelerate say of a case: their own functions, called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from dsrun.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers' functions. deepspeed, accelerate: a set-up -> bytes on a GPU, None where they have no answer."""

    deepspeed: Callable[[Setup], float | None]
    accelerate: Callable[[Setup], float | None]


def load() -> Peers:
    """Import both. Raises ImportError where one isn't installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no GPU is asked for anything
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        from accelerate.commands.estimate import estimate_training_usage
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    def deepspeed(setup: Setup) -> float | None:
        if setup.method != "full":
            return None
        shape, nodes = setup.shape, setup.nodes
        where: Mapping[str, Any] = {"num_gpus_per_node": max(1, setup.gpus // nodes), "num_nodes": nodes}
        offload = setup.optimizer_device != "gpu"
        if setup.stage == 3 or setup.engine == "fsdp":
            # Its largest "layer" is the module with the most weights of its own (model_to_params in stage3.py).
            largest = max(shape.embedding, shape.hidden * shape.intermediate)
            params = setup.parameter_device != "gpu"
            return float(
                estimate_zero3_model_states_mem_needs(
                    shape.parameters, largest, cpu_offload=offload, cpu_offload_params=params, **where
                )[1]
            )
        if setup.stage < 2:
            # Nothing is divided: what it says of ZeRO-2 on one GPU.
            where = {"num_gpus_per_node": 1, "num_nodes": 1}
        return float(estimate_zero2_model_states_mem_needs(shape.parameters, cpu_offload=offload, **where)[1])

    def accelerate(setup: Setup) -> float | None:
        if setup.method != "full":
            return None
        size = 4 * setup.shape.parameters
        if setup.precision == "fp32":
            return float(estimate_training_usage(size, "float32")["step"])
        # The largest of its columns is what its own table shows as "Training using Adam (Peak vRAM)".
        half = "float16" if setup.precision == "fp16" else "bfloat16"
        return float(max(estimate_training_usage(size, half).values()))

    return Peers(deepspeed, accelerate)

"""Estimates of DeepSpeed, accelerate and fitcheck-llm for a case: their own functions, called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from dsrun.planner.lora import lora_weights
from dsrun.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers' functions: a set-up -> bytes on a GPU, None where they have no answer."""

    deepspeed: Callable[[Setup], float | None]
    accelerate: Callable[[Setup], float | None]
    fitcheck: Callable[[Setup], float | None]


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

    return Peers(deepspeed, accelerate, _fitcheck)


TARGETS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
           "down": "down_proj"}  # fmt: skip


def _fitcheck(setup: Setup) -> float | None:
    """fitcheck-llm's estimate of a run on one GPU, which is all that it knows; None without the package."""
    try:
        import fitcheck
    except ModuleNotFoundError:
        return None
    if setup.gpus > 1 or setup.offloads or setup.optimizer not in ("adamw", "sgd"):
        return None
    shape = setup.shape
    model = fitcheck.ModelConfig(
        "model", shape.parameters, shape.hidden, shape.layers, shape.heads, shape.kv_heads, shape.intermediate,
        shape.vocab, shape.head_dim, shape.tied,
    )  # fmt: skip
    of = "+".join(setup.targets or tuple(TARGETS)).split("+")
    training = fitcheck.TrainingConfig(
        precision={"fp32": "fp32", "fp16": "fp16"}.get(setup.precision, "bf16"),
        quantization={None: "none", "int8": "int8"}.get(setup.quantized, "nf4"),
        optimizer=setup.optimizer,
        batch_size=setup.micro_batch,
        seq_len=setup.seq_len,
        lora_rank=None
        if setup.method == "full"
        else max(1, setup.adapters // lora_weights(shape, 1, setup.targets)),
        lora_targets=[name for role, name in TARGETS.items() if role in of],
        grad_checkpoint=setup.checkpointing == 1,
        flash_attn=setup.flash,
        grad_accum_steps=setup.grad_accum,
    )
    try:
        found = fitcheck.estimate(model, training, fitcheck.get_gpu("a100-80"))
    except ValueError:
        return None
    return float(found.total_mib) * 2**20

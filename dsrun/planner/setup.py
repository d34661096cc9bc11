"""A set-up to plan for: a shape, how it is divided, in which numbers, and what it is fed. All plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.planner.shape import Shape

ENGINES = ("deepspeed", "fsdp", "torch")
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "pure")
DEVICES = ("gpu", "cpu", "nvme")
METHODS = ("full", "lora", "qlora")
OPTIMIZERS: dict[str, tuple[float, float]] = {
    "adamw": (8, 4),
    "adamw-8bit": (2, 1),
    "sgd": (0, 0),
    "lion": (4, 2),
}
"""Optimizer -> bytes of state a parameter, with fp32 states and with 16-bit ones.

AdamW keeps two moments, Lion one; bitsandbytes' 8-bit AdamW keeps both in a byte each, whatever the weights are.
"""
LOGITS: dict[str, float] = {"hf": 13, "hf-old": 16, "fused": 1}
"""Bytes a logit costs at the loss: transformers since 4.45, before it, and a fused linear cross-entropy (Liger).

transformers makes the 16-bit logits, an fp32 copy, its log-softmax and the gradients of both; the figures are the
middle of what published runs with and without the fused kernel imply (15.5-16.5, 12.5-13.5, about 1).
"""
QUANTIZED: dict[str, float] = {"nf4": 0.527, "gptq4": 0.53, "int8": 1.0}
"""Bytes a weight of a quantized matrix takes: 4 bits and a scale for each block (QLoRA's double quantization: 0.127
bits a weight), GPTQ's 4 bits with a 16-bit scale and a 4-bit zero for 128."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is planned for.

    gpus: ranks in all, on `nodes` hosts. engine: deepspeed, fsdp, or torch (one process that holds everything).
    stage: ZeRO's, for deepspeed. optimizer_device, parameter_device: where offload puts them.
    precision: fp16 and bf16 mean 16-bit weights with an fp32 master copy; amp, fp32 weights computed with in 16 bits;
    pure, 16-bit weights and optimizer states without a master copy; fp32, everything.
    adapters: weights that LoRA adds. copies: weights of whole modules that are trained beside them, as copies
    (PEFT's modules_to_save). quantized: a key of QUANTIZED.
    seq_len: tokens in a row, prompt and answer. micro_batch: rows a rank takes at a time.
    variable_lengths: rows of a batch are padded to its longest, so that sizes change from step to step.
    flash: attention that keeps no matrix of scores (flash attention, or torch's memory-efficient kernel).
    logits_bytes: bytes a logit, see LOGITS. fused_adam: an Adam that needs no temporary (FusedAdam, CPU Adam).
    reduce_bucket ... sub_group: elements, as in deepspeed.json. fp32_gradients: gradients are summed in fp32.
    zero_init: under ZeRO-3, the model is divided while it is made (transformers does it where it knows of the config).
    """

    shape: Shape
    gpus: int = 1
    nodes: int = 1
    engine: str = "deepspeed"
    stage: int = 2
    optimizer_device: str = "gpu"
    parameter_device: str = "gpu"
    precision: str = "bf16"
    optimizer: str = "adamw"
    method: str = "full"
    adapters: int = 0
    copies: int = 0
    quantized: str | None = None
    seq_len: int = 2048
    micro_batch: int = 1
    grad_accum: int = 1
    checkpointing: bool = False
    flash: bool = True
    variable_lengths: bool = False
    logits_bytes: float = LOGITS["hf"]
    fused_adam: bool = True
    pinned: bool = True
    reduce_bucket: int = 500_000_000
    overlap_comm: bool = False
    max_reuse: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    fp32_gradients: bool = False
    zero_init: bool = True
    nvme_buffers: int = 4

    @property
    def tokens(self) -> int:
        """Tokens in a micro batch, on one rank."""
        return self.seq_len * self.micro_batch

    @property
    def trained(self) -> int:
        """Weights with gradients: all of them, or the method's."""
        return self.shape.parameters if self.method == "full" else self.adapters + self.copies

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is computed with."""
        return 4 if self.precision in ("fp32", "amp") else 2

    @property
    def base_bytes(self) -> float:
        """The model's own weights as they are held, all of them: quantized matrices, and the embeddings in full."""
        psi, width = self.shape.parameters, self.weight_bytes
        if not self.quantized:
            return float(width * psi)
        ends = min(psi, self.shape.embedding * (1 if self.shape.tied else 2))
        return QUANTIZED[self.quantized] * (psi - ends) + width * ends

    @property
    def shards(self) -> int:
        """Ranks that share the weights: all of them under ZeRO-3 and FSDP."""
        return self.gpus if self.stage == 3 or self.engine == "fsdp" else 1


def lora_weights(shape: Shape, rank: int, targets: str = "all") -> int:
    """Weights that LoRA adds: rank x (rows + columns) for every matrix it is put on.

    targets: "all" linear layers of a block, or "attention": the queries' and values' only (PEFT's default for Llama).
    """
    attention = [(shape.hidden, shape.query_width), (shape.hidden, shape.kv_width)]
    if targets == "all":
        attention += [(shape.hidden, shape.kv_width), (shape.query_width, shape.hidden)]
        attention += [(shape.hidden, shape.intermediate)] * (3 if shape.gated else 2)
    return shape.layers * rank * sum(rows + columns for rows, columns in attention)


def zero_fields(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """How a ds_config divides things, in the fields of a Setup. What it leaves out has DeepSpeed's own default."""
    zero = ds_config.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    optimizer = ds_config.get("optimizer", {})
    kind = str(optimizer.get("type", "")).lower()
    return {
        "stage": stage,
        "optimizer_device": _device(zero, "offload_optimizer"),
        "parameter_device": _device(zero, "offload_param") if stage == 3 else "gpu",
        "reduce_bucket": int(zero.get("reduce_bucket_size", 500_000_000)),
        # DeepSpeed's default is true for stage 3 and false below it (runtime/zero/config.py).
        "overlap_comm": bool(zero.get("overlap_comm", stage == 3)),
        "max_reuse": int(zero.get("stage3_max_reuse_distance", 1_000_000_000)),
        "sub_group": int(zero.get("sub_group_size", 1_000_000_000)),
        "fp32_gradients": ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32",
        "pinned": bool((zero.get("offload_optimizer") or {}).get("pin_memory", True)),
        "nvme_buffers": int((zero.get("offload_optimizer") or {}).get("buffer_count", 4)),
        "fused_adam": kind.startswith("adam") and not optimizer.get("params", {}).get("torch_adam", False),
    }


def batch_fields(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Precision, micro batch and accumulation of a ds_config; what isn't a number there ("auto") is left out."""
    fp16, bf16 = ds_config.get("fp16", {}), ds_config.get("bf16", {})
    precision = "fp16" if fp16.get("enabled") is True else "bf16" if bf16.get("enabled") is True else "fp32"
    fields: dict[str, Any] = {"precision": precision}
    for key, name in (
        ("train_micro_batch_size_per_gpu", "micro_batch"),
        ("gradient_accumulation_steps", "grad_accum"),
    ):
        if isinstance(ds_config.get(key), int):
            fields[name] = ds_config[key]
    return fields


def _device(zero: Mapping[str, Any], section: str) -> str:
    found = (zero.get(section) or {}).get("device", "none")
    return "gpu" if found == "none" else str(found)

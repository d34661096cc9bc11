"""The setup that is planned for: a model's shape, its sharding, its precision, its batches. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.options import optimizers
from dsrun.planner.shape import Shape

DEVICES = ("gpu", "cpu", "nvme")
METHODS = ("full", "lora", "qlora")
OPTIMIZERS = {name: optimizer.state_bytes for name, optimizer in optimizers.OPTIMIZERS.items()}
"""Optimizer -> bytes of state per parameter, with fp32 states and with 16-bit ones."""
LOGITS: dict[str, float] = {"hf": 12, "hf-old": 16}
"""Bytes a logit costs at the loss: transformers' own since 4.45, and before.

It makes the 16-bit logits, an fp32 copy, its log-softmax and the gradients of both: 12.0 at the peak of transformers
5's output layer and loss. Published runs of the older code imply 15.5 to 16.5.
"""
QUANTIZED: dict[str, float] = {"nf4": 0.516, "nf4-single": 0.5625, "gptq4": 0.52, "int8": 1.0}
"""Bytes per weight of a quantized matrix.

nf4: 4 bits, a scale of 8 bits for 64 weights, and one of 32 bits for 256 of those (bitsandbytes' double quantization:
0.127 bits a weight). nf4-single: with scales of 32 bits. gptq4: 4 bits, and for 128 weights a scale of 16 and a zero of
4 bits.
"""


@dataclass(frozen=True)
class Setup:
    """A training setup. The defaults are DeepSpeed's own where it has one."""

    shape: Shape
    gpus: int = 1
    """Ranks in all, on `nodes` hosts."""
    nodes: int = 1
    engine: str = "deepspeed"
    """deepspeed, fsdp, or torch: one process that holds everything."""
    stage: int = 2
    """ZeRO's stage, for deepspeed."""
    replicas: int = 1
    """Copies of the model, each sharded over gpus / replicas ranks (FSDP's hybrid sharding)."""
    secondary: int = 1
    """Ranks that share a second copy of the weights, at ZeRO-3 (zero_hpz_partition_size); 1: there is none."""
    quantized_gather: bool = False
    """At ZeRO-3 weights are 8 bits wide while they are gathered (zero_quantized_weights)."""
    quantized_reduce: bool = False
    """At ZeRO-3 gradients are 4 bits wide while they are reduced over several nodes (zero_quantized_gradients)."""
    whole_gradients: bool = False
    """FSDP reduces gradients once a step: until then each rank has them whole."""
    optimizer_device: str = "gpu"
    """The place of the optimizer's states: one of DEVICES."""
    parameter_device: str = "gpu"
    """The place of the weights, at stage 3: one of DEVICES."""
    precision: str = "bf16"
    """fp16, bf16: 16-bit weights with an fp32 master copy. amp: fp32 weights that are computed with in 16 bits.
    pure: 16-bit weights and optimizer states without a master copy. fp32: everything."""
    optimizer: str = "adamw"
    """A key of OPTIMIZERS."""
    method: str = "full"
    """One of METHODS."""
    adapters: int = 0
    """Weights that LoRA adds."""
    targets: tuple[str, ...] | None = None
    """The matrices with LoRA (lora.roles); None: all of a block's. Empty for a prefix."""
    lora_dropout: float = 0.0
    """Dropout of LoRA's inputs."""
    fp32_adapters: bool = True
    """Whether LoRA's weights are fp32, as PEFT makes them (autocast_adapter_dtype). DeepSpeed casts them."""
    kbit_casts: bool = False
    """What isn't quantized is fp32, as PEFT's prepare_model_for_kbit_training makes it: embedding, output weights and
    norms, and with them the residual stream."""
    fp32_stream: bool = False
    """The embedding's output is fp32 though weights are gathered in 16 bits, so that the residual stream is, too."""
    copies: int = 0
    """Weights of whole modules that are trained beside LoRA, as copies (PEFT's modules_to_save)."""
    quantized: str | None = None
    """A key of QUANTIZED, for the weights that LoRA leaves frozen."""
    quantized_head: bool = False
    """Whether the output weights are quantized, too (LitGPT; transformers leaves them as they are)."""
    dequantized_twice: bool = False
    """A matrix in use comes in the precision that it was quantized from, and then in the one that is computed in."""
    keeps_inputs: bool = False
    """Quantized matrices keep their inputs for backward, which doesn't need them (bitsandbytes before 0.43.2)."""
    seq_len: int = 2048
    """Tokens of an example, prompt and response."""
    example: int = 0
    """Mean tokens of the examples in a packed sequence, which attention doesn't leave; 0: one fills it."""
    micro_batch: int = 1
    """Examples per rank and micro step."""
    grad_accum: int = 1
    """Micro steps per optimizer step."""
    fp8: str = ""
    """The scales of products in fp8 (a key of speed.FP8), with layers compiled; FSDP alone has them. Empty: none."""
    checkpointing: int = 0
    """Activation checkpointing: backward computes one block in as many again from its input; 1: each, 0: none."""
    activations_device: str = "gpu"
    """The place where those inputs wait: gpu or cpu."""
    flash: bool = True
    """Attention keeps no matrix of scores (flash attention, or torch's memory-efficient kernel). Gemma 2 has no other
    than the first of them in transformers."""
    async_save: bool = False
    """A checkpoint lies in host memory while it is written."""
    scores_bytes: float | None = None
    """Bytes a score of attention in a block that is computed again; None: transformers 5's (activations.SCORES_ONCE).
    Published runs of transformers 4 grow by 16 (ms-swift's, from 4,096 to 8,192 tokens)."""
    variable_lengths: bool = False
    """Examples are padded to the longest of their batch, so that sizes change from step to step."""
    logits_bytes: float = LOGITS["hf"]
    """Bytes per logit, see LOGITS."""
    fused_loss: bool = False
    """Output layer and loss are one kernel (Liger), which never holds all logits."""
    fused_tokens: int = 0
    """Tokens whose logits that kernel holds at once; 0: as many as it takes by itself."""
    loss_tokens: int = 0
    """Tokens that the loss alone takes at a time, computing a piece's logits again in backward; 0: all at once."""
    tile: int = 0
    """Tokens that the loss and each MLP take at a time, so that no others are held for backward; 0: all at once."""
    fused_adam: bool = True
    """The optimizer needs no temporaries (FusedAdam, CPU Adam)."""
    pinned: bool = True
    """Offloaded states are in pinned memory."""
    reduce_bucket: int = 500_000_000
    """Elements of a bucket (reduce_bucket_size)."""
    overlap_comm: bool = False
    max_reuse: int = 1_000_000_000
    """Elements after which a gathered weight is released (stage3_max_reuse_distance)."""
    sub_group: int = 1_000_000_000
    """Elements that the optimizer steps at a time (sub_group_size)."""
    fp32_gradients: bool = False
    """Gradients are summed in fp32 (data_types.grad_accum_dtype)."""
    zero_init: bool = True
    """At stage 3 the model is sharded while it is made (transformers does so if it knows the DeepSpeed config)."""
    flattens_on_gpu: bool = True
    """Stages 1 and 2 lay the weights out on the GPU where there is room (DeepSpeed since 0.17; before, on the host)."""
    reentrant: bool | None = None
    """Checkpointing's kind (torch.utils.checkpoint's use_reentrant); None: dsrun's, reentrant at stage 3 alone."""
    looped_experts: bool = False
    """A mixture's experts are computed one after another in Python (transformers 4), not in grouped products."""
    ep: int = 1
    """Ranks that divide every layer's experts (AutoEP)."""
    nvme_buffers: int = 4
    """offload_optimizer.buffer_count."""

    def changed(self, **fields: Any) -> Setup:
        """dataclasses.replace in a tenth of its time, for searches that make hundreds of setups."""
        if unknown := fields.keys() - self.__dict__.keys():
            raise TypeError(f"a Setup has no {', '.join(sorted(unknown))}")
        setup = object.__new__(Setup)
        setup.__dict__.update(self.__dict__)
        setup.__dict__.update(fields)
        return setup

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch, on one rank."""
        return self.seq_len * self.micro_batch

    @property
    def recomputed(self) -> int:
        """Blocks that backward computes again: the first, and one in `checkpointing` after it."""
        return -(-self.shape.layers // self.checkpointing) if self.checkpointing else 0

    @property
    def recomputed_share(self) -> float:
        """Recomputed blocks as a share of all."""
        return self.recomputed / max(1, self.shape.layers)

    @property
    def tiled_share(self) -> float:
        """Weights of the MLPs that go forward twice as they take their tokens in tiles, as a share of all."""
        shape = self.shape
        if not self.tile or shape.experts is not None:
            return 0.0
        matrices = 3 if shape.gated else 2
        return matrices * shape.hidden * shape.intermediate * shape.layers / shape.parameters

    @property
    def stream_bytes(self) -> int:
        """Bytes of an element of the residual stream.

        It is as wide as what the embedding puts into it, for adding 16 bits to fp32 gives fp32, and autocast makes
        products alone 16 bits wide. What FSDP gathers is 16 bits wide, the embedding too. Every network that ships
        does the same there (tests/planner/test_traced_stream.py).
        """
        wide = self.precision == "fp32" or (self.precision == "amp" and self.engine == "torch")
        return 4 if wide or self.fp32_stream or self.kbit_casts else 2

    @property
    def own_weights(self) -> int:
        """Weights that a rank computes with: all but the other ranks' experts."""
        return self.shape.parameters - self.shape.in_experts + self.shape.in_experts // self.ep

    @property
    def own_share(self) -> float:
        """Those as a share of all."""
        return self.own_weights / max(1, self.shape.parameters)

    @property
    def exchanged(self) -> float:
        """Bytes of a micro batch's tokens on their way to experts of other ranks, in one layer: of what a rank sends,
        as much as it gets where routers are even."""
        if self.ep == 1 or self.shape.experts is None:
            return 0.0
        return float(self.computed_bytes * self.tokens * self.shape.experts.chosen * self.shape.hidden)

    @property
    def block_inputs(self) -> float:
        """Bytes of the inputs of recomputed blocks, on one rank."""
        return float(self.stream_bytes * self.shape.hidden * self.recomputed * self.tokens)

    @property
    def trained(self) -> int:
        """Weights that get gradients, and that are exported: of LoRA only what it adds."""
        whole = self.shape.parameters - self.shape.frozen
        return whole if self.method == "full" else self.adapters + self.copies

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as it is held (under amp it is computed with in 2)."""
        return 4 if self.precision in ("fp32", "amp") else 2

    @property
    def computed_bytes(self) -> int:
        """Bytes of a weight as it is computed with, gathered and exported."""
        return 4 if self.precision == "fp32" else 2

    @property
    def adapter_bytes(self) -> int:
        """Bytes of a LoRA weight."""
        return self.weight_bytes if self.engine == "deepspeed" or not self.fp32_adapters else 4

    @property
    def keeps_scores(self) -> bool:
        """Whether attention makes a matrix of scores."""
        return not self.flash

    @property
    def base_bytes(self) -> float:
        """Bytes of the model's own weights as they are held; quantized, the embeddings keep their precision."""
        psi, width = self.shape.parameters, self.weight_bytes
        if not self.quantized:
            return float(width * psi)
        ends = min(psi, self.shape.embedding if self.quantized_head else self.shape.ends)
        return QUANTIZED[self.quantized] * (psi - ends) + (4 if self.kbit_casts else width) * ends

    def held_bytes(self, weights: float) -> float:
        """Bytes of this many of a block's weights as they are held, and gathered where ranks share them."""
        return float((QUANTIZED[self.quantized] if self.quantized else self.computed_bytes) * weights)

    @property
    def shards(self) -> int:
        """Ranks that share the weights: all of them under ZeRO-3 and FSDP."""
        if self.engine == "fsdp":
            return self.gpus // self.replicas
        return self.gpus if self.stage == 3 else 1

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share the optimizer's states: all of them from ZeRO-1 on, and under FSDP."""
        if self.engine == "fsdp":
            return self.shards
        return self.gpus if self.engine == "deepspeed" and self.stage >= 1 else 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the fullest node."""
        return -(-self.gpus // self.nodes)

    @property
    def share(self) -> float:
        """Trained weights per rank, where the ranks share them."""
        return self.trained / (self.gpus // self.replicas)

    @property
    def offloads_optimizer(self) -> bool:
        return self.optimizer_device != "gpu"

    @property
    def recomputes_all(self) -> bool:
        """Whether blocks are computed again to their ends: the reentrant kind doesn't stop before."""
        at_stage_3 = self.engine == "deepspeed" and self.stage == 3
        return at_stage_3 if self.reentrant is None else self.reentrant

    @property
    def sharded(self) -> bool:
        """Whether ranks share the weights."""
        return self.engine == "fsdp" or (self.engine == "deepspeed" and self.stage == 3)

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return self.engine != "torch" and (self.offloads_optimizer or self.parameter_device != "gpu")

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps on an fp32 copy of its own.

        DeepSpeed's does, but for stage 0 in fp32, which steps on the weights themselves (runtime/engine.py).
        """
        if self.engine == "deepspeed":
            return self.precision != "fp32" or self.stage >= 1
        return self.precision in ("fp16", "bf16")


def zero_fields(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sharding and offload of a ds_config, as fields of a Setup. Absent keys have DeepSpeed's own defaults."""
    zero = ds_config.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    offload = zero.get("offload_optimizer") or {}
    optimizer = ds_config.get("optimizer", {})
    adam = str(optimizer.get("type", "")).lower().startswith("adam")
    return {
        "stage": stage,
        "optimizer_device": _device(offload),
        "parameter_device": _device(zero.get("offload_param") or {}) if stage == 3 else "gpu",
        "secondary": int(zero.get("zero_hpz_partition_size", 1)) if stage == 3 else 1,
        "quantized_gather": stage == 3 and bool(zero.get("zero_quantized_weights", False)),
        "quantized_reduce": stage == 3 and bool(zero.get("zero_quantized_gradients", False)),
        "reduce_bucket": int(zero.get("reduce_bucket_size", 500_000_000)),
        # True by default at stage 3, false below it (runtime/zero/config.py).
        "overlap_comm": bool(zero.get("overlap_comm", stage == 3)),
        "max_reuse": int(zero.get("stage3_max_reuse_distance", 1_000_000_000)),
        "sub_group": int(zero.get("sub_group_size", 1_000_000_000)),
        "fp32_gradients": ds_config.get("data_types", {}).get("grad_accum_dtype") == "fp32",
        "pinned": bool(offload.get("pin_memory", True)),
        "nvme_buffers": int(offload.get("buffer_count", 4)),
        "fused_adam": adam and _in_one_kernel(optimizer.get("params", {})),
    }


def fsdp_fields(base: Setup, *, replicas: int, offload: bool, whole_gradients: bool) -> dict[str, Any]:
    """The sharding and offload of FSDP, as fields of a Setup: in bf16 trained weights are held in fp32, without a
    copy."""
    in_bf16 = "amp" if base.method == "full" else "pure"
    return {
        "engine": "fsdp",
        "stage": 0,
        "replicas": replicas,
        "whole_gradients": whole_gradients,
        "optimizer_device": "cpu" if offload else "gpu",
        "parameter_device": "cpu" if offload else "gpu",
        "precision": in_bf16 if base.precision == "bf16" else base.precision,
        "pinned": offload,
        "fused_adam": not offload,
    }


def _in_one_kernel(params: Mapping[str, Any]) -> bool:
    """Whether Adam steps all weights in one kernel: DeepSpeed's fused one, or torch's with `fused`."""
    return not params.get("torch_adam", False) or bool(params.get("fused"))


def _device(offload: Mapping[str, Any]) -> str:
    device = offload.get("device", "none")
    return "gpu" if device == "none" else str(device)


def batch_fields(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Precision, micro batch and accumulation of a ds_config; what isn't a number there ("auto") is left out."""
    enabled = (name for name in ("fp16", "bf16") if ds_config.get(name, {}).get("enabled") is True)
    numbers = {
        "micro_batch": ds_config.get("train_micro_batch_size_per_gpu"),
        "grad_accum": ds_config.get("gradient_accumulation_steps"),
    }
    batch = {name: value for name, value in numbers.items() if isinstance(value, int)}
    return {"precision": next(enabled, "fp32"), **batch}

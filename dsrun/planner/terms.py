"""The terms of a plan in words: the text behind `dsrun plan --components`.

Psi: weights; T: those with gradients; N: ranks; w: bytes of a weight that is computed with; b, s: micro batch and
tokens of an example; L, h, v: layers, hidden size, vocabulary; a: heads; f: feed-forward width.
"""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    what: str
    """The thing that takes memory or time."""
    formula: str
    """Its formula."""
    source: str
    """The source of the formula; a file alone is DeepSpeed 0.19's."""


STAGE12 = "runtime/zero/stage_1_and_2.py"
STAGE3 = "runtime/zero/stage3.py"
ZERO = "ZeRO, arXiv 1910.02054"

GPU: dict[str, Term] = {
    "weights": Term("the weights that are computed with",
        "w Psi; / N under stage 3 and with FSDP (w: 4 in bf16, too); quantized: bits / 8", ZERO),
    "adapters": Term("LoRA's weights, and modules trained as copies",
        "4 T (DeepSpeed casts them: w T)", "PEFT"),
    "master": Term("the fp32 copy that the optimizer steps on", "4 T / N (stage 0: 4 T; FSDP: none)", STAGE12),
    "secondary": Term("the second copy of the weights in each host (hpZ)",
        "w Psi / zero_hpz_partition_size", "runtime/zero/partition_parameters.py; ZeRO++, arXiv 2306.10209"),
    "moments": Term("the optimizer's states, Adam's two moments in fp32", "8 T / N (stage 0: 8 T)", ZERO),
    "reduce_bucket": Term("stage 3's standing bucket for gradients", "w reduce_bucket_size", STAGE3),
    "gradient_shard": Term("stage 3's flat share of the gradients", "w T / N", STAGE3),
    "offload_scratch": Term("the largest weight's gradient on its way to the host", "w v h", STAGE12),
    "fp32_gradients": Term("gradients summed in fp32 at stage 1", "4 T", "runtime/bf16_optimizer.py"),
    "activations": Term("what backward needs of every block",
        "Llama's: b s L (16 h + 4 (queries + keys) + 8 f); LoRA 8, 4, 6 and its inputs; "
        "what is computed again 2 b s h (4 with an fp32 residual stream), on the host with offload; "
        "in tiles without an MLP's inside, 8 f",
        "transformers' blocks, with torch's saved-tensor hooks"),
    "layer": Term("one block's activations, made again with checkpointing",
        "b s (16 h + ...)", "the same"),
    "scores": Term("attention's scores of one block, without flash attention",
        "12 b a s^2", "transformers' eager attention"),
    "logits": Term("logits, their fp32 copy, log-softmax and gradients",
        "12 b s v; fused: 2 (v c + b s h + T's part in v h), c: 2^n tokens, about b s h / v; in tiles of t tokens: "
        "12 t v + 2 b s h + 6 T's part in v h",
        "transformers 5; liger-kernel's ops/fused_linear_cross_entropy.py; arXiv:2506.13996, 3.1"),
    "dequantized": Term("the quantized matrix that is in use, in 16 bits", "2 h f (GPTQ: 6)", "bitsandbytes, AutoGPTQ"),
    "dequantized_head": Term("the output weights in 16 bits, where they are quantized, too, or fp32",
        "2 v h", "bitsandbytes; torch's autocast"),
    "exchanged": Term("tokens on their way to and from other ranks' experts", "2 w b s k h",
        "module_inject/auto_ep_layer.py"),
    "fp8_casts": Term("an MLP's input and weight in 8 bits, with --fp8", "2 (b s f + h f)",
        "torchao's float8/float8_linear.py"),
    "gathered": Term("weights that stay gathered between their uses",
        "w (max_reuse_distance / 2 + v h), at most w Psi; FSDP: 2 w p + w l, with p the largest part, l a layer "
        "(quantized as it is)",
        "runtime/zero/partitioned_param_coordinator.py; torch's fsdp/_fully_shard/_fsdp_param_group.py"),
    "viewed": Term("experts' weights that autograd keeps gathered from forward to backward, by a view",
        "stage 3: w x all experts' weights in blocks that are not computed again",
        "runtime/zero/partition_parameters.py: free_param; transformers' integrations/moe.py"),
    "experts": Term("a block's experts, which stage 3 gathers together", "w e, less max_reuse_distance / 2",
        "runtime/zero/partitioned_param_coordinator.py"),
    "buckets": Term("buckets that gradients are reduced in",
        "w reduce_bucket_size, twice with overlap_comm", STAGE12),
    "reduce_copy": Term("a bucket, laid out flat to be reduced",
        "w reduce_bucket_size (stage 0: 5e8)", "runtime/comm/coalesced_collectives.py"),
    "carried": Term("gradients of earlier micro batches",
        "w T, / N at stage 2 and with FSDP (whole_gradients: whole)", STAGE12),
    "gradients": Term("gradients when backward ends",
        "w T, / N at stage 2 (twice with accumulation); FSDP: 4 T / N + (4 + w) p, less what is ungathered by then",
        STAGE12),
    "step": Term("temporaries of the optimizer's step",
        "stage 0: 10 T; 1: 2 T + 6 T / N; 2: 8 T / N; 3: 6 sub_group_size; torch's AdamW: 8 at stage 3; "
        "FSDP, and without DeepSpeed: the gradients, with torch's AdamW a moment more",
        "runtime/fp16/fused_optimizer.py, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py"),
}  # fmt: skip
"""The terms on the GPU."""

HOST: dict[str, Term] = {
    "processes": Term("Python, CUDA and the libraries of every rank",
        "3.5 GiB x ranks (CPU ranks: 0.5; 0.9 with torch's CUDA build)", "published runs"),
    "master": Term("the fp32 copy that the CPU's Adam steps on", "4 T / nodes", STAGE12),
    "moments": Term("Adam's two moments in fp32", "8 T / nodes", "ops/adam/cpu_adam.py"),
    "gradients": Term("fp32 gradients", "4 T / nodes", "runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py"),
    "optimizer_buffers": Term("buffers that optimizer states pass through on their way to NVMe",
        "4 buffer_count x the largest sub-group", "runtime/swap_tensor/optimizer_utils.py"),
    "staging": Term("new weights on their way back to the GPU", "w T / nodes", STAGE12),
    "scratch": Term("the largest weight's gradient as it arrives", "w v h x ranks", STAGE12),
    "accumulated": Term("gradients of earlier micro batches", "w T / nodes", STAGE12),
    "gradient_shard": Term("the flat gradients as they arrive", "w T / nodes", STAGE3),
    "weights": Term("the weights", "w Psi / nodes (FSDP in bf16: 4 Psi; each copy's)", STAGE3),
    "pinned_twice": Term("the weights as they were first pinned",
        "w Psi / nodes", "runtime/zero/partition_parameters.py"),
    "parameter_buffers": Term("buffers that weights pass through on their way to NVMe",
        "5 x the largest weight", "runtime/swap_tensor/partitioned_param_swapper.py"),
    "block_inputs": Term("what blocks that are computed again start from, where it is offloaded",
        "2 b s h L x ranks", "torch.autograd.graph.save_on_cpu"),
    "pinned_rounding": Term("pinned blocks, rounded up to powers of two",
        "per block", "torch's CachingHostAllocator"),
    "loading_copies": Term("the model while it is loaded",
        "w Psi x ranks, without zero.Init", "transformers' from_pretrained"),
    "saving_copies": Term("what passes through while a checkpoint is written",
        "the largest tensor of a rank", "torch.save"),
    "checkpoint_copy": Term("the checkpoint that is written beside the training (--async-save)",
        "12 T / nodes, and w T at stages 1 and 2; FSDP: 12 T / nodes", "dsrun/planner/disk.py"),
    "gloo_copy": Term("what gloo copies of a bucket that it scatters, on CPUs",
        "w reduce_bucket_size", "measured"),
    "kept_by_malloc": Term("what malloc keeps of freed blocks below 32 MiB, on CPUs",
        "1.5 x those", "measured"),
}  # fmt: skip
"""The terms in a node's main memory."""

SPEED: dict[str, Term] = {
    "compute": Term("matrix products and attention",
        "6 Psi a token without the embedding (up to 8 with checkpointing) / (peak x efficiency)", "arXiv 2205.05198"),
    "launch": Term("what Python takes to launch the work, where that is longer",
        "5 to 15.5 ms a layer", "published runs"),
    "communication": Term("what computing does not hide of gathering and reducing",
        "6 w / 2 Psi at stage 3 (gathered in 8 bits: 2 + w; reduced in 4: 1/2), w Psi at 2", ZERO),
    "step_communication": Term("the communication at the step's end",
        "2 w Psi at stages 0 and 1, w Psi at 2", ZERO),
    "dequantize": Term("turning quantized weights into 16 bits", "Psi, forward and back", "published runs"),
    "optimizer": Term("the optimizer on the GPU",
        "30 T / N bytes / memory bandwidth", "Adam's reads and writes"),
    "cpu_optimizer": Term("the optimizer on the CPU",
        "30 T / nodes bytes / memory bandwidth", "Adam's reads and writes"),
    "offload": Term("weights, gradients and activations between host and GPU", "bytes / PCIe bandwidth", ZERO),
    "nvme": Term("states between host and NVMe",
        "28 T / nodes bytes / disk bandwidth", "ZeRO-Infinity, arXiv 2104.07857"),
}  # fmt: skip
"""The terms of a step's seconds."""

MOMENTS: dict[str, str] = {
    "start": "while DeepSpeed starts",
    "flat": "while DeepSpeed lays the weights out flat",
    "turn": "between forward and backward",
    "middle": "in backward",
    "end": "at the end of backward",
    "step": "in the optimizer's step",
}
"""The moments at which a peak may be, in words."""

"""The time of a step: every term in seconds, from the rates of GPUs, links and disks.

The model has few parts and is coarse. What it says of an unknown machine is right within a factor of two; the order
in which it puts ways of sharding the same job holds much better, because what is unknown is common to them. Its
constants come from published tables: QwenLM's of seconds an iteration (Qwen README, A100-80G), chenyaofo's of DeepSpeed
strategies (gist d4cd6a20, eight A800), MosaicML's of llm-foundry's throughput (A100 and H100, FSDP).

Psi is the number of weights, N the ranks. 1 GB is 10^9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from dsrun.planner.setup import OPTIMIZERS, QUANTIZED, Setup

if TYPE_CHECKING:
    from dsrun.planner.gpus import GpuModel

BYTES_AN_OPERATION = 0.0055
"""Bytes of the GPU's own memory that training moves for each operation, beside what matrix products hide: norms,
rotations, masks, the loss.

It makes the share of the matrix rate that a card reaches, 1 / (1 + this x operations a second / bytes a second).
llm-foundry's tables of two generations (0.63-0.66 of an A100's rate, 0.47-0.50 of an H100's) both give 0.0036; tables
of transformers with DeepSpeed from 2023 (the gist: 0.41 to 0.45 of an A100's) give 0.008 to 0.009. Today's are
between: 0.54.
"""
CPU_EFFICIENCY = 0.45
"""Share of a CPU's rate that training reaches."""
ATTENTION = 2.0
"""Weight of an operation in attention's kernels: they reach about half of the rate of matrix products, as
llm-foundry's rows from 512 to 65,536 tokens show."""
REFERENCE_HIDDEN = 4096
"""Hidden size of the models that BYTES_AN_OPERATION was read from."""
MATRIX_KERNELS = 8 / 35
"""Share of a block's kernels that are matrix products or attention: of Llama's, 8 of 35."""
LAUNCH_MS = {0: 5.0, 1: 8.0, 2: 11.0, 3: 15.5}
"""ZeRO's stage -> milliseconds a layer and micro step that Python takes to launch the work and, under ZeRO-3, to fetch
and release weights. Short rows can't go below it: Qwen-7B under ZeRO-3 takes as long for 256 tokens as for 512."""
LOOPED_EXPERT = {0: 0.3, 1: 0.3, 2: 0.3, 3: 1.0}
"""ZeRO's stage -> time to launch an expert in a loop, as a share of a layer's (LAUNCH_MS).

Its kernels are 10 of a block's 35. Under ZeRO-3 nothing is fetched ahead, since nobody knows which expert is next: all
48 x 128 of Qwen3-30B-A3B's take 91.2 s a micro step on 16 A800 (ms-swift's documentation), which is a layer's time for
each. Of the other stages no published run is known.
"""
FSDP_LAUNCH_MS = 8.0
"""Milliseconds a layer and micro step under FSDP, whose hooks are at whole blocks (assumed: no table shows it)."""
OVERLAP = 0.3
"""Share of the shorter of computing and communicating that isn't hidden behind the longer."""
EXPOSED = 0.5
"""Share of the gathering of new weights, after the optimizer, that isn't hidden."""
SWEPT = 14
"""Bytes that a step of the optimizer moves for a weight beside its moments, which it reads and writes: the gradient and
both directions of the master copy in fp32, and the 16-bit weight. Adam: 30 in all."""
STREAMED = 0.7
"""Share of the GPU memory's bandwidth that Adam's kernel gets."""
DEQUANTIZED = {"gptq4": 0.09, "nf4": 0.3, "nf4-single": 0.3, "int8": 0.3}
"""Quantized weights -> share of the GPU memory's bandwidth that turning them into 16 bits gets.

GPTQ's follows from Qwen's Q-LoRA table (7B to 72B: 70e9 weights a second); the others are assumed.
"""
FP8 = {"rowwise": 1.16, "tensorwise": 1.36}
"""Scales of fp8 products -> how much faster the layers' products are with them, casts and all, compiled.

Of torchtitan's own runs of Llama-3-8B on 8 H100s at 8k tokens: 5,760 tokens/s in bf16, 6,424 rowwise, 7,186 tensorwise
(its commit 7a04053; the last one gathers in 8 bits, too, which hides behind computing). Products are 0.75 of the time.
"""
NODE_PCIE_GB_S = 24.0
"""The most that all of a node's GPUs together move between host and GPU under offload.

Not the sum of their links: the copies are small, and wait for one another and for the CPU. Published runs on eight
GPUs imply 12 to 60.
"""
UNCERTAIN = 2.0
"""The factor within which a prediction for an unknown machine is right."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The rates of the machines. Bandwidths are in GB/s."""

    matrix_tflops: float
    """Rate of one GPU in dense 16-bit products."""
    fp32_tflops: float
    """Rate of one GPU without its matrix units."""
    memory_gb_s: float
    """Bandwidth of the GPU's own memory."""
    link_gb_s: float
    """Bus bandwidth of an all-reduce inside a node, for each GPU."""
    network_gb_s: float = 12.5
    """Bandwidth of a whole node to other nodes, in one direction (12.5: 100 Gbit/s)."""
    pcie_gb_s: float = 12.0
    """Bandwidth between a node's host memory and all its GPUs together, in one direction, as offload reaches it."""
    cpu_gb_s: float = 30.0
    """Bandwidth of host memory that CPU Adam reaches (15 to 50)."""
    nvme_gb_s: float = 3.0
    """Bandwidth of a node's disks together, reading."""
    bytes_an_operation: float = BYTES_AN_OPERATION
    """Bytes that keep training below the matrix rate, see BYTES_AN_OPERATION."""
    cpu: bool = False
    bf16: bool = True
    """Whether the GPU computes in bfloat16; one that can't does so at fp32's rate at most."""

    @property
    def efficiency(self) -> float:
        """Share of the matrix rate that training reaches while nothing else holds it up."""
        if self.cpu:
            return CPU_EFFICIENCY
        return 1 / (1 + self.bytes_an_operation * self.matrix_tflops * 1e12 / (self.memory_gb_s * 1e9))

    @classmethod
    def from_gpu(cls, gpu: GpuModel, gpus_per_node: int) -> Hardware:
        """Nodes with this many of a kind of GPU; what the GPU doesn't decide has its default."""
        return cls(
            matrix_tflops=gpu.matrix_tflops,
            fp32_tflops=gpu.fp32_tflops,
            memory_gb_s=gpu.memory_gb_s,
            link_gb_s=gpu.link_gb_s,
            pcie_gb_s=min(gpu.pcie_gb_s * gpus_per_node, max(gpu.pcie_gb_s, NODE_PCIE_GB_S)),
            bf16=gpu.bf16,
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of an optimizer step."""

    seconds_per_step: float
    """Seconds with all micro steps."""
    tokens_per_second: float
    """Tokens of all ranks, padding included."""
    terms: dict[str, float]
    """Name -> seconds that it adds to the step; what is hidden behind something else is left out. They add up to
    seconds_per_step (terms.SPEED says what each is)."""
    bytes_per_step: float
    """Bytes that enter a node from the others, and leave it."""
    model_flops_utilisation: float
    """The operations that the model needs (nothing twice) as a share of the GPUs' 16-bit rate (fp32's for fp32)."""
    uncertain: float = UNCERTAIN
    """The true time lies within this factor, up or down."""


def speed(setup: Setup, hardware: Hardware) -> Speed:
    """The speed of a set-up.

    Computing and communicating overlap in a micro step: the longer one counts in full, the shorter by OVERLAP. What
    comes once a step - new weights to gather, the optimizer, offload's traffic - is added.
    """
    micro_steps, tokens = setup.grad_accum, setup.tokens
    peak = peak_rate(setup, hardware)
    flops = tokens * computed_a_token(setup)
    work = flops / (peak * hardware.efficiency)
    beside = work * (1 - hardware.efficiency) * (_moved(setup) - 1)
    work += beside
    dequantize = _dequantize(setup, hardware)
    # No kernel can be shorter than Python takes to launch it: only what that takes beyond the work counts. Products
    # have most of the work and few of the launches, so that the others wait long before they do.
    products, others = flops / peak, work - flops / peak + dequantize
    started = _launch(setup)
    launch = max(0.0, MATRIX_KERNELS * started - products)
    launch += max(0.0, (1 - MATRIX_KERNELS) * started - others)
    busy = work + dequantize + launch
    moved = traffic(setup)
    # Seconds per byte: a ring passes (N-1)/N of everything through each rank.
    pace = (setup.gpus - 1) / (setup.gpus * 1e9 * _rate(setup, hardware))
    moving = pace * moved.micro_step + _link_pace(setup, hardware) * moved.within
    # The last micro step sends more (ZeRO-1 and DDP reduce only there), and has as little to hide it behind.
    earlier = (micro_steps - 1) * waiting(busy, moving)
    terms = {
        "compute": micro_steps * work,
        "launch": micro_steps * launch,
        "communication": earlier + waiting(busy, moving + pace * moved.last),
        "step_communication": EXPOSED * pace * moved.after,
    }
    if dequantize:
        terms["dequantize"] = micro_steps * dequantize
    optimizer_terms(setup, hardware, terms)
    seconds = math.fsum(terms.values())
    needed = micro_steps * tokens * flops_a_token(setup, again=0.0)
    return Speed(
        seconds_per_step=seconds,
        tokens_per_second=setup.gpus * micro_steps * tokens / seconds,
        terms=terms,
        bytes_per_step=(setup.nodes - 1) / setup.nodes * moved.step(micro_steps),
        model_flops_utilisation=needed / (seconds * peak),
    )


def slow_network(setup: Setup, hardware: Hardware) -> str | None:
    """Advice about a network that takes longer than computing under ZeRO-3; None where it doesn't."""
    if setup.engine != "deepspeed" or setup.stage != 3 or setup.nodes == 1:
        return None
    pace = speed(setup, hardware)
    rate = _rate(setup, hardware)
    seconds = pace.bytes_per_step / (1e9 * rate)
    computing = math.fsum(pace.terms.get(name, 0.0) for name in ("compute", "launch", "dequantize"))
    if seconds <= computing:
        return None
    across = (setup.nodes - 1) / setup.nodes
    in_node = setup.gpus // setup.nodes
    hpz = ""
    if in_node > 1 and not _copy_in_node(setup):
        left = pace.bytes_per_step - across * setup.grad_accum * _gathered(setup)
        hpz = (
            f"Preset zero3-hpz (zero_hpz_partition_size {in_node}, the GPUs of a node) makes it {left / 1e9:.3g} GB, "
            "for a second copy of the weights in each node; "
        )
    other = across * traffic(setup.changed(stage=2)).step(setup.grad_accum)
    return (
        f"ZeRO-3 moves {pace.bytes_per_step / 1e9:.3g} GB into every node each step, {seconds:.3g} s at "
        f"{rate:.3g} GB/s; computing takes {computing:.3g} s. {hpz}ZeRO-2 makes it {other / 1e9:.3g} GB, if it fits."
    )


class Traffic(NamedTuple):
    """Bytes that pass through every rank, before the factor (N-1)/N."""

    micro_step: float
    """Bytes in each micro step."""
    last: float
    """Bytes in a step's last micro step, beside those."""
    after: float
    """Bytes after the optimizer has stepped."""
    within: float = 0.0
    """Bytes in each micro step between the ranks of a node alone, with the factor of their number."""

    def step(self, micro_steps: int) -> float:
        """Bytes of a whole step between nodes."""
        return micro_steps * self.micro_step + self.last + self.after


def traffic(setup: Setup) -> Traffic:
    """The bytes that a set-up's ranks send one another.

    Rajbhandari et al., arXiv 1910.02054: ZeRO-3 and FSDP gather the weights for forward and for backward, and reduce
    the gradients (6 Psi in 16 bits). ZeRO-2 reduces them in every micro step, ZeRO-1 only in the last, and both
    gather the new weights (2 Psi each). DDP sums the gradients in the last (4 Psi). Only trained weights have any.
    With a second copy of the weights in each node (ZeRO++'s hpZ, arXiv 2306.10209) backward gathers within the node.
    ZeRO++'s qgZ sends gradients twice, in 4 bits: within the nodes, and their sums between them; qwZ gathers 8 bits.
    FSDP's copies (hybrid sharding) are counted as one model over all ranks, which is more than they send across hosts.
    """
    gradients, within = float(_width(setup) * setup.trained) * setup.own_share, 0.0
    if setup.quantized_reduce and setup.nodes > 1:
        gradients = within = 0.5 * setup.trained
    if _copy_in_node(setup):
        return Traffic(_gathered(setup) + gradients, 0.0, 0.0, _gathered(setup) + within)
    if within:
        return Traffic(2 * _gathered(setup) + gradients, 0.0, 0.0, within)
    if setup.engine == "fsdp" or (setup.engine == "deepspeed" and setup.stage == 3):
        return Traffic(2 * _gathered(setup) + gradients, 0.0, 0.0)
    if setup.engine == "torch" or setup.stage == 0:
        return Traffic(0.0, 2 * gradients, 0.0)
    return Traffic(gradients, 0.0, gradients) if setup.stage == 2 else Traffic(0.0, gradients, gradients)


def _copy_in_node(setup: Setup) -> bool:
    """Whether a second copy of the weights lies in each of several nodes."""
    return setup.nodes > 1 and setup.stage == 3 and 1 < setup.secondary <= setup.gpus // setup.nodes


def _link_pace(setup: Setup, hardware: Hardware) -> float:
    """Seconds per byte that the ranks of a node send one another: those that share a second copy of the weights, or
    all."""
    ranks = setup.secondary if _copy_in_node(setup) else setup.gpus // setup.nodes
    return (ranks - 1) / (ranks * 1e9 * hardware.link_gb_s)


def waiting(busy: float, moving: float) -> float:
    """Seconds that communicating adds to a micro step beside `busy` ones of computing."""
    return max(busy, moving) + OVERLAP * min(busy, moving) - busy


def _gathered(setup: Setup) -> float:
    """Bytes of all weights that a rank computes with, as they are gathered."""
    held = QUANTIZED[setup.quantized] if setup.quantized else _width(setup)
    if setup.quantized_gather:
        held = 1  # and a scale of 4 bytes for up to 8,000 (CUDAQuantizer in runtime/zero/partition_parameters.py)
    return float(held * setup.own_weights + _width(setup) * setup.adapters)


def _width(setup: Setup) -> int:
    """Bytes of a weight on its way: amp computes, and so gathers, in 16 bits."""
    return 4 if setup.precision == "fp32" else 2


def _rate(setup: Setup, hardware: Hardware) -> float:
    """GB/s of a collective: the slower of the links in a node and the node's way to the others."""
    if setup.nodes == 1:
        return hardware.link_gb_s
    if setup.gpus == setup.nodes:
        return hardware.network_gb_s
    return min(hardware.link_gb_s, hardware.network_gb_s)


def peak_rate(setup: Setup, hardware: Hardware) -> float:
    """Operations a second of one GPU, in the set-up's numbers."""
    slow = setup.precision == "fp32" or (setup.precision == "bf16" and not hardware.bf16)
    return 1e12 * (hardware.fp32_tflops if slow else hardware.matrix_tflops)


def computed_a_token(setup: Setup) -> float:
    """Operations for a token, weighed by the time that they take: with what is computed again."""
    tiled = 2 * setup.tiled_share * setup.shape.parameters
    return (
        flops_a_token(setup, again=setup.recomputed_share, attention=ATTENTION) + tiled - _saved_by_fp8(setup)
    )


def _saved_by_fp8(setup: Setup) -> float:
    """Operations whose time products in fp8 save for a token. Experts and the output's layer stay as they are."""
    if not setup.fp8 or setup.engine != "fsdp" or setup.shape.experts is not None or setup.method != "full":
        return 0.0
    products = 2 * (3 + setup.recomputed_share) * max(0, setup.shape.parameters - setup.shape.ends)
    return products * (1 - 1 / FP8[setup.fp8])


def flops_a_token(setup: Setup, *, again: float, attention: float = 1.0) -> float:
    """Operations for a token: 2 Psi forward, 2 Psi back for the activations, 2 Psi for trained weights' gradients.

    Psi without an embedding that is only looked up. Attention adds 2 L a hd s to each of the three, over a causal row's
    mean length, and twice that where the whole matrix of scores is computed. again: the share of blocks that go forward
    twice, with checkpointing all: full training's 6 Psi become nearly 8, LoRA's 4 nearly 6. attention: what its
    operations count for, where it is time that is wanted.
    """
    shape = setup.shape
    length = min(setup.seq_len, setup.example or setup.seq_len)  # packed examples don't see one another
    scores = 2 * shape.attention_layers * shape.query_width * length * (1 if setup.flash else 2)
    blocks = max(0, shape.active - shape.ends)
    weights = blocks + shape.embedding  # the output matrix; a tied one is the embedding itself
    trained = setup.trained * (weights / shape.parameters if setup.method == "full" else 1)
    forward = weights + setup.adapters
    twice = max(0, blocks - _not_again(setup)) + setup.adapters
    return 2 * (2 * forward + again * twice + trained) + (3 + again) * attention * scores


def _not_again(setup: Setup) -> int:
    """Weights of blocks that checkpointing leaves out as it computes them again: the last matrix, whose output backward
    has no use for. torch stops before it (torch/utils/checkpoint.py: early stop), but not in the reentrant kind; a norm
    or dropout behind it needs its output, and so does the mixing of experts."""
    shape, block = setup.shape, setup.shape.block
    needed = shape.experts is not None or block.dropouts or block.norms > block.outputs
    if needed or setup.recomputes_all:
        return 0
    return shape.layers * shape.hidden * shape.intermediate


def _launch(setup: Setup) -> float:
    """Seconds that a micro step takes at least, however little there is to compute."""
    by_engine = {"deepspeed": LAUNCH_MS[setup.stage], "fsdp": FSDP_LAUNCH_MS, "torch": LAUNCH_MS[0]}
    layer = 1e-3 * setup.shape.layers * by_engine[setup.engine]
    if (experts := setup.shape.experts) is None or not setup.looped_experts:
        return layer
    share = LOOPED_EXPERT[setup.stage if setup.engine == "deepspeed" else 0]
    return layer * (1 + share * experts.count * (1 - experts.dense / setup.shape.layers))


def _moved(setup: Setup) -> float:
    """Memory traffic of an operation, relative to BYTES_AN_OPERATION: 1 but for mixtures of experts.

    The inside of a feed-forward block as wide as f moves 8 f bytes a token for the 18 h f operations of its products;
    a chosen expert 4 h more, as its tokens are brought together and apart again, and its matrices are narrow.
    """
    shape = setup.shape
    if (experts := shape.experts) is None:
        return 1.0
    each = (8 * experts.width + 4 * shape.hidden) / (18 * shape.hidden * experts.width)
    mixed = 3 * experts.chosen * experts.width * shape.hidden * (shape.layers - experts.dense)
    share = min(1.0, mixed / max(1, shape.active - shape.ends))
    return 1 + share * (each * 18 * REFERENCE_HIDDEN / 8 - 1)


def _dequantize(setup: Setup, hardware: Hardware) -> float:
    """Seconds of a micro step that quantized weights take to become 16 bits wide, each time they are used."""
    if setup.quantized is None:
        return 0.0
    passes = 2 + setup.recomputed_share
    moved = (QUANTIZED[setup.quantized] + 2) * setup.shape.parameters
    return passes * moved / (1e9 * hardware.memory_gb_s * DEQUANTIZED[setup.quantized])


def optimizer_terms(setup: Setup, hardware: Hardware, terms: dict[str, float]) -> None:
    """Add the seconds of offload and the optimizer to a step's terms.

    On the GPU, each rank steps its share. On the host, gradients come down in every micro step (and with
    accumulation, the sum goes up again to be added to), the CPU steps the node's share, and new weights go up.
    Weights that live on the host go up for forward and for backward. NVMe is read and written beside that.
    """
    moments = OPTIMIZERS[setup.optimizer][0]
    share = setup.trained / (setup.nodes if setup.offloads_optimizer else setup.optimizer_shards)
    swept = (2 * moments + SWEPT) * share
    host = disk = 0.0
    if not setup.offloads_optimizer:
        terms["optimizer"] = swept / (1e9 * STREAMED * hardware.memory_gb_s)
    else:
        trips = setup.grad_accum * (2 if setup.grad_accum > 1 else 1)
        host = (trips + 1) * _width(setup) * share
        terms["cpu_optimizer"] = swept / (1e9 * hardware.cpu_gb_s)
        if setup.optimizer_device == "nvme":
            disk = (2 * (moments + 4) + 4) * share
    if setup.parameter_device != "gpu":
        fetched = 2 * setup.grad_accum * _gathered(setup) / setup.nodes
        host += fetched
        if setup.parameter_device == "nvme":
            disk += fetched
    if setup.activations_device == "cpu":
        host += 2 * setup.grad_accum * setup.ranks_per_node * setup.block_inputs
    if host:
        terms["offload"] = host / (1e9 * hardware.pcie_gb_s)
    if disk:
        terms["nvme"] = disk / (1e9 * hardware.nvme_gb_s)

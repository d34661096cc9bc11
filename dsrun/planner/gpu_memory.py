"""The GPU memory of a rank: every term by name, and the peaks that follow.

Psi is the number of weights, T those that are trained, N the ranks, w the bytes of a weight. Files are DeepSpeed
0.19's. terms.py has each term's formula and source.

How a peak comes about: some terms are held from the first step to the last (`persistent`), others come and go within
a step (`temporary`). AT says which of those are there at each of four moments: the turn from forward to backward, the
middle of backward, its end, and the optimizer's step. The largest sum decides. A fifth moment, the start, holds what
only initialisation needs.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsrun.planner.activations import activations, logits
from dsrun.planner.setup import OPTIMIZERS, Setup
from dsrun.words import GIB

if TYPE_CHECKING:
    from dsrun.planner.trace.request import TraceResult

CONTEXT_GIB = 0.9
"""The CUDA context and its kernels, which torch's own counters leave out (0.6-0.9 on A100, 1.3 on V100)."""
NCCL_GIB = 0.9
"""NCCL's buffers, if there is more than one rank."""
HELD_AT_END = 0.1
"""Share of the activations that is left when backward ends: the first blocks' and the embedding's."""
FIXED_LENGTHS, VARIABLE_LENGTHS = 1.1, 2.0
"""Factor from memory in use at the peak of forward and backward to what torch's allocator reserves: with examples of
one length, and with batches padded to their longest, whose holes fit nothing (read from published nvidia-smi
figures)."""
REUSED = {"deepspeed": 0.7, "fsdp": 0.7, "torch": 0.8}
"""Share of the smaller of (forward and backward, step) that fits into what the larger one left reserved."""
UNPACKED = {"nf4": 2.0, "nf4-single": 2.0, "int8": 2.0, "gptq4": 6.0}
"""Bytes a weight of the one matrix that is being turned into 16 bits (gptq4: by way of 32-bit integers)."""
DDP_BUCKET = 500_000_000
"""Elements that stage 0 reduces at once (runtime/engine.py: MEMORY_OPT_ALLREDUCE_SIZE)."""

AT: dict[str, dict[str, float]] = {
    "turn": {
        "activations": 1, "logits": 1, "gathered": 1, "viewed": 1, "buckets": 1, "carried": 1,
        "dequantized_head": 1,
    },
    "middle": {
        "activations": 1, "layer": 1, "scores": 1, "gathered": 1, "viewed": 1, "experts": 1, "buckets": 1, "carried": 1,
        "reduce_copy": 1, "dequantized": 1, "fp8_casts": 1, "exchanged": 1,
    },
    "end": {
        "activations": HELD_AT_END, "layer": 1, "gathered": 0.5, "viewed": HELD_AT_END, "experts": 1, "buckets": 1,
        "gradients": 1, "reduce_copy": 1,
    },
    "step": {"step": 1},
}  # fmt: skip
"""Moment -> the share of each temporary term that is there."""
AT_ON_CPU: dict[str, dict[str, float]] = {
    "turn": AT["turn"],
    "middle": {name: share for name, share in AT["middle"].items() if name != "reduce_copy"},
    "end": {**AT["end"], "gathered": 0, "experts": 0, "gloo_copy": 1, "kept_by_malloc": 1},
    "step": {**AT["step"], "kept_by_malloc": 1},
}
"""Moment -> the share of each temporary term, for ranks on CPUs."""
WITH_LENGTHS = ("activations", "layer", "scores", "logits", "exchanged")
"""Temporary terms whose size depends on how long the examples of a batch are."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU."""

    terms: dict[str, float]
    """Name -> bytes, every term once (terms.GPU says what each is)."""
    peaks: dict[str, float]
    """Moment -> bytes in use."""
    reserved: float
    """Bytes that torch's allocator reserves, with the holes between."""
    smi: float
    """Bytes that nvidia-smi shows, with CUDA's context and NCCL."""
    held: float
    """Bytes that are there all the time."""
    traced: TraceResult | None = None
    """What a trace says beside the formulas: then peaks, reserved and smi are the trace's."""

    @property
    def allocated(self) -> float:
        """The largest peak, as torch.cuda.max_memory_allocated shows it."""
        return max(self.peaks.values())

    @property
    def needed(self) -> float:
        """The largest peak that there is no way around: what is laid out flat goes through the host without room."""
        return self.peaks[self.decisive]

    @property
    def decisive(self) -> str:
        """The moment of that peak."""
        return max((name for name in self.peaks if name != "flat"), key=lambda name: self.peaks[name])

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])


def gpu_memory(setup: Setup, *, optimizer_states: bool = True, room: float = math.inf) -> GpuMemory:
    """The GPU memory of a setup.

    optimizer_states: False before the first step, while Adam's moments don't exist (ZeRO-1 and 2 make them there).
    room: bytes for what torch allocates: the flat copy of the weights is made on the GPU only where it fits.
    """
    held, passing = persistent(setup), temporary(setup)
    if not optimizer_states:
        held.pop("moments", None)
    states = math.fsum(held.values())
    above = within_step(setup, passing)
    if not optimizer_states:
        above["step"] = 0.0
    peaks = {moment: states + size for moment, size in above.items()}
    peaks["start"] = starting(setup, held)
    flat = flattening(setup, held)
    peaks["flat"] = flat if flat <= room else 0.0
    reserved = max(*peaks.values(), states + _reserved(setup, passing, above))
    smi = reserved + untracked_gib(setup.gpus) * GIB
    return GpuMemory({**held, **passing}, peaks, reserved, smi, states)


def within_step(
    setup: Setup, passing: Mapping[str, float], *, names: Container[str] | None = None, cpu: bool = False
) -> dict[str, float]:
    """Moment -> bytes of the temporary terms that are there.

    names: of these terms alone. cpu: ranks on CPUs, where gloo copies what it reduces at the end. Stage 0 reduces after
    backward, the others in it.
    """
    sizes = {
        moment: math.fsum(
            share * passing.get(name, 0.0) for name, share in shares.items() if names is None or name in names
        )
        for moment, shares in (AT_ON_CPU if cpu else AT).items()
    }
    if (
        setup.engine == "deepspeed"
        and setup.stage == 0
        and not cpu
        and (names is None or "reduce_copy" in names)
    ):
        sizes["middle"] -= passing.get("reduce_copy", 0.0)
    return sizes


def _reserved(setup: Setup, passing: Mapping[str, float], above: Mapping[str, float]) -> float:
    """Bytes that torch's allocator reserves beyond those held all the time.

    It keeps what forward and backward needed, with holes, and the step reuses a part of it. Only what has an example's
    length leaves the larger holes of padded batches: gathered weights and buckets are of one size.
    """
    lengths = within_step(setup, passing, names=WITH_LENGTHS)
    padded = setup.variable_lengths and setup.engine != "torch"
    more = VARIABLE_LENGTHS - FIXED_LENGTHS if padded else 0.0
    both = max(FIXED_LENGTHS * above[moment] + more * lengths[moment] for moment in ("turn", "middle", "end"))
    # Of the smaller of the two, the part that doesn't fit into the holes of the larger is reserved on top.
    return max(both, above["step"]) + (1 - REUSED[setup.engine]) * min(both, above["step"])


def untracked_gib(ranks: int) -> float:
    """GiB of a GPU that torch doesn't count: CUDA's context and, with several ranks, NCCL's buffers."""
    return CONTEXT_GIB + (NCCL_GIB if ranks > 1 else 0)


def persistent(setup: Setup) -> dict[str, float]:
    """Terms held from the first step to the last: weights, master copy, optimizer states, standing buffers."""
    if setup.engine == "fsdp" and setup.offloads:
        return {"weights": 0.0}  # of everything only the layer at work
    trained, width, shards = setup.trained, setup.weight_bytes, setup.optimizer_shards
    own = (
        setup.own_share if setup.shards == 1 else 1.0
    )  # at stage 3 the ranks with the same experts share those
    held = {"weights": own * setup.base_bytes / setup.shards if setup.parameter_device == "gpu" else 0.0}
    if setup.method != "full":
        held["adapters"] = (setup.adapter_bytes * setup.adapters + width * setup.copies) / setup.shards
    fp32_states, bit16_states = OPTIMIZERS[setup.optimizer]
    if setup.engine != "deepspeed":
        # LoRA's own weights are fp32 there: they need no master copy, and their states are fp32 even under "pure".
        others = trained - setup.adapters
        states = bit16_states if setup.precision == "pure" else fp32_states
        held["moments"] = (fp32_states * setup.adapters + states * others) / shards
        if setup.has_master:
            held["master"] = 4 * others / shards
        return held
    if not setup.offloads_optimizer:
        if setup.has_master:
            held["master"] = 4 * trained / shards
        held["moments"] = fp32_states * trained / shards
    if setup.stage == 3:
        if setup.secondary > 1:
            held["secondary"] = setup.base_bytes / min(setup.secondary, setup.gpus)
        held["reduce_bucket"] = setup.reduce_bucket * width  # stage3.py: __ipg_bucket_flat_buffer
        if not setup.offloads_optimizer:
            held["gradient_shard"] = width * setup.share
    elif setup.offloads_optimizer:
        held["offload_scratch"] = width * min(_largest_trained(setup), setup.shape.parameters)
    if setup.stage == 1 and setup.fp32_gradients:
        held["fp32_gradients"] = 4.0 * trained * setup.own_share
    return held


def temporary(setup: Setup) -> dict[str, float]:
    """Terms that come and go within a step."""
    by_engine = {"deepspeed": _stage3 if setup.stage == 3 else _below_stage3, "fsdp": _fsdp, "torch": _torch}
    terms = {**activations(setup), "logits": logits(setup), **by_engine[setup.engine](setup)}
    if setup.exchanged:
        terms["exchanged"] = 2 * setup.exchanged
    if setup.fp8 and setup.engine == "fsdp":
        # An MLP's input and weight in 8 bits, each in the two orders that backward's products want.
        tokens, shape = setup.tokens, setup.shape
        terms["fp8_casts"] = 2.0 * (tokens * shape.intermediate + shape.hidden * shape.intermediate)
    if setup.quantized:
        # One matrix at a time becomes 16 bits wide; GPTQ's kernels unpack it to 32-bit integers first.
        bytes_a_weight = UNPACKED[setup.quantized] + (2 if setup.dequantized_twice else 0)
        terms["dequantized"] = bytes_a_weight * setup.shape.hidden * setup.shape.intermediate
        if setup.quantized_head:
            terms["dequantized_head"] = bytes_a_weight * setup.shape.embedding
        elif setup.kbit_casts:
            # autocast makes the fp32 output weights 16 bits wide, and keeps the copy for backward.
            terms["dequantized_head"] = 2.0 * setup.shape.embedding
    return terms


def _below_stage3(setup: Setup) -> dict[str, float]:
    """Gradients and buckets of stages 0 to 2."""
    width, trained, stage = setup.weight_bytes, setup.trained, setup.stage
    passing: dict[str, float] = {}
    # Stage 2 keeps its share of the gradients; with offload that goes to the host as it comes.
    gradients = width * (setup.share if stage == 2 else trained * setup.own_share)
    if stage == 2 and setup.offloads_optimizer:
        gradients = 0.0
    if stage >= 1:
        passing["buckets"] = setup.reduce_bucket * width * (2 if setup.overlap_comm else 1)
    if setup.gpus > 1:
        # What is reduced is laid out flat first (stage_1_and_2.py: allreduce_bucket; engine.py:
        # buffered_allreduce_fallback, with a size of its own).
        passing["reduce_copy"] = float(width * min(setup.reduce_bucket if stage else DDP_BUCKET, trained))
    again = setup.grad_accum > 1
    if again and gradients:
        passing["carried"] = gradients
    passing["gradients"] = gradients * (2 if again and stage == 2 else 1) + _large_gradient(setup)
    passing["step"] = 0.0 if setup.offloads_optimizer else _step(setup, gradients)
    return passing


def _step(setup: Setup, gradients: float) -> float:
    """Temporaries of the optimizer's step below stage 3, on the GPU.

    Stage 0 in 16 bits makes an fp32 copy of every gradient, and then one flat one of all (fp16/fused_optimizer.py).
    Stages 1 and 2 flatten their share and turn it into fp32 while the list of it still lives (stage_1_and_2.py).
    """
    fp32, unfused = setup.precision == "fp32", _unfused_bytes(setup)
    if setup.stage == 0:
        return gradients + (unfused if fp32 else 8.0) * setup.trained
    flat = gradients + (setup.weight_bytes + (0 if fp32 else 4)) * setup.share
    # Stage 2 drops its list of them before the optimizer steps (averaged_gradients[i] = None).
    return max(flat, (0.0 if setup.stage == 2 else gradients) + (4 + unfused) * setup.share)


def _stage3(setup: Setup) -> dict[str, float]:
    width, shape = setup.weight_bytes, setup.shape
    passing: dict[str, float] = {}
    if setup.gpus > 1 or setup.parameter_device != "gpu":
        # What backward uses again within max_reuse elements stays gathered at the turn: half that distance, as it is
        # walked there and back (partitioned_param_coordinator.py), and the output weights, which are in use.
        own = setup.own_weights
        within_reuse = min(own - shape.embedding, setup.max_reuse // 2)
        # A product with experts takes their tensor through a view, which autograd keeps until backward: letting go of
        # the weight (partition_parameters.py: free_param) frees nothing then, and backward gathers them once more.
        experts = 0 if setup.looped_experts else shape.in_experts // setup.ep
        viewed = experts * (1 - setup.recomputed_share)
        gathered = setup.held_bytes(within_reuse) * (1 - viewed / own) + width * shape.embedding
        if experts and shape.experts:
            passing["viewed"] = setup.held_bytes(viewed)
            # A block's experts come together, however many they are.
            at_once = experts // (shape.layers - shape.experts.dense)
            passing["experts"] = setup.held_bytes(max(0, at_once - within_reuse))
        if not setup.zero_init:
            # Without zero.Init's own linear function, autograd holds a view of each gathered weight (zero/linear.py),
            # but for blocks that are computed again.
            whole = setup.held_bytes(own) * (1 - setup.recomputed_share)
            gathered = max(gathered, whole - passing.get("viewed", 0.0))
        passing["gathered"] = gathered
    if setup.gpus > 1:
        # torch.cat in coalesced_collectives.py
        passing["reduce_copy"] = float(width * min(setup.reduce_bucket, max(setup.trained, 1)))
    passing["gradients"] = _large_gradient(setup)
    group = min(setup.sub_group, setup.share)
    passing["step"] = 0.0 if setup.offloads_optimizer else max(6, 4 + _unfused_bytes(setup)) * group
    return passing


def _fsdp(setup: Setup) -> dict[str, float]:
    """The parts that are gathered at one time, and the share of the gradients with the part that is reduced.

    Parts are the embedding, a layer, the output layer; a tied embedding stays with the model. torch gathers a part into
    one flat tensor and copies its weights out of it, while the next part is gathered. Reducing one takes its gradients,
    in the type that is computed with, and their flat fp32 copy; by then its own weights are gone.
    """
    width, whole = setup.computed_bytes, _gradient_bytes(setup)
    layer, embedding, tied = setup.shape.layer_parameters, setup.shape.embedding, setup.shape.tied
    large = max(layer, embedding)
    layer_bytes, embedding_bytes = setup.held_bytes(layer), float(width * embedding)  # quantized as they are
    gathered = 2 * max(layer_bytes, embedding_bytes) + layer_bytes
    if tied:
        gathered = 2 * embedding_bytes + (3 if layer > embedding else 2) * layer_bytes
    gradients = 0.0 if setup.offloads else whole / setup.shards
    reduced = large if setup.method == "full" else embedding if setup.copies else 0
    beside = 2 * layer if tied or layer > embedding else 0
    at_end = gradients + (4 + width) * reduced + width * (beside + (embedding if tied else 0))
    passing = {
        "gathered": gathered,
        "gradients": max(gradients, at_end - AT["end"]["gathered"] * gathered),
        "step": 0.0 if setup.offloads else gradients + _foreach(setup),
    }
    carried = whole if setup.whole_gradients else gradients
    return {**passing, "carried": carried} if setup.grad_accum > 1 else passing


def _torch(setup: Setup) -> dict[str, float]:
    gradients = float(_gradient_bytes(setup))
    passing = {"gradients": gradients, "step": gradients + _foreach(setup)}
    if setup.precision == "amp":
        passing["gathered"] = 2.0 * setup.shape.parameters  # autocast keeps the 16-bit copies it made
    return {**passing, "carried": gradients} if setup.grad_accum > 1 else passing


def _unfused_bytes(setup: Setup) -> int:
    """Bytes per stepped weight of the fp32 temporary that torch's own Adam makes of DeepSpeed's master copy."""
    return 0 if setup.fused_adam else 4


def _foreach(setup: Setup) -> float:
    """Bytes of the temporary that torch's own Adam makes as it steps a rank's weights all at once (optim/adam.py:
    _multi_tensor_adam, _foreach_sqrt): one more moment, as wide as they are.

    With that, FSDP takes 10 bytes a weight over its ranks in pure bf16 and 20 in mixed precision, as was measured.
    """
    if setup.fused_adam:
        return 0.0
    width = 2.0 if setup.precision == "pure" else 4.0
    return (4.0 * setup.adapters + width * (setup.trained - setup.adapters)) / setup.shards


def _gradient_bytes(setup: Setup) -> float:
    """Every gradient once, on a rank that shares none."""
    return setup.adapter_bytes * setup.adapters + setup.weight_bytes * (setup.trained - setup.adapters)


def _largest_trained(setup: Setup) -> int:
    """Elements of the largest weight that gets a gradient. LoRA's own are small."""
    return setup.shape.largest if setup.method == "full" else setup.shape.embedding if setup.copies else 0


def _large_gradient(setup: Setup) -> float:
    """The gradient of a weight that is larger than the bucket: whole, beside it."""
    return float(setup.weight_bytes * _largest_trained(setup))


def starting(setup: Setup, held: Mapping[str, float]) -> float:
    """The most that initialisation has to hold.

    Stages 1 and 2 clone their share of the flat weights before it goes to the host or becomes fp32
    (stage_1_and_2.py), and then make fp32 gradients of zeros beside the master copy.
    """
    if setup.engine == "deepspeed" and setup.stage in (1, 2):
        clone = setup.weight_bytes * setup.share
        return held["weights"] + (
            clone if setup.offloads_optimizer else 4 * setup.share + max(clone, 4 * setup.share)
        )
    names = ["weights", "master"]
    names += ["moments", "reduce_bucket"] if setup.engine == "deepspeed" and setup.stage == 3 else []
    return math.fsum(held.get(name, 0.0) for name in names)


def flattening(setup: Setup, held: Mapping[str, float]) -> float:
    """Bytes that stages 1 and 2 hold while they lay the trained weights out flat beside themselves.

    They do so on the GPU if it has room for both, else through the host (stage_1_and_2.py: flatten_on_accelerator).
    """
    if setup.engine != "deepspeed" or setup.stage not in (1, 2) or not setup.flattens_on_gpu:
        return 0.0
    return held["weights"] + setup.weight_bytes * setup.trained

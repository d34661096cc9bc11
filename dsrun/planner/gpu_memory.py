"""What a rank holds on its GPU: every term by name, and the peaks that follow.

Psi is the number of weights, N the ranks that share something. Where a term says a file, it is DeepSpeed 0.19's. The
terms are added at four moments - the turn from forward to backward, the middle of backward, its end, and the
optimizer's step - and the largest decides. A fifth, the start, holds what only initialisation needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsrun.planner.setup import OPTIMIZERS, Setup

GIB = 2**30
CONTEXT_GIB = 0.9
"""The CUDA context and its kernels, beside torch's own counters (0.6-0.9 on A100, 1.3 on V100)."""
NCCL_GIB = 0.9
"""NCCL's buffers, where there is more than one rank."""
HELD_AT_END = 0.1
"""Share of the activations that is left when backward ends: the first blocks' and the embedding's."""
FIXED_LENGTHS, VARIABLE_LENGTHS = 1.1, 2.0
"""How much more torch's allocator holds than is in use at the peak of forward and backward: with rows of one length,
and with batches padded to their longest row, whose holes fit nothing (a reading of published nvidia-smi figures)."""
REUSED = {"deepspeed": 0.7, "fsdp": 0.7, "torch": 0.8}
"""Share of the smaller of (forward and backward, step) that finds room in what the larger one left."""

DDP_BUCKET = 500_000_000
"""Elements that stage 0 reduces at once (engine.py: MEMORY_OPT_ALLREDUCE_SIZE)."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on one GPU.

    terms: name -> bytes, every one once (TERMS in dsrun.planner.terms says what each is). peaks: moment -> bytes in
    use then. allocated: the largest of them, what torch.cuda.max_memory_allocated shows; it decides whether it fits.
    reserved: what torch holds, with the holes between. smi: what nvidia-smi shows: with CUDA's context and NCCL.
    held: what is there all the time.
    """

    terms: dict[str, float]
    peaks: dict[str, float]
    allocated: float
    reserved: float
    smi: float
    held: float

    @property
    def moment(self) -> str:
        """When the peak is reached."""
        return max(self.peaks, key=lambda name: self.peaks[name])


def gpu_memory(setup: Setup, *, optimizer_states: bool = True) -> GpuMemory:
    """The memory of a set-up.

    optimizer_states: False before the first step, while Adam's moments don't exist yet (ZeRO-1 and 2 make them there).
    """
    held = persistent(setup)
    if not optimizer_states:
        held.pop("moments", None)
    passing = temporary(setup)
    states = sum(held.values())
    t = passing.get
    gathered = t("gathered", 0.0)
    moving = t("buckets", 0.0) + t("carried", 0.0)
    activations, layer = passing["activations"], passing["layer"]
    turn = activations + passing["logits"] + gathered + moving
    # Stage 0 reduces after backward, the others in it.
    copied = t("reduce_copy", 0.0) if setup.stage or setup.engine != "deepspeed" else 0.0
    middle = activations + layer + passing.get("scores", 0.0) + gathered + moving + copied
    end = (
        HELD_AT_END * activations
        + layer
        + passing["gradients"]
        + t("buckets", 0.0)
        + t("reduce_copy", 0.0)
        + gathered / 2
    )
    step = passing["step"] if optimizer_states else 0.0
    start = starting(setup, held)
    peaks = {
        "turn": states + turn,
        "middle": states + middle,
        "end": states + end,
        "step": states + step,
        "start": start,
    }
    allocated = max(peaks.values())
    both = max(turn, middle, end) * (
        VARIABLE_LENGTHS if setup.variable_lengths and setup.engine != "torch" else FIXED_LENGTHS
    )
    reserved = max(allocated, states + max(both, step) + (1 - REUSED[setup.engine]) * min(both, step))
    smi = reserved + around(setup.gpus) * GIB
    return GpuMemory({**held, **passing}, peaks, allocated, reserved, smi, states)


def around(ranks: int) -> float:
    """GiB of a GPU that torch does not count: CUDA's context and, among several ranks, NCCL's buffers."""
    return CONTEXT_GIB + (NCCL_GIB if ranks > 1 else 0)


def persistent(setup: Setup) -> dict[str, float]:
    """What is held from the first step to the last: weights, master copy, optimizer states, standing buffers."""
    held: dict[str, float] = {}
    psi, trained, width, ranks = setup.shape.parameters, setup.trained, setup.weight_bytes, setup.gpus
    held["weights"] = setup.base_bytes / setup.shards if setup.parameter_device == "gpu" else 0.0
    if setup.method != "full":
        held["adapters"] = (_adapter_bytes(setup) * setup.adapters + width * setup.copies) / setup.shards
    optimizer_ranks = ranks if setup.engine == "fsdp" or setup.stage >= 1 else 1
    fp32_states, bit16_states = OPTIMIZERS[setup.optimizer]
    if setup.engine == "deepspeed":
        if setup.optimizer_device == "gpu":
            # Stage 0 in fp32 is the only one that trains the weights themselves (engine.py).
            if setup.precision != "fp32" or setup.stage >= 1:
                held["master"] = 4 * trained / optimizer_ranks
            held["moments"] = fp32_states * trained / optimizer_ranks
        if setup.stage == 3:
            held["reduce_bucket"] = setup.reduce_bucket * width  # stage3.py: __ipg_bucket_flat_buffer
            if setup.optimizer_device == "gpu":
                held["gradient_shard"] = width * trained / ranks
        elif setup.optimizer_device != "gpu":
            held["offload_scratch"] = width * min(_largest_trained(setup), psi)
        if setup.stage == 1 and setup.fp32_gradients:
            held["fp32_gradients"] = 4.0 * trained
    else:
        states = bit16_states if setup.precision == "pure" else fp32_states
        held["moments"] = (
            fp32_states * setup.adapters + states * (trained - setup.adapters)
        ) / optimizer_ranks
        if setup.precision in ("fp16", "bf16"):
            held["master"] = 4 * (trained - setup.adapters) / optimizer_ranks
    return held


def _adapter_bytes(setup: Setup) -> int:
    """PEFT makes LoRA's weights fp32 (autocast_adapter_dtype); DeepSpeed's engine casts them with the others."""
    return setup.weight_bytes if setup.engine == "deepspeed" else 4


def _gradient_bytes(setup: Setup) -> float:
    """Every gradient once, on one rank that divides nothing."""
    return _adapter_bytes(setup) * setup.adapters + setup.weight_bytes * (setup.trained - setup.adapters)


def temporary(setup: Setup) -> dict[str, float]:
    """What comes and goes within a step."""
    passing = activations(setup)
    passing["logits"] = setup.logits_bytes * setup.tokens * setup.shape.vocab
    width = setup.weight_bytes
    trained = setup.trained
    fused = 0 if setup.fused_adam else 4
    ranks = setup.gpus
    again = setup.grad_accum > 1
    if setup.engine == "deepspeed":
        if setup.stage == 3:
            _stage3(setup, passing, fused)
        else:
            shares = ranks if setup.stage == 2 else 1
            offloaded = setup.optimizer_device != "gpu"
            # Stage 2 keeps its share; with offload the share goes to the host as it comes.
            gradients = 0.0 if offloaded and setup.stage == 2 else width * trained / shares
            if setup.stage >= 1:
                passing["buckets"] = setup.reduce_bucket * width * (2 if setup.overlap_comm else 1)
            if ranks > 1:
                # What is reduced is laid out flat first (stage_1_and_2.py: allreduce_bucket; engine.py:
                # buffered_allreduce_fallback, with a number of its own).
                at_once = setup.reduce_bucket if setup.stage else DDP_BUCKET
                passing["reduce_copy"] = float(width * min(at_once, trained))
            if again and gradients:
                passing["carried"] = gradients
            both = again and setup.stage == 2 and not offloaded
            passing["gradients"] = gradients * (2 if both else 1) + _large_gradient(setup)
            passing["step"] = 0.0 if offloaded else _step(setup, gradients, fused)
    elif setup.engine == "fsdp":
        passing["gathered"] = 2.0 * 2 * max(setup.shape.layer_parameters, setup.shape.embedding)
        gradients = _gradient_bytes(setup) / ranks
        passing["gradients"] = gradients + 2.0 * setup.shape.layer_parameters
        if again:
            passing["carried"] = gradients
        passing["step"] = gradients + fused * trained / ranks
    else:
        if setup.precision == "amp":
            passing["gathered"] = 2.0 * setup.shape.parameters  # autocast keeps the 16-bit copies it made
        gradients = _gradient_bytes(setup)
        passing["gradients"] = float(gradients)
        if again:
            passing["carried"] = float(gradients)
        passing["step"] = gradients + (fused / 2 if setup.precision == "pure" else fused) * trained
    return passing


def _stage3(setup: Setup, passing: dict[str, float], fused: int) -> None:
    width, share = setup.weight_bytes, setup.trained / setup.gpus
    # What backward will use again within max_reuse elements stays gathered at the turn: half that distance, as it is
    # walked there and back (partitioned_param_coordinator.py), and the output weights, which are in use.
    if setup.gpus > 1 or setup.parameter_device != "gpu":
        kept = min(setup.shape.parameters, setup.max_reuse // 2 + setup.shape.embedding)
        if not setup.zero_init and not setup.checkpointing:
            # Without zero.Init's own linear function, autograd holds a view of each gathered weight (zero/linear.py).
            kept = setup.shape.parameters
        passing["gathered"] = float(width * kept)
    bucket = min(setup.reduce_bucket, max(setup.trained, 1))
    if setup.gpus > 1:
        passing["reduce_copy"] = float(width * bucket)  # torch.cat in coalesced_collectives.py
    passing["gradients"] = _large_gradient(setup)
    sub_group = min(setup.sub_group, share)
    passing["step"] = 0.0 if setup.optimizer_device != "gpu" else max(6, 4 + fused) * sub_group


def _largest_trained(setup: Setup) -> int:
    """Elements of the largest weight that gets a gradient. LoRA's own are small."""
    return setup.shape.largest if setup.method == "full" else setup.shape.embedding if setup.copies else 0


def _large_gradient(setup: Setup) -> float:
    """The gradient of a weight that is larger than the bucket: whole, beside it."""
    return float(setup.weight_bytes * _largest_trained(setup))


def _step(setup: Setup, gradients: float, fused: int) -> float:
    """Temporaries of the optimizer's step below stage 3, on the GPU.

    Stage 0 in 16 bits makes an fp32 copy of every gradient and then one flat one of all (fp16/fused_optimizer.py);
    stages 1 and 2 flatten their share and turn it into fp32 while the list of it still lives (stage_1_and_2.py).
    """
    trained = setup.trained
    if setup.stage == 0:
        return gradients + (fused * trained if setup.precision == "fp32" else 8.0 * trained)
    share = trained / setup.gpus
    flat = 0 if setup.precision == "fp32" else 4
    return gradients + max(setup.weight_bytes + flat, 4 + fused) * share


def activations(setup: Setup) -> dict[str, float]:
    """Activations that backward needs: all blocks' or, with checkpointing, their inputs and one block's.

    A token of a Llama block in 16 bits, with flash attention, costs 16 h for the two norms and the residual stream
    (transformers computes norms in fp32), 4 bytes for each element of the queries and the attention's output, of
    the keys and the values, and 8 for each of the gated feed-forward's width. Without a gate (GPT's blocks, whose norms
    torch computes in one kernel): 8 h and 4, and 2 h for the masks of dropout. With those and a width of 4 h that is
    Korthikanti et al.'s 34 s b h (arXiv 2205.05198) less attention's scores.
    """
    shape, tokens = setup.shape, setup.tokens
    norms, inner = (16, 8) if shape.gated else (8 + 2 * shape.dropout, 4)
    scale = 2 if setup.precision == "fp32" else 1
    token = scale * (4 * (shape.query_width + shape.kv_width) + inner * shape.intermediate)
    # Llama's norms are in fp32 anyway: without the casts, 24 h and not twice 16.
    token += (24 if scale == 2 and shape.gated else scale * norms) * shape.hidden
    layer = float(token * tokens)
    scores = float(scale * shape.heads * setup.seq_len * tokens)
    if setup.checkpointing:
        passing = {"activations": float(2 * scale * shape.hidden * shape.layers * tokens), "layer": layer}
        if not setup.flash:
            passing["scores"] = 16 / scale * scores
    else:
        passing = {"activations": shape.layers * layer, "layer": layer}
        if not setup.flash:
            passing["activations"] += shape.layers * 5 * scores
    return passing


def starting(setup: Setup, held: dict[str, float]) -> float:
    """The most that initialisation holds.

    Stages 1 and 2 clone their share of the flat weights before it goes to the host or becomes fp32
    (stage_1_and_2.py), and then make fp32 gradients of zeros beside the master copy.
    """
    weights = held["weights"]
    share = setup.trained / setup.gpus
    if setup.engine != "deepspeed" or setup.stage == 0:
        return weights + held.get("master", 0.0)
    if setup.stage == 3:
        return weights + held.get("master", 0.0) + held.get("moments", 0.0) + held.get("reduce_bucket", 0.0)
    if setup.optimizer_device != "gpu":
        return weights + setup.weight_bytes * share
    return weights + 4 * share + max(setup.weight_bytes * share, 4 * share)

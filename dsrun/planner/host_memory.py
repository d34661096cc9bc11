"""The main memory of a node: every term by name, and the peaks that follow.

With GPUs it is what offloading keeps there, what loading passes through it, and each process's own. Psi is the number
of weights, T those that are trained, w the bytes of a weight; a node has its ranks' share. Files are DeepSpeed 0.19's.

On a CPU the "GPU" memory is the host's, and offloading moves bytes from one place in it to another: there the terms of
gpu_memory are added to the host's, with the differences that torch and DeepSpeed have there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsrun.files import WEIGHT_FILE_BYTES
from dsrun.planner.disk import copied_bytes
from dsrun.planner.gpu_memory import DDP_BUCKET, HELD_AT_END, persistent, temporary, within_step
from dsrun.planner.setup import OPTIMIZERS, Setup
from dsrun.words import GIB

PROCESS_GIB = 3.5
"""Python, CUDA's context and the libraries, per rank (fitted to published runs: 3 to 4)."""
CPU_PROCESS_GIB = 0.46
"""A rank's process without CUDA: 0.36 GiB once the libraries are loaded and 0.10 that they take later (the mean of a
tiny model's seven presets in bench/planner_cpu.py: 0.08 without ZeRO, 0.10 to 0.11 with it)."""
CUDA_LIBRARIES_GIB = 0.36
"""Memory that torch's CUDA build maps beyond its CPU build in a rank on CPUs: two ranks of chatglm2-tiny took 2.04 GiB,
and 1.31 had been predicted from runs with the CPU build (torch 2.13)."""
SMALL_BYTES = 2**25
"""Blocks below 32 MiB are parts of malloc's heap, which it keeps when they are freed; larger ones it asks the kernel
for, one by one, and gives back at once (glibc: DEFAULT_MMAP_THRESHOLD_MAX)."""
NOT_GIVEN_BACK = 1.5
"""Memory that malloc has not given back when the gradients are reduced, as a multiple of the gathered weights
(they and their gradients come and go in two threads; 1.4 to 1.9 in bench/planner_cpu.py)."""
PARAMETER_BUFFERS = 5
"""Buffers of the parameter swapper, each of a rank's share of the largest weight (runtime/zero/offload_config.py;
dsrun's template sets the size, as DeepSpeed's own 1e8 elements may be too small)."""
MAX_IN_CPU = 1_000_000_000
"""Elements a rank keeps in memory although the weights go to NVMe (offload_param.max_in_cpu, its default)."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of main memory on one node (the first: rank 0 gathers the model there)."""

    terms: dict[str, float]
    """Name -> bytes, every term once (terms.HOST says what each is)."""
    peaks: dict[str, float]
    """Moment -> bytes in use: training, loading, checkpoint, export."""

    @property
    def peak(self) -> float:
        return max(self.peaks.values())

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])


def host_memory(
    setup: Setup, *, accelerator: str = "cuda", native_pinning: bool = False, cuda_build: bool = False
) -> HostMemory:
    """The main memory that a setup needs on each of its nodes.

    accelerator: "cuda", or "cpu" where DeepSpeed runs without a GPU. native_pinning: DS_PIN_MEMORY_BACKEND=native,
    which pins exactly what is asked for; torch's own allocator rounds every block up to a power of two. cuda_build: of
    torch; beside GPUs that is counted anyway.
    """
    return (
        _on_cpu(setup, cuda_build=cuda_build)
        if accelerator == "cpu"
        else _beside_gpus(setup, native_pinning=native_pinning)
    )


def offloaded(setup: Setup) -> dict[str, float]:
    """Main memory for offloading, in bytes per node, every pinned block at its own size."""
    if not setup.offloads:
        return {}
    trained, width, ranks = setup.trained / setup.nodes, setup.weight_bytes, setup.ranks_per_node
    held: dict[str, float] = {}
    if setup.engine == "fsdp":  # CPUOffloadPolicy: each rank's share of all three
        copies = setup.replicas / setup.nodes
        weights = setup.base_bytes + setup.adapter_bytes * setup.adapters + width * setup.copies
        return {
            "weights": copies * weights,
            "moments": copies * OPTIMIZERS[setup.optimizer][0] * setup.trained,
            "gradients": copies * 4 * setup.trained,
        }
    if setup.optimizer_device == "cpu":
        held["master"] = 4 * trained
        held["moments"] = OPTIMIZERS[setup.optimizer][0] * trained
        held["gradients"] = 4 * trained  # stage_1_and_2.py, stage3.py: initialize_optimizer_states
    elif setup.optimizer_device == "nvme":
        # swap_tensor/optimizer_utils.py: every buffer holds the largest sub-group in fp32.
        held["optimizer_buffers"] = setup.nvme_buffers * 4.0 * min(setup.sub_group, setup.share) * ranks
    if setup.stage < 3:
        held["staging"] = width * trained  # stage_1_and_2.py: param_buffer_of_bit16_for_cpu_offload_groups
        held["scratch"] = float(width * _largest(setup) * ranks)  # temp_grad_buffer_for_cpu_offload
        if setup.grad_accum > 1:
            held["accumulated"] = width * trained  # stage_1_and_2.py: accumulated_grads_in_cpu
        return held
    if setup.offloads_optimizer:
        held["gradient_shard"] = width * trained  # stage3.py: grad_partitions_flat_buffer
    if setup.parameter_device == "cpu":
        # partition_parameters.py pins every share by itself; stage3.py then copies those with gradients into one flat
        # buffer, and what was pinned stays with torch's allocator. Published LoRA runs, whose weights are not copied,
        # hold as much.
        weights = width * (setup.shape.parameters + setup.adapters + setup.copies) / setup.nodes
        held["weights"] = held["pinned_twice"] = weights
    elif setup.parameter_device == "nvme":
        held["weights"] = float(width * min(MAX_IN_CPU, setup.share) * ranks)
        held["parameter_buffers"] = float(
            PARAMETER_BUFFERS * width * -(-_largest(setup) // setup.gpus) * ranks
        )
    return held


def _largest(setup: Setup) -> int:
    """Elements of the largest weight with gradients; with a small vocabulary that is not the embedding."""
    return min(max(setup.shape.matrices), setup.trained) if setup.method == "full" else 0


def pinned_blocks(setup: Setup) -> Iterator[tuple[float, float]]:
    """Blocks that torch's allocator pins for offloading: (bytes of a block, number of such blocks on a node)."""
    if setup.activations_device == "cpu" and setup.recomputed:
        yield setup.block_inputs / setup.recomputed, setup.recomputed * setup.ranks_per_node
    if not setup.offloads:
        return
    width, ranks, share = setup.weight_bytes, setup.ranks_per_node, setup.share
    if setup.engine == "fsdp":
        for size, count in setup.shape.matrices.items() if setup.pinned else ():
            yield width * size / setup.shards, count * ranks
        return
    if setup.stage < 3:
        if setup.pinned and setup.offloads_optimizer:
            yield from ((4 * share, 2 * ranks), (width * share, ranks), (width * _largest(setup), ranks))
            if setup.grad_accum > 1 and setup.method == "full":
                for size, count in setup.shape.matrices.items():
                    yield width * size, count / setup.nodes
        return
    if setup.pinned and setup.optimizer_device == "cpu":
        group = min(setup.sub_group, share)
        yield 4 * group, ranks * share / group if group else 0
    if setup.pinned and setup.offloads_optimizer:
        yield width * share, ranks
    if setup.parameter_device == "cpu":
        yield width * share, ranks  # stage3.py pins the flat buffer whatever the config says
        for size, count in setup.shape.matrices.items():
            yield width * size / setup.gpus, count * ranks


def power_of_two(size: float) -> int:
    """Bytes that torch's CachingHostAllocator takes for `size` bytes."""
    return 1 << (int(size) - 1).bit_length() if size >= 1 else 0


def _beside_gpus(setup: Setup, *, native_pinning: bool) -> HostMemory:
    ranks, width = setup.ranks_per_node, setup.weight_bytes
    held = {"processes": PROCESS_GIB * GIB * ranks, **offloaded(setup)}
    if setup.activations_device == "cpu":
        held["block_inputs"] = setup.block_inputs * ranks
    rounding = math.fsum(count * (power_of_two(size) - size) for size, count in pinned_blocks(setup))
    if rounding > 0 and not native_pinning:
        held["pinned_rounding"] = rounding
    # It comes and goes while all else is there; before the export the last one has gone.
    held["checkpoint_copy"] = copy = copied_bytes(setup)
    training = math.fsum(held.values())
    loading = held.get("weights", 0.0) + held.get("pinned_twice", 0.0)
    # from_pretrained makes the model on the host in every process, and DeepSpeed moves it. zero.Init fills each rank's
    # share as it reads, and with FSDP each rank reads its own; the file's pages are the kernel's to take back.
    if setup.quantized is None and setup.engine != "fsdp" and not (setup.stage == 3 and setup.zero_init):
        loading = float(ranks * width * setup.shape.parameters)
    saving = _saving(setup)
    peaks = {
        "training": training,
        "loading": held["processes"] + loading,
        "checkpoint": training - copy + max(saving, copy),
        "export": training - copy + _exporting(setup),
    }
    return HostMemory({**held, "loading_copies": loading, "saving_copies": saving}, peaks)


def _exporting(setup: Setup) -> float:
    """Rank 0 gathers a file of what is exported, and writes it, before the next (training/models/export.py).

    What is trained beside the model is whole there, to be added to each shard.
    """
    weights = setup.shape.parameters
    beside = float(setup.trained) if setup.trained < weights else 0.0
    width = setup.computed_bytes
    return width * beside + min(float(width * weights), WEIGHT_FILE_BYTES)


def _saving(setup: Setup) -> float:
    """Bytes that pass through a node's main memory when a checkpoint is saved.

    torch.save brings one storage at a time to the host, all ranks at once: the flat weights of stages 1 and 2 (rank 0
    alone), the fp32 master copy or a moment of a rank's share. What is offloaded is written from where it is.
    """
    width = setup.weight_bytes
    if setup.engine == "fsdp":  # a tensor at a time, each rank its share
        return float(width * _largest(setup)) / setup.shards * setup.ranks_per_node
    if setup.engine != "deepspeed":
        return float(width * setup.shape.parameters)
    weights = float(width * (setup.trained if setup.stage in (1, 2) else _largest(setup)))
    if setup.stage == 3:
        weights = 0.0
    if setup.offloads_optimizer:
        return weights
    if setup.stage == 0:
        return weights if setup.precision == "fp32" else 4.0 * setup.trained
    return max(weights, 4 * min(setup.sub_group, setup.share) * setup.ranks_per_node)


def _on_cpu(setup: Setup, *, cuda_build: bool) -> HostMemory:
    """The memory of a node without GPUs: a rank's GPU memory and the host's, all in one.

    1. Nothing is pinned (accelerator/cpu_accelerator.py).
    2. A bucket takes no more than is ever written to it, and gloo needs a copy of what it scatters.
    3. malloc keeps what was small when it is freed.
    """
    ranks, width = setup.ranks_per_node, setup.weight_bytes
    held, passing = persistent(setup), temporary(setup)
    touched = float(width * min(setup.reduce_bucket, setup.trained))
    if setup.engine == "fsdp":
        for name, size in offloaded(setup).items():
            held[name] = held.get(name, 0.0) + size / ranks
    if setup.engine == "deepspeed":
        for buffers, name in ((held, "reduce_bucket"), (passing, "buckets")):
            if name in buffers:
                buffers[name] = touched
        if setup.gpus > 1:
            # Laid out flat before it is reduced: allreduce_bucket in stage_1_and_2.py and engine.py (which has a size
            # of its own), coalesced_collectives.py.
            bucket = setup.reduce_bucket if setup.stage else DDP_BUCKET
            passing["reduce_copy"] = float(width * min(bucket, setup.trained))
        for name, size in offloaded(setup).items():
            if name != "pinned_twice":
                held[name] = held.get(name, 0.0) + size / ranks
    if setup.stage == 3 and setup.gpus > 1:
        passing["gloo_copy"] = touched
    passing["kept_by_malloc"] = not_given_back = _not_given_back(setup, passing)
    states = math.fsum(held.values())
    between_steps = ranks * (states + not_given_back)
    processes = (CPU_PROCESS_GIB + (CUDA_LIBRARIES_GIB if cuda_build else 0)) * GIB * ranks
    weights = width * setup.shape.parameters
    if setup.stage == 3 and setup.zero_init:
        loading = (1 + ranks / setup.gpus) * weights
    elif setup.engine == "fsdp":
        loading = float(setup.replicas * weights)
    else:  # stages 1 and 2 flatten the weights beside themselves
        loading = float(ranks * (1 if setup.stage == 0 else 2) * weights)
    copy = copied_bytes(setup)
    peaks = {
        "training": processes + copy + ranks * (states + max(within_step(setup, passing, cpu=True).values())),
        "loading": processes + loading,
        "checkpoint": processes + copy + between_steps,
        "export": processes + between_steps + (_exporting(setup) if setup.shards > 1 else 0),
    }
    # A GPU's gradients and the host's are two terms of one name, and one memory here.
    terms = {name: ranks * (held.get(name, 0.0) + passing.get(name, 0.0)) for name in {**held, **passing}}
    return HostMemory({**terms, "processes": processes, "checkpoint_copy": copy}, peaks)


def _not_given_back(setup: Setup, passing: Mapping[str, float]) -> float:
    """Bytes that malloc has not given back when the gradients are reduced, see SMALL_BYTES.

    If a batch's blocks are larger than that, as much is counted as of the largest batch whose blocks are not.
    """
    width, shape, tokens = setup.weight_bytes, setup.shape, max(1, setup.tokens)
    weights = sum(size * count for size, count in shape.matrices.items() if width * size < SMALL_BYTES)
    inner = min(1.0, SMALL_BYTES / (width * tokens * max(1, shape.intermediate)))
    logits = min(1.0, SMALL_BYTES / (4 * tokens * max(1, shape.vocab)))
    return (
        NOT_GIVEN_BACK * min(passing.get("gathered", 0.0), width * weights)
        + (1 - HELD_AT_END) * inner * passing["activations"]
        + logits * passing["logits"]
    )

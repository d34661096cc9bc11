"""What a node holds in its main memory: every term by name, and the peaks that follow.

With GPUs it is what offloading keeps there, what loading passes through it, and each process's own. Psi is the number
of weights, P of those that are trained, w the bytes of one that is computed with; a node has the share of its ranks.
Where a term says a file, it is DeepSpeed 0.19's.

On a CPU the "GPU" memory is the host's, and DeepSpeed's offloading moves bytes from one place in it to another: there
the terms of gpu_memory are added to those of the host, with the differences that torch and DeepSpeed have there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsrun.planner.gpu_memory import DDP_BUCKET, GIB, HELD_AT_END, persistent, temporary
from dsrun.planner.setup import OPTIMIZERS, Setup
from dsrun.planner.shape import Shape

PROCESS_GIB = 3.5
"""Python, CUDA's context and the libraries, a rank (fitted to published runs: 3 to 4)."""
CPU_PROCESS_GIB, CPU_ZERO_GIB = 0.47, 0.08
"""The same without CUDA: 0.25 GiB once the libraries are loaded, 0.22 that they take later, and what ZeRO loads on top
(bench/planner_cpu.py)."""
SMALL_BYTES = 2**25
KEPT = 1.5
"""How much of the gathered weights glibc's malloc has not given back when the gradients are reduced, as a multiple of
them (they and their gradients come and go in two threads; 1.4 to 1.9 in bench/planner_cpu.py)."""
PARAMETER_BUFFERS = 5
"""Buffers of the parameters' swapper, of a rank's share of the largest weight each (runtime/zero/offload_config.py;
dsrun's template sets the size, as DeepSpeed's own 1e8 elements may be too small)."""
MAX_IN_CPU = 1_000_000_000
"""Elements a rank keeps in memory although the weights go to NVMe (offload_param.max_in_cpu, its default)."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of main memory on one node (the first: rank 0 gathers the model there).

    terms: name -> bytes, every one once. peaks: moment -> bytes in use then. peak: the largest of them.
    """

    terms: dict[str, float]
    peaks: dict[str, float]
    peak: float

    @property
    def moment(self) -> str:
        """When the peak is reached."""
        return max(self.peaks, key=lambda name: self.peaks[name])


def host_memory(setup: Setup, *, accelerator: str = "cuda", native_pinning: bool = False) -> HostMemory:
    """The main memory that a set-up needs on each of its nodes.

    accelerator: "cuda", or "cpu" where DeepSpeed runs without a GPU. native_pinning: DS_PIN_MEMORY_BACKEND=native,
    which pins exactly what is asked for; torch's own allocator rounds every block up to a power of two.
    """
    return _on_cpu(setup) if accelerator == "cpu" else _beside_gpus(setup, native_pinning=native_pinning)


def ranks_per_node(setup: Setup) -> int:
    """Ranks on a node; the fullest, where they don't divide evenly."""
    return -(-setup.gpus // setup.nodes)


def offloaded(setup: Setup) -> dict[str, float]:
    """What offloading keeps in main memory, in bytes per node, every pinned block at its own size."""
    if setup.engine != "deepspeed" or setup.optimizer_device == setup.parameter_device == "gpu":
        return {}
    trained, width = setup.trained / setup.nodes, setup.weight_bytes
    ranks = ranks_per_node(setup)
    share = setup.trained / setup.gpus
    states = OPTIMIZERS[setup.optimizer][0]
    held: dict[str, float] = {}
    if setup.optimizer_device == "cpu":
        held["master"] = 4 * trained
        held["moments"] = states * trained
        held["gradients"] = 4 * trained  # stage_1_and_2.py, stage3.py: initialize_optimizer_states
    elif setup.optimizer_device == "nvme":
        # swap_tensor/optimizer_utils.py: every buffer holds the largest sub-group in fp32.
        held["optimizer_buffers"] = setup.nvme_buffers * 4.0 * min(setup.sub_group, share) * ranks
    if setup.stage < 3:
        held["staging"] = width * trained  # stage_1_and_2.py: param_buffer_of_bit16_for_cpu_offload_groups
        held["scratch"] = float(width * _largest(setup) * ranks)  # temp_grad_buffer_for_cpu_offload
        if setup.grad_accum > 1:
            held["accumulated"] = width * trained  # stage_1_and_2.py: accumulated_grads_in_cpu
        return held
    if setup.optimizer_device != "gpu":
        held["gradient_shard"] = width * trained  # stage3.py: grad_partitions_flat_buffer
    if setup.parameter_device == "cpu":
        held["weights"] = _weights(setup)
        # partition_parameters.py pins every share by itself; stage3.py then copies those with gradients into one flat
        # buffer, and what was pinned stays with torch's allocator. Published LoRA runs, whose weights are copied
        # nowhere, hold as much.
        held["pinned_twice"] = _weights(setup)
    elif setup.parameter_device == "nvme":
        held["weights"] = float(width * min(MAX_IN_CPU, share) * ranks)
        largest = -(-_largest(setup) // setup.gpus)
        held["parameter_buffers"] = float(PARAMETER_BUFFERS * width * largest * ranks)
    return held


def _weights(setup: Setup) -> float:
    """All weights in the width that is computed with, a node's share."""
    return setup.weight_bytes * (setup.shape.parameters + setup.adapters + setup.copies) / setup.nodes


def _largest(setup: Setup) -> int:
    """Elements of the largest weight with gradients; of small vocabularies it is not the embedding."""
    largest = max(size for size, _ in matrices(setup.shape))
    return min(largest, setup.trained) if setup.method == "full" else 0


def pinned_blocks(setup: Setup) -> Iterator[tuple[float, float]]:
    """What torch's allocator pins for offloading: (bytes of a block, such blocks on a node)."""
    if setup.engine != "deepspeed" or setup.optimizer_device == setup.parameter_device == "gpu":
        return
    width, ranks, share = setup.weight_bytes, ranks_per_node(setup), setup.trained / setup.gpus
    if setup.stage < 3:
        if setup.pinned and setup.optimizer_device != "gpu":
            yield from ((4 * share, 2 * ranks), (width * share, ranks), (width * _largest(setup), ranks))
            if setup.grad_accum > 1 and setup.method == "full":
                for size, count in matrices(setup.shape):
                    yield width * size, count / setup.nodes
        return
    if setup.pinned and setup.optimizer_device == "cpu":
        group = min(setup.sub_group, share)
        yield 4 * group, ranks * share / group if group else 0
    if setup.pinned and setup.optimizer_device != "gpu":
        yield width * share, ranks
    if setup.parameter_device == "cpu":
        yield width * share, ranks  # stage3.py pins the flat buffer whatever the config says
        for size, count in matrices(setup.shape):
            yield width * size / setup.gpus, count * ranks


def matrices(shape: Shape) -> Iterator[tuple[int, int]]:
    """(Elements, how many) of the model's matrices; its vectors are not worth counting."""
    yield shape.hidden * shape.query_width, 2 * shape.layers
    yield shape.hidden * shape.kv_width, 2 * shape.layers
    yield shape.hidden * shape.intermediate, (3 if shape.gated else 2) * shape.layers
    yield shape.embedding, 1 if shape.tied else 2


def power_of_two(size: float) -> int:
    """What torch's CachingHostAllocator takes for `size` bytes."""
    return 1 << (int(size) - 1).bit_length() if size >= 1 else 0


def _beside_gpus(setup: Setup, *, native_pinning: bool) -> HostMemory:
    ranks = ranks_per_node(setup)
    held = {"processes": PROCESS_GIB * GIB * ranks, **offloaded(setup)}
    if not native_pinning:
        rounding = sum(count * (power_of_two(size) - size) for size, count in pinned_blocks(setup))
        if rounding > 0:
            held["pinned_rounding"] = rounding
    training = sum(held.values())
    psi, width = setup.shape.parameters, setup.weight_bytes
    # from_pretrained makes the model on the host in every process, and DeepSpeed moves it. zero.Init fills each rank's
    # share as it reads; the file's own pages are the kernel's to take back.
    whole = setup.quantized is None and not (setup.stage == 3 and setup.zero_init)
    loading = (
        float(ranks * width * psi) if whole else held.get("weights", 0.0) + held.get("pinned_twice", 0.0)
    )
    peaks = {
        "training": training,
        "loading": held["processes"] + loading,
        "checkpoint": training + _written(setup),
        # training/export.py: rank 0 gathers the whole model. Of LoRA only what was added is written.
        "export": training
        + float(width * (psi if setup.method == "full" else setup.adapters + setup.copies)),
    }
    terms = {**held, "loading_copies": loading, "saving_copies": _written(setup)}
    return HostMemory(terms, peaks, max(peaks.values()))


def _written(setup: Setup) -> float:
    """What saving a checkpoint passes through a node's main memory.

    torch.save brings one storage at a time to the host, all ranks at once: the flat weights of stages 1 and 2 (rank 0
    alone), the fp32 master copy or a moment of a rank's share. What is offloaded is written from where it is.
    """
    width, ranks = setup.weight_bytes, ranks_per_node(setup)
    if setup.engine != "deepspeed":
        return float(width * setup.shape.parameters)
    weights = float(width * setup.trained) if setup.stage in (1, 2) else float(width * _largest(setup))
    if setup.optimizer_device != "gpu":
        return weights if setup.stage < 3 else 0.0
    if setup.stage == 0:
        return weights if setup.precision == "fp32" else 4.0 * setup.trained
    share = setup.trained / setup.gpus
    return max(weights if setup.stage < 3 else 0.0, 4 * min(setup.sub_group, share) * ranks)


def _on_cpu(setup: Setup) -> HostMemory:
    """Without GPUs: what a rank would hold on its GPU and on the host, all in one memory.

    Nothing is pinned (accelerator/cpu_accelerator.py), a bucket takes no more than is ever written to it, and gloo
    needs a copy of what it scatters. malloc keeps what was small when it is freed.
    """
    ranks, width = ranks_per_node(setup), setup.weight_bytes
    held, passing = persistent(setup), temporary(setup)
    touched = float(width * min(setup.reduce_bucket, setup.trained))
    if setup.engine == "deepspeed":
        for buffers, name in ((held, "reduce_bucket"), (passing, "buckets")):
            if name in buffers:
                buffers[name] = touched
        if setup.gpus > 1:
            # Before it is reduced, a bucket is laid out anew: stage_1_and_2.py: allreduce_bucket, engine.py:
            # allreduce_bucket, coalesced_collectives.py.
            passing["reduce_copy"] = float(width * min(_bucket(setup), setup.trained))
        for name, size in offloaded(setup).items():
            if name != "pinned_twice":
                held[name] = held.get(name, 0.0) + size / ranks
    if setup.stage == 3 and setup.gpus > 1:
        passing["gloo_copy"] = touched
    passing["kept_by_malloc"] = _kept(setup, passing)
    t = passing.get
    states, kept = sum(held.values()), passing["kept_by_malloc"]
    activations, layer = passing["activations"], passing["layer"]
    moving = t("buckets", 0.0) + t("carried", 0.0)
    turn = activations + passing["logits"] + t("gathered", 0.0) + moving
    middle = activations + layer + passing.get("scores", 0.0) + t("gathered", 0.0) + moving
    end = HELD_AT_END * activations + layer + passing["gradients"] + t("buckets", 0.0)
    end += t("reduce_copy", 0.0) + t("gloo_copy", 0.0) + kept
    training = ranks * (states + max(turn, middle, end, passing["step"] + kept))
    processes = (CPU_PROCESS_GIB + (CPU_ZERO_GIB if setup.stage else 0)) * GIB * ranks
    psi = width * setup.shape.parameters
    whole = not (setup.stage == 3 and setup.zero_init)
    copies = 1 if setup.stage == 0 else 2  # stages 1 and 2 flatten the weights beside themselves
    loading = float(ranks * copies * psi) if whole else (1 + ranks / setup.gpus) * psi
    peaks = {
        "training": processes + training,
        "loading": processes + loading,
        "checkpoint": processes + ranks * (states + kept),
        "export": processes + ranks * (states + kept) + (psi if setup.stage == 3 else 0),
    }
    # A GPU's gradients and the host's are two terms of one name, and one memory here.
    terms = {name: ranks * (held.get(name, 0.0) + t(name, 0.0)) for name in {**held, **passing}}
    terms["processes"] = processes
    return HostMemory(terms, peaks, max(peaks.values()))


def _bucket(setup: Setup) -> int:
    """Elements that are reduced at once: stage 0 has a fixed number (engine.py: MEMORY_OPT_ALLREDUCE_SIZE)."""
    return DDP_BUCKET if setup.stage == 0 else setup.reduce_bucket


def _kept(setup: Setup, passing: dict[str, float]) -> float:
    """What malloc has not given back when the gradients are reduced: blocks below 32 MiB, which are parts of its heap.

    Larger ones it asks the kernel for, one by one, and gives back at once (glibc: DEFAULT_MMAP_THRESHOLD_MAX). Of a
    batch whose blocks are larger, as much is counted as of the largest whose blocks are not.
    """
    width, shape, rows = setup.weight_bytes, setup.shape, max(1, setup.tokens)
    weights = sum(size * count for size, count in matrices(setup.shape) if width * size < SMALL_BYTES)
    inner = min(1.0, SMALL_BYTES / (width * rows * max(1, shape.intermediate)))
    logits = min(1.0, SMALL_BYTES / (4 * rows * max(1, shape.vocab)))
    return (
        KEPT * min(passing.get("gathered", 0.0), width * weights)
        + (1 - HELD_AT_END) * inner * passing["activations"]
        + logits * passing["logits"]
    )

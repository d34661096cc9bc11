"""Files that a job leaves on disks: its checkpoints, the exported model, and ZeRO-Infinity's swap files.

bench/planner_cpu.py compares the sums with real folders. Files are DeepSpeed 0.19's.
"""

from __future__ import annotations

from dsrun.planner.setup import OPTIMIZERS, Setup

BLOCK_BYTES = 2**20
"""The least that is swapped: swap_tensor/utils.py: MIN_AIO_BYTES, and the presets' aio.block_size."""


def checkpoint_bytes(setup: Setup) -> int:
    """One checkpoint: the files of all nodes together, in bytes.

    Stages 0 to 2 write the weights as they are computed with, once (runtime/engine.py: _save_checkpoint), and the
    optimizer's states with its fp32 master copy; stage 3 the latter alone, and shares of weights that aren't trained.
    """
    fp32, bit16 = OPTIMIZERS[setup.optimizer]
    state = bit16 if setup.engine != "deepspeed" and setup.precision == "pure" else fp32
    states = (state + (4 if setup.has_master else 0)) * setup.trained
    frozen = setup.base_bytes if setup.method != "full" else 0.0
    stage = setup.stage if setup.engine == "deepspeed" else 0
    if stage == 3:
        return round(states + frozen)
    # Stage 2 writes what isn't trained once more, beside the rest (zero_optimization_partition_gradients).
    again = frozen if stage == 2 else 0
    return round(setup.base_bytes + setup.weight_bytes * (setup.adapters + setup.copies) + states + again)


def copied_bytes(setup: Setup) -> float:
    """A checkpoint's copy in the main memory of the first node, in bytes, where checkpoints are written beside the
    training.

    Every rank copies what it writes, which is what is trained: its share of the optimizer's states, and FSDP's weights;
    at stages 1 and 2 the first rank all weights, at stage 0 the states, too. Swap files are copied on their disk.
    """
    if not setup.async_save:
        return 0.0
    fp32, bit16 = OPTIMIZERS[setup.optimizer]
    state = bit16 if setup.engine != "deepspeed" and setup.precision == "pure" else fp32
    states = (
        (state + (4 if setup.has_master else 0)) * setup.trained if setup.optimizer_device != "nvme" else 0
    )
    weights = setup.weight_bytes * setup.trained
    if setup.engine == "fsdp":
        return (weights + states) / setup.nodes
    if setup.engine == "torch" or setup.stage == 0:
        return float(weights + states)
    return (weights if setup.stage < 3 else 0) + states / setup.nodes


def model_bytes(setup: Setup) -> int:
    """The exported folder: the weights in the precision they were trained in, without the tokenizer's few megabytes.

    Of LoRA, what PEFT writes: its own weights and the modules that were trained as copies.
    """
    return setup.computed_bytes * setup.trained


def nvme_bytes(setup: Setup) -> int:
    """The swap files on one node's NVMe disk, in bytes: 0 where nothing is offloaded there.

    1. The optimizer's states, its master copy and the fp32 gradients (swap_tensor/partitioned_optimizer_swapper.py).
    2. The weights, each rank its share (swap_tensor/partitioned_param_swapper.py).

    A rank's share of a weight that is smaller than a block stays in memory, which keeps small models off the disk.
    """
    if setup.engine != "deepspeed" or setup.stage != 3:
        return 0
    swapped = 0.0
    if setup.optimizer_device == "nvme" and 4 * setup.share >= BLOCK_BYTES:
        swapped += (OPTIMIZERS[setup.optimizer][0] + 4) * setup.trained
        if setup.method == "full":  # LoRA's own matrices are smaller than a block
            swapped += _swapped(setup, 4)
    if setup.parameter_device == "nvme":
        swapped += _swapped(setup, setup.weight_bytes)
    return round(swapped / setup.nodes)


def _swapped(setup: Setup, width: int) -> int:
    """Bytes of the matrices of which every rank's share is at least a block. width: bytes of an element."""
    matrices = setup.shape.matrices.items()
    return width * sum(size * count for size, count in matrices if width * size / setup.gpus >= BLOCK_BYTES)

"""What a job leaves on disks: its checkpoints, the model that comes out of it, and ZeRO-Infinity's swap files.

Psi is the number of weights, w the bytes of one that is computed with. bench/planner_cpu.py compares the sums with real
folders. Where a term says a file, it is DeepSpeed 0.19's.
"""

from __future__ import annotations

from dsrun.planner.host_memory import matrices
from dsrun.planner.setup import OPTIMIZERS, Setup

BLOCK_BYTES = 2**20
"""The least that is swapped: swap_tensor/utils.py: MIN_AIO_BYTES, and the presets' aio.block_size."""


def checkpoint_bytes(setup: Setup) -> int:
    """One checkpoint: the files of all nodes together, in bytes.

    Stages 0 to 2 write the weights as they are computed with, once (runtime/engine.py: _save_checkpoint), and the
    optimizer's states with its fp32 master copy; stage 3 the latter alone, and shares of weights that aren't trained.
    """
    states = _states(setup)
    frozen = setup.base_bytes if setup.method != "full" else 0.0
    if setup.engine == "deepspeed" and setup.stage == 3:
        return round(states + frozen)
    # Stages above 1 write what isn't trained once more, beside the rest (zero_optimization_partition_gradients).
    again = frozen if setup.engine == "deepspeed" and setup.stage == 2 else 0
    added = setup.weight_bytes * (setup.adapters + setup.copies)
    return round(setup.base_bytes + added + states + again)


def _states(setup: Setup) -> float:
    """The optimizer's states and its master copy, where it has one of its own."""
    fp32, bit16 = OPTIMIZERS[setup.optimizer]
    if setup.engine == "deepspeed":
        # Stage 0 in fp32 steps on the weights themselves; in every other case the optimizer has a copy, or writes its
        # own share under that name (stage3.py, where they are one and the same in fp32).
        own = setup.precision != "fp32" or setup.stage >= 1
        return (fp32 + 4 * own) * setup.trained
    master = 4 if setup.precision in ("fp16", "bf16") else 0
    return ((bit16 if setup.precision == "pure" else fp32) + master) * setup.trained


def model_bytes(setup: Setup) -> int:
    """The exported folder: the weights in the precision they were trained in, without the tokenizer's few megabytes.

    Of LoRA, what PEFT writes: its own weights and the modules that were trained as copies.
    """
    own = setup.shape.parameters if setup.method == "full" else 0
    return setup.weight_bytes * (own + setup.adapters + setup.copies)


def nvme_bytes(setup: Setup) -> int:
    """The swap files on one node's NVMe disk, in bytes: 0 where nothing is offloaded there.

    The optimizer's states, its master copy and the fp32 gradients (swap_tensor/partitioned_optimizer_swapper.py); the
    weights, every rank its share (swap_tensor/partitioned_param_swapper.py). A rank's share of one that is smaller than
    a block stays in memory, which keeps small models off the disk.
    """
    if setup.engine != "deepspeed" or setup.stage != 3:
        return 0
    swapped = 0.0
    if setup.optimizer_device == "nvme" and 4 * setup.trained / setup.gpus >= BLOCK_BYTES:
        swapped += (OPTIMIZERS[setup.optimizer][0] + 4) * setup.trained
        if setup.method == "full":  # LoRA's own matrices are smaller than a block
            swapped += 4 * _swapped(setup, 4)
    if setup.parameter_device == "nvme":
        swapped += setup.weight_bytes * _swapped(setup, setup.weight_bytes)
    return round(swapped / setup.nodes)


def _swapped(setup: Setup, width: int) -> int:
    """Weights in matrices of which every rank's share is at least a block. width: bytes of one."""
    return sum(
        size * count for size, count in matrices(setup.shape) if width * size / setup.gpus >= BLOCK_BYTES
    )

"""DS22x: offload to CPU memory and to NVMe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from dsrun.config.rules.frame import Context, Hit, rule

ZERO = "zero_optimization"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAMETERS = f"{ZERO}.offload_param"
ADAM_TENSORS = 4


@rule("DS221", "error")
def parameters_below_stage_3(context: Context) -> Iterator[Hit]:
    """offload_param is read in stage 3 only; below it nothing is said or offloaded (runtime/engine.py)."""
    if context.stage < 3 and context.text(f"{PARAMETERS}.device") in ("cpu", "nvme"):
        yield Hit(
            PARAMETERS,
            f"has no effect at stage {context.stage}",
            "Set zero_optimization.stage to 3, or remove it.",
        )


@rule("DS222", "error")
def optimizer_at_stage_0(context: Context) -> Iterator[Hit]:
    """Stage 0 builds the CPU's Adam but leaves the gradients on the GPU (runtime/engine.py)."""
    if context.stage == 0 and context.text(f"{OPTIMIZER}.device") in ("cpu", "nvme"):
        yield Hit(OPTIMIZER, "needs ZeRO, and stage is 0", "Set zero_optimization.stage to 2, or remove it.")


@rule("DS223", "error")
def nvme_without_path(context: Context) -> Iterator[Hit]:
    """A missing folder fails once the model is loaded (runtime/zero/stage3.py, runtime/swap_tensor)."""
    for path in (OPTIMIZER, PARAMETERS):
        if context.text(f"{path}.device") == "nvme" and not context.text(f"{path}.nvme_path"):
            yield Hit(f"{path}.nvme_path", "device is nvme and no folder is given", "Add --nvme-path FOLDER.")


@rule("DS224", "error")
def nvme_below_stage_3(context: Context) -> Iterator[Hit]:
    """Stages 1 and 2 take nvme for cpu: nothing is written to disk (runtime/zero/stage_1_and_2.py)."""
    if context.text(f"{OPTIMIZER}.device") == "nvme" and context.stage in (1, 2):
        yield Hit(
            f"{OPTIMIZER}.device",
            f"stage {context.stage} keeps the optimizer in memory all the same",
            "Set zero_optimization.stage to 3, or device to cpu.",
        )


@rule("DS225", "error")
def too_few_optimizer_buffers(context: Context) -> Iterator[Hit]:
    """Adam swaps weight, gradient and two moments at a time; with fewer buffers the second step dies.

    Reading or writing ahead doubles the need (partitioned_optimizer_swapper.py and
    pipelined_optimizer_swapper.py in runtime/swap_tensor).
    """
    if context.text(f"{OPTIMIZER}.device") != "nvme" or context.stage != 3:
        return
    ahead = any(context.flag(f"{OPTIMIZER}.{key}") for key in ("pipeline_read", "pipeline_write", "pipeline"))
    needed = 2 * ADAM_TENSORS if ahead else ADAM_TENSORS
    count = context.integer(f"{OPTIMIZER}.buffer_count")
    count = ADAM_TENSORS if count is None else count
    if count < needed:
        why = "with pipeline_read or pipeline_write" if ahead else "for Adam"
        yield Hit(f"{OPTIMIZER}.buffer_count", f"{count} is too few {why}", f"{needed} or more.")


@rule("DS226", "warning")
def relative_nvme_path(context: Context) -> Iterator[Hit]:
    """The path is used as it stands, from each rank's own folder (partitioned_param_swapper.py)."""
    for path in (OPTIMIZER, PARAMETERS):
        folder = context.text(f"{path}.nvme_path")
        if context.text(f"{path}.device") == "nvme" and folder and not PurePath(folder).is_absolute():
            yield Hit(
                f"{path}.nvme_path", f"{folder!r} depends on where a rank is started", "Give the whole path."
            )

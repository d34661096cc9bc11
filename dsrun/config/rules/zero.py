"""DS20x: ZeRO stages and buckets."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.frame import Context, Hit, rule

ZERO = "zero_optimization"


@rule("DS201", "error")
def odd_allgather_bucket(context: Context) -> Iterator[Hit]:
    """Stages 1 and 2 assert a multiple of NCCL's start alignment, 2 (runtime/zero/stage_1_and_2.py)."""
    path = f"{ZERO}.allgather_bucket_size"
    size = context.integer(path)
    if size is not None and size % 2 and context.stage in (1, 2):
        yield Hit(path, f"{size} is odd", f"An even number of elements, as {size + 1}.")


@rule("DS202", "warning")
def overlap_below_stage_3(context: Context) -> Iterator[Hit]:
    """Wrong gradients without an error in stages 1 and 2 (DeepSpeed issues 5523, 5347, 8061)."""
    if context.flag(f"{ZERO}.overlap_comm") and context.stage in (1, 2):
        yield Hit(
            f"{ZERO}.overlap_comm",
            f"has given wrong gradients at stage {context.stage}",
            "false is slower and right: https://github.com/deepspeedai/DeepSpeed/issues/5523",
        )


@rule("DS203", "warning")
def weights_stay_in_pieces(context: Context) -> Iterator[Hit]:
    """Without gathering, save_16bit_model saves nothing and returns False (runtime/engine.py).

    HF Trainer then leaves ZeRO's pieces in place of model.safetensors.
    """
    path = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    if context.stage == 3 and not context.get(path):
        yield Hit(path, "is off: saving gives no model file, only ZeRO's pieces", "Set it to true.")

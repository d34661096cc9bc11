"""DS301, DS305, DS312, DS313, DS325 and DS326: fp16 and bf16, and which of them the model gets."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema
from dsrun.config.rules.common import removal, setting
from dsrun.config.rules.examples import SAVED_3, ZERO_1, ZERO_2, bf16, fp16
from dsrun.config.rules.frame import REFUSED, Context, Hit, rule

FP32, FP16, BF16 = "fp32", "fp16", "bf16"

NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), FP32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), FP16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), BF16),
}
"""What DeepSpeed calls the data types (DtypeEnum in runtime/config.py)."""

MASTER = ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads")


def mode(context: Context) -> str | None:
    """The precision that the model gets: fp16, bf16 or fp32; None where that is open.

    Where accelerate fills in, "auto" and a missing section follow the TrainingArguments (set_mixed_precision in
    accelerate/utils/dataclasses.py).
    """
    for name in (BF16, FP16):
        if context.flag(f"{name}.enabled"):
            return name
    left = [name for name in (BF16, FP16) if context.is_auto(f"{name}.enabled") or not context.has(name)]
    if context.target not in schema.FILLING:
        return context.precision
    if left and context.setting.trainer is None:
        return None
    asked = (name for name in left if context.argument(name) or context.argument(f"{name}_full_eval"))
    return next(asked, FP32)


def by_bf16_optimizer(context: Context) -> bool:
    """Whether BF16_Optimizer takes the place of ZeRO's own (_do_optimizer_sanity_check in runtime/engine.py)."""
    added_up = NAMES.get(context.text("data_types.grad_accum_dtype") or "")
    on_cpu = context.text("zero_optimization.offload_optimizer.device") == "cpu"
    return context.stage == 1 and mode(context) == BF16 and added_up == FP32 and not on_cpu


@rule(
    "DS301",
    "error",
    REFUSED,
    bad=[
        {**fp16(), **bf16()},
        {**fp16(), "bfloat16": {"enabled": True}},
        {**fp16(), "bf16": {"enabled": "true"}},
    ],
    good=[fp16(), bf16(), {**fp16(), "bf16": {"enabled": False}}, {**bf16(), "fp16": {"enabled": False}}],
)
def both_precisions(context: Context) -> Iterator[Hit]:
    """fp16 and bf16 together stop the start (_initialize_params in runtime/config.py)."""
    if context.flag("fp16.enabled") and context.flag("bf16.enabled"):
        yield Hit(
            "bf16.enabled",
            "fp16 is enabled as well",
            "Enable one of them: bf16 where the GPUs have it, fp16 elsewhere.",
            setting(context, "fp16.enabled", value=False),
        )


@rule(
    "DS305",
    "warning",
    bad=[
        {"fp16": {"loss_scale": 128}},
        {"bf16": {"check_grad_overflow": False}},
        {**bf16(), "fp16": {"hysteresis": 2}},
    ],
    good=[
        {"fp16": {}},
        {"fp16": {"auto_cast": False}},
        {"fp16": {"enabled": False, "loss_scale": 128}},
        {"bf16": {"enabled": False}},
    ],
)
def precision_section_without_enabled(context: Context) -> Iterator[Hit]:
    """`enabled` is false where it is left out, and the rest acts only with it (runtime/precision_config.py).

    All but auto_cast, that is.
    """
    for name, other in ((FP16, BF16), (BF16, FP16)):
        if not set(context.section(name)) - {"auto_cast"} or context.has(f"{name}.enabled"):
            continue
        if context.flag(f"{other}.enabled"):
            advice, fix = f"Remove it: {other} is enabled.", removal(context, name, safe=False)
        else:
            advice = f'Add "enabled": true to {name}, or remove the section.'
            fix = setting(context, f"{name}.enabled", value=True)
        yield Hit(name, f"has no effect without {name}.enabled", advice, fix)


@rule(
    "DS312",
    "note",
    bad=[{"_bf16": True, "_device": "cuda", **ZERO_1, **fp16()}, {"_bf16": True, **ZERO_1, **fp16()}],
    good=[
        {"_bf16": True, **ZERO_1, **bf16()},
        {**ZERO_1, **fp16()},
        {"_bf16": False, **ZERO_1, **fp16()},
        {"_bf16": True, "_device": "cpu", **ZERO_1, **fp16()},
    ],
)
def fp16_where_bf16_is(context: Context) -> Iterator[Hit]:
    """bf16 has the range of fp32, so it needs no loss scale and skips no step (runtime/precision_config.py)."""
    if context.setting.bf16 and context.setting.device != "cpu" and mode(context) == FP16:
        yield Hit(
            "fp16.enabled",
            "these GPUs compute in bfloat16, which needs no loss scale",
            "Enable bf16 instead, unless a model or a checkpoint asks for fp16.",
        )


@rule(
    "DS313",
    "warning",
    bad=[
        {"_bf16": False, "_device": "cuda", **ZERO_1, **bf16()},
        {"_bf16": False, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    ],
    good=[
        {"_bf16": True, **ZERO_1, **bf16()},
        {**ZERO_1, **bf16()},
        {"_bf16": False, **ZERO_1, **fp16()},
        {"_bf16": False, "_device": "cpu", **ZERO_1, **bf16()},
        {"_bf16": False, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"_bf16": False, "torch_autocast": {"enabled": False, "dtype": "bfloat16"}},
    ],
)
def bf16_where_it_is_not(context: Context) -> Iterator[Hit]:
    """GPUs before Ampere take bfloat16 and work it out in other units, at a fraction of the speed.

    DeepSpeed lets them: it asks torch.cuda.is_bf16_supported(), which counts emulation (torch/cuda/__init__.py,
    accelerator/cuda_accelerator.py).
    """
    if context.setting.bf16 is not False or context.setting.device == "cpu":
        return
    cast = NAMES.get(context.text("torch_autocast.dtype") or "")
    paths = {
        "bf16.enabled": mode(context) == BF16,
        "torch_autocast.dtype": cast == BF16 and context.flag("torch_autocast.enabled"),
    }
    for path, is_bf16 in paths.items():
        if is_bf16:
            text = "these GPUs have no units for bfloat16: it is emulated, and slow"
            yield Hit(path, text, "Use fp16: on such GPUs it is what is fast.")


@rule(
    "DS325",
    "warning",
    bad=[
        {**ZERO_2, **bf16(immediate_grad_update=True)},
        {**ZERO_1, **bf16(immediate_grad_update=True)},
        {**SAVED_3, **bf16(check_grad_overflow=False)},
    ],
    good=[
        {**ZERO_1, **bf16(immediate_grad_update=True), "data_types": {"grad_accum_dtype": "fp32"}},
        {**ZERO_2, **bf16(immediate_grad_update=False)},
        {**ZERO_2, **bf16(check_grad_overflow=False)},
        {**SAVED_3, **bf16(check_grad_overflow=True)},
        bf16(immediate_grad_update=True),
    ],
    since=(0, 17),
)
def bf16_fields_without_effect(context: Context) -> Iterator[Hit]:
    """BF16_Optimizer alone reads the one (runtime/bf16_optimizer.py), stages 1 and 2 the other.

    Source of the latter: _configure_zero_optimizer in runtime/engine.py. A pipeline's engine asks for
    immediate_grad_update at stage 0.
    """
    path = "bf16.immediate_grad_update"
    if context.flag(path) and mode(context) == BF16 and context.stage > 0 and not by_bf16_optimizer(context):
        yield Hit(
            path,
            f"has no effect at stage {context.stage} here",
            'Remove it; it acts at stage 1 with "data_types": {"grad_accum_dtype": "fp32"}.',
            removal(context, path),
        )
    path = "bf16.check_grad_overflow"
    if context.flag(path) is False and mode(context) == BF16 and context.stage == 3:
        yield Hit(path, "has no effect at stage 3, which always looks", "Remove it.", removal(context, path))


@rule(
    "DS326",
    "note",
    bad=[{**ZERO_2, **bf16(check_grad_overflow=False)}, {**ZERO_1, **bf16(check_grad_overflow=False)}],
    good=[
        {**ZERO_2, **bf16()},
        {**ZERO_2, **bf16(check_grad_overflow=True)},
        {**SAVED_3, **bf16(check_grad_overflow=False)},
    ],
    since=(0, 17),
)
def overflow_not_looked_for(context: Context) -> Iterator[Hit]:
    """Without the check one infinite gradient goes into the weights (step in runtime/zero/stage_1_and_2.py)."""
    path = "bf16.check_grad_overflow"
    if context.flag(path) is False and mode(context) == BF16 and context.stage in (1, 2):
        yield Hit(path, "lets a step with infinite gradients into the weights", "Leave it at true.")

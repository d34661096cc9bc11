"""DS301, DS305, DS312, DS313, DS325, DS326, DS328 and DS329: fp16 and bf16, and which of them the model gets."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import no_effect, removal, set_to
from dsrun.config.rules.examples import SAVED_3, ZERO_1, ZERO_2, bf16, fp16
from dsrun.config.rules.frame import FAILS, REFUSED, Context, Finding, bad, good, once, rule
from dsrun.config.rules.kinds import Table, put, report
from dsrun.config.schemas import schema
from dsrun.config.schemas.names import CLOSE, alike

FP32, FP16, BF16 = "fp32", "fp16", "bf16"

NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), FP32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), FP16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), BF16),
}
"""DeepSpeed's names of the data types (DtypeEnum in runtime/config.py)."""

MASTER = ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads")


@once
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
    enabled = (name for name in left if context.argument(name) or context.argument(f"{name}_full_eval"))
    return next(enabled, FP32)


FP16_ON_GPUS = (when.unless(when.on_cpu), lambda context: mode(context) == FP16)


def by_bf16_optimizer(context: Context) -> bool:
    """Whether BF16_Optimizer takes the place of ZeRO's own (_do_optimizer_sanity_check in runtime/engine.py)."""
    added_up = NAMES.get(context.text("data_types.grad_accum_dtype") or "")
    on_cpu = context.text("zero_optimization.offload_optimizer.device") == "cpu"
    return context.stage == 1 and mode(context) == BF16 and added_up == FP32 and not on_cpu


@rule("DS301", REFUSED)
@bad({**fp16(), **bf16()}, {**fp16(), "bfloat16": {"enabled": True}})
@good(fp16(), bf16())
def both_precisions() -> Table:
    """fp16 and bf16 together are refused (_initialize_params in runtime/config.py)."""
    path = "bf16.enabled"
    text = "fp16 is enabled too. Enable one of them: bf16 if the GPUs support it, otherwise fp16."
    return report(path, text, (when.on("fp16.enabled"), when.on(path)), put("fp16.enabled", False))


@rule("DS305", "warning")
@bad({"fp16": {"loss_scale": 128}}, {"bf16": {"check_grad_overflow": False}})
@good({"fp16": {}}, {"fp16": {"auto_cast": False}}, {"fp16": {"enabled": False, "loss_scale": 128}})
def precision_section_without_enabled(context: Context) -> Iterator[Finding]:
    """`enabled` is false by default, and the rest acts only with it (runtime/precision_config.py).

    The exception is auto_cast. A misspelt `enabled` is an unknown key, which is said there.
    """
    for name, other in ((FP16, BF16), (BF16, FP16)):
        keys = set(context.section(name)) - {"auto_cast"}
        if not keys or any(alike(str(key), "enabled") > CLOSE for key in keys):
            continue
        if name == FP16 and context.setting.bf16 is False and context.flag(f"{other}.enabled"):
            advice = f'Add "enabled": true to {name}, and take {other} out: these GPUs emulate it.'
            fix = None
        elif context.flag(f"{other}.enabled"):
            advice, fix = f"Remove it: {other} is enabled.", removal(context, name, safe=False)
        else:
            advice = f'Add "enabled": true to {name}, or remove the section.'
            fix = set_to(context, f"{name}.enabled", value=True)
        yield Finding(name, f"has no effect without {name}.enabled", advice, fix)


@rule("DS312", "note")
@bad({"_bf16": True, "_device": "cuda", **ZERO_1, **fp16()}, {"_bf16": True, **ZERO_1, **fp16()})
@good({"_bf16": True, **ZERO_1, **bf16()}, {**ZERO_1, **fp16()})
def fp16_although_bf16_is_supported() -> Table:
    """bf16 has the range of fp32, so it needs no loss scale and skips no step (runtime/precision_config.py)."""
    text = (
        "these GPUs compute in bfloat16, which needs no loss scale. "
        "Enable bf16 instead, unless a model or a checkpoint asks for fp16."
    )
    return report("fp16.enabled", text, (lambda context: context.setting.bf16, *FP16_ON_GPUS))


@rule("DS313", "warning")
@bad(
    {"_bf16": False, "_device": "cuda", **ZERO_1, **bf16()},
    {"_bf16": False, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
)
@good({"_bf16": True, **ZERO_1, **bf16()}, {**ZERO_1, **bf16()})
def bf16_not_supported(context: Context) -> Iterator[Finding]:
    """GPUs before Ampere emulate bfloat16, at a fraction of the speed.

    DeepSpeed allows it: it asks torch.cuda.is_bf16_supported(), which counts emulation (torch/cuda/__init__.py,
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
            text = "these GPUs emulate bfloat16, which is slow"
            fp32 = "Use fp32: DeepSpeed refuses fp16 on these GPUs."
            yield Finding(
                path,
                text,
                fp32 if context.setting.fp16 is False else "Use fp16, which is fast on these GPUs.",
            )


@rule("DS328", FAILS)
@bad({"_fp16": False, "_device": "cuda", **ZERO_1, **fp16()}, {"_fp16": False, **ZERO_2, **fp16()})
@good({"_fp16": True, **ZERO_1, **fp16()}, {"_fp16": False, **ZERO_1})
def fp16_refused_on_old_gpus() -> Table:
    """GPUs below compute capability 7.0 (P100 and older) stop the start: "Type fp16 is not supported on your device".

    Source: is_fp16_supported in accelerator/cuda_accelerator.py, _configure_distributed_model in runtime/engine.py.
    """
    text = (
        "is true, but DeepSpeed refuses fp16 on GPUs below compute capability 7.0. "
        "Train in fp32. With DS_ALLOW_DEPRECATED_FP16=1 DeepSpeed takes it on those of 6.x."
    )
    conditions = (lambda context: context.setting.fp16 is False, *FP16_ON_GPUS)
    return report("fp16.enabled", text, conditions, put("fp16.enabled", False))


@rule("DS329", "warning")
@bad({"_device": "cpu", **ZERO_1, **fp16()}, {"_device": "cpu", "_fp16": False, **ZERO_2, **fp16()})
@good({"_device": "cpu", **ZERO_1, **bf16()}, {"_device": "cpu", "_fp16": True, **ZERO_1, **fp16()})
def fp16_on_a_cpu() -> Table:
    """Few CPUs compute in fp16 (AVX512-FP16, AMX-FP16); on others DeepSpeed stops the start: "Type fp16 is not
    supported on your device".

    Source: is_fp16_supported in accelerator/cpu_accelerator.py, _do_sanity_check in runtime/engine.py.
    """
    text = (
        "is true, and the ranks are CPUs: but for the newest servers' (AVX512-FP16) DeepSpeed refuses it at the start. "
        "Enable bf16 instead, half the memory, or neither: fp32."
    )
    conditions = (
        when.on_cpu,
        lambda context: context.setting.fp16 is not True,
        lambda context: mode(context) == FP16,
    )
    return report("fp16.enabled", text, conditions)


@rule("DS325", "warning", since=(0, 17))
@bad({**ZERO_2, **bf16(immediate_grad_update=True)}, {**SAVED_3, **bf16(check_grad_overflow=False)})
@good(
    {**ZERO_1, **bf16(immediate_grad_update=True), "data_types": {"grad_accum_dtype": "fp32"}},
    {**ZERO_2, **bf16(immediate_grad_update=False)},
)
def bf16_fields_without_effect(context: Context) -> Iterator[Finding]:
    """Only BF16_Optimizer reads the one (runtime/bf16_optimizer.py), stages 1 and 2 the other.

    Source of the latter: _configure_zero_optimizer in runtime/engine.py. A pipeline's engine asks for
    immediate_grad_update at stage 0.
    """
    path = "bf16.immediate_grad_update"
    if context.flag(path) and mode(context) == BF16 and context.stage > 0 and not by_bf16_optimizer(context):
        yield no_effect(
            context,
            path,
            f" at stage {context.stage} here",
            'Remove it; it acts at stage 1 with "data_types": {"grad_accum_dtype": "fp32"}.',
        )
    path = "bf16.check_grad_overflow"
    if context.flag(path) is False and mode(context) == BF16 and context.stage == 3:
        yield no_effect(context, path, " at stage 3, which always checks")


@rule("DS326", "warning", since=(0, 17, 1))
@bad({**ZERO_2, **bf16(check_grad_overflow=False)}, {**ZERO_1, **bf16(check_grad_overflow=False)})
@good({**ZERO_2, **bf16()}, {**ZERO_2, **bf16(check_grad_overflow=True)})
def overflow_not_checked() -> Table:
    """Without the check one infinite gradient goes into the weights (step in runtime/zero/stage_1_and_2.py)."""
    path = "bf16.check_grad_overflow"
    text = "lets infinite gradients into the weights. Leave it at true."
    return report(path, text, (when.off(path), when.at_stage(1, 2), lambda context: mode(context) == BF16))

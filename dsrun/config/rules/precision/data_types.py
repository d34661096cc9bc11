"""DS318 to DS320 and DS327: data_types."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import no_effect, removal
from dsrun.config.rules.examples import ZERO_1, ZERO_2, bf16, fp16
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.precision.modes import FP32, NAMES, mode


@rule("DS318", FAILS, since=(0, 19, 2))
@bad(
    {**ZERO_1, **bf16(), "data_types": {"param_dtype": "fp32"}},
    {**ZERO_1, **fp16(), "data_types": {"param_dtype": "torch.bfloat16"}},
)
@good(
    {**ZERO_1, **bf16(), "data_types": {"param_dtype": "bfloat16"}},
    {**ZERO_1, **fp16(), "data_types": {"param_dtype": "half"}},
)
def param_dtype_differs_from_precision(context: Context) -> Iterator[Finding]:
    """param_dtype must repeat what fp16 and bf16 say (_assert_valid_mixed_precision_config, runtime/engine.py)."""
    path = "data_types.param_dtype"
    given, precision = context.text(path), mode(context)
    if precision and given in NAMES and NAMES[given] != precision:
        yield Finding(
            path,
            f"is {given}, but the model is in {precision}",
            "Remove it: the precision follows fp16.enabled and bf16.enabled.",
            removal(context, path, safe=False),
        )


@rule("DS319", FAILS)
@bad(
    {**bf16(), "data_types": {"grad_accum_dtype": "fp32"}},
    {**fp16(), "data_types": {"grad_accum_dtype": "bf16"}},
)
@good(
    {**bf16(), "data_types": {"grad_accum_dtype": "bfloat16"}},
    {**ZERO_1, **bf16(), "data_types": {"grad_accum_dtype": "fp32"}},
)
def grad_accum_dtype_at_stage_0(context: Context) -> Iterator[Finding]:
    """Without ZeRO gradients are added up in the model's precision (_do_optimizer_sanity_check, runtime/engine.py)."""
    path = "data_types.grad_accum_dtype"
    given, precision = context.text(path), mode(context)
    if context.stage == 0 and precision and given in NAMES and NAMES[given] != precision:
        yield Finding(
            path,
            f"is {given}, but the model is in {precision}: stage 0 can't mix them",
            "Set zero_optimization.stage to 1, or remove it.",
            removal(context, path, safe=False),
        )


@rule("DS320", DIFFERS)
@bad(
    {**ZERO_2, **bf16(), "data_types": {"grad_accum_dtype": "fp16"}},
    {**ZERO_1, **fp16(), "data_types": {"grad_accum_dtype": "bf16"}},
)
@good(
    {**ZERO_2, **bf16(), "data_types": {"grad_accum_dtype": "fp32"}},
    {**ZERO_2, **bf16(), "data_types": {"grad_accum_dtype": "bf16"}},
)
def grad_accum_dtype_loses_precision(context: Context) -> Iterator[Finding]:
    """ZeRO silently adds gradients up in any type (get_data_types in runtime/engine.py).

    The other 16-bit type has less range (fp16) or fewer digits (bf16) than the model's.
    """
    path = "data_types.grad_accum_dtype"
    given, precision = context.text(path), mode(context)
    if context.stage == 0 or not precision or given not in NAMES or NAMES[given] in (precision, FP32):
        return
    yield Finding(
        path,
        f"is {given}, but the model is in {precision}",
        f"Remove it: gradients are then added up in {precision}.",
        removal(context, path, safe=False),
        "warning" if precision == FP32 else "",
    )


@rule("DS327", "warning", since=(0, 19, 8))
@bad(
    {"data_types": {"keep_in_fp32_modules": ["router"]}},
    {"fp16": {"enabled": False}, "data_types": {"keep_in_fp32_modules": ["router"]}},
)
@good(
    {**ZERO_1, **bf16(), "data_types": {"keep_in_fp32_modules": ["router"]}},
    {"data_types": {"keep_in_fp32_modules": []}},
)
def keep_in_fp32_in_fp32_training(context: Context) -> Iterator[Finding]:
    """In fp32 training everything is in fp32 anyway (keep_in_fp32_pattern in runtime/keep_in_fp32.py)."""
    path = "data_types.keep_in_fp32_modules"
    if isinstance(context.get(path), list) and context.get(path) and mode(context) == FP32:
        yield no_effect(context, path, ": the model is in fp32", "Remove it, or enable bf16.")

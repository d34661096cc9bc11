"""DS318 to DS320 and DS327: data_types."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import removal
from dsrun.config.rules.examples import ZERO_1, ZERO_2, bf16, fp16, hf
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Hit, rule
from dsrun.config.rules.precision import FP32, NAMES, mode


@rule(
    "DS318",
    "error",
    FAILS,
    bad=[
        {**ZERO_1, **bf16(), "data_types": {"param_dtype": "fp32"}},
        {**ZERO_1, **fp16(), "data_types": {"param_dtype": "torch.bfloat16"}},
        {"data_types": {"param_dtype": "half"}},
    ],
    good=[
        {**ZERO_1, **bf16(), "data_types": {"param_dtype": "bfloat16"}},
        {**ZERO_1, **fp16(), "data_types": {"param_dtype": "half"}},
        {"data_types": {"param_dtype": "float"}},
        {"data_types": {"param_dtype": None}},
        hf(data_types={"param_dtype": "fp16"}),
    ],
    since=(0, 19),
)
def parameters_of_another_type(context: Context) -> Iterator[Hit]:
    """param_dtype only repeats what fp16 and bf16 say (_assert_valid_mixed_precision_config, runtime/engine.py)."""
    path = "data_types.param_dtype"
    given, found = context.text(path), mode(context)
    if found and given in NAMES and NAMES[given] != found:
        yield Hit(
            path,
            f"is {given}, and the model is in {found}",
            "Remove it: the precision follows fp16.enabled and bf16.enabled.",
            removal(context, path, safe=False),
        )


@rule(
    "DS319",
    "error",
    FAILS,
    bad=[
        {**bf16(), "data_types": {"grad_accum_dtype": "fp32"}},
        {**fp16(), "data_types": {"grad_accum_dtype": "bf16"}},
        {"data_types": {"grad_accum_dtype": "float16"}},
    ],
    good=[
        {**bf16(), "data_types": {"grad_accum_dtype": "bfloat16"}},
        {**ZERO_1, **bf16(), "data_types": {"grad_accum_dtype": "fp32"}},
        {"data_types": {"grad_accum_dtype": "float32"}},
        {**bf16(), "data_types": {"grad_accum_dtype": None}},
    ],
)
def gradients_of_another_type_at_stage_0(context: Context) -> Iterator[Hit]:
    """Without ZeRO gradients are added up in the model's precision (_do_optimizer_sanity_check, runtime/engine.py)."""
    path = "data_types.grad_accum_dtype"
    given, found = context.text(path), mode(context)
    if context.stage == 0 and found and given in NAMES and NAMES[given] != found:
        yield Hit(
            path,
            f"is {given}, and the model is in {found}: stage 0 can't mix them",
            "Set zero_optimization.stage to 1, or remove it.",
            removal(context, path, safe=False),
        )


@rule(
    "DS320",
    "error",
    DIFFERS,
    bad=[
        {**ZERO_2, **bf16(), "data_types": {"grad_accum_dtype": "fp16"}},
        {**ZERO_1, **fp16(), "data_types": {"grad_accum_dtype": "bf16"}},
        {**ZERO_1, "data_types": {"grad_accum_dtype": "bf16"}},
    ],
    good=[
        {**ZERO_2, **bf16(), "data_types": {"grad_accum_dtype": "fp32"}},
        {**ZERO_2, **bf16(), "data_types": {"grad_accum_dtype": "bf16"}},
        {**ZERO_2, **fp16(), "data_types": {"grad_accum_dtype": "fp16"}},
        {**ZERO_2, "data_types": {"grad_accum_dtype": "fp32"}},
    ],
)
def gradients_in_the_other_16_bits(context: Context) -> Iterator[Hit]:
    """ZeRO adds gradients up in any type without a word (get_data_types in runtime/engine.py).

    The other 16 bits lose range (fp16) or digits (bf16) that the model's own have.
    """
    path = "data_types.grad_accum_dtype"
    given, found = context.text(path), mode(context)
    if context.stage == 0 or not found or given not in NAMES or NAMES[given] in (found, FP32):
        return
    yield Hit(
        path,
        f"is {given}, and the model is in {found}",
        f"Remove it: gradients are then added up in {found}.",
        removal(context, path, safe=False),
        "warning" if found == FP32 else None,
    )


@rule(
    "DS327",
    "warning",
    bad=[
        {"data_types": {"keep_in_fp32_modules": ["router"]}},
        {"fp16": {"enabled": False}, "data_types": {"keep_in_fp32_modules": ["router"]}},
    ],
    good=[
        {**ZERO_1, **bf16(), "data_types": {"keep_in_fp32_modules": ["router"]}},
        {"data_types": {"keep_in_fp32_modules": []}},
        hf(data_types={"keep_in_fp32_modules": ["router"]}),
    ],
    since=(0, 19),
)
def kept_in_fp32_where_all_is(context: Context) -> Iterator[Hit]:
    """Under fp32 nothing needs keeping (keep_in_fp32_pattern in runtime/keep_in_fp32.py)."""
    path = "data_types.keep_in_fp32_modules"
    if isinstance(context.get(path), list) and context.get(path) and mode(context) == FP32:
        yield Hit(
            path,
            "has no effect: the model is in fp32",
            "Remove it, or enable bf16.",
            removal(context, path),
        )

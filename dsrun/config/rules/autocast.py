"""DS311 and DS321 to DS324: casts on the way, by fp16.auto_cast and by torch.autocast."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema
from dsrun.config.rules.common import removal, setting
from dsrun.config.rules.examples import ADAMW, CPU, ZERO_1, bf16, fp16, hf
from dsrun.config.rules.frame import FAILS, Context, Hit, rule
from dsrun.config.rules.precision import BF16, FP16, FP32, MASTER, NAMES, mode


@rule(
    "DS311",
    "error",
    FAILS,
    bad=[
        {**ZERO_1, "fp16": {"enabled": False, "auto_cast": True}},
        {**ZERO_1, **bf16(), "fp16": {"enabled": False, "auto_cast": True}},
        hf({"bf16": True}, fp16={"enabled": "auto", "auto_cast": True}),
    ],
    good=[
        {**ZERO_1, **fp16(auto_cast=True)},
        {**ZERO_1, "fp16": {"enabled": False, "auto_cast": False}},
        hf({"fp16": True}, fp16={"enabled": "auto", "auto_cast": True}),
        hf(fp16={"enabled": "auto", "auto_cast": True}),
    ],
)
def inputs_cast_without_fp16(context: Context) -> Iterator[Hit]:
    """auto_cast turns the model's inputs into fp16 whether or not fp16 is enabled (forward in runtime/engine.py).

    Measured: "mat1 and mat2 must have the same dtype" at the first layer. Whole numbers, such as the tokens that
    HF Trainer gives a language model, stay what they are.
    """
    found = mode(context)
    if context.flag("fp16.auto_cast") and found in (FP32, BF16):
        yield Hit(
            "fp16.auto_cast",
            f"casts the inputs to fp16, and the model is in {found}",
            "Remove it, or enable fp16.",
            removal(context, "fp16.auto_cast", safe=False),
            None if context.target == "deepspeed" else "warning",
        )


@rule(
    "DS321",
    "warning",
    bad=[
        {**ZERO_1, **bf16(), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {**ZERO_1, **fp16(), "torch_autocast": {"enabled": True}},
    ],
    good=[
        {**ZERO_1, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {**ZERO_1, **bf16(), "torch_autocast": {"enabled": False}},
        {
            **CPU,
            **ADAMW,
            **bf16(bf16_master_weights_and_grads=True),
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
        },
    ],
    since=(0, 17),
)
def autocast_with_16_bit_weights(context: Context) -> Iterator[Hit]:
    """Autocast is for weights in fp32; fp16 and bf16 turn them into 16 bits all the same (runtime/engine.py).

    With bf16_master_weights_and_grads everything is meant to be in 16 bits, and autocast belongs to it.
    """
    found = next((name for name in (BF16, FP16) if context.flag(f"{name}.enabled")), None)
    if found and context.flag("torch_autocast.enabled") and not any(context.flag(path) for path in MASTER):
        yield Hit(
            "torch_autocast.enabled",
            f"is meant for weights in fp32, and {found} keeps them in 16 bits",
            f"Remove torch_autocast, or set {found}.enabled to false.",
            setting(context, f"{found}.enabled", value=False),
        )


@rule(
    "DS322",
    "warning",
    bad=[
        {"torch_autocast": {"dtype": "bf16"}},
        {"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"]}},
    ],
    good=[
        {"torch_autocast": {}},
        {"torch_autocast": {"enabled": False, "dtype": "bf16"}},
        {"torch_autocast": {"enabled": True}},
    ],
    since=(0, 17),
)
def autocast_without_enabled(context: Context) -> Iterator[Hit]:
    """`enabled` is false where it is left out (get_torch_autocast_enabled in runtime/config.py)."""
    if context.section("torch_autocast") and not context.has("torch_autocast.enabled"):
        yield Hit(
            "torch_autocast",
            "has no effect without torch_autocast.enabled",
            'Add "enabled": true, or remove the section.',
            setting(context, "torch_autocast.enabled", value=True),
        )


@rule(
    "DS323",
    "error",
    FAILS,
    bad=[
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": "torch.nn.Linear"}},
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", "Conv2d"]}},
    ],
    good=[
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
        {"torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["Linear"]}},
        {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": []}},
    ],
    since=(0, 17),
)
def autocast_modules_not_found(context: Context) -> Iterator[Hit]:
    """Each entry is imported by its full name, and a text is taken letter by letter (runtime/torch_autocast.py)."""
    path = "torch_autocast.lower_precision_safe_modules"
    given = context.get(path)
    if not context.flag("torch_autocast.enabled"):
        return
    if isinstance(given, str) and given != schema.AUTO:
        yield Hit(
            path,
            f'is "{given}", a text: DeepSpeed goes through it letter by letter',
            f'Write a list: ["{given}"].',
            setting(context, path, [given], safe="." in given),
        )
    for index, name in enumerate(given if isinstance(given, list) else ()):
        if isinstance(name, str) and "." not in name:
            yield Hit(
                f"{path}.{index}",
                f'is "{name}", a class without its module',
                f"Write the full name, such as torch.nn.{name}.",
            )


@rule(
    "DS324",
    "warning",
    bad={"torch_autocast": {"enabled": True, "dtype": "float32"}},
    good=[
        {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        {"torch_autocast": {"enabled": True}},
        {"torch_autocast": {"enabled": False, "dtype": "float32"}},
    ],
    since=(0, 17),
)
def autocast_to_fp32(context: Context) -> Iterator[Hit]:
    """Autocast to fp32 changes nothing: torch turns it off, or casts to what is there (runtime/torch_autocast.py)."""
    path = "torch_autocast.dtype"
    if context.flag("torch_autocast.enabled") and NAMES.get(context.text(path) or "") == FP32:
        yield Hit(path, "casts to fp32, which is what the weights are in", "Write bfloat16 or float16.")

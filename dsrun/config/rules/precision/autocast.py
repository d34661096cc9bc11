"""DS311 and DS321 to DS324: casts on the way, by fp16.auto_cast and by torch.autocast."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import removal, set_to
from dsrun.config.rules.examples import ZERO_1, bf16, fp16
from dsrun.config.rules.frame import FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, put, report
from dsrun.config.rules.precision.modes import BF16, FP16, FP32, MASTER, NAMES, mode
from dsrun.config.schemas import schema


@rule("DS311", FAILS)
@bad(
    {**ZERO_1, "fp16": {"enabled": False, "auto_cast": True}},
    {**ZERO_1, **bf16(), "fp16": {"enabled": False, "auto_cast": True}},
)
@good({**ZERO_1, **fp16(auto_cast=True)}, {**ZERO_1, "fp16": {"enabled": False, "auto_cast": False}})
def inputs_cast_without_fp16(context: Context) -> Iterator[Finding]:
    """auto_cast turns the model's inputs into fp16 whether or not fp16 is enabled (forward in runtime/engine.py).

    Measured: "mat1 and mat2 must have the same dtype" at the first layer. Integers, such as the tokens that
    HF Trainer gives a language model, aren't cast.
    """
    precision = mode(context)
    if context.flag("fp16.auto_cast") and precision in (FP32, BF16):
        yield Finding(
            "fp16.auto_cast",
            f"casts the inputs to fp16, but the model is in {precision}",
            "Remove it, or enable fp16.",
            removal(context, "fp16.auto_cast", safe=False),
            "" if context.target == "deepspeed" else "warning",
        )


@rule("DS321", "warning", since=(0, 17, 2))
@bad(
    {**ZERO_1, **bf16(), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    {**ZERO_1, **fp16(), "torch_autocast": {"enabled": True}},
)
@good(
    {**ZERO_1, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    {**ZERO_1, **bf16(), "torch_autocast": {"enabled": False}},
)
def autocast_with_16_bit_weights(context: Context) -> Iterator[Finding]:
    """Autocast is for weights in fp32, but fp16 and bf16 turn them into 16 bits (runtime/engine.py).

    With bf16_master_weights_and_grads everything is meant to be in 16 bits, and autocast belongs to it.
    """
    precision = next((name for name in (BF16, FP16) if context.flag(f"{name}.enabled")), None)
    if (
        precision
        and context.flag("torch_autocast.enabled")
        and not any(context.flag(path) for path in MASTER)
    ):
        yield Finding(
            "torch_autocast.enabled",
            f"is meant for weights in fp32, but {precision} keeps them in 16 bits",
            f"Remove torch_autocast, or set {precision}.enabled to false.",
            set_to(context, f"{precision}.enabled", value=False),
        )


@rule("DS322", "warning", since=(0, 17, 2))
@bad(
    {"torch_autocast": {"dtype": "bf16"}},
    {"torch_autocast": {"lower_precision_safe_modules": ["torch.nn.Linear"]}},
)
@good({"torch_autocast": {}}, {"torch_autocast": {"enabled": False, "dtype": "bf16"}})
def autocast_without_enabled() -> Table:
    """`enabled` is false by default (get_torch_autocast_enabled in runtime/config.py)."""
    text = 'has no effect without torch_autocast.enabled. Add "enabled": true, or remove the section.'
    conditions = (lambda context: context.section("torch_autocast"), when.lacks("torch_autocast.enabled"))
    return report("torch_autocast", text, conditions, put("torch_autocast.enabled", True))


@rule("DS323", FAILS, since=(0, 17, 2))
@bad(
    {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": "torch.nn.Linear"}},
    {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear", "Conv2d"]}},
)
@good(
    {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
    {"torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["Linear"]}},
)
def autocast_modules_not_found(context: Context) -> Iterator[Finding]:
    """Each entry is imported by its full name, and a string is read letter by letter (runtime/torch_autocast.py)."""
    path = "torch_autocast.lower_precision_safe_modules"
    given = context.get(path)
    if not context.flag("torch_autocast.enabled"):
        return
    if isinstance(given, str) and given != schema.AUTO:
        yield Finding(
            path,
            f'is "{given}", a string: DeepSpeed reads it letter by letter',
            f'Write a list: ["{given}"].',
            set_to(context, path, [given], safe="." in given),
        )
    for index, name in enumerate(given if isinstance(given, list) else ()):
        if isinstance(name, str) and "." not in name:
            yield Finding(
                f"{path}.{index}",
                f'is "{name}", a class name without its module',
                f"Write the full name, such as torch.nn.{name}.",
            )


@rule("DS324", "warning", since=(0, 17, 2))
@bad({"torch_autocast": {"enabled": True, "dtype": "float32"}})
@good({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"torch_autocast": {"enabled": True}})
def autocast_to_fp32() -> Table:
    """Autocast to fp32 changes nothing: torch turns it off, or casts to the same type (runtime/torch_autocast.py)."""
    path = "torch_autocast.dtype"
    conditions = (
        when.on("torch_autocast.enabled"),
        lambda context: NAMES.get(context.text(path) or "") == FP32,
    )
    return report(
        path, "casts to fp32, which the weights already are. Write bfloat16 or float16.", conditions
    )

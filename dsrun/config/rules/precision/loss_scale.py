"""DS302 to DS304 and DS306 to DS310: the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import no_effect, set_to
from dsrun.config.rules.examples import ZERO_1, ZERO_2, bf16, fp16, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, in_range, put
from dsrun.config.rules.optimizer.signatures import data, optimizer_class
from dsrun.config.rules.precision.modes import FP16, mode

FP16_MAX = 65504
USUAL_POWER = 32
"""The largest initial_scale_power in common use; each one above costs a skipped step more."""

LARGEST_POWER = 63
"""torch multiplies the loss by a whole number of 64 bits."""

DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""Keys that only a dynamic loss scale reads."""


def in_fp16(context: Context) -> bool:
    """Whether the fp16 section counts: it is on, or HF Trainer may turn it on."""
    precision = mode(context)
    return precision == FP16 or (precision is None and context.has("fp16"))


def adapts(context: Context) -> bool:
    """Whether the loss scale is dynamic, which 0 means (runtime/precision_config.py)."""
    return in_fp16(context) and not context.number("fp16.loss_scale")


def first_power(context: Context) -> int:
    """The loss scale starts at 2 to the power of this."""
    power = context.integer("fp16.initial_scale_power")
    return 16 if power is None else power


@rule("DS302", DIFFERS)
@bad({**ZERO_1, **fp16(hysteresis=0)}, {**ZERO_2, **fp16(hysteresis=-1)})
@good({**ZERO_1, **fp16(hysteresis=1)}, {**ZERO_1, **fp16()})
def hysteresis_below_1() -> Table:
    """The scale is halved when the counter is exactly 1; counting down from 0 it never is.

    So every step that overflows is skipped, forever (DynamicLossScaler.update_scale in
    runtime/fp16/loss_scaler.py). Stage 0 knows no hysteresis.
    """
    text = (
        "is {value}: the loss scale is never lowered, so after one overflow every step is skipped. "
        "Write 2, DeepSpeed's default; 1 lowers the scale at the first overflow."
    )
    conditions = (when.is_whole("fp16.hysteresis"), when.unless(when.below_stage(1)), adapts)
    return in_range("fp16.hysteresis", text, conditions, put("fp16.hysteresis", 2), least=1)


@rule("DS303", "warning")
@bad({**ZERO_1, **fp16(loss_scale=65505)}, {**ZERO_1, **fp16(loss_scale=1e9)})
@good({**ZERO_1, **fp16(loss_scale=65504)}, {**ZERO_1, "fp16": {"enabled": False, "loss_scale": 1e9}})
def static_scale_above_fp16() -> Table:
    """A gradient of 1 overflows at such a scale. DeepSpeed then skips the step, and with a fixed scale every step.

    Only the log says so (LossScaler in runtime/fp16/loss_scaler.py).
    """
    path = "fp16.loss_scale"
    text = (
        "is {value:g}, above {most}, the largest number of fp16: steps overflow and are skipped. "
        "Write 0 for a dynamic scale."
    )
    return in_range(path, text, in_fp16, put(path, 0), most=FP16_MAX)


@rule("DS304", DIFFERS)
@bad(
    {**ZERO_1, **fp16(initial_scale_power=4, min_loss_scale=17)},
    {**ZERO_1, **fp16(initial_scale_power=4, min_loss_scale=16)},
)
@good({**ZERO_1, **fp16(initial_scale_power=4, min_loss_scale=15)}, {**ZERO_1, **fp16(min_loss_scale=65535)})
def minimum_above_initial_scale(context: Context) -> Iterator[Finding]:
    """With a minimum above 2^initial_scale_power the first overflow raises the scale instead of halving it.

    With one that is just as high it ends the run: "Current loss scale already at minimum"
    (DynamicLossScaler.update_scale in runtime/fp16/loss_scaler.py; stage 0 goes on).
    """
    power, minimum = first_power(context), context.number("fp16.min_loss_scale")
    if minimum is None or not adapts(context) or not -LARGEST_POWER <= power <= LARGEST_POWER:
        return
    path, first = "fp16.min_loss_scale", 2.0**power
    fix = set_to(context, path, 1)
    advice = "Write 1, DeepSpeed's default."
    if minimum > first:
        yield Finding(
            path, f"is {minimum:.17g}, above {first:.17g}, the first scale (2^{power})", advice, fix
        )
    elif minimum == first and power > 0 and context.stage > 0:
        text = f"is {minimum:.17g}, equal to the first scale (2^{power}): an overflow ends the run"
        finding = Finding(path, text, advice, fix)
        yield replace(finding, effect=FAILS) if power > USUAL_POWER else replace(finding, severity="warning")


@rule("DS306", "warning", since=(0, 18))
@bad(fp16(), {**zero(0), **fp16(loss_scale=128)})
@good({**ZERO_1, **fp16()}, bf16())
def loss_scale_at_stage_0(context: Context) -> Iterator[Finding]:
    """At stage 0 the engine's backward doesn't scale the loss, but the step still divides by the scale.

    Small gradients are lost and clipping never acts; measured with 0.19.8, two ranks: a gradient norm of 8.4e-5
    where stages 1 to 3 have 5.5 (DeepSpeedEngine.backward in runtime/engine.py scales for ZeROOptimizer only).
    """
    tuned = context.flag("autotuning.enabled")  # which picks the stage
    if mode(context) == FP16 and context.stage == 0 and not tuned:
        kind = optimizer_class(context)
        refused = kind and kind not in data()["zero"] and not context.get("zero_allow_untested_optimizer")
        yield Finding(
            "fp16.enabled",
            "at stage 0 DeepSpeed never multiplies the loss by the loss scale: small gradients become 0",
            f"Use bf16; ZeRO, which does, refuses {context.text('optimizer.type')}."
            if refused
            else "Use ZeRO stage 1 or above, or bf16.",
        )


@rule("DS307", "note")
@bad(
    {**ZERO_1, **fp16(loss_scale=128, initial_scale_power=8)},
    {**ZERO_1, **fp16(loss_scale=1, loss_scale_window=0, consecutive_hysteresis=True)},
)
@good(
    {**ZERO_1, **fp16(loss_scale=0, initial_scale_power=8, loss_scale_window=100, hysteresis=1)},
    {**ZERO_1, **fp16(loss_scale=128, auto_cast=True)},
)
def dynamic_scale_keys_with_a_fixed_scale(context: Context) -> Iterator[Finding]:
    """The keys of a dynamic loss scale aren't read with a fixed one (CreateLossScaler).

    Source: runtime/fp16/loss_scaler.py.
    """
    scale = context.number("fp16.loss_scale")
    if not scale or mode(context) != FP16:
        return
    for key in DYNAMIC:
        if context.has(path := f"fp16.{key}"):
            yield no_effect(
                context,
                path,
                f": loss_scale is {scale:g}, a fixed scale",
                "Remove it, or set loss_scale to 0 for a dynamic scale.",
            )


@rule("DS308", FAILS)
@bad({**ZERO_1, **fp16(initial_scale_power=64)}, {**ZERO_1, **fp16(initial_scale_power=63)})
@good({**ZERO_1, **fp16(initial_scale_power=32)}, {**ZERO_1, **fp16(initial_scale_power=0)})
def initial_scale_out_of_range(context: Context) -> Iterator[Finding]:
    """The loss is multiplied by 2^power as an integer, and torch accepts at most 64 bits.

    "int too big to convert" at the first step; measured: 63 works, 64 doesn't (DynamicLossScaler.backward in
    runtime/fp16/loss_scaler.py). Below that each power too high is a skipped step, and at stage 0 the loss isn't
    multiplied at all.
    """
    if not adapts(context):
        return
    path, power = "fp16.initial_scale_power", first_power(context)
    fix = set_to(context, path, 16)
    if power > LARGEST_POWER and context.stage > 0:
        text = f"is {power}: torch can't multiply the loss by 2^{power}, and the first step fails"
        advice = f"Write 16, DeepSpeed's default; {LARGEST_POWER} is the most that works."
        finding = Finding(path, text, advice, fix)
        # "auto" may turn out to be off.
        yield finding if mode(context) == FP16 else replace(finding, severity="warning")
    elif power > USUAL_POWER:
        text = f"is {power}: steps overflow and are skipped until the scale has dropped from 2^{power}"
        yield Finding(path, text, "Write 16, DeepSpeed's default.", fix, "warning")
    elif power < 0:
        text = f"is {power}: the loss is scaled down, so fp16 loses small gradients"
        yield Finding(path, text, "Write 16, DeepSpeed's default; 0 starts with no scaling.", fix, "warning")


@rule("DS309", REFUSED, since=(0, 19, 3))
@bad({**ZERO_1, **fp16(loss_scale_window=0)}, {**ZERO_1, **fp16(loss_scale_window=-1, loss_scale=0)})
@good(
    {**ZERO_1, **fp16(loss_scale_window=1, min_loss_scale=1)},
    {**ZERO_1, **fp16(loss_scale_window=0, min_loss_scale=0, loss_scale=128)},
)
def scale_limits_not_positive(context: Context) -> Iterator[Finding]:
    """Checked for fp16 with a dynamic scale (DeepSpeedFP16Config in runtime/precision_config.py).

    The window divides, and a minimum of 0 lets the scale vanish. A fraction is refused in any case.
    """
    dynamic = mode(context) == FP16 and not context.number("fp16.loss_scale")
    for key, usual in (("loss_scale_window", 1000), ("min_loss_scale", 1)):
        value = context.number(path := f"fp16.{key}")
        if value is not None and (0 < value < 1 or (dynamic and value <= 0 and float(value).is_integer())):
            yield Finding(
                path,
                f"is {value:g}, but must be a whole number above 0",
                f"Write {usual}, DeepSpeed's default.",
                set_to(context, path, usual),
            )


@rule("DS310", REFUSED, since=(0, 18, 8))
@bad(fp16(loss_scale=-1), {**ZERO_1, **fp16(loss_scale=-2.5)})
@good({**ZERO_1, **fp16(loss_scale="128")}, {**ZERO_1, **fp16(loss_scale=0)})
def negative_loss_scale(context: Context) -> Iterator[Finding]:
    """A field validator stops at a negative scale (DeepSpeedFP16Config in runtime/precision_config.py).

    What that and its neighbour refuse of other types is read from their code ("x-refuses" of the schema).
    """
    number = context.number("fp16.loss_scale")
    if number is not None and number < 0:
        text = f"is {number:g}, but must be 0 for a dynamic scale, or more"
        yield Finding("fp16.loss_scale", text, "Write 0.", set_to(context, "fp16.loss_scale", 0))

"""DS3xx: fp16, bf16 and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.frame import Context, Hit, rule

FP16_MAX = 65504


@rule("DS301", "error")
def both_precisions(context: Context) -> Iterator[Hit]:
    """fp16 and bf16 together stop the start (_initialize_params in runtime/config.py)."""
    if context.flag("fp16.enabled") and context.flag("bf16.enabled"):
        yield Hit(
            "bf16.enabled", "fp16 is enabled as well", "Enable one: --precision bf16, or fp16 without bf16."
        )


@rule("DS302", "error")
def hysteresis_below_1(context: Context) -> Iterator[Hit]:
    """The scale is halved when the counter is exactly 1: counting down from 0 it never gets there.

    So every step is skipped (DynamicLossScaler.update_scale in runtime/fp16/loss_scaler.py).
    """
    value = context.integer("fp16.hysteresis")
    if value is not None and value < 1:
        yield Hit(
            "fp16.hysteresis",
            f"with {value} the loss scale is never lowered",
            "2 is usual; 1 lowers it at once.",
        )


@rule("DS303", "error")
def static_scale_above_fp16(context: Context) -> Iterator[Hit]:
    """A fixed scale above the largest fp16 number overflows at every step, and DeepSpeed skips them all.

    Only the log says so (LossScaler in runtime/fp16/loss_scaler.py).
    """
    value = context.number("fp16.loss_scale")
    if value is not None and value > FP16_MAX:
        yield Hit(
            "fp16.loss_scale",
            f"{value:g} is above {FP16_MAX}: every step overflows",
            "0 finds a scale by itself.",
        )


@rule("DS304", "error")
def minimum_above_initial_scale(context: Context) -> Iterator[Hit]:
    """With a minimum above 2^initial_scale_power the first overflow raises the scale instead of halving it.

    Source: DynamicLossScaler.update_scale in runtime/fp16/loss_scaler.py.
    """
    power = context.integer("fp16.initial_scale_power")
    power = 16 if power is None else power
    minimum = context.number("fp16.min_loss_scale")
    if (
        minimum is not None
        and abs(power) < 1000
        and minimum > 2.0**power
        and not context.number("fp16.loss_scale")
    ):
        yield Hit(
            "fp16.min_loss_scale", f"{minimum:g} is above the first scale, 2^{power}", "1 is DeepSpeed's own."
        )


@rule("DS305", "warning")
def scale_settings_without_fp16(context: Context) -> Iterator[Hit]:
    """Nothing of the section acts unless fp16.enabled is true (runtime/precision_config.py)."""
    if context.section("fp16") and not context.has("fp16.enabled"):
        yield Hit(
            "fp16", "has no effect without fp16.enabled", "Add --precision fp16, or leave the section out."
        )


@rule("DS306", "warning")
def loss_scale_at_stage_0(context: Context) -> Iterator[Hit]:
    """At stage 0 the engine's backward leaves the loss unscaled, while the step divides by the scale all the same.

    Small gradients are lost and clipping never acts; measured with 0.19.8, two ranks: a gradient norm of 8.4e-5
    where stages 1 to 3 have 5.5 (DeepSpeedEngine.backward in runtime/engine.py scales for ZeROOptimizer only).
    """
    if context.flag("fp16.enabled") and not context.integer("zero_optimization.stage"):
        yield Hit(
            "fp16.enabled",
            "at stage 0 DeepSpeed 0.19 never multiplies the loss by the loss scale",
            "Use zero1, or bf16; dsrun's own training loop scales the loss itself.",
        )

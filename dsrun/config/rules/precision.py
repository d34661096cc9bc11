"""DS30x-DS32x: fp16, bf16, the loss scale, data types and torch.autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.config import schema, tree
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Edit, Fix, Hit, rule
from dsrun.config.rules.signatures import offloaded, optimizer_class

FP16_MAX = 65504
USUAL_POWER = 32
"""The largest initial_scale_power in common use; each one above costs a skipped step more."""

LARGEST_POWER = 63
"""torch multiplies the loss by a whole number of 64 bits."""

FP32, FP16, BF16 = "fp32", "fp16", "bf16"
NAMES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), FP32),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), FP16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), BF16),
}
"""What DeepSpeed calls the data types (DtypeEnum in runtime/config.py)."""

DYNAMIC = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
"""What only a loss scale that adapts itself asks for."""

MASTER = ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads")
STATES = "bf16.bf16_optimizer_states"
ZERO_1: dict[str, Any] = {"zero_optimization": {"stage": 1}}
ZERO_2: dict[str, Any] = {"zero_optimization": {"stage": 2}}
ZERO_3: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
}
CPU: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def fp16(**fields: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **fields}}


def bf16(**fields: Any) -> dict[str, Any]:
    return {"bf16": {"enabled": True, **fields}}


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


def in_fp16(context: Context) -> bool:
    """Whether the fp16 section counts: it is on, or HF Trainer may turn it on."""
    found = mode(context)
    return found == FP16 or (found is None and context.has("fp16"))


def adapts(context: Context) -> bool:
    """Whether the loss scale adapts itself, which 0 stands for (runtime/precision_config.py)."""
    return in_fp16(context) and not context.number("fp16.loss_scale")


def first_power(context: Context) -> int:
    """The loss scale starts at 2 to this power."""
    power = context.integer("fp16.initial_scale_power")
    return 16 if power is None else power


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
            Fix((Edit("replace", "fp16.enabled", False),), safe=False),
        )


@rule(
    "DS302",
    "error",
    DIFFERS,
    bad=[{**ZERO_1, **fp16(hysteresis=0)}, {**ZERO_2, **fp16(hysteresis=-1)}],
    good=[{**ZERO_1, **fp16(hysteresis=1)}, {**ZERO_1, **fp16()}],
)
def hysteresis_below_1(context: Context) -> Iterator[Hit]:
    """The scale is halved when the counter is exactly 1: counting down from 0 it never gets there.

    So every step that overflows is skipped, for ever (DynamicLossScaler.update_scale in
    runtime/fp16/loss_scaler.py). Stage 0 knows no hysteresis.
    """
    value = context.integer("fp16.hysteresis")
    if value is not None and value < 1 and context.stage > 0 and adapts(context):
        yield Hit(
            "fp16.hysteresis",
            f"is {value}: the loss scale is never lowered, and once a step overflows all are skipped",
            "Write 2, DeepSpeed's default; 1 lowers the scale at the first overflow.",
            Fix((Edit("replace", "fp16.hysteresis", 2),), safe=False),
        )


@rule(
    "DS303",
    "warning",
    bad=[{**ZERO_1, **fp16(loss_scale=65505)}, {**ZERO_1, **fp16(loss_scale=1e9)}],
    good=[{**ZERO_1, **fp16(loss_scale=65504)}, {**ZERO_1, "fp16": {"enabled": False, "loss_scale": 1e9}}],
)
def static_scale_above_fp16(context: Context) -> Iterator[Hit]:
    """A gradient of 1 overflows at such a scale. DeepSpeed then skips the step, and with a fixed scale every one.

    Only the log says so (LossScaler in runtime/fp16/loss_scaler.py).
    """
    value = context.number("fp16.loss_scale")
    if value is not None and value > FP16_MAX and in_fp16(context):
        yield Hit(
            "fp16.loss_scale",
            f"is {value:g}, above {FP16_MAX}, the largest number of fp16: steps overflow and are skipped",
            "Write 0: DeepSpeed then finds the scale by itself.",
            Fix((Edit("replace", "fp16.loss_scale", 0),), safe=False),
        )


@rule(
    "DS304",
    "error",
    DIFFERS,
    bad=[
        {**ZERO_1, **fp16(initial_scale_power=4, min_loss_scale=17)},
        {**ZERO_1, **fp16(min_loss_scale=65537)},
        {**ZERO_1, **fp16(initial_scale_power=4, min_loss_scale=16)},
        {**ZERO_1, **fp16(initial_scale_power=33, min_loss_scale=2**33)},
        fp16(initial_scale_power=4, min_loss_scale=17),
    ],
    good=[
        {**ZERO_1, **fp16(initial_scale_power=4, min_loss_scale=15)},
        {**ZERO_1, **fp16(min_loss_scale=65535)},
        {**ZERO_1, **fp16(initial_scale_power=0)},
        {**ZERO_1, **fp16(loss_scale=128, min_loss_scale=65537)},
        fp16(initial_scale_power=4, min_loss_scale=16),
    ],
)
def minimum_above_initial_scale(context: Context) -> Iterator[Hit]:
    """With a minimum above 2^initial_scale_power the first overflow raises the scale instead of halving it.

    With one that is just as high it ends the run: "Current loss scale already at minimum"
    (DynamicLossScaler.update_scale in runtime/fp16/loss_scaler.py; stage 0 goes on).
    """
    power, minimum = first_power(context), context.number("fp16.min_loss_scale")
    if minimum is None or not adapts(context) or not -LARGEST_POWER <= power <= LARGEST_POWER:
        return
    path, first = "fp16.min_loss_scale", 2.0**power
    fix = Fix((Edit("replace", path, 1),), safe=False)
    advice = "Write 1, DeepSpeed's default."
    if minimum > first:
        yield Hit(path, f"is {minimum:.17g}, above {first:.17g}, the first scale (2^{power})", advice, fix)
    elif minimum == first and power > 0 and context.stage > 0:
        text = f"is {minimum:.17g}, the first scale itself (2^{power}): an overflow ends the run"
        hit = Hit(path, text, advice, fix)
        yield hit._replace(effect=FAILS) if power > USUAL_POWER else hit._replace(severity="warning")


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
            advice, fix = f"Remove it: {other} is enabled.", Fix((Edit("remove", name),), safe=False)
        else:
            advice = f'Add "enabled": true to {name}, or remove the section.'
            fix = Fix((Edit("add", f"{name}.enabled", True),), safe=False)
        yield Hit(name, f"has no effect without {name}.enabled", advice, fix)


@rule(
    "DS306",
    "warning",
    bad=[fp16(), {"zero_optimization": {"stage": 0}, **fp16(loss_scale=128)}],
    good=[{**ZERO_1, **fp16()}, bf16(), {"_version": "0.17", **fp16()}],
    since=(0, 18),
)
def loss_scale_at_stage_0(context: Context) -> Iterator[Hit]:
    """At stage 0 the engine's backward leaves the loss unscaled, while the step divides by the scale all the same.

    Small gradients are lost and clipping never acts; measured with 0.19.8, two ranks: a gradient norm of 8.4e-5
    where stages 1 to 3 have 5.5 (DeepSpeedEngine.backward in runtime/engine.py scales for ZeROOptimizer only).
    """
    if mode(context) == FP16 and context.stage == 0:
        yield Hit(
            "fp16.enabled",
            "at stage 0 DeepSpeed never multiplies the loss by the loss scale",
            "Use ZeRO stage 1, or bf16; dsrun's own training loop scales the loss itself.",
        )


@rule(
    "DS307",
    "warning",
    bad=[
        {**ZERO_1, **fp16(loss_scale=128, initial_scale_power=8)},
        {**ZERO_1, **fp16(loss_scale=1, loss_scale_window=0, consecutive_hysteresis=True)},
    ],
    good=[
        {**ZERO_1, **fp16(loss_scale=0, initial_scale_power=8, loss_scale_window=100, hysteresis=1)},
        {**ZERO_1, **fp16(loss_scale=128, auto_cast=True)},
        {**ZERO_1, "fp16": {"enabled": False, "loss_scale": 128, "hysteresis": 2}},
    ],
)
def adapting_with_a_fixed_scale(context: Context) -> Iterator[Hit]:
    """What steers a loss scale that adapts itself is never asked for with a fixed one (CreateLossScaler).

    Source: runtime/fp16/loss_scaler.py.
    """
    scale = context.number("fp16.loss_scale")
    if not scale or mode(context) != FP16:
        return
    for key in DYNAMIC:
        if context.has(path := f"fp16.{key}"):
            yield Hit(
                path,
                f"has no effect: loss_scale is {scale:g}, a fixed scale",
                "Remove it, or set loss_scale to 0 for a scale that adapts itself.",
                Fix((Edit("remove", path),)),
            )


@rule(
    "DS308",
    "error",
    FAILS,
    bad=[
        {**ZERO_1, **fp16(initial_scale_power=64)},
        {**ZERO_1, **fp16(initial_scale_power=2000)},
        {**ZERO_1, **fp16(initial_scale_power=63)},
        {**ZERO_1, **fp16(initial_scale_power=33)},
        {**ZERO_1, **fp16(initial_scale_power=-1)},
        fp16(initial_scale_power=64),
    ],
    good=[
        {**ZERO_1, **fp16(initial_scale_power=32)},
        {**ZERO_1, **fp16(initial_scale_power=0)},
        {**ZERO_1, **fp16(initial_scale_power=64, loss_scale=128)},
        {**ZERO_1, "fp16": {"enabled": False, "initial_scale_power": 64}},
    ],
)
def initial_scale_out_of_range(context: Context) -> Iterator[Hit]:
    """The loss is multiplied by 2^power as a whole number, and torch takes none of more than 64 bits.

    "int too big to convert" at the first step; measured: 63 goes, 64 doesn't (DynamicLossScaler.backward in
    runtime/fp16/loss_scaler.py). Below that each power too many is a skipped step, and at stage 0 the loss isn't
    multiplied at all.
    """
    path, power = "fp16.initial_scale_power", first_power(context)
    fix = Fix((Edit("replace", path, 16),), safe=False)
    if not adapts(context):
        return
    if power > LARGEST_POWER and context.stage > 0:
        text = f"is {power}: torch can't multiply the loss by 2^{power}, and the first step fails"
        yield Hit(path, text, f"Write 16, DeepSpeed's default; {LARGEST_POWER} is the most that works.", fix)
    elif power > USUAL_POWER:
        text = f"is {power}: steps overflow and are skipped until the scale has come down from 2^{power}"
        yield Hit(path, text, "Write 16, DeepSpeed's default.", fix, "warning")
    elif power < 0:
        text = f"is {power}: the loss is made smaller, where fp16 loses small gradients"
        yield Hit(path, text, "Write 16, DeepSpeed's default; 0 starts with no scaling.", fix, "warning")


@rule(
    "DS309",
    "error",
    REFUSED,
    bad=[
        {**ZERO_1, **fp16(loss_scale_window=0)},
        {**ZERO_1, **fp16(loss_scale_window=-1, loss_scale=0)},
        {**ZERO_1, **fp16(min_loss_scale=0)},
        {**ZERO_1, **fp16(min_loss_scale=-1)},
    ],
    good=[
        {**ZERO_1, **fp16(loss_scale_window=1, min_loss_scale=1)},
        {**ZERO_1, **fp16(loss_scale_window=0, min_loss_scale=0, loss_scale=128)},
        {**ZERO_1, "fp16": {"enabled": False, "loss_scale_window": 0, "min_loss_scale": 0}},
        {"_version": "0.18", **ZERO_1, **fp16(min_loss_scale=0)},
    ],
    since=(0, 19),
)
def scale_limits_not_positive(context: Context) -> Iterator[Hit]:
    """Checked with fp16 on and a scale that adapts itself (DeepSpeedFP16Config in runtime/precision_config.py).

    The window divides, and a minimum of 0 lets the scale vanish.
    """
    if mode(context) != FP16 or context.number("fp16.loss_scale"):
        return
    for key, usual in (("loss_scale_window", 1000), ("min_loss_scale", 1)):
        value = context.integer(path := f"fp16.{key}")
        if value is not None and value <= 0:
            yield Hit(
                path,
                f"is {value}, and must be above 0 where the loss scale adapts itself",
                f"Write {usual}, DeepSpeed's default.",
                Fix((Edit("replace", path, usual),), safe=False),
            )


@rule(
    "DS310",
    "error",
    REFUSED,
    bad=[
        fp16(loss_scale=True),
        {**ZERO_1, "fp16": {"enabled": False, "min_loss_scale": True}},
        {**ZERO_1, "fp16": {"enabled": False, "loss_scale_window": "8.0"}},
        {**ZERO_1, **fp16(min_loss_scale="1.0")},
    ],
    good=[
        {**ZERO_1, **fp16(loss_scale="128")},
        {**ZERO_1, **fp16(loss_scale_window="8", min_loss_scale=1.0, hysteresis="2.0")},
        {**ZERO_1, **fp16(hysteresis=True)},
    ],
    since=(0, 18),
)
def scale_fields_not_converted(context: Context) -> Iterator[Hit]:
    """Three fields are looked at before pydantic converts them: no flags, and no fractions in a text.

    Source: the field validators of DeepSpeedFP16Config in runtime/precision_config.py.
    """
    for key in ("loss_scale", "loss_scale_window", "min_loss_scale"):
        given = tree.get(context.config, path := f"fp16.{key}")
        number = context.number(path)
        pointed = isinstance(given, str) and "." in given and key != "loss_scale"
        if number is not None and (isinstance(given, bool) or pointed):
            yield Hit(
                path,
                f"is {schema.shorten(given)}: DeepSpeed wants a number here and converts nothing",
                f"Write {number:g}.",
                Fix((Edit("replace", path, number),), safe=pointed),
            )


@rule(
    "DS311",
    "error",
    FAILS,
    bad=[
        {**ZERO_1, "fp16": {"enabled": False, "auto_cast": True}},
        {**ZERO_1, **bf16(), "fp16": {"enabled": False, "auto_cast": True}},
        {"_for": "hf", "_trainer": {"bf16": True}, "fp16": {"enabled": "auto", "auto_cast": True}},
    ],
    good=[
        {**ZERO_1, **fp16(auto_cast=True)},
        {**ZERO_1, "fp16": {"enabled": False, "auto_cast": False}},
        {"_for": "hf", "_trainer": {"fp16": True}, "fp16": {"enabled": "auto", "auto_cast": True}},
        {"_for": "hf", "fp16": {"enabled": "auto", "auto_cast": True}},
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
            Fix((Edit("remove", "fp16.auto_cast"),), safe=False),
            None if context.target == "deepspeed" else "warning",
        )


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
    "DS314",
    "error",
    REFUSED,
    bad=[
        {**bf16(bf16_master_weights_and_grads=True)},
        {"bf16": {"enabled": False, "bf16_master_weights_and_grads": True}},
        {**fp16(fp16_master_weights_and_grads=True)},
        {**bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)},
    ],
    good=[
        {**CPU, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
        bf16(bf16_master_weights_and_grads=False, bf16_optimizer_states=False),
        {"_version": "0.17", **fp16(fp16_master_weights_and_grads=True)},
    ],
    since=(0, 18),
)
def master_weights_without_zero(context: Context) -> Iterator[Hit]:
    """16-bit master weights are a part of ZeRO, and the check asks not for `enabled` (_do_error_check).

    Source: runtime/config.py.
    """
    for path in (*MASTER, STATES):
        if context.stage == 0 and context.flag(path):
            yield Hit(path, "needs ZeRO, and stage is 0", "Set zero_optimization.stage to 1, 2 or 3.")


@rule(
    "DS315",
    "error",
    REFUSED,
    bad=[
        {**ZERO_2, **bf16(bf16_optimizer_states=True)},
        {**ZERO_1, **bf16(bf16_optimizer_states=True, bf16_master_weights_and_grads=False)},
    ],
    good=[
        {**ZERO_2, **ADAMW, **bf16(bf16_optimizer_states=True, bf16_master_weights_and_grads=True)},
        {**ZERO_2, **bf16(bf16_optimizer_states=False)},
    ],
    since=(0, 18),
)
def states_without_master_weights(context: Context) -> Iterator[Hit]:
    """Optimizer states in bf16 go with master weights in bf16 (_do_error_check in runtime/config.py)."""
    if context.stage > 0 and context.flag(STATES) and not context.flag(MASTER[1]):
        op = "replace" if context.has(MASTER[1]) else "add"
        yield Hit(
            STATES,
            "needs bf16_master_weights_and_grads",
            "Set bf16.bf16_master_weights_and_grads to true as well.",
            Fix((Edit(op, MASTER[1], True),), safe=False),
        )


@rule(
    "DS316",
    "error",
    FAILS,
    bad=[
        {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
        {**ZERO_1, **ADAMW, **fp16(fp16_master_weights_and_grads=True)},
        {**ZERO_3, **bf16(bf16_master_weights_and_grads=True)},
        {**CPU, "optimizer": {"type": "Adagrad"}, **bf16(bf16_master_weights_and_grads=True)},
        {
            **CPU,
            "optimizer": {"type": "Adagrad"},
            **bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True),
        },
    ],
    good=[
        {**CPU, **ADAMW, **bf16(bf16_master_weights_and_grads=True)},
        {**CPU, **ADAMW, **fp16(fp16_master_weights_and_grads=True)},
        {**CPU, **bf16(bf16_master_weights_and_grads=True)},
        {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)},
        {**ZERO_2, **ADAMW, **bf16(bf16_master_weights_and_grads=False)},
        {
            **ZERO_1,
            **ADAMW,
            **bf16(bf16_master_weights_and_grads=True),
            "data_types": {"grad_accum_dtype": "fp32"},
        },
    ],
    since=(0, 18),
)
def master_weights_without_cpu_adam(context: Context) -> Iterator[Hit]:
    """16-bit master weights want offload and exactly DeepSpeedCPUAdam, or the optimizer's states in bf16 too.

    Source: _configure_master_weights in runtime/base_optimizer.py, with the checks in
    runtime/zero/stage_1_and_2.py and stage3.py. BF16_Optimizer doesn't ask.
    """
    kind, on_cpu = optimizer_class(context), offloaded(context)
    if context.stage == 0 or (on_cpu and kind in (None, "DeepSpeedCPUAdam")) or by_bf16_optimizer(context):
        return
    for path in MASTER:
        spared = path == MASTER[1] and context.flag(STATES) and not on_cpu
        if context.flag(path) and not spared:
            text = f"the optimizer is {kind}" if on_cpu else "the optimizer isn't offloaded"
            way_out = "" if path == MASTER[0] or on_cpu else ", or set bf16.bf16_optimizer_states to true"
            yield Hit(
                path,
                f"needs DeepSpeedCPUAdam, and {text}",
                f"Offload the optimizer to the CPU with optimizer.type AdamW{way_out}.",
            )


@rule(
    "DS317",
    "error",
    FAILS,
    bad={
        **CPU,
        **ADAMW,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": True},
    },
    good={
        **CPU,
        **ADAMW,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "fp16": {"enabled": False, "fp16_master_weights_and_grads": False},
    },
    since=(0, 18),
)
def both_master_weights(context: Context) -> Iterator[Hit]:
    """Master weights are in fp16 or in bf16 (_configure_master_weights in runtime/base_optimizer.py)."""
    if context.stage > 0 and all(context.flag(path) for path in MASTER):
        off = MASTER[1] if mode(context) == FP16 else MASTER[0]
        yield Hit(
            off,
            "master weights can't be in fp16 and in bf16",
            f"Remove {off}.",
            Fix((Edit("remove", off),), safe=False),
        )


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
        {"_for": "hf", "data_types": {"param_dtype": "fp16"}},
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
            Fix((Edit("remove", path),), safe=False),
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
            Fix((Edit("remove", path),), safe=False),
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
        Fix((Edit("remove", path),), safe=False),
        "warning" if found == FP32 else None,
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
            Fix((Edit("replace", f"{found}.enabled", False),), safe=False),
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
            Fix((Edit("add", "torch_autocast.enabled", True),), safe=False),
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
            Fix((Edit("replace", path, [given]),), safe="." in given),
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


@rule(
    "DS325",
    "warning",
    bad=[
        {**ZERO_2, **bf16(immediate_grad_update=True)},
        {**ZERO_1, **bf16(immediate_grad_update=True)},
        {**ZERO_3, **bf16(check_grad_overflow=False)},
    ],
    good=[
        {**ZERO_1, **bf16(immediate_grad_update=True), "data_types": {"grad_accum_dtype": "fp32"}},
        {**ZERO_2, **bf16(immediate_grad_update=False)},
        {**ZERO_2, **bf16(check_grad_overflow=False)},
        {**ZERO_3, **bf16(check_grad_overflow=True)},
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
            Fix((Edit("remove", path),)),
        )
    path = "bf16.check_grad_overflow"
    if context.flag(path) is False and mode(context) == BF16 and context.stage == 3:
        yield Hit(
            path, "has no effect at stage 3, which always looks", "Remove it.", Fix((Edit("remove", path),))
        )


@rule(
    "DS326",
    "note",
    bad=[{**ZERO_2, **bf16(check_grad_overflow=False)}, {**ZERO_1, **bf16(check_grad_overflow=False)}],
    good=[
        {**ZERO_2, **bf16()},
        {**ZERO_2, **bf16(check_grad_overflow=True)},
        {**ZERO_3, **bf16(check_grad_overflow=False)},
    ],
    since=(0, 17),
)
def overflow_not_looked_for(context: Context) -> Iterator[Hit]:
    """Without the check one infinite gradient goes into the weights (step in runtime/zero/stage_1_and_2.py)."""
    path = "bf16.check_grad_overflow"
    if context.flag(path) is False and mode(context) == BF16 and context.stage in (1, 2):
        yield Hit(path, "lets a step with infinite gradients into the weights", "Leave it at true.")


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
        {"_for": "hf", "data_types": {"keep_in_fp32_modules": ["router"]}},
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
            Fix((Edit("remove", path),)),
        )

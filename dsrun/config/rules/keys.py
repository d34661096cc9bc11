"""DS00x: what the schema says of each key by itself."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Hit, rule
from dsrun.config.schema import FILLING

TUNED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""What DeepSpeed's autotuner takes "auto" for."""


@rule(
    "DS001",
    "error",
    DIFFERS,
    bad=[
        {"zero_optimisation": {"stage": 3}},
        {"flops_profiler": {"enable": True}},
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-4}, "scheduler": {"type": "WarmupLR"}}},
    ],
    good=[
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        {"_why": "a note"},
    ],
)
def unknown_key_ignored(context: Context) -> Iterator[Hit]:
    """The top level and some fifteen sections are read with `get`: what nobody asks for is never noticed.

    Source: DeepSpeedConfig._initialize_params in runtime/config.py.
    """
    for hit in _of(context, "unknown", refused=False):
        section, _, key = hit.path.rpartition(".")
        # Without a type there is no optimizer at all, which is said by rules of its own.
        if not (
            key == "name" and section in ("optimizer", "scheduler") and not context.has(f"{section}.type")
        ):
            yield hit


@rule(
    "DS002",
    "error",
    DIFFERS,
    bad=[
        {"zero_optimization": {"stage": 4}},
        {"gradient_clipping": None},
        {"gradient_accumulation_steps": 2.5},
        {"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}},
        {"pipeline": {"partition": 1}},
    ],
    good={"gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
)
def wrong_value(context: Context) -> Iterator[Hit]:
    """Checked sections refuse it (runtime/config_utils.py); elsewhere it goes on to whoever computes with it.

    A text where a number belongs fails at the first step; a fraction of accumulation steps trains, with a step at
    other times than anyone meant (runtime/config.py, runtime/engine.py). A key that has no effect at all is a warning.
    """
    for hit in _of(context, "value"):
        idle = hit.effect is None and "x-no-effect" in (context.schema.node(hit.path) or {})
        yield hit._replace(severity="warning") if idle else hit


@rule(
    "DS003",
    "error",
    DIFFERS,
    bad=[
        {"bf16": {"enabled": "auto"}},
        {"_for": "hf", "fp16": {"enabled": True, "loss_scale": "auto"}},
    ],
    good=[
        {"_for": "hf", "fp16": {"enabled": "auto"}},
        {"train_micro_batch_size_per_gpu": "auto", "autotuning": {"enabled": True}},
    ],
)
def auto_that_nobody_fills_in(context: Context) -> Iterator[Hit]:
    """DeepSpeed drops "auto" in silence, so that the default holds (runtime/config_utils.py), or fails on it.

    HF Trainer fills in a fixed list (transformers/integrations/deepspeed.py) and stops at any other
    (accelerate/utils/dataclasses.py). DeepSpeed's autotuner fills in two (autotuning/autotuner.py).
    """
    stops = context.target in FILLING
    tuned = TUNED if context.flag("autotuning.enabled") else ()
    for hit in _of(context, "auto"):
        if hit.path in tuned:
            continue
        yield hit._replace(effect=FAILS) if stops else hit


@rule(
    "DS004",
    "error",
    DIFFERS,
    bad=[
        {"elasticity": {"enabled": False}},
        {"fp32_allreduce": True},
        {"_version": "0.16", "aio": {"thread_count": 2}},
    ],
    good=[{"_version": "0.14", "elasticity": {"enabled": False}}, {"communication_data_type": "fp32"}],
)
def removed_key(context: Context) -> Iterator[Hit]:
    """At most of them 0.19 stops, whatever the value (_reject_removed_config_keys, runtime/config.py).

    Older versions, and 0.19 at the few it only renamed, pass over them in silence.
    """
    return _of(context, "removed")


@rule(
    "DS005",
    "error",
    DIFFERS,
    bad=[
        {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
        {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
    ],
    good={"bfloat16": {"enabled": True}},
)
def alias_beside_its_name(context: Context) -> Iterator[Hit]:
    """Both names of one field are a validation error (runtime/zero/config.py).

    bfloat16 beside bf16 is ignored (runtime/precision_config.py).
    """
    return _of(context, "alias")


@rule(
    "DS006",
    "error",
    REFUSED,
    bad=[
        {"zero_optimization": {"stage": 2, "offload_optimzer": {"device": "cpu"}}},
        {"bf16": {"enable": True}},
    ],
    good={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
)
def unknown_key_refused(context: Context) -> Iterator[Hit]:
    """Checked sections refuse unknown keys, once the model is loaded (extra="forbid", runtime/config_utils.py)."""
    return _of(context, "unknown", refused=True)


@rule(
    "DS007",
    "warning",
    bad=[{"bf16": {"enabled": "true"}}, {"zero_optimization": {"stage": "1"}}, {"prescale_gradients": 0}],
    good={"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
)
def value_of_another_type(context: Context) -> Iterator[Hit]:
    """Checked sections convert "2" to 2 and "true" to true (pydantic, runtime/config_utils.py); other readers don't.

    accelerate compares the stage with the number 3: at "3" it saves empty tensors
    (accelerate/utils/deepspeed.py); so for HF Trainer and accelerate this is an error at the stage.
    """
    for violation in context.violations:
        if violation.kind == "converted":
            stage = violation.path == "zero_optimization.stage" and context.target != "deepspeed"
            text = (
                f"{violation.message}, and accelerate doesn't: saving writes empty weights"
                if stage
                else violation.message
            )
            hit = Hit(violation.path, text, violation.suggestion, violation.fix)
            yield hit._replace(severity="error", effect=DIFFERS) if stage else hit


@rule("DS008", "error", DIFFERS, bad={"prescale_gradients": "false"}, good={"prescale_gradients": False})
def text_counts_as_true(context: Context) -> Iterator[Hit]:
    """Outside the checked sections a flag is tested as it is: any text counts as true (runtime/config.py)."""
    return _of(context, "flag")


@rule(
    "DS009",
    "error",
    DIFFERS,
    bad={"_version": "0.9", "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
    good={"_version": "0.9", "zero_optimization": {"stage": 2}},
)
def key_of_a_later_version(context: Context) -> Iterator[Hit]:
    """A key that the version in use doesn't know yet is ignored or refused like any unknown one (runtime/config.py)."""
    return _of(context, "later")


@rule(
    "DS010",
    "error",
    DIFFERS,
    bad=[{"max_grad_norm": 1.0}, {"zero_stage": 3}],
    good={"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}},
)
def key_of_another_tool(context: Context) -> Iterator[Hit]:
    """Settings of accelerate, TrainingArguments, FairScale or Megatron mean nothing to runtime/config.py."""
    return _of(context, "foreign")


def _of(context: Context, kind: str, *, refused: bool | None = None) -> Iterator[Hit]:
    for violation in context.violations:
        if violation.kind == kind and refused in (None, violation.refused):
            yield Hit(
                violation.path,
                violation.message,
                violation.suggestion,
                violation.fix,
                effect=REFUSED if violation.refused else FAILS if violation.fails else None,
            )

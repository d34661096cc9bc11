"""DS65x to DS67x: accelerate (which HF Trainer starts DeepSpeed through) and Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import OFFLOADS, ZERO, removal, set_to
from dsrun.config.rules.examples import ZERO_2, hf, made, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, put, remove, report
from dsrun.config.rules.running.batch import ACCUMULATION, MICRO, TOTAL
from dsrun.config.schemas import schema

BUCKETS = tuple(
    f"{ZERO}.{key}"
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)


def _filled_in(context: Context) -> bool:
    """Whether accelerate reads the file, by itself or for HF Trainer."""
    return context.target in schema.FILLING


def _auto(context: Context, path: str) -> bool:
    """Whether accelerate finds "auto" at a path, as it is written: it knows no second names."""
    return _filled_in(context) and bool(tree.get(context.config, path) == schema.AUTO)


@rule("DS650", FAILS)
@bad(
    hf(
        _bare=True,
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
    )
)
@good(hf(**zero(0)), {"_for": "accelerate", "zero_optimization": {}})
def no_zero_section(context: Context) -> Iterator[Finding]:
    """accelerate requires zero_optimization, even for stage 0 (DeepSpeedPlugin.__post_init__ in
    accelerate/utils/dataclasses.py). The autotuner writes it into the configs it tries (autotuning/autotuner.py).
    """
    if _filled_in(context) and not context.has(ZERO) and not context.flag("autotuning.enabled"):
        advice = 'Add zero_optimization: {"stage": 0} to train without ZeRO, or the stage you want.'
        fix = set_to(context, f"{ZERO}.stage", 0)
        yield Finding(ZERO, "is missing: accelerate stops without it", advice, fix)


@rule("DS651", FAILS)
@bad(hf(managed_gradient_accumulation=False), {"_for": "accelerate", "managed_gradient_accumulation": False})
@good(hf(managed_gradient_accumulation=True), {"managed_gradient_accumulation": False})
def unmanaged_accumulation_under_accelerate() -> Table:
    """accelerate sets the boundary itself, which the engine then refuses at the first backward pass.

    Source: DeepSpeedEngineWrapper.backward in accelerate/utils/deepspeed.py, set_gradient_accumulation_boundary
    in runtime/engine.py.
    """
    path = "managed_gradient_accumulation"
    text = "is false, which accelerate doesn't support. Remove it: accelerate counts the passes."
    return report(path, text, (_filled_in, when.off(path)), remove(path))


@rule("DS652", FAILS)
@bad(
    hf(_model={"hidden_size": 0}, **zero(2, reduce_bucket_size="auto")),
    {"_for": "accelerate", "_model": {"hidden_size": 0}, **zero(1, stage3_prefetch_bucket_size="auto")},
)
@good(
    hf(_model={"hidden_size": 64}, **zero(2, reduce_bucket_size="auto")),
    hf(**zero(2, reduce_bucket_size="auto")),
)
def auto_buckets_without_hidden_size(context: Context) -> Iterator[Finding]:
    """ "auto" buckets are worked out from model.config.hidden_size (trainer_config_finalize in
    transformers/integrations/deepspeed.py, _prepare_deepspeed in accelerate/accelerator.py).
    """
    if context.setting.model is None or context.setting.model.hidden_size != 0:
        return
    for path in BUCKETS:
        if _auto(context, path):
            default = context.schema.describe(path)[0]
            text = "is \"auto\", computed from a hidden_size that the model's config doesn't have"
            fix = set_to(context, path, default)
            yield Finding(path, text, f"Write a number, such as DeepSpeed's default {default}.", fix)


@rule("DS653", DIFFERS)
@bad(
    hf(**zero(2, offload_optimizer={"device": "auto"})),
    {"_for": "accelerate", **zero(2, offload_optimizer={"device": "auto"})},
)
@good(hf(**zero(2, offload_optimizer={"device": "none"})))
def auto_turns_offload_off(context: Context) -> Iterator[Finding]:
    """accelerate takes the device from its own settings, or none (DeepSpeedPlugin.__post_init__ in
    accelerate/utils/dataclasses.py).
    """
    for section in OFFLOADS:
        path = f"{section}.device"
        if _auto(context, path):
            fix = set_to(context, path, "cpu")
            if context.by_trainer:
                yield Finding(
                    path,
                    'is "auto", which becomes none: nothing is offloaded',
                    "Write cpu, nvme or none.",
                    fix,
                )
            else:
                variable = f"ACCELERATE_DEEPSPEED_{section.rpartition('.')[2].upper()}_DEVICE"
                text = f'is "auto", which becomes the value of {variable}, or none'
                yield Finding(path, text, "Write cpu, nvme or none.", fix, severity="warning")


@rule("DS655", "warning")
@bad(hf(**zero("auto")))
@good(hf(**ZERO_2))
def auto_stage() -> Table:
    """accelerate takes ACCELERATE_DEEPSPEED_ZERO_STAGE, or 2 (DeepSpeedPlugin.__post_init__ in
    accelerate/utils/dataclasses.py).
    """
    path = f"{ZERO}.stage"
    text = 'is "auto", which becomes ACCELERATE_DEEPSPEED_ZERO_STAGE, or 2. Write the stage itself.'
    return report(path, text, lambda context: _auto(context, path), put(path, 2))


@rule("DS657", "note")
@bad(hf(zero_allow_untested_optimizer=False), {"_for": "accelerate", "zero_allow_untested_optimizer": False})
@good(
    hf(zero_allow_untested_optimizer=True),
    hf(zero_allow_untested_optimizer=False, **made("AdamW", lr="auto")),
)
def untested_optimizer_allowed_by_accelerate() -> Table:
    """An optimizer from the code is always allowed (_prepare_deepspeed in accelerate/accelerator.py,
    deepspeed_optim_sched in transformers/integrations/deepspeed.py).
    """
    path = "zero_allow_untested_optimizer"
    text = "is false, but accelerate sets it to true without an optimizer section. Remove it."
    return report(path, text, (_filled_in, when.off(path), when.lacks("optimizer")), remove(path))


@rule("DS658", DIFFERS)
@bad(hf(bfloat16={"enabled": True}), hf({"bf16": True}, bfloat16={"enabled": False}))
@good(hf(bf16={"enabled": "auto"}), hf({"bf16": True}, bfloat16={"enabled": True}))
def precision_under_its_old_name(context: Context) -> Iterator[Finding]:
    """accelerate looks for bf16 only and adds it if missing; DeepSpeed then ignores bfloat16.

    Source: set_mixed_precision in accelerate/utils/dataclasses.py, get_bfloat16_config in
    runtime/precision_config.py.
    """
    if (
        not _filled_in(context)
        or "bf16" in context.config
        or not isinstance(context.config.get("bfloat16"), dict)
    ):
        return
    given: Any = tree.get(context.config, "bfloat16.enabled")
    counted = bool(context.argument("bf16"))
    if given not in (None, schema.AUTO, counted):
        whose = "the Trainer's bf16" if context.by_trainer else "accelerate's mixed_precision"
        fix = Fix((Edit("rename", "bfloat16", "bf16"),), safe=False)
        text = f"isn't read by accelerate: only {whose} counts"
        yield Finding("bfloat16", text, "Rename the section to bf16.", fix)


@rule("DS660", FAILS)
@bad(
    {"_for": "accelerate", **made("AdamW", lr="auto", betas="auto")},
    {"_for": "accelerate", **made("AdamW", lr="auto", eps="auto")},
)
@good(
    {"_for": "accelerate", **made("AdamW", lr="auto", weight_decay="auto")},
    hf(**made("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")),
)
def auto_filled_in_by_hf_trainer_only(context: Context) -> Iterator[Finding]:
    """accelerate takes lr and weight_decay from DummyOptim, and stops at any other "auto" of the optimizer's
    (_prepare_deepspeed in accelerate/accelerator.py).
    """
    if context.target != "accelerate":
        return
    for key in ("betas", "eps"):
        path = f"optimizer.params.{key}"
        if _auto(context, path):
            default = context.schema.describe(path)[0]
            fix = set_to(context, path, default)
            text = 'is "auto", which only HF Trainer fills in: accelerate.prepare stops'
            yield Finding(path, text, f"Write the value, such as {default}.", fix)


@rule("DS661", FAILS)
@bad(
    {
        "_for": "accelerate",
        "_bare": True,
        **ZERO_2,
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
    }
)
@good(
    {"_for": "accelerate"},
    {"_for": "accelerate", "_bare": True, **ZERO_2, "train_batch_size": 4, "gradient_accumulation_steps": 1},
)
def auto_batch_size_without_micro_batch(context: Context) -> Iterator[Finding]:
    """accelerate computes the total from the micro batch's key, and stops if there is none (_prepare_deepspeed in
    accelerate/accelerator.py).
    """
    if context.target == "accelerate" and _auto(context, TOTAL) and context.get(MICRO) is None:
        text = f'is "auto", computed from {MICRO}, which is missing'
        yield Finding(TOTAL, text, f'Add {MICRO}: "auto".', set_to(context, MICRO, schema.AUTO, safe=True))


@rule("DS662", "warning")
@bad({"_for": "accelerate", "_bare": True, **ZERO_2, "train_micro_batch_size_per_gpu": "auto"})
@good({"_for": "accelerate"}, {"_for": "accelerate", "gradient_accumulation_steps": 2})
def accumulation_becomes_1() -> Table:
    """accelerate writes 1 if the key is missing, and prefers that to Accelerator(gradient_accumulation_steps=...)
    (DeepSpeedPlugin.__post_init__ in accelerate/utils/dataclasses.py, _prepare_deepspeed in accelerate/accelerator.py).
    """
    text = f'is missing and counts as 1, whatever Accelerator gets. Add {ACCUMULATION}: "auto".'
    conditions = (when.read_by("accelerate"), when.lacks(ACCUMULATION))
    return report(ACCUMULATION, text, conditions, put(ACCUMULATION, schema.AUTO, safe=True))


@rule("DS663", "note")
@bad(
    {
        "_for": "accelerate",
        "_bare": True,
        **ZERO_2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
    }
)
@good({"_for": "accelerate"}, {})
def clipping_by_default(context: Context) -> Iterator[Finding]:
    """accelerator.clip_grad_norm_ clips nothing under DeepSpeed: the config's value counts (clip_grad_norm_ in
    accelerate/accelerator.py, runtime/constants.py).
    """
    if context.target == "accelerate" and not context.has("gradient_clipping"):
        default = context.schema.describe("gradient_clipping")[0]
        held = f"clips at its default {default}" if default else "clips nothing"
        text = f"is missing: DeepSpeed {held}, and accelerator.clip_grad_norm_ changes nothing"
        yield Finding("gradient_clipping", text, "Write the norm to clip at, or 0.")


@rule("DS664", "note")
@bad(
    {"_for": "accelerate", **made("AdamW", lr=1e-4)},
    {"_for": "accelerate", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
)
@good({"_for": "accelerate"}, made("AdamW", lr=1e-4))
def section_needs_a_dummy_in_code(context: Context) -> Iterator[Finding]:
    """accelerate.prepare refuses an optimizer or scheduler in the config and a real one in the code
    (_prepare_deepspeed in accelerate/accelerator.py).
    """
    if context.target == "accelerate":
        for section, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
            if context.has(section):
                text = f"needs accelerate.utils.{dummy} in the code: prepare refuses a real one"
                yield Finding(section, text, f"Use {dummy}, or remove the section.")


@rule("DS670", FAILS)
@bad(
    {"_for": "lightning", "gradient_accumulation_steps": 1},
    {"_for": "lightning", "gradient_accumulation_steps": None},
)
@good({"_for": "lightning"}, {"gradient_accumulation_steps": 1})
def accumulation_set_by_lightning(context: Context) -> Iterator[Finding]:
    """Lightning stops at the key: accumulation is its Trainer's accumulate_grad_batches.

    Source: _format_batch_size_and_grad_accum_config in its pytorch/strategies/deepspeed.py.
    """
    if context.target == "lightning" and context.has(ACCUMULATION):
        steps = context.integer(ACCUMULATION)
        to = f"(accumulate_grad_batches={steps})" if steps else "(accumulate_grad_batches=...)"
        text = "must not be in the config: Lightning's Trainer stops at it"
        yield Finding(
            ACCUMULATION,
            text,
            f"Remove it, and use Trainer{to}.",
            removal(context, ACCUMULATION, safe=steps == 1),
        )


@rule("DS671", FAILS)
@bad({"_for": "lightning", "_device": "cpu"})
@good({"_for": "lightning", "_device": "cuda"}, {"_for": "lightning"})
def lightning_on_the_cpu() -> Table:
    """Lightning starts DeepSpeed on CUDA GPUs only (setup_environment in its pytorch/strategies/deepspeed.py)."""
    text = "Lightning's DeepSpeedStrategy runs on CUDA GPUs only. Train on a GPU, or with another strategy."
    return report(ZERO, text, (when.read_by("lightning"), when.on_cpu))


@rule("DS672", "warning")
@bad({"_for": "lightning", **made("AdamW", lr=1e-4)})
@good({"_for": "lightning"}, made("AdamW", lr=1e-4))
def optimizer_replaces_configure_optimizers(context: Context) -> Iterator[Finding]:
    """With the section, configure_optimizers isn't called, and its scheduler is left out
    (_initialize_deepspeed_train in Lightning's pytorch/strategies/deepspeed.py).
    """
    if context.target == "lightning" and context.has("optimizer"):
        text = "replaces the module's configure_optimizers, including its scheduler"
        yield Finding(
            "optimizer", text, "Remove the section, and make the optimizer in configure_optimizers."
        )

"""DS00x: what the schema finds in each key by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsrun.config.rules.common import AIO, printing_off, reads_aio
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.schemas.guess import NOBODYS
from dsrun.config.schemas.schema import FILLING
from dsrun.config.trainer_args import BY_PATH
from dsrun.config.tree import under

GDS = f"{AIO}.use_gds"
TUNED = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys for which DeepSpeed's autotuner takes "auto"."""


@rule("DS001", DIFFERS)
@bad({"zero_optimisation": {"stage": 3}}, {"flops_profiler": {"enable": True}})
@good(
    {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}, {"_why": "a note"}
)
def unknown_key_ignored(context: Context) -> Iterator[Finding]:
    """The top level and about fifteen sections are read with `get`: other keys go unnoticed.

    A key at the top level that none of DeepSpeed's is like is a project's own, and a warning.
    Source: DeepSpeedConfig._initialize_params in runtime/config.py.
    """
    for finding in _violations(context, "unknown", refused=False):
        section, _, key = finding.path.rpartition(".")
        # Without a type there is no optimizer at all: other rules report that.
        if not (
            key == "name" and section in ("optimizer", "scheduler") and not context.has(f"{section}.type")
        ):
            own = finding.suggestion == NOBODYS and not _holds_keys(context, finding.path)
            yield replace(finding, severity="warning") if own else finding


def _holds_keys(context: Context, path: str) -> bool:
    """Whether an unknown section holds keys of DeepSpeed's, which were meant to be read."""
    return any(context.schema.node(key) is not None for key in context.section(path))


@rule("DS002", DIFFERS)
@bad({"zero_optimization": {"stage": 4}}, {"gradient_clipping": None})
@good({"gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
def wrong_value(context: Context) -> Iterator[Finding]:
    """Checked sections refuse it (runtime/config_utils.py); elsewhere it reaches the code that computes with it.

    A string in place of a number fails at the first step; a fraction of accumulation steps trains, but steps at
    unexpected times (runtime/config.py, runtime/engine.py). For a key without any effect this is a warning.
    """
    for finding in _violations(context, "value"):
        idle = not finding.effect and "x-no-effect" in (context.schema.node(finding.path) or {})
        if not printing_off(context, finding.path):
            yield replace(finding, severity="warning") if idle else finding


@rule("DS003", DIFFERS)
@bad({"bf16": {"enabled": "auto"}}, {"_for": "hf", "fp16": {"enabled": True, "loss_scale": "auto"}})
@good(
    {"_for": "hf", "fp16": {"enabled": "auto"}},
    {"train_micro_batch_size_per_gpu": "auto", "autotuning": {"enabled": True}},
)
def auto_not_filled_in(context: Context) -> Iterator[Finding]:
    """DeepSpeed silently drops "auto" and uses the default (runtime/config_utils.py), or fails on it.

    HF Trainer fills in a fixed list (transformers/integrations/deepspeed.py) and stops at any other
    (accelerate/utils/dataclasses.py). DeepSpeed's autotuner fills in two (autotuning/autotuner.py).
    """
    stops = context.target in FILLING
    tuned = TUNED if context.flag("autotuning.enabled") else ()
    for finding in _violations(context, "auto"):
        if finding.path in tuned:
            continue
        yield replace(finding, effect=FAILS) if stops else finding


@rule("DS004", DIFFERS)
@bad({"elasticity": {"enabled": False}}, {"fp32_allreduce": True})
@good({"_version": "0.14", "elasticity": {"enabled": False}}, {"communication_data_type": "fp32"})
def removed_key(context: Context) -> Iterator[Finding]:
    """0.19 stops at most of them, whatever the value (_reject_removed_config_keys, runtime/config.py).

    Older versions silently ignore them, and so does 0.19 for the few that were only renamed.
    """
    return _violations(context, "removed")


@rule("DS005", DIFFERS)
@bad(
    {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}},
    {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}},
)
@good({"bfloat16": {"enabled": True}})
def two_names_for_one_key(context: Context) -> Iterator[Finding]:
    """Using both names of one field is a validation error (runtime/zero/config.py).

    bfloat16 beside bf16 is ignored (runtime/precision_config.py).
    """
    return _violations(context, "alias")


@rule("DS006", REFUSED)
@bad({"zero_optimization": {"stage": 2, "offload_optimzer": {"device": "cpu"}}}, {"bf16": {"enable": True}})
@good({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
def unknown_key_refused(context: Context) -> Iterator[Finding]:
    """Checked sections refuse unknown keys, once the model is loaded (extra="forbid", runtime/config_utils.py)."""
    return _violations(context, "unknown", refused=True)


@rule("DS007", "warning")
@bad({"bf16": {"enabled": "true"}}, {"prescale_gradients": 0})
@good({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
def wrong_type_converted(context: Context) -> Iterator[Finding]:
    """Checked sections convert "2" to 2 and "true" to true (pydantic, runtime/config_utils.py); other readers don't.

    accelerate compares the stage with the number 3: at "3" it saves empty tensors
    (accelerate/utils/deepspeed.py); so for HF Trainer and accelerate this is an error at the stage. The Trainer
    compares its arguments with what is written: to it "true" is not true (fill_match in
    transformers/integrations/deepspeed.py).
    """
    for violation in context.violations:
        if violation.kind != "converted":
            continue
        finding = Finding(violation.path, violation.message, violation.suggestion, violation.fix)
        if violation.path == "zero_optimization.stage" and context.target != "deepspeed":
            text = f"{violation.message}, but accelerate doesn't: saving writes empty weights"
            yield replace(finding, message=text, severity="error", effect=DIFFERS)
        elif violation.path in BY_PATH and context.by_trainer and isinstance(violation.value, str):
            text = (
                f"{violation.message}, but the Trainer doesn't: it equals no argument, and the Trainer stops"
            )
            yield replace(finding, message=text, severity="error", effect=FAILS)
        else:
            yield finding


@rule("DS008", DIFFERS)
@bad({"prescale_gradients": "false"})
@good({"prescale_gradients": False})
def string_counts_as_true(context: Context) -> Iterator[Finding]:
    """Outside the checked sections a flag isn't converted: any string counts as true (runtime/config.py)."""
    return _violations(context, "flag")


@rule("DS009", DIFFERS)
@bad({"_version": "0.9", "zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}})
@good({"_version": "0.9", "zero_optimization": {"stage": 2}})
def key_of_a_newer_version(context: Context) -> Iterator[Finding]:
    """A key that this version doesn't know yet is ignored or refused like any unknown one (runtime/config.py)."""
    return _violations(context, "later")


@rule("DS010", DIFFERS)
@bad({"max_grad_norm": 1.0}, {"zero_stage": 3})
@good({"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}})
def setting_of_another_tool(context: Context) -> Iterator[Finding]:
    """Settings of accelerate, TrainingArguments, FairScale or Megatron mean nothing to runtime/config.py."""
    return _violations(context, "foreign")


def _violations(context: Context, kind: str, *, refused: bool | None = None) -> Iterator[Finding]:
    """The findings of one kind of violation. refused: of those that DeepSpeed stops at, or of the others alone."""
    for violation in context.violations:
        if violation.kind == kind and refused in (None, violation.refused):
            effect = REFUSED if violation.refused else FAILS if violation.fails else ""
            yield Finding(
                violation.path,
                violation.message,
                violation.suggestion,
                violation.fix,
                effect=effect,
                severity="warning" if not effect and _is_unread(context, violation.path) else "",
            )


def _is_unread(context: Context, path: str) -> bool:
    """Whether a key of aio has no reader, as nothing goes to NVMe."""
    # DeepSpeed looks at the section itself and at use_gds in any case (get_aio_config in runtime/swap_tensor).
    looked_at = path == AIO or under(path, GDS)
    return under(path, AIO) and not looked_at and not reads_aio(context)

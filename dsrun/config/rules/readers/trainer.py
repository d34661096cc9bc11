"""DS601 to DS605: HF Trainer. TrainingArguments next to the config, and which of the two counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.rules.common import CLIPPING, set_to
from dsrun.config.rules.examples import ZERO_2, bf16, fp16, hf
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, once, rule
from dsrun.config.rules.running.batch import ACCUMULATION, MICRO, TOTAL
from dsrun.config.schemas import schema
from dsrun.config.schemas.schema import shorten
from dsrun.config.trainer_args import BY_PATH, DEFAULTS, MATCHES, Arguments, Match
from dsrun.words import listed

WARMUP_STEPS = 1000
WARMUP_MAX_LR = 0.001
ADAGRAD_LR = 0.01

AUTOS = {
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), schema.AUTO),
    }
}


@once
def known_arguments(context: Context) -> Arguments | None:
    """The TrainingArguments under HF Trainer, with their defaults; None where they aren't known."""
    if not context.by_trainer or context.setting.trainer is None:
        return None
    return Arguments(context.setting.trainer, context.world_size)


def _fixed(context: Context) -> Iterator[tuple[Match, Any]]:
    """The keys with a value of their own, as they are written: the Trainer compares before anything is converted.

    A text in place of a number or a flag is left out: it is wrong by itself (DS002, DS007).
    """
    texts = {violation.path for violation in context.violations if isinstance(violation.value, str)}
    for match in MATCHES:
        value = tree.get(context.config, match.path)
        left_open = value in (None, schema.AUTO) or (isinstance(value, list) and schema.AUTO in value)
        if not left_open and match.path not in texts:
            yield match, value


def _tuned(context: Context) -> bool:
    """Whether the autotuner writes the configs that train: its own batch sizes, from the script's arguments where the
    key is "auto" (get_gas_from_user_config in autotuning/autotuner.py).
    """
    return bool(context.flag("autotuning.enabled"))


def _clash(context: Context, arguments: Arguments) -> str | None:
    """The precision the config enables while the arguments ask for the other one."""
    for mine, other in (("fp16", "bf16"), ("bf16", "fp16")):
        if (
            str(tree.get(context.config, f"{mine}.enabled")).lower() == "true"
            and arguments[other]
            and not arguments[mine]
        ):
            return mine
    return None


@rule("DS601", FAILS)
@bad(hf({}, gradient_clipping=0.5), hf({}, train_micro_batch_size_per_gpu=4))
@good(hf({}, gradient_clipping=1), hf({"per_device_train_batch_size": 4}, train_micro_batch_size_per_gpu=4))
def differs_from_training_arguments(context: Context) -> Iterator[Finding]:
    """The Trainer compares fixed values with its arguments, and stops in train(), after the model is loaded.

    Source: fill_match and trainer_config_finalize in transformers/integrations/deepspeed.py.
    """
    if (arguments := known_arguments(context)) is None:
        return
    clash = _clash(context, arguments)
    for match, value in _fixed(context):
        wanted = match.value(arguments)
        if wanted is tree.MISSING or value == wanted or match.path == f"{clash}.enabled":
            continue
        # What was asked for by name holds; a default may be an oversight.
        fix = set_to(context, match.path, wanted) if context.argument(match.argument) == wanted else None
        text = f"is {shorten(value)}, but the Trainer's {match.argument} is {shorten(wanted)}"
        if match.calculated:
            text = f"is {shorten(value)}, but TrainingArguments make it {shorten(wanted)} ({match.argument})"
        advice = f'Write "auto" or {shorten(wanted)}{_other_way(match, value, wanted, arguments)}.'
        yield Finding(match.path, text, advice, fix)


def _other_way(match: Match, value: Any, wanted: Any, arguments: Arguments) -> str:
    """The advice to change the argument, so that the config's value holds; "" where none alone can do it."""
    name = match.argument.partition(" or ")[0]
    if match.path == TOTAL:
        name = ACCUMULATION
        per_step = wanted // arguments[name]
        if value % per_step or not value:
            return ""
        value = value // per_step
    return f", or set {name} to {shorten(value)}" if name in DEFAULTS else ""


@rule("DS602", "note")
@bad(hf(gradient_clipping=0.5), hf(train_batch_size=8, train_micro_batch_size_per_gpu=2, **bf16()))
@good(hf(gradient_clipping=1.0), hf(bf16={"enabled": "auto"}, fp16={"enabled": False}))
def must_equal_the_training_arguments(context: Context) -> Iterator[Finding]:
    """The Trainer stops where a fixed value differs from its argument (trainer_config_process and _finalize in
    transformers/integrations/deepspeed.py).
    """
    if not context.by_trainer or context.setting.trainer is not None or _tuned(context):
        return
    defaults = Arguments({})
    differing = [(match, value) for match, value in _fixed(context) if value != match.value(defaults)]
    if differing:
        pairs = ", ".join(
            f"{_short_name(match)} {shorten(value)} = {_named(match)}" for match, value in differing
        )
        many = f"these {len(differing)} values have" if len(differing) > 1 else "this value has"
        yield Finding(
            differing[0][0].path,
            f"{many} to equal the TrainingArguments, or the Trainer stops: {pairs}",
            'Give the arguments with --arg NAME=VALUE to check it, or write "auto".',
        )


def _short_name(match: Match) -> str:
    """A key by its name, and its section where the name says nothing."""
    return match.path if match.path.endswith(".enabled") else match.path.rpartition(".")[2]


def _named(match: Match) -> str:
    default = match.value(Arguments({}))
    known = default is not tree.MISSING and not match.calculated
    return f"{match.argument} ({shorten(default)} by default)" if known else match.argument


@rule("DS603", FAILS)
@bad(hf({"bf16": True}, **fp16()), hf({"fp16": True}, **bf16()))
@good(hf({"bf16": True}, fp16={"enabled": "auto"}), hf({"fp16": True}, **fp16()))
def precision_differs_from_training_arguments(context: Context) -> Iterator[Finding]:
    """accelerate refuses two different precisions in arguments and config (set_mixed_precision,
    accelerate/utils/dataclasses.py).
    """
    arguments = known_arguments(context)
    if arguments and (mine := _clash(context, arguments)):
        other = "bf16" if mine == "fp16" else "fp16"
        advice = f'Write "auto", or train with {mine} in TrainingArguments and without {other}.'
        yield Finding(f"{mine}.enabled", f"is true, but the TrainingArguments ask for {other}", advice)


@rule("DS604", DIFFERS)
@bad(
    hf(_bare=True, _version="0.18", train_micro_batch_size_per_gpu="auto", **ZERO_2),
    hf({"max_grad_norm": 0.3}, _bare=True, train_micro_batch_size_per_gpu="auto", **ZERO_2),
)
@good(
    hf({"max_grad_norm": 1}, _bare=True, train_micro_batch_size_per_gpu="auto", **ZERO_2),
    hf(_bare=True, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto", **ZERO_2),
)
def training_argument_ignored_without_its_key(context: Context) -> Iterator[Finding]:
    """The Trainer fills in existing keys only: without the key DeepSpeed's default holds, and the argument is ignored.

    Source: fill_match in transformers/integrations/deepspeed.py; runtime/constants.py, ops/adam/fused_adam.py and
    runtime/lr_schedules.py for the defaults. Without known arguments this is a warning, and only for defaults
    that differ.
    """
    if not context.by_trainer or _tuned(context):
        return
    arguments = known_arguments(context)
    judged = arguments or Arguments({}, context.world_size)
    groups: dict[str, list[_Left]] = {}
    for left in (*_left_out(context), *_left_to_optimizer(context), *_left_to_scheduler(context)):
        wanted = left.match.value(judged)
        if wanted not in (left.default, tree.MISSING):
            groups.setdefault(left.match.path.rpartition(".")[0], []).append(left._replace(wanted=wanted))
    for section, missing in groups.items():
        names = listed([left.match.path.rpartition(".")[2] for left in missing])
        taken = listed([left.in_words(known=arguments is not None) for left in missing])
        # It trains with another rate, or clips otherwise, than before: for its owner to decide.
        fix = Fix(tuple(Edit("add", left.match.path, schema.AUTO) for left in missing), safe=False)
        text = f"{f'lacks {names}' if section else 'is missing'}: DeepSpeed uses {taken}"
        finding = Finding(section or names, text, f'Add {names}: "auto".', fix)
        yield finding if arguments else replace(finding, severity="warning")


class _Left(NamedTuple):
    """A key left out, DeepSpeed's default for it, and the Trainer's value (None where that isn't known)."""

    match: Match
    default: Any
    wanted: Any = None

    def in_words(self, *, known: bool) -> str:
        wanted = f" {shorten(self.wanted)}" if known else ""
        return f"{shorten(self.default)} instead of the Trainer's {self.match.argument}{wanted}"


def _left_out(context: Context) -> Iterator[_Left]:
    if not context.has(CLIPPING):
        yield _Left(BY_PATH[CLIPPING], context.schema.describe(CLIPPING)[0])


def _left_to_optimizer(context: Context) -> Iterator[_Left]:
    kind, params = context.text("optimizer.type"), context.section("optimizer.params")
    if kind is None:
        return
    adam = kind.lower() in ("adam", "adamw")
    own_rates = any(key.endswith("_lr") for key in params)
    for key in ("lr", "betas", "eps", "weight_decay") if adam else ("lr",):
        path = f"optimizer.params.{key}"
        if key not in params and not (key == "lr" and (own_rates or _scheduler_sets_rate(context))):
            default = ADAGRAD_LR if kind.lower() == "adagrad" else context.schema.describe(path)[0]
            yield _Left(BY_PATH[path], default)


def _scheduler_sets_rate(context: Context) -> bool:
    """Whether the config's scheduler starts from a rate of its own (runtime/lr_schedules.py)."""
    kind = context.text("scheduler.type")
    if kind == "WarmupLR":
        return context.has("scheduler.params.warmup_max_lr")
    return kind in ("WarmupDecayLR", "OneCycle", "LRRangeTest")


def _left_to_scheduler(context: Context) -> Iterator[_Left]:
    kind, params = context.text("scheduler.type"), context.section("scheduler.params")
    defaults: dict[str, Any] = {}
    if kind in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        defaults["warmup_num_steps"] = WARMUP_STEPS
    if kind == "WarmupDecayLR":
        defaults["warmup_max_lr"] = WARMUP_MAX_LR
    for key, default in defaults.items():
        if key not in params:
            yield _Left(BY_PATH[f"scheduler.params.{key}"], default)


@rule("DS605", FAILS)
@bad(
    hf({"gradient_accumulation_steps": 2}, _bare=True, train_micro_batch_size_per_gpu="auto", **ZERO_2),
    hf(
        {"gradient_accumulation_steps": 2},
        _bare=True,
        train_batch_size="auto",
        train_micro_batch_size_per_gpu="auto",
        **ZERO_2,
    ),
)
@good(
    hf(_bare=True, train_micro_batch_size_per_gpu="auto", **ZERO_2),
    hf(
        {"gradient_accumulation_steps": 2},
        _bare=True,
        train_micro_batch_size_per_gpu="auto",
        autotuning={"enabled": True},
        **ZERO_2,
    ),
)
def accumulation_missing_for_hf_trainer(context: Context) -> Iterator[Finding]:
    """accelerate writes 1 if the key is missing, whatever the Trainer accumulates (DeepSpeedPlugin.__post_init__,
    accelerate/utils/dataclasses.py).

    With a total and a micro batch in the config the two no longer match (_batch_assertion, runtime/config.py). With one
    of them training is the same: the Trainer divides the loss itself (scale_wrt_gas in transformers/trainer.py), and
    accelerate says where a step ends (DeepSpeedEngineWrapper.backward in accelerate/utils/deepspeed.py).
    """
    arguments = known_arguments(context)
    if arguments is None or context.has(ACCUMULATION) or _tuned(context):
        return
    there, steps = context.has(TOTAL) + context.has(MICRO), arguments["gradient_accumulation_steps"]
    if steps == 1 or not there:
        return
    text = f"is missing: DeepSpeed gets 1, but the Trainer accumulates {steps}"
    fix = set_to(context, ACCUMULATION, schema.AUTO, safe=True)
    finding = Finding(ACCUMULATION, text, f'Add {ACCUMULATION}: "auto".', fix)
    if there == 2:
        yield replace(finding, message=f"{text}: {TOTAL} no longer matches, and the start fails")
    else:
        yield replace(
            finding, message=f"{text}; only DeepSpeed's own batch size differs, not training", severity="note"
        )

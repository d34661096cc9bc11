"""DS60x to DS64x: HF Trainer. What TrainingArguments says beside the config, and which of the two holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dsrun.config import schema, tree
from dsrun.config.edits import Edit, Fix
from dsrun.config.rules.batch import ACCUMULATION, MICRO, TENSOR, TOTAL
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Hit, rule
from dsrun.config.schema import shorten
from dsrun.config.trainer_args import BY_PATH, DEFAULTS, MATCHES, Arguments, Match

ZERO = "zero_optimization"
CLIPPING = "gradient_clipping"
GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
OFFLOAD = f"{ZERO}.offload_optimizer.device"
WARMUP_STEPS = 1000
WARMUP_MAX_LR = 0.001
ADAGRAD_LR = 0.01
AUTOS = {
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), schema.AUTO),
    }
}


def _arguments(context: Context) -> Arguments | None:
    """The TrainingArguments under HF Trainer, with their defaults; None where they aren't known."""
    if not context.by_trainer or context.setting.trainer is None:
        return None
    return Arguments(context.setting.trainer, context.world_size)


def _fixed(context: Context) -> Iterator[tuple[Match, Any]]:
    """The keys with a value of their own, as they are written: the Trainer compares before anything is converted."""
    for match in MATCHES:
        value = tree.get(context.config, match.path)
        if (
            value is not None
            and value != schema.AUTO
            and not (isinstance(value, list) and schema.AUTO in value)
        ):
            yield match, value


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


@rule(
    "DS601",
    "error",
    FAILS,
    bad=[
        {"_for": "hf", "_trainer": {}, "gradient_clipping": 0.5},
        {"_for": "hf", "_trainer": {}, "train_micro_batch_size_per_gpu": 4},
        {"_for": "hf", "_trainer": {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps": 4},
        {"_for": "hf", "_trainer": {"per_device_train_batch_size": 2}, "train_batch_size": 16},
        {"_for": "hf", "_trainer": {}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
        {"_for": "hf", "_trainer": {}, "optimizer": {"type": "AdamW", "params": {"lr": "5e-5"}}},
        {
            "_for": "hf",
            "_trainer": {"adam_beta2": 0.99},
            "optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.95], "lr": "auto"}},
        },
        {"_for": "hf", "_trainer": {}, "bf16": {"enabled": True}},
        {"_for": "hf", "_trainer": {"bf16": True}, "bf16": {"enabled": False}},
        {"_for": "hf", "_trainer": {"bf16_full_eval": True}, "bf16": {"enabled": "true"}},
        {
            "_for": "hf",
            "_trainer": {"max_steps": 50, "warmup_steps": 5},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 1000, "warmup_num_steps": "auto", "warmup_max_lr": "auto"},
            },
        },
        {
            "_for": "hf",
            "_trainer": {"max_steps": 50, "warmup_steps": 0.1},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 6}},
        },
    ],
    good=[
        {"_for": "hf", "_trainer": {}, "gradient_clipping": 1},
        {"_for": "hf", "_trainer": {"per_device_train_batch_size": 4}, "train_micro_batch_size_per_gpu": 4},
        {"_for": "hf", "_trainer": {"per_device_train_batch_size": 4}, "train_batch_size": 16},
        {"_for": "hf", "_trainer": {}, "_world_size": None, "train_batch_size": 16},
        {"_for": "hf", "_trainer": {"bf16": True}, "bf16": {"enabled": True}},
        {"_for": "hf", "_trainer": {"bf16_full_eval": True}, "bf16": {"enabled": True}},
        {"_for": "hf", "_trainer": {"fp16": False}, "fp16": {"enabled": False}},
        {
            "_for": "hf",
            "_trainer": {"learning_rate": 1e-4},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        },
        {
            "_for": "hf",
            "_trainer": {"max_steps": 50, "warmup_steps": 0.1},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
        },
        {
            "_for": "hf",
            "_trainer": {"warmup_steps": 0.1},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 6}},
        },
        {
            "_for": "hf",
            "_trainer": {},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_num_steps": 1}},
        },
    ],
)
def unlike_the_training_argument(context: Context) -> Iterator[Hit]:
    """The Trainer compares fixed values with its arguments by ==, and stops in train(), after the model is loaded.

    Source: fill_match and trainer_config_finalize in transformers/integrations/deepspeed.py.
    """
    if (arguments := _arguments(context)) is None:
        return
    clash = _clash(context, arguments)
    for match, value in _fixed(context):
        asked = match.value(arguments)
        if asked is tree.MISSING or value == asked or match.path == f"{clash}.enabled":
            continue
        fix = Fix((Edit("replace", match.path, schema.AUTO),), safe=False)
        text = f"is {shorten(value)}, and the Trainer's {match.argument} is {shorten(asked)}"
        if match.calculated:
            text = f"is {shorten(value)}, and TrainingArguments makes it {shorten(asked)} ({match.argument})"
        advice = 'Write "auto"' + _other_way(match, value, asked, arguments)
        yield Hit(match.path, text, f"{advice}.", fix)


def _other_way(match: Match, value: Any, asked: Any, arguments: Arguments) -> str:
    """Which argument to change so that the config's value holds; "" where none alone can do it."""
    if isinstance(value, str):
        return ""
    name = match.argument.partition(" or ")[0]
    if match.path == TOTAL:
        name = ACCUMULATION
        per_step = asked // arguments[name]
        if value % per_step or not value:
            return ""
        value = value // per_step
    return f", or set {name} to {shorten(value)}" if name in DEFAULTS else ""


@rule(
    "DS602",
    "note",
    bad=[
        {"_for": "hf", "gradient_clipping": 0.5},
        {
            "_for": "hf",
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
        {"_for": "hf", "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
    ],
    good=[
        {"_for": "hf", "gradient_clipping": 1.0},
        {"_for": "hf", "bf16": {"enabled": True}, "fp16": {"enabled": False}},
        {"_for": "hf", "_trainer": {"max_grad_norm": 0.5}, "gradient_clipping": 0.5},
        {"gradient_clipping": 0.5},
    ],
)
def has_to_equal_the_training_argument(context: Context) -> Iterator[Hit]:
    """The Trainer stops where a fixed value differs from its argument (trainer_config_finalize in
    transformers/integrations/deepspeed.py). Numbers only: that a precision has to be asked for is widely known.
    """
    if not context.by_trainer or context.setting.trainer is not None:
        return
    defaults = Arguments({})
    groups: dict[str, list[tuple[Match, Any]]] = {}
    for match, value in _fixed(context):
        if value != match.value(defaults) and not match.path.endswith(".enabled"):
            section = match.path.partition(".")[0]
            groups.setdefault(section if "." in match.path else "", []).append((match, value))
    for found in groups.values():
        pairs = ", ".join(
            f"{match.path.rpartition('.')[2]} {shorten(value)} = {_named(match)}" for match, value in found
        )
        fix = Fix(tuple(Edit("replace", match.path, schema.AUTO) for match, _ in found), safe=False)
        advice = 'Write "auto", and the Trainer fills in its own.'
        yield Hit(
            found[0][0].path, f"the Trainer stops unless its arguments say the same: {pairs}", advice, fix
        )


def _named(match: Match) -> str:
    default = match.value(Arguments({}))
    return match.argument if default is tree.MISSING else f"{match.argument} ({shorten(default)} by default)"


@rule(
    "DS603",
    "error",
    FAILS,
    bad=[
        {"_for": "hf", "_trainer": {"bf16": True}, "fp16": {"enabled": True}},
        {"_for": "hf", "_trainer": {"fp16": True}, "bf16": {"enabled": True}},
    ],
    good=[
        {"_for": "hf", "_trainer": {"bf16": True}, "fp16": {"enabled": "auto"}},
        {"_for": "hf", "_trainer": {"fp16": True}, "fp16": {"enabled": True}},
        {"_for": "hf", "_trainer": {"fp16": True}, "bf16": {"enabled": "auto"}},
    ],
)
def precision_of_the_other_kind(context: Context) -> Iterator[Hit]:
    """accelerate refuses the arguments' precision beside the config's (set_mixed_precision,
    accelerate/utils/dataclasses.py).
    """
    arguments = _arguments(context)
    if arguments and (mine := _clash(context, arguments)):
        other = "bf16" if mine == "fp16" else "fp16"
        fix = Fix((Edit("replace", f"{mine}.enabled", schema.AUTO),), safe=False)
        advice = f'Write "auto", or train with {mine} in TrainingArguments and without {other}.'
        yield Hit(f"{mine}.enabled", f"is true, and the Trainer is asked for {other}", advice, fix)


@rule(
    "DS604",
    "error",
    DIFFERS,
    bad=[
        {
            "_for": "hf",
            "_bare": True,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 2},
        },
        {
            "_for": "hf",
            "_bare": True,
            "_trainer": {"max_grad_norm": 0.3},
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
        {
            "_for": "hf",
            "_bare": True,
            "_version": "0.18",
            "_trainer": {},
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
        {"_for": "hf", "_trainer": {}, "optimizer": {"type": "AdamW", "params": {}}},
        {
            "_for": "hf",
            "_trainer": {"weight_decay": 0.1},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        },
        {"_for": "hf", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        {
            "_for": "hf",
            "_trainer": {"warmup_steps": 10},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        },
        {
            "_for": "hf",
            "_trainer": {"warmup_steps": 1000},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        },
    ],
    good=[
        {
            "_for": "hf",
            "_bare": True,
            "_trainer": {"max_grad_norm": 1},
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
        {"_for": "hf", **AUTOS},
        {"_for": "hf", "_trainer": {"learning_rate": 0.001}, "optimizer": {"type": "AdamW", "params": {}}},
        {"_for": "hf", "_trainer": {}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        {
            "_for": "hf",
            "_trainer": {"warmup_steps": 1000},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        },
        {
            "_for": "hf",
            "_trainer": {},
            "optimizer": {"type": "AdamW", "params": {"eps": "auto"}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            },
        },
        {"optimizer": {"type": "AdamW", "params": {}}},
    ],
)
def argument_whose_key_is_missing(context: Context) -> Iterator[Hit]:
    """The Trainer fills in keys that are there: without one DeepSpeed's default holds, and the argument is ignored.

    Source: fill_match in transformers/integrations/deepspeed.py; runtime/constants.py, ops/adam/fused_adam.py and
    runtime/lr_schedules.py for the defaults.
    """
    if not context.by_trainer:
        return
    arguments = _arguments(context)
    groups: dict[str, list[_Left]] = {}
    for left in (*_left_out(context), *_left_to_optimizer(context), *_left_to_scheduler(context)):
        asked = None if arguments is None else left.match.value(arguments)
        if arguments is None or asked not in (left.default, tree.MISSING):
            groups.setdefault(left.match.path.rpartition(".")[0], []).append(left._replace(asked=asked))
    for section, found in groups.items():
        names = _and([left.match.path.rpartition(".")[2] for left in found])
        taken = _and([left.in_words(known=arguments is not None) for left in found])
        fix = Fix(tuple(Edit("add", left.match.path, schema.AUTO) for left in found))
        text = f"{f'lacks {names}' if section else 'is missing'}: DeepSpeed takes {taken}"
        hit = Hit(section or names, text, f'Add {names}: "auto".', fix)
        yield hit if arguments else hit._replace(severity="warning")


class _Left(NamedTuple):
    """A key left out, DeepSpeed's default for it, and what the Trainer asks for (None where that isn't known)."""

    match: Match
    default: Any
    asked: Any = None

    def in_words(self, *, known: bool) -> str:
        asked = f" {shorten(self.asked)}" if known else ""
        return f"{shorten(self.default)} in place of the Trainer's {self.match.argument}{asked}"


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


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@rule(
    "DS605",
    "error",
    DIFFERS,
    bad=[
        {
            "_for": "hf",
            "_bare": True,
            "_trainer": {"gradient_accumulation_steps": 2},
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
        {
            "_for": "hf",
            "_bare": True,
            "_trainer": {"gradient_accumulation_steps": 2},
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
        {
            "_for": "hf",
            "_bare": True,
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
    ],
    good=[
        {
            "_for": "hf",
            "_bare": True,
            "_trainer": {"gradient_accumulation_steps": 1},
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": 2},
        },
        {"_for": "hf", "_trainer": {"gradient_accumulation_steps": 2}},
        {
            "_for": "hf",
            "_bare": True,
            "_trainer": {"gradient_accumulation_steps": 1},
            "train_batch_size": 32,
            "zero_optimization": {"stage": 2},
        },
    ],
)
def accumulation_that_deepspeed_is_not_told(context: Context) -> Iterator[Hit]:
    """accelerate writes 1 where the key is missing, whatever the Trainer accumulates (DeepSpeedPlugin.__post_init__,
    accelerate/utils/dataclasses.py).

    With a total and a micro batch in the config the two no longer agree (_batch_assertion, runtime/config.py).
    """
    if not context.by_trainer or context.has(ACCUMULATION) or not (context.has(TOTAL) or context.has(MICRO)):
        return
    arguments = _arguments(context)
    fix = Fix((Edit("add", ACCUMULATION, schema.AUTO),))
    advice = f'Add {ACCUMULATION}: "auto".'
    if arguments is None:
        text = "is missing: DeepSpeed is told 1, whatever the Trainer accumulates"
        yield Hit(ACCUMULATION, text, advice, fix, severity="warning")
    elif (steps := arguments["gradient_accumulation_steps"]) != 1:
        text = f"is missing: DeepSpeed is told 1, and the Trainer accumulates {steps}"
        both = context.has(TOTAL) and context.has(MICRO)
        yield Hit(ACCUMULATION, text, advice, fix, effect=FAILS if both else DIFFERS)


@rule(
    "DS606",
    "warning",
    bad=[
        {"_for": "hf", "_trainer": {"optim": "adafactor"}, **AUTOS},
        {"_for": "hf", "_trainer": {"optim": "sgd"}, **AUTOS},
    ],
    good=[
        {"_for": "hf", "_trainer": {"optim": "adamw_torch"}, **AUTOS},
        {
            "_for": "hf",
            "_trainer": {"optim": "adagrad"},
            "optimizer": {"type": "Adagrad", "params": {"lr": "auto"}},
        },
        {"_for": "hf", "_trainer": {}, "optimizer": {"type": "Lion", "params": {"lr": "auto"}}},
        {"_for": "hf", "_trainer": {"optim": "adafactor"}},
    ],
)
def optim_replaced_by_the_config(context: Context) -> Iterator[Hit]:
    """An optimizer in the config is the one that trains; args.optim isn't looked at (deepspeed_optim_sched,
    transformers/integrations/deepspeed.py).
    """
    arguments, kind = _arguments(context), context.text("optimizer.type")
    if arguments is None or kind is None or not arguments.asked("optim"):
        return
    optim, family = arguments["optim"], "adam" if kind.lower().startswith("adam") else kind.lower()
    if not optim.removeprefix("paged_").startswith(family):
        yield Hit(
            "optimizer",
            f"{kind} trains, and the Trainer's optim {optim} is ignored",
            f"Remove the section to train with {optim}, or leave optim out.",
            Fix((Edit("remove", "optimizer"),), safe=False),
        )


SAME_SCHEDULE = {
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
    "constant_with_warmup": "WarmupLR",
}
"""lr_scheduler_type -> the scheduler of DeepSpeed's that does the same."""


@rule(
    "DS607",
    "warning",
    bad={
        "_for": "hf",
        "_trainer": {"lr_scheduler_type": "cosine", "warmup_steps": 1000},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    },
    good=[
        {
            "_for": "hf",
            "_trainer": {"lr_scheduler_type": "cosine"},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
            },
        },
        {
            "_for": "hf",
            "_trainer": {"lr_scheduler_type": "constant_with_warmup"},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
            },
        },
        {
            "_for": "hf",
            "_trainer": {},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
            },
        },
        {"_for": "hf", "_trainer": {"lr_scheduler_type": "cosine"}},
    ],
)
def schedule_replaced_by_the_config(context: Context) -> Iterator[Hit]:
    """A scheduler in the config is the one that runs; lr_scheduler_type isn't looked at (deepspeed_optim_sched,
    transformers/integrations/deepspeed.py).
    """
    arguments, kind = _arguments(context), context.text("scheduler.type")
    if arguments is None or kind is None or not arguments.asked("lr_scheduler_type"):
        return
    asked = arguments["lr_scheduler_type"]
    if SAME_SCHEDULE.get(asked) != kind:
        yield Hit(
            "scheduler",
            f"{kind} runs, and the Trainer's lr_scheduler_type {asked} is ignored",
            f"Remove the section to train with {asked}, or leave lr_scheduler_type out.",
            Fix((Edit("remove", "scheduler"),), safe=False),
        )


KEPT = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit", "adagrad", "lion_32bit", "paged_lion_32bit")
"""Values of optim that accelerate has a CPU optimizer of DeepSpeed's for."""


@rule(
    "DS608",
    "error",
    DIFFERS,
    bad=[
        {
            "_for": "hf",
            "_trainer": {"optim": "sgd"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {
            "_for": "hf",
            "_trainer": {"optim": "adafactor"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    ],
    good=[
        {
            "_for": "hf",
            "_trainer": {"optim": "adagrad"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {
            "_for": "hf",
            "_trainer": {},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        {
            "_for": "hf",
            "_trainer": {"optim": "sgd"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        },
        {"_for": "hf", "_trainer": {"optim": "sgd"}},
        {
            "_for": "hf",
            "_trainer": {"optim": "sgd"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        },
        {
            "_for": "hf",
            "_trainer": {"optim": "sgd"},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            **AUTOS,
        },
    ],
)
def optim_that_becomes_adam(context: Context) -> Iterator[Hit]:
    """With offload accelerate trades the Trainer's optimizer for DeepSpeedCPUAdam, Adagrad and Lion apart.

    Source: map_pytorch_optim_to_deepspeed in accelerate/utils/deepspeed.py. Adafactor's learning rate of None then
    fails in the first step (ops/adam/cpu_adam.py).
    """
    arguments = _arguments(context)
    if arguments is None or context.has("optimizer") or context.text(OFFLOAD) not in ("cpu", "nvme"):
        return
    optim = arguments["optim"]
    if optim not in KEPT and context.flag("zero_force_ds_cpu_optimizer") is not False:
        fails = optim == "adafactor"
        text = "and fails at the first step" if fails else "without a word"
        yield Hit(
            OFFLOAD,
            f"with offload the Trainer's optim {optim} becomes DeepSpeed's CPU Adam, {text}",
            "Set zero_force_ds_cpu_optimizer to false to keep it, or train with optim adamw_torch.",
            effect=FAILS if fails else DIFFERS,
        )


@rule(
    "DS610",
    "error",
    FAILS,
    bad={"_for": "hf", "_trainer": {"fsdp": "full_shard"}},
    good=[{"_for": "hf", "_trainer": {"fsdp": ""}}, {"_for": "hf", "_trainer": {}}],
)
def fsdp_beside_deepspeed(context: Context) -> Iterator[Hit]:
    """Either shards the model; the Trainer refuses both (Trainer.__init__, transformers/trainer.py)."""
    arguments = _arguments(context)
    if arguments and arguments["fsdp"]:
        yield Hit(
            ZERO, f"and the Trainer's fsdp {shorten(arguments['fsdp'])} exclude each other", "Leave fsdp out."
        )


@rule(
    "DS611",
    "error",
    FAILS,
    bad={"_for": "hf", "_trainer": {"save_only_model": True, "load_best_model_at_end": True}},
    good=[
        {"_for": "hf", "_trainer": {"save_only_model": True}},
        {"_for": "hf", "_trainer": {"load_best_model_at_end": True}},
    ],
)
def best_model_without_its_checkpoint(context: Context) -> Iterator[Hit]:
    """Loading the best model takes DeepSpeed's own checkpoint, which save_only_model leaves out.

    Source: create_accelerator_and_postprocess in transformers/trainer.py.
    """
    arguments = _arguments(context)
    if arguments and arguments["save_only_model"] and arguments["load_best_model_at_end"]:
        text = "save_only_model and load_best_model_at_end exclude each other under DeepSpeed"
        yield Hit(ZERO, text, "Leave one of the two out.")


@rule(
    "DS612",
    "error",
    FAILS,
    bad=[
        {"_for": "hf", "_trainer": {"do_eval": True}},
        {"_for": "hf", "_trainer": {"do_eval": True, "do_train": False}, "zero_optimization": {"stage": 0}},
    ],
    good=[
        {"_for": "hf", "_trainer": {"do_eval": True, "do_train": True}},
        {"_for": "hf", "_trainer": {"do_eval": True, "eval_strategy": "steps"}},
        {"_for": "hf", "_trainer": {"do_train": False}},
        {
            "_for": "hf",
            "_trainer": {"do_eval": True},
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        },
    ],
)
def evaluation_alone_below_stage_3(context: Context) -> Iterator[Hit]:
    """Evaluating without training first is ZeRO inference, and that is stage 3's (deepspeed_init,
    transformers/integrations/deepspeed.py).
    """
    arguments = _arguments(context)
    if arguments is None or context.stage == 3 or arguments["do_train"] or not arguments["do_eval"]:
        return
    if arguments["eval_strategy"] == "no":
        text = f"{context.stage} can't evaluate alone, and the Trainer is asked for do_eval without do_train"
        yield Hit(f"{ZERO}.stage", text, "Set the stage to 3, or evaluate without DeepSpeed.")


@rule(
    "DS613",
    "error",
    FAILS,
    bad={
        "_for": "hf",
        "_trainer": {"auto_find_batch_size": True},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    },
    good=[
        {"_for": "hf", "_trainer": {"auto_find_batch_size": True}},
        {
            "_for": "hf",
            "_trainer": {},
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        },
    ],
)
def batch_size_search_at_stage_3(context: Context) -> Iterator[Hit]:
    """The Trainer refuses auto_find_batch_size at stage 3 (create_accelerator_and_postprocess,
    transformers/trainer.py).
    """
    arguments = _arguments(context)
    if arguments and context.stage == 3 and arguments["auto_find_batch_size"]:
        text = "3 and the Trainer's auto_find_batch_size exclude each other"
        yield Hit(f"{ZERO}.stage", text, "Set the batch size yourself, or the stage to 2.")


@rule(
    "DS614",
    "warning",
    since=(0, 17),
    bad=[
        {"_for": "hf", "_trainer": {"bf16": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"_for": "hf", "_trainer": {"fp16": True}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    ],
    good=[
        {"_for": "hf", "_trainer": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        {"_for": "hf", "_trainer": {"bf16": True}, "torch_autocast": {"enabled": False}},
    ],
)
def autocast_of_low_precision_weights(context: Context) -> Iterator[Hit]:
    """The argument turns the weights themselves to 16 bit, which autocast is there to avoid (set_mixed_precision,
    accelerate/utils/dataclasses.py).
    """
    arguments = _arguments(context)
    if arguments is None or not context.flag("torch_autocast.enabled"):
        return
    if asked := [name for name in ("bf16", "fp16") if arguments[name]]:
        text = f"has little left to do: the Trainer's {asked[0]} makes the weights 16 bit"
        yield Hit(
            "torch_autocast", text, f"Leave {asked[0]} out of TrainingArguments, or remove torch_autocast."
        )


@rule(
    "DS615",
    "error",
    FAILS,
    bad={"_for": "hf", "_device": "cpu", "_world_size": 2, "_trainer": {"use_cpu": False}},
    good=[
        {"_for": "hf", "_device": "cpu", "_world_size": 2, "_trainer": {"use_cpu": True}},
        {"_for": "hf", "_device": "cpu", "_world_size": 1, "_trainer": {"use_cpu": False}},
        {"_for": "hf", "_device": "cpu", "_world_size": 2, "_trainer": {}},
        {"_for": "hf", "_device": "cuda", "_world_size": 2, "_trainer": {"use_cpu": False}},
    ],
)
def ranks_on_the_cpu_that_are_not_counted(context: Context) -> Iterator[Hit]:
    """Without use_cpu each rank takes itself for the only one, and the batch no longer agrees.

    Source: _setup_devices in transformers/training_args.py, _batch_assertion in runtime/config.py.
    """
    world = context.world_size or 1
    if (
        context.by_trainer
        and context.setting.device == "cpu"
        and world > 1
        and context.argument("use_cpu") is False
    ):
        text = f"is worked out for 1 rank, and there are {world} on the CPU"
        yield Hit(TOTAL, text, "Set use_cpu in TrainingArguments.")


@rule(
    "DS609",
    "warning",
    since=(0, 16),
    bad=[
        {"_for": "hf", "tensor_parallel": {"autotp_size": 2}},
        {"_for": "accelerate", "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 0}},
    ],
    good=[
        {"_for": "hf", "tensor_parallel": {"autotp_size": 1}},
        {
            "_for": "hf",
            "tensor_parallel": {"autotp_size": 2},
            "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
        },
        {"_for": "hf", "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
        {"tensor_parallel": {"autotp_size": 2}},
    ],
)
def tensor_parallel_weights_stay_in_pieces(context: Context) -> Iterator[Hit]:
    """With AutoTP saving asks for the gather flag at every stage, whatever its name says (get_state_dict in
    accelerate/accelerator.py); the Trainer then leaves ZeRO's checkpoint in place of model.safetensors.
    """
    size = context.integer(TENSOR) or 1
    if context.target in schema.FILLING and size > 1 and context.stage < 3 and not context.flag(GATHER):
        yield Hit(
            GATHER,
            f"is off: the parts of {size} GPUs are not put together, and saving gives no model file",
            "Set it to true; with tensor parallelism it acts at every stage.",
            Fix((Edit("replace" if context.has(GATHER) else "add", GATHER, True),)),
        )

"""HF's TrainingArguments beside a DeepSpeed config: their defaults, and the keys each argument has to agree with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.catalog import suggestion
from dsrun.config import tree
from dsrun.config.schemas import foreign
from dsrun.errors import DsrunError
from dsrun.files import read_text
from dsrun.json_numbers import is_number

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-05,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-08,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "max_steps": -1,
    "fp16": False,
    "bf16": False,
    "fp16_full_eval": False,
    "bf16_full_eval": False,
    "optim": "adamw_torch_fused",
    "lr_scheduler_type": "linear",
    "eval_strategy": "no",
}
"""Defaults in transformers 5.23; an argument that isn't here is off by default."""

CHOICES: dict[str, tuple[str, ...]] = {
    "optim": (
        *("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused"),
        *("adafactor", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit"),
        *("ademamix", "sgd", "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit"),
        *("lion_8bit", "lion_32bit", "paged_adamw_32bit", "paged_adamw_8bit"),
        *("paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit"),
        *("rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw"),
        *("galore_adamw_8bit", "galore_adafactor", "galore_adamw_layerwise"),
        *("galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo"),
        *("grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        *("apollo_adamw", "apollo_adamw_layerwise", "stable_adamw"),
    ),
    "lr_scheduler_type": (
        *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant"),
        *("constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr"),
        *("cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy"),
    ),
}
"""The names that transformers 5.23 knows (OptimizerNames, SchedulerType)."""

OLDER = {"optim": ("adamw_hf", "adamw_apex_fused")}
"""Names that transformers knew before 5."""

FLAGS = (
    *("fp16", "bf16", "fp16_full_eval", "bf16_full_eval", "do_train", "do_eval", "use_cpu"),
    *("save_only_model", "load_best_model_at_end", "auto_find_batch_size"),
)
AT_LEAST_1 = ("per_device_train_batch_size", "gradient_accumulation_steps")
WHOLE = (*AT_LEAST_1, "max_steps")


class Arguments:
    """The arguments given, and the defaults of those left out."""

    def __init__(self, given: Mapping[str, Any], world_size: int | None = None) -> None:
        self.given = given
        self.world_size = world_size

    def __getitem__(self, name: str) -> Any:
        value = self.given.get(name)
        value = DEFAULTS.get(name) if value is None else value
        return getattr(value, "value", value)  # an Enum, as TrainingArguments makes of optim and the like

    def changed(self, name: str) -> bool:
        """Whether an argument is something else than its default."""
        return bool(self[name] != DEFAULTS.get(name))

    def total_batch(self) -> Any:
        per_rank = self["per_device_train_batch_size"] * self["gradient_accumulation_steps"]
        return tree.MISSING if self.world_size is None else per_rank * self.world_size

    def steps(self) -> Any:
        return self["max_steps"] if self["max_steps"] > 0 else tree.MISSING

    def warmup(self) -> Any:
        """Steps of the warm-up as in get_warmup_steps: a number below 1 is a share of all steps; at least one step."""
        given = self["warmup_steps"] or self["warmup_ratio"] or 0
        if 0 < given < 1:
            return tree.MISSING if self.steps() is tree.MISSING else math.ceil(self.steps() * given)
        return max(1, int(given))


class Match(NamedTuple):
    """A key that has to equal an argument, or to be "auto" (trainer_config_process and _finalize,
    transformers/integrations/deepspeed.py).
    """

    path: str
    argument: str
    """The argument's name in the Trainer's own message."""
    calculate: Callable[[Arguments], Any] | None = None
    """The value to equal, where that isn't the argument's own; tree.MISSING where it isn't known."""

    def value(self, arguments: Arguments) -> Any:
        return self.calculate(arguments) if self.calculate else arguments[self.argument]

    @property
    def calculated(self) -> bool:
        """Whether it is worked out of several arguments."""
        return self.argument not in DEFAULTS


MATCHES = (
    Match("train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    Match("gradient_accumulation_steps", "gradient_accumulation_steps"),
    Match(
        "train_batch_size",
        "GPUs x per_device_train_batch_size x gradient_accumulation_steps",
        Arguments.total_batch,
    ),
    Match("gradient_clipping", "max_grad_norm"),
    Match("optimizer.params.lr", "learning_rate"),
    Match("optimizer.params.betas", "adam_beta1, adam_beta2", lambda a: [a["adam_beta1"], a["adam_beta2"]]),
    Match("optimizer.params.eps", "adam_epsilon"),
    Match("optimizer.params.weight_decay", "weight_decay"),
    Match("scheduler.params.warmup_max_lr", "learning_rate"),
    Match("scheduler.params.warmup_num_steps", "warmup_steps", Arguments.warmup),
    Match("scheduler.params.total_num_steps", "max_steps", Arguments.steps),
    Match("fp16.enabled", "fp16 or fp16_full_eval", lambda a: a["fp16"] or a["fp16_full_eval"] or False),
    Match("bf16.enabled", "bf16 or bf16_full_eval", lambda a: a["bf16"] or a["bf16_full_eval"] or False),
)
BY_PATH = {match.path: match for match in MATCHES}


def given(file: str | None, pairs: Sequence[str]) -> dict[str, Any] | None:
    """The TrainingArguments in a JSON or YAML file and in NAME=VALUE texts, which count more; None without both.

    A file may hold other things, as the scripts' own arguments; what NAME=VALUE names must be an argument.
    Raises DsrunError for a file that can't be read, an unknown name, or a value that the Trainer refuses.
    """
    if file is None and not pairs:
        return None
    values = {} if file is None else _from_file(file)
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise DsrunError(
                f"is not NAME=VALUE: {pair!r}", where="--arg", hint="As in --arg learning_rate=1e-4"
            )
        if name not in names():
            hint = suggestion(name, names(), "It takes the arguments of HF's TrainingArguments.")
            raise DsrunError("is not an argument of the Trainer", where=f"--arg {name}", hint=hint)
        values[name] = _value(text.strip())
    for name, value in values.items():
        if value is not None and (wrong := _wrong(name, value)):
            raise DsrunError(wrong[0], where=name, hint=wrong[1])
    for suffix, use in (("", ""), ("_full_eval", " for evaluation")):
        both = f"fp16{suffix}", f"bf16{suffix}"
        if all(values.get(name) for name in both):
            raise DsrunError(
                f"and {both[1]} are both true", where=both[0], hint=f"HF refuses both{use}: leave one out."
            )
    return values


def _wrong(name: str, value: Any) -> tuple[str, str] | None:
    """The fault of an argument's value, and what would be right; None for a right one."""
    default = DEFAULTS.get(name)
    hint = f"The default is {default}."
    if name in FLAGS:
        return (
            None if value in (True, False) else (f"is not true or false: {value!r}", "Write true or false.")
        )
    if name in CHOICES:
        known = CHOICES[name] + OLDER.get(name, ())
        message = f"is not one that the Trainer knows: {value!r}"
        return None if value in known else (message, suggestion(str(value), known, hint))
    if not isinstance(default, (int, float)):
        return None
    if not is_number(value):
        return f"is not a number: {value!r}", hint
    if name in WHOLE and not float(value).is_integer():
        return f"is not a whole number: {value!r}", hint
    return (f"is {value}, and must be at least 1", hint) if name in AT_LEAST_1 and value < 1 else None


def names() -> frozenset[str]:
    """Every argument's name."""
    return foreign.names("trainer") | set(DEFAULTS) | {"fsdp"}


def _from_file(file: str) -> dict[str, Any]:
    text = read_text(Path(file).expanduser())
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        import yaml

        try:
            arguments = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise DsrunError(f"is neither JSON nor YAML: {error}", where=file) from error
    if not isinstance(arguments, dict):
        raise DsrunError(
            "holds no TrainingArguments", where=file, hint="As in learning_rate: 1e-4, one on each line."
        )
    return {key: _value(value) if isinstance(value, str) else value for key, value in arguments.items()}


def _value(text: str) -> Any:
    """The value of a text: 1e-4 is a number (YAML takes it for a text), True and true are flags."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

"""Every optimizer of --optimizer, once: its parameters, DeepSpeed's name for it, the bytes of its states.

The option's choices, the checks before the start, the ranks that make it and the planner read this table. An optimizer
that steps each weight by itself is an entry here and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsrun.errors import Problem


@dataclass(frozen=True)
class Optimizer:
    """One value of --optimizer."""

    state_bytes: tuple[float, float]
    """Bytes of its states for each weight, in fp32 and in 16 bits."""
    types: tuple[str, ...] = ()
    """Its types in an optimizer section of the config, in small letters."""
    made_by: str = ""
    """MODULE:CLASS where the ranks make it and hand it to DeepSpeed; empty where DeepSpeed does, from the config."""
    fsdp: str = ""
    """MODULE:CLASS of one that steps FSDP's sharded tensors; empty where there is none."""
    takes: tuple[str, ...] = ()
    """The parameters of that class that a config may give."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Its parameters where the config has none."""
    package: str = ""
    """The package that has to be installed for it."""


ADAM_TAKES = ("lr", "betas", "eps", "weight_decay")
WHICH_ADAM = ("torch_adam", "adam_w_mode")
"""Parameters that only say which Adam of DeepSpeed's it is."""
ADAMW, ADAMW_8BIT, MUON = "adamw", "adamw-8bit", "muon"
OPTIMIZERS = {
    ADAMW: Optimizer(  # two moments
        (8, 4), types=("adam", "adamw"), fsdp="torch.optim:AdamW", takes=ADAM_TAKES, defaults={"weight_decay": 0.0}
    ),
    ADAMW_8BIT: Optimizer(  # both in a byte each, whatever the weights are
        (2, 1), made_by="bitsandbytes.optim:AdamW8bit", takes=ADAM_TAKES, package="bitsandbytes"
    ),
    "sgd": Optimizer(
        (4, 2), types=("sgd",), made_by="torch.optim:SGD", fsdp="torch.optim:SGD",
        takes=("lr", "momentum", "dampening", "nesterov", "weight_decay"), defaults={"momentum": 0.9},
    ),
    # DeepSpeed has Lion for GPUs and for host memory only, where it has to be compiled. Defaults: arXiv:2302.06675.
    "lion": Optimizer(
        (4, 2), types=("lion",), made_by="dsrun.training.engines.lion:Lion",
        fsdp="dsrun.training.engines.lion:Lion",
        takes=("lr", "betas", "weight_decay"), defaults={"betas": [0.9, 0.99]},
    ),
    MUON: Optimizer((4, 2), types=("muon",)),  # one moment of matrices, which are nearly all weights
}  # fmt: skip
TYPES = {kind: name for name, optimizer in OPTIMIZERS.items() for kind in optimizer.types}
"""An optimizer section's type in small letters -> the option's name for it; others are the config's own affair."""
PARAMS = "optimizer.params."
"""The beginning of the paths of an optimizer's arguments in a DeepSpeed config."""
BETAS = {"lion": (0.9, 0.99)}
"""Both betas of an optimizer, where they aren't (0.9, 0.999)."""


class GivenArguments(Protocol):
    """The options that arguments of the optimizer are given by."""

    @property
    def optimizer(self) -> str: ...
    @property
    def weight_decay(self) -> float | None: ...
    @property
    def adam_beta1(self) -> float | None: ...
    @property
    def adam_beta2(self) -> float | None: ...
    @property
    def adam_epsilon(self) -> float | None: ...
    @property
    def momentum(self) -> float | None: ...
    @property
    def overrides(self) -> tuple[str, ...]: ...


FLAGS = {
    "weight_decay": "--weight-decay", "betas": "--adam-beta1 and --adam-beta2", "eps": "--adam-epsilon",
    "momentum": "--momentum",
}  # fmt: skip
"""An argument -> the options that give it, in messages."""


def given_arguments(options: GivenArguments) -> dict[str, Any]:
    """The arguments that options other than --set give, by the optimizer's own names."""
    first, second = BETAS.get(options.optimizer, (0.9, 0.999))
    betas = (options.adam_beta1, options.adam_beta2)
    values = {
        "weight_decay": options.weight_decay,
        "betas": None if betas == (None, None) else [_or(betas[0], first), _or(betas[1], second)],
        "eps": options.adam_epsilon,
        "momentum": options.momentum,
    }
    return {name: value for name, value in values.items() if value is not None}


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def made_by_ranks(name: str) -> bool:
    """Whether the ranks make it; else DeepSpeed does, from the config's section."""
    return name in OPTIMIZERS and bool(OPTIMIZERS[name].made_by)


def apart(options: GivenArguments) -> dict[str, Any]:
    """Arguments that the config's optimizer section, which is AdamW's as a rule, has no place for, --set's among them:
    all of an optimizer that the ranks make, and Muon's momentum."""
    names = _apart_names(options.optimizer)
    by_set = {name: _value(text) for name, text, _ in _of_optimizer(options.overrides) if name in names}
    own = {name: value for name, value in given_arguments(options).items() if name in names}
    return by_set | own


def texts_for_config(options: GivenArguments) -> tuple[str, ...]:
    """--set's texts for the DeepSpeed config: the given ones, and the optimizer's arguments that have options."""
    names = _apart_names(options.optimizer)
    gone = {whole for name, _, whole in _of_optimizer(options.overrides) if name in names}
    own = {name: value for name, value in given_arguments(options).items() if name not in names}
    return (
        *(text for text in options.overrides if text not in gone),
        *(f"{PARAMS}{name}={json.dumps(value)}" for name, value in own.items()),
    )


def _apart_names(optimizer: str) -> frozenset[str]:
    """The learning rate is none of them: it is an option of its own, and --set may not contradict that."""
    if optimizer == MUON:
        return frozenset({"momentum"})
    return frozenset(OPTIMIZERS[optimizer].takes) - {"lr"} if made_by_ranks(optimizer) else frozenset()


def _of_optimizer(texts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The arguments of the optimizer among the texts of --set: the name, the value and the whole text of each."""
    for text in texts:
        path, _, value = text.partition("=")
        path = path.strip().removeprefix("$.")
        if path.startswith(PARAMS):
            yield path.removeprefix(PARAMS), value, text


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def argument_problems(options: GivenArguments, takes: Iterable[str] | None = None) -> list[Problem]:
    """What is wrong with given arguments: the optimizer has none of that name, or --set says another value.

    takes: the names that it takes, where that is not by its entry in OPTIMIZERS.
    """
    name = options.optimizer
    known = {ADAMW: ADAM_TAKES, MUON: (*ADAM_TAKES, "momentum")}.get(name) if takes is None else tuple(takes)
    if known is None and name in OPTIMIZERS:
        known = OPTIMIZERS[name].takes
    by_set = {argument: (_value(value), text) for argument, value, text in _of_optimizer(options.overrides)}
    problems = []
    for argument, value in given_arguments(options).items():
        if known is not None and argument not in known:
            hint = f"It takes {', '.join(other for other in known if other != 'lr')}."
            problems.append(Problem(f"{name} has no {argument}", FLAGS[argument], hint))
        elif argument in by_set and by_set[argument][0] != value:
            fault = f"is {value}, and --set {by_set[argument][1]} says another"
            problems.append(Problem(fault, FLAGS[argument], "Give one of them."))
    return problems

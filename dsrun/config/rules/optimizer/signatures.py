"""Signatures of optimizers: the class that a name stands for, and the arguments that it takes.

Read from schemas/optimizers.json, which tools/schemas/signatures.py writes: torch isn't imported here.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.catalog import closest
from dsrun.config.rules.common import ADAMS
from dsrun.config.rules.frame import Context, once
from dsrun.config.schemas import schema

TORCH = "torch.optim."
TORCH_SCHEDULER = "torch.optim.lr_scheduler."
OF_ADAM = ("adam_w_mode", "fp32_optimizer_states", "torch_adam")
"""Parameters that the engine takes out of an Adam's (get_optimizer_configuration in runtime/engine.py)."""

SPELLED = {
    name.lower(): name
    for name in ("AdamW", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "OneBitLamb", "ZeroOneAdam")
}

MUP = ("muadam", "muadamw", "musgd")


# Names of the same thing elsewhere, where no likeness leads there.
# Two arguments that are one list here: neither is the list.
PAIRED = ("beta1", "beta2", "adam_beta1", "adam_beta2")
MEANT = {
    "learning_rate": ("lr", "warmup_max_lr", "max_lr"),
    "lr": ("warmup_max_lr", "cycle_max_lr", "lr_range_test_min_lr", "max_lr"),
    "max_lr": ("warmup_max_lr", "cycle_max_lr"),
    "min_lr": ("warmup_min_lr", "cycle_min_lr", "eta_min"),
    "wd": ("weight_decay",),
    "adam_epsilon": ("eps",),
    "epsilon": ("eps",),
    "warmup_steps": ("warmup_num_steps",),
    "num_warmup_steps": ("warmup_num_steps",),
    "total_steps": ("total_num_steps",),
    "max_steps": ("total_num_steps",),
    "num_training_steps": ("total_num_steps",),
    "adamw_mode": ("adam_w_mode",),
}


class Signature(NamedTuple):
    """takes: the arguments there are. needs: those without a default."""

    takes: tuple[str, ...]
    needs: tuple[str, ...]


@lru_cache(maxsize=1)
def data() -> dict[str, Any]:
    text = Path(schema.__file__).with_name("optimizers.json").read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


def signature(kind: str, name: str | None) -> Signature | None:
    """The signature of a class; None for one that nothing is known of. kind: optimizers or schedulers."""
    entry = data()[kind].get(name)
    return Signature(tuple(entry["takes"]), tuple(entry["needs"])) if entry else None


def own(context: Context, path: str) -> tuple[str, ...]:
    """The names that DeepSpeed itself has for optimizer.type or scheduler.type; () where that isn't known."""
    return tuple((context.schema.node(path) or {}).get("x-known-values", ()))


@once
def optimizer_name(context: Context) -> str | None:
    """optimizer.type as DeepSpeed compares it: its own names in any case, in lower case here; else as it stands."""
    name = context.text("optimizer.type")
    known = {value.lower() for value in own(context, "optimizer.type")}
    return name.lower() if name and name.lower() in known else name


def offloaded(context: Context) -> bool:
    """Whether the engine takes the CPU's optimizer (zero_use_cpu_optimizer in runtime/engine.py)."""
    device = context.text("zero_optimization.offload_optimizer.device")
    return device in ("cpu", "nvme") or context.flag("zero_optimization.cpu_offload") is True


@once
def optimizer_class(context: Context) -> str | None:
    """The class that the engine makes for the optimizer section (_configure_basic_optimizer, runtime/engine.py).

    None where there is no section, or the name isn't known.
    """
    name = optimizer_name(context)
    on_cpu = offloaded(context)
    if name in ADAMS:
        if context.flag("optimizer.params.torch_adam"):
            l2 = name == "adam" and context.flag("optimizer.params.adam_w_mode") is False
            return TORCH + ("Adam" if l2 else "AdamW")
        cpu_adam = "ZenFlowCPUAdam" if context.section("zero_optimization.zenflow") else "DeepSpeedCPUAdam"
        return cpu_adam if on_cpu else "FusedAdam"
    classes = {
        "adagrad": "DeepSpeedCPUAdagrad" if on_cpu else TORCH + "Adagrad",
        "lion": "DeepSpeedCPULion" if on_cpu else "FusedLion",
        "lamb": "FusedLamb",
        "muon": "MuonWithAuxAdam",
    }
    chosen = classes.get(name or "", f"{TORCH}{name}")
    return chosen if chosen in data()["optimizers"] else None


@once
def takes(context: Context) -> tuple[str, ...] | None:
    """The keys that optimizer.params may hold for the class that is made; None where that isn't known."""
    of_class = signature("optimizers", optimizer_class(context))
    if of_class is None:
        return None
    return tuple(sorted({*of_class.takes, *(OF_ADAM if optimizer_name(context) in ADAMS else ())}))


def torch_names(kind: str, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in data()[kind] if name.startswith(prefix)]


def spelled(name: str) -> str:
    """A DeepSpeed optimizer's name as it is usually written."""
    return SPELLED.get(name, name.capitalize())


def bare(name: str) -> str:
    """The optimizer in a name such as FusedAdam, adamw_torch_fused or paged_adamw_8bit, in lower case."""
    return re.sub(r"deepspeed|fused|paged|torch|apex|bnb|cpu|hf|[0-9]+bit|[^a-z]", "", name.lower())


def argument_meant(key: str, known: tuple[str, ...]) -> str | None:
    """The argument that an unknown one was probably meant to be."""
    if key in PAIRED:
        return None
    named = next((name for name in MEANT.get(key, ()) if name in known), None)
    return named or closest(key, known)

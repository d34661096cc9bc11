"""DS431 to DS435, DS442 and DS443: which schedule it is, and the arguments that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.catalog import closest
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import set_to
from dsrun.config.rules.examples import ZERO_1
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Edit, Finding, Fix, bad, good, once, rule
from dsrun.config.rules.kinds import Table, report
from dsrun.config.rules.optimizer.signatures import (
    TORCH_SCHEDULER,
    Signature,
    argument_meant,
    own,
    signature,
    torch_names,
)
from dsrun.config.rules.precision.modes import mode

TYPE = "scheduler.type"
PARAMS = "scheduler.params"

# What is in the names of schedules elsewhere, HF's lr_scheduler_type above all.
MEANT = (
    ("cos", "WarmupCosineLR"),
    ("linear", "WarmupDecayLR"),
    ("decay", "WarmupDecayLR"),
    ("poly", "WarmupDecayLR"),
    ("constant", "WarmupLR"),
    ("cycle", "OneCycle"),
    ("warmup", "WarmupLR"),
)


def built(name: str, lr: Any = 1e-3, **params: Any) -> dict[str, Any]:
    """An optimizer and a scheduler section, for the examples."""
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return {"optimizer": optimizer, "scheduler": {"type": name, "params": params}}


@once
def class_of(context: Context) -> str | None:
    """The class that the engine makes: DeepSpeed's own, else PyTorch's (_scheduler_from_config, runtime/engine.py)."""
    name = context.text(TYPE)
    if name in own(context, TYPE):
        return name
    full = f"{TORCH_SCHEDULER}{name}"
    return full if signature("schedulers", full) else None


def needed(context: Context) -> Signature | None:
    return signature("schedulers", class_of(context))


def takes_it(name: str, key: str) -> bool:
    of_class = signature("schedulers", name)
    return of_class is not None and key in of_class.takes


@rule("DS431", FAILS)
@bad(built("cosine"), built("linear", warmup_num_steps=1))
@good(built("WarmupLR", warmup_num_steps=10), built("StepLR", step_size=10))
def unknown_scheduler(context: Context) -> Iterator[Finding]:
    """ "DeepSpeed does not recognize LR scheduler": names must match exactly (_scheduler_from_config).

    Source: runtime/engine.py; HF's names are another list (transformers/trainer_utils.py).
    """
    name, known = context.text(TYPE), own(context, TYPE)
    if not name or not known or class_of(context):
        return
    other_case = next((value for value in known if value.lower() == name.lower()), None)
    by_word = next((value for word, value in MEANT if word in name.lower() and value in known), None)
    likely = other_case or by_word or closest(name, [*known, *torch_names("schedulers", TORCH_SCHEDULER)])
    yield Finding(
        TYPE,
        f"{name} is not a schedule of DeepSpeed",
        (f"Did you mean {likely}? " if likely else "") + f"There are {', '.join(known)}.",
        set_to(context, TYPE, likely, safe=likely == other_case) if likely else None,
    )


@rule("DS432", FAILS)
@bad(
    {**ZERO_1, **built("StepLR", step_size=10)},
    {"_for": "hf", **built("CosineAnnealingLR", lr="auto", T_max=10)},
)
@good(built("StepLR", step_size=10), {**ZERO_1, **built("WarmupLR", warmup_num_steps=10)})
def torch_scheduler_with_zero(context: Context) -> Iterator[Finding]:
    """PyTorch's schedules need a torch optimizer, but ZeRO and 16-bit training wrap it.

    "DeepSpeedZeroOptimizer is not an Optimizer" (_configure_lr_scheduler in runtime/engine.py); measured at every
    stage, and in bf16 at stage 0.
    """
    name = class_of(context) or ""
    if name.startswith(TORCH_SCHEDULER):
        why = f"ZeRO stage {context.stage}" if context.stage > 0 else mode(context)
        if why and why != "fp32":
            yield Finding(
                TYPE,
                f"{name} can't work with {why}, which wraps the optimizer",
                f"Use one of {', '.join(own(context, TYPE))}, or make the schedule in the code.",
            )


@rule("DS433", FAILS)
@bad(
    {**built("WarmupLR"), "scheduler": {"type": "WarmupLR"}},
    {**built("OneCycle"), "scheduler": {"type": "OneCycle"}},
)
@good(built("WarmupLR"), built("WarmupLR", warmup_num_steps=10))
def scheduler_without_params(context: Context) -> Iterator[Finding]:
    """ "argument after ** must be a mapping, not NoneType" (_scheduler_from_config in runtime/engine.py)."""
    arguments = needed(context)
    if arguments and not context.has(PARAMS):
        fix = None if arguments.needs else set_to(context, PARAMS, {})
        those = f" with {' and '.join(arguments.needs)}" if arguments.needs else ", even if empty: {}"
        yield Finding("scheduler", "has no params, without which DeepSpeed fails", f"Add params{those}.", fix)


@rule("DS434", FAILS)
@bad(
    built("WarmupLR", warmup_steps=10),
    built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_max_lr=1e-3),
)
@good(
    built("WarmupLR", warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps=10, warmup_type="linear"),
    built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_min_ratio=0.1),
)
def unknown_scheduler_argument(context: Context) -> Iterator[Finding]:
    """params are passed to the class unchanged: TypeError (_scheduler_from_config in runtime/engine.py)."""
    arguments, kind = needed(context), class_of(context)
    for key in context.section(PARAMS) if arguments else ():
        if arguments is None or key in arguments.takes:
            continue
        others = [name for name in own(context, TYPE) if takes_it(name, key)]
        path, meant = f"{PARAMS}.{key}", None if others else argument_meant(key, arguments.takes)
        taken = meant is None or context.has(f"{PARAMS}.{meant}")
        edit = Edit("remove", path) if taken else Edit("rename", path, meant)
        advice = f"Did you mean {meant}? " if meant else ""
        advice += f"{' and '.join(others)} {'takes' if len(others) == 1 else 'take'} it. " if others else ""
        yield Finding(
            path,
            f"{kind} has no such argument",
            f"{advice}{kind} takes {', '.join(arguments.takes)}.",
            Fix((edit,), safe=False),
        )


@rule("DS435", FAILS)
@bad(built("OneCycle"), built("OneCycle", cycle_min_lr=1e-4))
@good(
    built("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3),
    built("WarmupDecayLR", warmup_num_steps=1, total_num_steps=10),
)
def missing_scheduler_argument(context: Context) -> Iterator[Finding]:
    """Arguments without a default: "missing 2 required positional arguments" (runtime/lr_schedules.py)."""
    arguments = needed(context)
    if arguments is None or not isinstance(context.get(PARAMS), dict):
        return
    if missing := [key for key in arguments.needs if not context.has(f"{PARAMS}.{key}")]:
        yield Finding(
            PARAMS, f"{class_of(context)} needs {' and '.join(missing)}", f"Add {PARAMS}.{missing[0]}."
        )


@rule("DS442", DIFFERS)
@bad(
    {"optimizer": {"type": "AdamW"}, "scheduler": {"params": {"warmup_num_steps": 10}}},
    {"optimizer": {"type": "AdamW"}, "scheduler": {}},
)
@good(built("WarmupLR", warmup_num_steps=10), {"optimizer": {"type": "AdamW"}})
def scheduler_without_type(context: Context) -> Iterator[Finding]:
    """A section without `type` means no schedule: the rate never changes (get_scheduler_name in runtime/config.py)."""
    if isinstance(context.get("scheduler"), dict) and not context.has(TYPE):
        name = context.text("scheduler.name")
        fix = Fix((Edit("move", "scheduler.name", TYPE),), safe=False) if name else None
        yield Finding(
            "scheduler",
            "has no type, so there is no schedule" + (": name isn't read" if name else ""),
            f"Set scheduler.type to {name or 'WarmupLR'}, or remove the section.",
            fix,
        )


@rule("DS443", "note")
@bad({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}})
@good(
    built("WarmupLR", warmup_num_steps=10),
    {"_for": "hf", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
)
def scheduler_for_an_optimizer_from_code() -> Table:
    """The schedule is made for any optimizer, if there is one (runtime/engine.py)."""
    text = (
        "has no optimizer section next to it: it acts on the code's optimizer, if there is one. "
        "Add an optimizer section, or pass an optimizer to deepspeed.initialize."
    )
    return report("scheduler", text, (when.read_by("deepspeed"), when.has(TYPE), when.lacks("optimizer")))

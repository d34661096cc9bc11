"""DS43x-DS45x: the learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsrun.catalog import closest
from dsrun.config import schema, tree
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Edit, Fix, Hit, rule
from dsrun.config.rules.precision import mode
from dsrun.config.rules.signatures import (
    TORCH_SCHEDULER,
    Signature,
    argument_meant,
    own,
    signature,
    torch_names,
)

TYPE = "scheduler.type"
PARAMS = "scheduler.params"
WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
TO_A_RATE = ("WarmupLR", "WarmupDecayLR")
"""They set the rate; WarmupCosineLR multiplies the optimizer's."""

DECAYS = ("WarmupDecayLR", "WarmupCosineLR")
COUNTS = ("warmup_num_steps", "lr_range_test_step_size")
"""Arguments that have to be an int, and not just a whole number."""

DEFAULT_PEAK = 0.001

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
ZERO_1: dict[str, Any] = {"zero_optimization": {"stage": 1}}


def built(name: str, lr: Any = 1e-3, **params: Any) -> dict[str, Any]:
    """An optimizer and a scheduler section, for the examples."""
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return {"optimizer": optimizer, "scheduler": {"type": name, "params": params}}


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
    found = signature("schedulers", name)
    return found is not None and key in found.takes


def peak(context: Context) -> float | None:
    """The rate at the end of the warm-up; None where that is open.

    WarmupDecayLR, and WarmupLR before 0.17, have a default of their own; null is the optimizer's rate
    (runtime/lr_schedules.py).
    """
    path = f"{PARAMS}.warmup_max_lr"
    if context.has(path) and context.get(path) is not None:
        return context.number(path)
    own_default = context.text(TYPE) == "WarmupDecayLR" or context.version < (0, 17)
    if own_default and not context.has(path):
        return DEFAULT_PEAK
    return context.number("optimizer.params.lr")


@rule(
    "DS431",
    "error",
    FAILS,
    bad=[
        built("cosine"),
        built("linear", warmup_num_steps=1),
        built("constant_with_warmup"),
        built("warmuplr", warmup_num_steps=1),
        built("WarmupDecayLr", total_num_steps=10),
        built("zzz"),
        {"_version": "0.10", **built("WarmupCosineLR", total_num_steps=10)},
    ],
    good=[built("WarmupLR", warmup_num_steps=10), built("StepLR", step_size=10)],
)
def unknown_scheduler(context: Context) -> Iterator[Hit]:
    """ "DeepSpeed does not recognize LR scheduler": names are taken exactly (_scheduler_from_config).

    Source: runtime/engine.py; HF's names are another list (transformers/trainer_utils.py).
    """
    name, known = context.text(TYPE), own(context, TYPE)
    if not name or not known or class_of(context):
        return
    other_case = next((value for value in known if value.lower() == name.lower()), None)
    by_word = next((value for word, value in MEANT if word in name.lower() and value in known), None)
    likely = other_case or by_word or closest(name, [*known, *torch_names("schedulers", TORCH_SCHEDULER)])
    yield Hit(
        TYPE,
        f"{name} is no schedule of DeepSpeed",
        (f"Did you mean {likely}? " if likely else "") + f"There are {', '.join(known)}.",
        Fix((Edit("replace", TYPE, likely),), safe=likely == other_case) if likely else None,
    )


@rule(
    "DS432",
    "error",
    FAILS,
    bad=[
        {**ZERO_1, **built("StepLR", step_size=10)},
        {"_for": "hf", **built("CosineAnnealingLR", lr="auto", T_max=10)},
        {"bf16": {"enabled": True}, **built("StepLR", step_size=10)},
    ],
    good=[built("StepLR", step_size=10), {**ZERO_1, **built("WarmupLR", warmup_num_steps=10)}],
)
def torch_scheduler_with_zero(context: Context) -> Iterator[Hit]:
    """PyTorch's schedules want a torch optimizer, and ZeRO and 16 bits put a wrapper around it.

    "DeepSpeedZeroOptimizer is not an Optimizer" (_configure_lr_scheduler in runtime/engine.py); measured at every
    stage, and in bf16 at stage 0.
    """
    found = class_of(context) or ""
    if found.startswith(TORCH_SCHEDULER):
        why = f"ZeRO stage {context.stage}" if context.stage > 0 else mode(context)
        if why and why != "fp32":
            yield Hit(
                TYPE,
                f"{found} can't work with {why}, which wraps the optimizer",
                f"Take one of {', '.join(own(context, TYPE))}, or let the code make the schedule.",
            )


@rule(
    "DS433",
    "error",
    FAILS,
    bad=[
        {**built("WarmupLR"), "scheduler": {"type": "WarmupLR"}},
        {**built("OneCycle"), "scheduler": {"type": "OneCycle"}},
    ],
    good=[built("WarmupLR"), built("WarmupLR", warmup_num_steps=10)],
)
def scheduler_without_params(context: Context) -> Iterator[Hit]:
    """ "argument after ** must be a mapping, not NoneType" (_scheduler_from_config in runtime/engine.py)."""
    found = needed(context)
    if found and not context.has(PARAMS):
        fix = None if found.needs else Fix((Edit("add", PARAMS, {}),), safe=False)
        what = f" with {' and '.join(found.needs)}" if found.needs else ", if only as {}"
        yield Hit("scheduler", "has no params, and DeepSpeed fails without them", f"Add params{what}.", fix)


@rule(
    "DS434",
    "error",
    FAILS,
    bad=[
        built("WarmupLR", warmup_steps=10),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_max_lr=1e-3),
        {
            "_for": "hf",
            **built(
                "WarmupCosineLR",
                "auto",
                total_num_steps="auto",
                warmup_num_steps="auto",
                warmup_max_lr="auto",
            ),
        },
        built("WarmupLR", total_num_steps=100),
        built("WarmupLR", cycle_max_lr=1e-3),
        built("WarmupLR", lr=1e-3, zzz=1),
        {"scheduler": {"type": "WarmupLR", "params": {"lr": 1e-3}}},
    ],
    good=[
        built("WarmupLR", warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps=10, warmup_type="linear"),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_min_ratio=0.1),
        built("StepLR", step_size=10, gamma=0.5),
    ],
)
def scheduler_argument_not_taken(context: Context) -> Iterator[Hit]:
    """params go to the class as they are: TypeError (_scheduler_from_config in runtime/engine.py)."""
    found, kind = needed(context), class_of(context)
    for key in context.section(PARAMS) if found else ():
        if found is None or key in found.takes:
            continue
        others = [name for name in own(context, TYPE) if takes_it(name, key)]
        path, meant = f"{PARAMS}.{key}", None if others else argument_meant(key, found.takes)
        taken = meant is None or context.has(f"{PARAMS}.{meant}")
        edit = Edit("remove", path) if taken else Edit("rename", path, meant)
        advice = f"Did you mean {meant}? " if meant else ""
        advice += f"{' and '.join(others)} {'takes' if len(others) == 1 else 'take'} it. " if others else ""
        yield Hit(
            path,
            f"{kind} takes no such argument",
            f"{advice}{kind} takes {', '.join(found.takes)}.",
            Fix((edit,), safe=False),
        )


@rule(
    "DS435",
    "error",
    FAILS,
    bad=[
        built("OneCycle"),
        built("OneCycle", cycle_min_lr=1e-4),
        built("WarmupDecayLR", warmup_num_steps=1),
        built("WarmupCosineLR", warmup_num_steps=1),
        built("StepLR"),
    ],
    good=[
        built("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3),
        built("WarmupDecayLR", warmup_num_steps=1, total_num_steps=10),
        built("LRRangeTest"),
        {
            "_for": "hf",
            **built(
                "WarmupDecayLR", "auto", total_num_steps="auto", warmup_max_lr="auto", warmup_num_steps="auto"
            ),
        },
    ],
)
def scheduler_argument_missing(context: Context) -> Iterator[Hit]:
    """Arguments without a default: "missing 2 required positional arguments" (runtime/lr_schedules.py)."""
    found = needed(context)
    if found is None or not isinstance(context.get(PARAMS), dict):
        return
    if missing := [key for key in found.needs if not context.has(f"{PARAMS}.{key}")]:
        yield Hit(PARAMS, f"{class_of(context)} needs {' and '.join(missing)}", f"Add {PARAMS}.{missing[0]}.")


@rule(
    "DS436",
    "error",
    DIFFERS,
    bad=[
        built("WarmupDecayLR", warmup_num_steps=10, total_num_steps=9),
        built("WarmupCosineLR", warmup_num_steps=10, total_num_steps=5),
        built("WarmupDecayLR", total_num_steps=999),
        built("WarmupDecayLR", warmup_num_steps=10, total_num_steps=0),
        built("WarmupDecayLR", warmup_num_steps=10, total_num_steps=10),
    ],
    good=[
        built("WarmupDecayLR", warmup_num_steps=10, total_num_steps=11),
        built("WarmupCosineLR", warmup_num_steps=1, total_num_steps=3),
        built("WarmupDecayLR", total_num_steps=1001),
        {
            "_for": "hf",
            **built(
                "WarmupDecayLR", "auto", total_num_steps="auto", warmup_max_lr="auto", warmup_num_steps=10
            ),
        },
    ],
)
def warmup_longer_than_the_run(context: Context) -> Iterator[Hit]:
    """total_num_steps counts the warm-up: with fewer the rate never gets to its peak, or falls to 0 at once there.

    DeepSpeed says so in the log and goes on (runtime/lr_schedules.py).
    """
    path, counted = f"{PARAMS}.total_num_steps", f"{PARAMS}.warmup_num_steps"
    total, warmup = context.number(path), context.number(counted)
    default = ""
    if not context.has(counted):
        warmup, default = 1000, ", the default"
    if class_of(context) not in DECAYS or total is None or warmup is None or total > warmup:
        return
    few = "is" if total < warmup else "is just"
    yield Hit(
        path,
        f"{few} {total:g}, and the warm-up alone takes {warmup:g} steps (warmup_num_steps{default})",
        "Write the optimizer steps of the whole run, the warm-up among them.",
        severity="warning" if total == warmup else None,
    )


@rule(
    "DS437",
    "error",
    FAILS,
    bad=[
        built("WarmupLR", warmup_num_steps=10.0),
        built("WarmupDecayLR", warmup_num_steps=1e2, total_num_steps=1000),
        built("LRRangeTest", lr_range_test_step_size=200.0),
    ],
    good=[
        built("WarmupLR", warmup_num_steps=10),
        built("WarmupDecayLR", warmup_num_steps=1, total_num_steps=1e3),
        {"_version": "0.18", **built("WarmupLR", warmup_num_steps=10.0)},
    ],
    since=(0, 19),
)
def count_written_as_fraction(context: Context) -> Iterator[Hit]:
    """A count with a point is a float, and that is asked for: "must be a positive integer, got 10.0".

    Source: runtime/lr_schedules.py.
    """
    for key in COUNTS:
        value = tree.get(context.config, path := f"{PARAMS}.{key}")
        if isinstance(value, float) and value.is_integer() and value > 0:
            yield Hit(
                path,
                f"is {schema.shorten(value)}: DeepSpeed wants a whole number without a point or an exponent",
                f"Write {int(value)}.",
                Fix((Edit("replace", path, int(value)),)),
            )


@rule(
    "DS438",
    "error",
    FAILS,
    bad=[
        built("WarmupLR", warmup_num_steps=0),
        built("WarmupCosineLR", warmup_num_steps=-5, total_num_steps=10),
        built("LRRangeTest", lr_range_test_step_size=0),
        built("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=0),
    ],
    good=[
        built("WarmupLR", warmup_num_steps=1),
        built("LRRangeTest", lr_range_test_step_size=1),
        built("OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=1),
    ],
)
def count_not_positive(context: Context) -> Iterator[Hit]:
    """ "must be a positive integer" (runtime/lr_schedules.py). A warm-up can't be turned off with 0 steps.

    Before 0.19 a warm-up of 0 or fewer steps counted as one of two.
    """
    for key in (*COUNTS, "cycle_first_step_size"):
        value = context.number(path := f"{PARAMS}.{key}")
        if value is None or value > 0:
            continue
        old = context.version < (0, 19) and key == "warmup_num_steps"
        one = (
            "Write 1 for no warm-up to speak of." if key == "warmup_num_steps" else "Write a number above 0."
        )
        text = f"is {value:g}, and must be above 0"
        yield Hit(
            path, text, one, Fix((Edit("replace", path, 1),), safe=False), effect=DIFFERS if old else None
        )


@rule(
    "DS439",
    "warning",
    bad=[
        built("WarmupLR", warmup_min_lr=1e-2, warmup_max_lr=1e-3),
        built("WarmupLR", warmup_min_lr=1e-2),
        built("OneCycle", cycle_min_lr=1e-2, cycle_max_lr=1e-3),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_min_ratio=1.5),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, cos_min_ratio=1.01),
    ],
    good=[
        built("WarmupLR", warmup_min_lr=1e-3, warmup_max_lr=1e-3),
        built("WarmupLR", warmup_min_lr=0),
        built("OneCycle", cycle_min_lr=1e-3, cycle_max_lr=1e-3),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_min_ratio=1, cos_min_ratio=1),
    ],
)
def schedule_upside_down(context: Context) -> Iterator[Hit]:
    """The bounds are taken as they stand: a warm-up then cools down (get_lr in runtime/lr_schedules.py)."""
    kind = context.text(TYPE)
    pairs = []
    if kind in TO_A_RATE:
        pairs = [("warmup_min_lr", "the peak", peak(context))]
    elif kind == "WarmupCosineLR":
        pairs = [(key, "the optimizer's rate", 1.0) for key in ("warmup_min_ratio", "cos_min_ratio")]
    elif kind == "OneCycle":
        pairs = [("cycle_min_lr", "cycle_max_lr", context.number(f"{PARAMS}.cycle_max_lr"))]
    for key, name, top in pairs:
        low = context.number(path := f"{PARAMS}.{key}")
        if low is not None and top is not None and low > top:
            yield Hit(path, f"is {low:g}, above {name} ({top:g})", f"Write at most {top:g}.")


@rule(
    "DS440",
    "error",
    DIFFERS,
    bad=[
        built("WarmupLR", warmup_type="cosine"),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_type="Linear"),
    ],
    good=[built("WarmupLR", warmup_type="linear"), built("WarmupLR", warmup_type="log")],
)
def unknown_warmup_type(context: Context) -> Iterator[Hit]:
    """Any other shape counts as log, with a line in the log (runtime/lr_schedules.py)."""
    path = f"{PARAMS}.warmup_type"
    value = context.text(path)
    if value is not None and context.text(TYPE) in WARMUPS and value not in ("log", "linear"):
        fix = Fix((Edit("replace", path, "linear"),), safe=value.lower() == "linear")
        yield Hit(path, f"is {value}: DeepSpeed takes it for log", "Write linear or log.", fix)


@rule(
    "DS441",
    "error",
    DIFFERS,
    bad=[
        built("WarmupLR", warmup_max_lr=0.5),
        built("WarmupDecayLR", total_num_steps=10, warmup_num_steps=1, warmup_max_lr=2e-3),
        built("WarmupDecayLR", lr=3e-5, total_num_steps=10, warmup_num_steps=1),
        {"_version": "0.16", **built("WarmupLR", lr=3e-5)},
    ],
    good=[
        built("WarmupLR", warmup_max_lr=1e-3),
        built("WarmupLR", lr=3e-5),
        built("WarmupDecayLR", total_num_steps=10, warmup_num_steps=1),
        built("WarmupDecayLR", lr=3e-5, total_num_steps=10, warmup_num_steps=1, warmup_max_lr=3e-5),
        {"_for": "hf", **built("WarmupLR", "auto", warmup_max_lr="auto")},
        built("WarmupCosineLR", lr=3e-5, total_num_steps=10, warmup_num_steps=1),
    ],
)
def schedule_overrides_the_rate(context: Context) -> Iterator[Hit]:
    """The schedule writes its own rate over the optimizer's, from the first step on (runtime/lr_schedules.py).

    WarmupDecayLR has a peak of 0.001 where none is given.
    """
    path, given = f"{PARAMS}.warmup_max_lr", "optimizer.params.lr"
    if context.text(TYPE) not in TO_A_RATE:
        return
    rate, top, named = context.number(given), peak(context), context.has(path)
    if rate is not None and top is not None and top != rate:
        default = "" if named else ", the default"
        yield Hit(
            path,
            f"is {top:g}{default}, and replaces the optimizer's lr of {rate:g}",
            f"Write {rate:g} here, or the same lr in both places.",
            Fix((Edit("replace" if named else "add", path, rate),), safe=False),
        )


@rule(
    "DS442",
    "error",
    DIFFERS,
    bad=[
        {"optimizer": {"type": "AdamW"}, "scheduler": {"params": {"warmup_num_steps": 10}}},
        {"optimizer": {"type": "AdamW"}, "scheduler": {}},
    ],
    good=[built("WarmupLR", warmup_num_steps=10), {"optimizer": {"type": "AdamW"}}],
)
def scheduler_without_type(context: Context) -> Iterator[Hit]:
    """A section without `type` is no schedule: the rate never changes (get_scheduler_name in runtime/config.py)."""
    if isinstance(context.get("scheduler"), dict) and not context.has(TYPE):
        name = context.text("scheduler.name")
        fix = Fix((Edit("move", "scheduler.name", TYPE),), safe=False) if name else None
        yield Hit(
            "scheduler",
            "has no type, and means no schedule at all" + (": name isn't read" if name else ""),
            f"Set scheduler.type to {name or 'WarmupLR'}, or remove the section.",
            fix,
        )


@rule(
    "DS443",
    "note",
    bad=[{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}],
    good=[
        built("WarmupLR", warmup_num_steps=10),
        {"_for": "hf", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}},
    ],
)
def scheduler_of_the_codes_optimizer(context: Context) -> Iterator[Hit]:
    """The schedule is made for whatever optimizer there is, and only if there is one (runtime/engine.py)."""
    if context.target == "deepspeed" and context.has(TYPE) and not context.has("optimizer"):
        yield Hit(
            "scheduler",
            "there is no optimizer section: it acts on the code's optimizer, if the code brings one",
            "Add an optimizer section, or make sure that the code gives deepspeed.initialize an optimizer.",
        )


@rule(
    "DS444",
    "note",
    bad=[
        built("WarmupLR", warmup_num_steps=10),
        built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=2),
    ],
    good=[
        built("WarmupLR", warmup_num_steps=10, warmup_type="log"),
        built("WarmupLR", warmup_num_steps=10, warmup_type="linear"),
        built("LRRangeTest"),
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1e-3}}},
    ],
)
def warmup_is_logarithmic(context: Context) -> Iterator[Hit]:
    """log is the default shape: the first two steps are at the lowest rate, then it climbs fast.

    Half of the peak is there after the square root of warmup_num_steps (_get_gamma in runtime/lr_schedules.py).
    """
    if context.text(TYPE) in WARMUPS and not context.has(f"{PARAMS}.warmup_type"):
        yield Hit(
            PARAMS,
            "the warm-up is logarithmic, DeepSpeed's default: half of the rate is there after a few steps",
            'Add "warmup_type": "linear" for the warm-up that other tools have, or "log" if it is meant.',
        )


@rule(
    "DS445",
    "note",
    bad=[built("LRRangeTest"), built("LRRangeTest", lr_range_test_min_lr=1e-5)],
    good=[built("WarmupLR", warmup_num_steps=10)],
)
def rate_that_only_climbs(context: Context) -> Iterator[Hit]:
    """LRRangeTest raises the rate for ever, to find where the loss breaks down (runtime/lr_schedules.py)."""
    if context.text(TYPE) == "LRRangeTest":
        yield Hit(TYPE, "is LRRangeTest, whose rate climbs without end", "Take it for a test only.")


@rule(
    "DS446",
    "warning",
    bad=[
        built("WarmupLR", warmup_num_steps=10, last_batch_iteration=0),
        built("LRRangeTest", last_batch_iteration=100),
    ],
    good=[
        built("WarmupLR", warmup_num_steps=10, last_batch_iteration=-1),
        built("WarmupLR", warmup_num_steps=10),
    ],
)
def schedule_that_starts_late(context: Context) -> Iterator[Hit]:
    """-1 is a fresh run; from 0 on the first rate isn't set (runtime/lr_schedules.py). A checkpoint brings its own."""
    path = f"{PARAMS}.last_batch_iteration"
    value = context.number(path)
    if value is not None and value > -1:
        fix = Fix((Edit("remove", path),), safe=False)
        yield Hit(
            path, f"is {value:g}: the schedule starts in the middle", "Remove it: checkpoints bring it.", fix
        )

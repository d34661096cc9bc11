"""DS436 to DS441 and DS444 to DS446: what the schedule makes of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dsrun.config import tree
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import set_to
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, in_range, remove, report
from dsrun.config.rules.optimizer.scheduler import PARAMS, TYPE, built, class_of
from dsrun.config.schemas import schema

WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
TO_A_RATE = ("WarmupLR", "WarmupDecayLR")
"""They set the rate; WarmupCosineLR multiplies the optimizer's."""

DECAYS = ("WarmupDecayLR", "WarmupCosineLR")
COUNTS = ("warmup_num_steps", "lr_range_test_step_size")
"""Arguments that have to be an int, and not just a whole number."""

DEFAULT_PEAK = 0.001


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


@rule("DS436", DIFFERS)
@bad(
    built("WarmupDecayLR", warmup_num_steps=10, total_num_steps=9),
    built("WarmupDecayLR", total_num_steps=999),
)
@good(
    built("WarmupDecayLR", warmup_num_steps=10, total_num_steps=11),
    built("WarmupCosineLR", warmup_num_steps=1, total_num_steps=3),
)
def warmup_longer_than_the_run(context: Context) -> Iterator[Finding]:
    """total_num_steps includes the warm-up: with fewer steps the rate never reaches its peak, or drops to 0 there.

    DeepSpeed only logs it (runtime/lr_schedules.py).
    """
    path, counted = f"{PARAMS}.total_num_steps", f"{PARAMS}.warmup_num_steps"
    total, warmup = context.number(path), context.number(counted)
    default = ""
    if not context.has(counted):
        warmup, default = 1000, ", the default"
    if class_of(context) not in DECAYS or total is None or warmup is None or total > warmup:
        return
    few = "is" if total < warmup else "is just"
    yield Finding(
        path,
        f"{few} {total:g}, but the warm-up alone takes {warmup:g} steps (warmup_num_steps{default})",
        "Write the optimizer steps of the whole run, including the warm-up.",
        severity="warning" if total == warmup else "",
    )


@rule("DS437", FAILS, since=(0, 19))
@bad(
    built("WarmupLR", warmup_num_steps=10.0),
    built("WarmupDecayLR", warmup_num_steps=1e2, total_num_steps=1000),
)
@good(built("WarmupLR", warmup_num_steps=10), built("WarmupDecayLR", warmup_num_steps=1, total_num_steps=1e3))
def step_count_written_as_float(context: Context) -> Iterator[Finding]:
    """A count with a decimal point is a float, which is refused: "must be a positive integer, got 10.0".

    Source: runtime/lr_schedules.py.
    """
    for key in COUNTS:
        value = tree.get(context.config, path := f"{PARAMS}.{key}")
        if isinstance(value, float) and value.is_integer() and value > 0:
            yield Finding(
                path,
                f"is {schema.shorten(value)}: DeepSpeed needs an integer without a decimal point or an exponent",
                f"Write {int(value)}.",
                set_to(context, path, int(value), safe=True),
            )


@rule("DS438", FAILS)
@bad(built("WarmupLR", warmup_num_steps=0), built("WarmupCosineLR", warmup_num_steps=-5, total_num_steps=10))
@good(built("WarmupLR", warmup_num_steps=1), built("LRRangeTest", lr_range_test_step_size=1))
def step_count_not_positive(context: Context) -> Iterator[Finding]:
    """ "must be a positive integer" (runtime/lr_schedules.py). A warm-up can't be turned off with 0 steps.

    Before 0.19 a warm-up of 0 or fewer steps counted as 2.
    """
    for key in (*COUNTS, "cycle_first_step_size"):
        value = context.number(path := f"{PARAMS}.{key}")
        if value is None or value > 0 or not context.has("scheduler.type"):
            continue
        old = context.version < (0, 19) and key == "warmup_num_steps"
        one = "Write 1 for almost no warm-up." if key == "warmup_num_steps" else "Write a number above 0."
        text = f"is {value:g}, but must be above 0"
        yield Finding(path, text, one, set_to(context, path, 1), effect=DIFFERS if old else "")


@rule("DS439", "warning")
@bad(
    built("WarmupLR", warmup_min_lr=1e-2, warmup_max_lr=1e-3),
    built("OneCycle", cycle_min_lr=1e-2, cycle_max_lr=1e-3),
)
@good(built("WarmupLR", warmup_min_lr=1e-3, warmup_max_lr=1e-3), built("WarmupLR", warmup_min_lr=0))
def schedule_bounds_swapped(context: Context) -> Iterator[Finding]:
    """The bounds are used as given: a warm-up then cools down (get_lr in runtime/lr_schedules.py)."""
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
            yield Finding(path, f"is {low:g}, above {name} ({top:g})", f"Write at most {top:g}.")


@rule("DS440", DIFFERS)
@bad(
    built("WarmupLR", warmup_type="cosine"),
    built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=1, warmup_type="Linear"),
)
@good(built("WarmupLR", warmup_type="linear"), built("WarmupLR", warmup_type="log"))
def unknown_warmup_type(context: Context) -> Iterator[Finding]:
    """Any other value counts as log, with a line in the log (runtime/lr_schedules.py)."""
    path = f"{PARAMS}.warmup_type"
    value = context.text(path)
    if value is not None and context.text(TYPE) in WARMUPS and value not in ("log", "linear"):
        fix = set_to(context, path, "linear", safe=value.lower() == "linear")
        yield Finding(path, f"is {value}, which DeepSpeed treats as log", "Write linear or log.", fix)


@rule("DS441", "warning")
@bad(
    built("WarmupLR", warmup_max_lr=0.5),
    built("WarmupDecayLR", lr=3e-5, total_num_steps=10, warmup_num_steps=1),
)
@good(built("WarmupLR", warmup_max_lr=1e-3), built("WarmupLR", lr=3e-5))
def schedule_overrides_the_learning_rate(context: Context) -> Iterator[Finding]:
    """The schedule overwrites the optimizer's rate, from the first step on (runtime/lr_schedules.py).

    The fix leaves the rate that trains. WarmupDecayLR has a peak of 0.001 by default: then lr is the only rate that
    was written, and this is an error.
    """
    path, given = f"{PARAMS}.warmup_max_lr", "optimizer.params.lr"
    if context.text(TYPE) not in TO_A_RATE:
        return
    rate, top, named = context.number(given), peak(context), context.has(path)
    if rate is None or top is None or top == rate:
        return
    if named:
        text = f"is {top:g}, and replaces the optimizer's lr of {rate:g}"
        yield Finding(path, text, f"Write {top:g} as the lr, or {rate:g} here.", set_to(context, given, top))
    else:
        text = f"is {top:g}, the default, and replaces the optimizer's lr of {rate:g}"
        fix = set_to(context, path, rate)
        yield Finding(path, text, f"Write {rate:g} here.", fix, severity="error", effect=DIFFERS)


@rule("DS444", "note")
@bad(built("WarmupLR", warmup_num_steps=10), built("WarmupCosineLR", total_num_steps=10, warmup_num_steps=2))
@good(
    built("WarmupLR", warmup_num_steps=10, warmup_type="log"),
    built("WarmupLR", warmup_num_steps=10, warmup_type="linear"),
)
def warmup_is_logarithmic(context: Context) -> Iterator[Finding]:
    """log is the default: the first two steps have the lowest rate, then it rises fast.

    Half of the peak is reached after the square root of warmup_num_steps (_get_gamma in runtime/lr_schedules.py).
    """
    if context.text(TYPE) in WARMUPS and not context.has(f"{PARAMS}.warmup_type"):
        counted = f"{PARAMS}.warmup_num_steps"
        steps = context.number(counted) if context.has(counted) else 1000
        half = f"at step {math.sqrt(steps):.0f} of {steps:g}" if steps and steps > 1 else "after a few steps"
        yield Finding(
            PARAMS,
            f"the warm-up is logarithmic, DeepSpeed's default: half of the rate is reached {half}",
            'Add "warmup_type": "linear" for the warm-up of other tools, or "log" to keep it.',
        )


@rule("DS445", "warning")
@bad(built("LRRangeTest"), built("LRRangeTest", lr_range_test_min_lr=1e-5))
@good(built("WarmupLR", warmup_num_steps=10))
def learning_rate_only_rises() -> Table:
    """LRRangeTest keeps raising the rate, to find where the loss diverges (runtime/lr_schedules.py)."""
    text = "is LRRangeTest, whose rate keeps rising. Use it for a test only."
    return report(TYPE, text, when.is_one_of(TYPE, "LRRangeTest"))


@rule("DS446", "warning")
@bad(
    built("WarmupLR", warmup_num_steps=10, last_batch_iteration=0),
    built("LRRangeTest", last_batch_iteration=100),
)
@good(built("WarmupLR", warmup_num_steps=10, last_batch_iteration=-1), built("WarmupLR", warmup_num_steps=10))
def schedule_starts_in_the_middle() -> Table:
    """-1 is a new run; from 0 on the first rate isn't set (runtime/lr_schedules.py). A checkpoint has its own."""
    path = f"{PARAMS}.last_batch_iteration"
    text = "is {value:g}: the schedule starts in the middle. Remove it: checkpoints contain it."
    return in_range(path, text, fix=remove(path, safe=False), most=-1)

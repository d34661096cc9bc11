"""DS436 to DS441 and DS444 to DS446: what the schedule makes of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema, tree
from dsrun.config.rules.common import removal, setting
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Hit, rule
from dsrun.config.rules.scheduler import PARAMS, TYPE, built, class_of

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
                setting(context, path, int(value), safe=True),
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
        if value is None or value > 0 or not context.has("scheduler.type"):
            continue
        old = context.version < (0, 19) and key == "warmup_num_steps"
        one = (
            "Write 1 for no warm-up to speak of." if key == "warmup_num_steps" else "Write a number above 0."
        )
        text = f"is {value:g}, and must be above 0"
        yield Hit(path, text, one, setting(context, path, 1), effect=DIFFERS if old else None)


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
        fix = setting(context, path, "linear", safe=value.lower() == "linear")
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
            setting(context, path, rate),
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
        fix = removal(context, path, safe=False)
        yield Hit(
            path, f"is {value:g}: the schedule starts in the middle", "Remove it: checkpoints bring it.", fix
        )

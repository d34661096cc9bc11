"""Parts that several subjects share: names of keys, values of sections, and the usual fixes."""

from __future__ import annotations

import math
from typing import Any

from dsrun.config import tree
from dsrun.config.rules.frame import Context, Edit, Finding, Fix
from dsrun.config.schemas.schema import FILLING

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAMETERS = f"{ZERO}.offload_param"
OFFLOADS = (OPTIMIZER, PARAMETERS)
OVERLAP = f"{ZERO}.overlap_comm"
SCATTER = f"{ZERO}.reduce_scatter"
GATHER = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
OLD_GATHER = f"{ZERO}.stage3_gather_fp16_weights_on_model_save"
ZENFLOW = f"{ZERO}.zenflow"
CLIPPING = "gradient_clipping"
AIO = "aio"
DEEP = "compile.deepcompile"

ADAMS = ("adam", "adamw")
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def written(context: Context, path: str) -> str:
    """A key's path under the name that it has in the file: itself, or an alias of it."""
    section, _, _ = path.rpartition(".")
    holder = tree.get(context.config, section) if section else context.config
    names = [f"{section}.{key}" for key in holder] if isinstance(holder, dict) else []
    return next((name for name in names if context.schema.canonical(name) == path), path)


def removal(context: Context, *paths: str, safe: bool = True) -> Fix:
    """The fix that takes out keys; safe where they do nothing."""
    return Fix(tuple(Edit("remove", written(context, path)) for path in paths), safe=safe)


def no_effect(
    context: Context, path: str, why: str, advice: str = "Remove it.", *, safe: bool = True
) -> Finding:
    """The finding of a key that does nothing, with its removal. why: the reason, with the blank or colon in front.

    safe: whether nothing else could have been meant.
    """
    return Finding(written(context, path), f"has no effect{why}", advice, removal(context, path, safe=safe))


def set_to(context: Context, path: str, value: Any, *, safe: bool = False) -> Fix:
    """The fix that sets a key to a right value. Unless it is safe, the value is a guess at what was wanted."""
    return Fix((Edit("replace" if context.has(path) else "add", written(context, path), value),), safe=safe)


def device(context: Context, section: str) -> str | None:
    """The device that a section offloads to, cpu or nvme; the old flags mean cpu. None where it offloads nothing."""
    old = {OPTIMIZER: "cpu_offload", PARAMETERS: "cpu_offload_param"}[section]
    if context.flag(f"{ZERO}.{old}"):
        return "cpu"
    name = context.text(f"{section}.device")
    return name if name in ("cpu", "nvme") else None


def on_nvme(context: Context, section: str) -> bool:
    """Whether a section's device is nvme where that means something, in stage 3."""
    return context.stage == 3 and device(context, section) == "nvme"


def reads_aio(context: Context) -> bool:
    """Whether anything may read the section aio: something goes to nvme, or is left open."""
    return any(on_nvme(context, section) or context.is_auto(f"{section}.device") for section in OFFLOADS)


def value_or_default(context: Context, path: str) -> float | None:
    """The number that holds at a key; None where it is "auto" or no number."""
    if not context.has(path):
        default, _ = context.schema.describe(path)
        return default if isinstance(default, (int, float)) else None
    return context.number(path)


def above_1(context: Context, path: str) -> bool:
    """Whether a size splits anything: it is known, and above 1."""
    return (context.integer(path) or 0) > 1


def heads_beside(context: Context, path: str) -> int | None:
    """The model's attention heads, where the size at a path splits something and doesn't divide them."""
    size, model = context.integer(path), context.setting.model
    heads = model.attention_heads if model else None
    return heads if size is not None and size > 1 and heads and heads % size else None


def printing_off(context: Context, path: str) -> bool:
    """Whether a key is steps_per_print at infinity, as accelerate itself sets it (accelerate/utils/dataclasses.py)."""
    return path == "steps_per_print" and context.target in FILLING and context.get(path) == math.inf


def divisors(number: int, last: str = ", ") -> str:
    """The divisors of a number: "1, 2, 4", or "1, 2 or 4" with " or " before the last one."""
    *smaller, largest = (str(size) for size in range(1, number + 1) if number % size == 0)
    return f"{', '.join(smaller)}{last}{largest}" if smaller else largest

"""Checks that weights are numbers: wherever they are read, kept and exported."""

from __future__ import annotations

import math

import torch

from dsrun.errors import TrainingError


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether every element is a number. One pass without a copy. Types of one byte are quantised, and always finite.

    The least and the greatest element are NaN where one is (torch.aminmax).
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return True
    least, greatest = torch.aminmax(tensor.detach())
    return math.isfinite(float(least)) and math.isfinite(float(greatest))


def check(tensor: torch.Tensor, name: str, where: str, *, original: torch.Tensor | None = None) -> None:
    """Raise TrainingError, with the weight's name and file, where a weight that was read is not finite.

    original: the weight as it is in the file, where `tensor` is of another type.
    """
    if is_finite(tensor):
        return
    what = f"{name} is not finite: {how_many(tensor)}"
    hint = "The file is damaged, or it is of a training that failed: take an earlier or another copy of the model."
    if original is not None and is_finite(original):
        what = f"{name} doesn't fit {str(tensor.dtype).removeprefix('torch.')}: {how_many(tensor)}"
        hint = "Train with --precision bf16 or fp32."
    raise TrainingError(what, where=where, hint=hint)


def how_many(tensor: torch.Tensor) -> str:
    """The count of elements that are no numbers, in words."""
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    parts = [f"{count:,} {name}" for count, name in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(parts)} of {tensor.numel():,} values"

"""The part of a model that repeats: its decoder layers."""

from __future__ import annotations

from typing import Any


def layers_of(model: Any) -> list[Any]:
    """The modules that transformers would not split over devices, in their order; empty where it names none."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]

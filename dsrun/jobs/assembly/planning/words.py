"""A plan, and advice, in few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsrun.planner.plan import Plan
from dsrun.planner.setup import Setup

if TYPE_CHECKING:
    from dsrun.planner.advice import Advice


def title(plan: Plan) -> str:
    """A plan in few words: preset, micro batch x accumulation, checkpointing."""
    return f"{plan.preset} with {plan.setup.micro_batch} x {plan.setup.grad_accum}{recomputing(plan.setup)}"


def recomputing(setup: Setup) -> str:
    """The activations that are computed again, as the end of a list; empty where nothing is."""
    if not setup.checkpointing:
        return ""
    blocks = "" if setup.checkpointing == 1 else f" of one layer in {setup.checkpointing}"
    return f", activation checkpointing{blocks}" + ", offloaded" * (setup.activations_device == "cpu")


def advice_text(advice: Advice | None) -> str:
    """Advice in one line."""
    if advice is None:
        return "Nothing that dsrun knows makes it fit here."
    return f"It fits with: {'; '.join(step.text for step in advice.steps)}."

"""A request becomes a job: fine-tunes, scripts, resumed and repeated runs, and the checks before the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:  # `dsrun plan` uses modules beside this one, and none of these
    from dsrun.jobs.spec.job import Job, ScriptJob
    from dsrun.options.table import Resolved

J = TypeVar("J", "Job", "ScriptJob")


@dataclass(frozen=True)
class PlannedJob(Generic[J]):
    """A job that passed every check."""

    job: J
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    asked: Resolved[Any] | None = None
    """Every option as it holds, and where it came from; None for a run that goes on, whose job has them."""

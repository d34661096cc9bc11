"""A request becomes a job: fine-tunes, scripts, resumed and repeated runs, and the checks before the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from dsrun.errors import DsrunError, Problem

if TYPE_CHECKING:  # `dsrun plan` uses modules beside this one, and none of these
    from dsrun.jobs.spec.job import Job, ScriptJob
    from dsrun.options.table import Resolved

J = TypeVar("J", "Job", "ScriptJob")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class PlannedJob(Generic[J]):
    """A job that passed every check."""

    job: J
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    asked: Resolved[Any] | None = None
    """Every option as it holds, and where it came from; None for a run that goes on, whose job has them."""


@dataclass(frozen=True)
class Findings:
    """What the steps on the way to a job have to say, in their order."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, step: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
        """What a step makes of what it gets; None where it refuses that, which is kept with the problems."""
        try:
            return step(*args, **more)
        except DsrunError as error:
            self.problems.extend(error.problems)
            return None

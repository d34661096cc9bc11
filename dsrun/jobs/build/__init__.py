"""A request becomes a job: fine-tunes, scripts, resumed and repeated runs, and the checks before the start."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dsrun.errors import DsrunError, Problem, collected

if TYPE_CHECKING:  # `dsrun plan` uses modules beside this one, and none of these
    from dsrun.cluster.devices import Machine
    from dsrun.jobs.allocation.allocation import Allocation
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.spec.job import Job, ScriptJob
    from dsrun.options.table import Resolved

J = TypeVar("J", "Job", "ScriptJob")
D = TypeVar("D", bound="JobDraft")
NO_TEXT = re.compile(r'[^"]*[\ud800-\udfff][^"]*')
"""A value of job.json with a byte that Python could not decode (os.fsdecode makes half a surrogate pair of it)."""


@dataclass(frozen=True)
class PlannedJob(Generic[J]):
    """A job that passed every check."""

    job: J
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    asked: Resolved[Any] | None = None
    """Every option as it holds, and where it came from; None for a run that goes on, whose job has them."""

    def __post_init__(self) -> None:
        """Raise DsrunError where the job holds a name that is no text: job.json could not be written."""
        if name := NO_TEXT.search(self.job.to_json()):
            shown = os.fsencode(name[0]).decode("utf-8", "backslashreplace")
            encoding = sys.getfilesystemencoding()
            hint = "Rename it, or the folder of that name."
            if encoding != "utf-8":
                hint = "Take a locale of UTF-8 (LC_ALL=C.UTF-8), or export PYTHONUTF8=1."
            what = f"can't be decoded as {encoding}, which this locale's names are in"
            raise DsrunError(what, where=shown, hint=hint)


@dataclass
class JobDraft:
    """A job on its way. What is None is not known, because a step before found something wrong."""

    asked: Resolved[Any]
    machine: Machine
    environ: Mapping[str, str]
    allocator: Allocator
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    placed: Allocation | None = None


def go_through(draft: D, steps: Sequence[Callable[[D], None]]) -> None:
    """Take the steps one after the other; what one of them refuses is kept, and the next goes on."""
    for step in steps:
        with collected(draft.problems):
            step(draft)

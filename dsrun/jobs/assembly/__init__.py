"""A request becomes a job: fine-tunes, scripts, resumed and repeated runs, and the checks before the start."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dsrun.errors import DsrunError

if TYPE_CHECKING:  # `dsrun plan` uses modules beside this one, and none of these
    from dsrun.job.job import Job, ScriptJob
    from dsrun.options.layers import Resolved

J = TypeVar("J", "Job", "ScriptJob")
NO_TEXT = re.compile(r'[^"]*[\ud800-\udfff][^"]*')
"""A value of job.json with a byte that Python could not decode (os.fsdecode makes half a surrogate pair of it)."""


@dataclass(frozen=True)
class PlannedJob(Generic[J]):
    """A job that passed every check."""

    job: J
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    resolved: Resolved[Any] | None = None
    """Every option as it holds, and where it came from; None for a run that goes on, whose job has them."""

    def __post_init__(self) -> None:
        """Raise DsrunError where the job holds a name that is no text: job.json could not be written."""
        if name := NO_TEXT.search(self.job.to_json()):
            shown = os.fsencode(name[0]).decode("utf-8", "backslashreplace")
            encoding = sys.getfilesystemencoding()
            hint = "Rename it, or the folder of that name."
            if encoding != "utf-8":
                hint = "Take a locale of UTF-8 (LC_ALL=C.UTF-8), or export PYTHONUTF8=1."
            fault = f"can't be decoded as {encoding}, which this locale's names are in"
            raise DsrunError(fault, where=shown, hint=hint)

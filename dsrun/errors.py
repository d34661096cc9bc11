"""The errors of dsrun: raised where the facts are, shown in one place (dsrun/cli/__init__.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with an input."""

    what: str
    """The fault, with the value."""
    where: str = ""
    """The file, file:line, option or `$.json.path` it is about; empty if there is none."""
    hint: str = ""
    """The right value, or the next step."""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  {self.hint}" if self.hint else text


class DsrunError(Exception):
    """The input or the run is bad: shown without a traceback, exit code 1.

    Holds every problem that was found in one input, so that all of them can be fixed at once.
    """

    exit_code = 1

    def __init__(self, what: str | Iterable[Problem], *, where: str = "", hint: str = "") -> None:
        if isinstance(what, str):
            self.problems = [Problem(what, where, hint)]
        else:
            self.problems = list(what)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UnfitFileError(DsrunError):
    """A file that is not read: a pipe, a device, a link out of its folder, or one that is too large."""


BOUNDLESS = (RecursionError, MemoryError, OverflowError)
"""Errors that a text can bring about which nests or counts without end."""
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, *BOUNDLESS)
"""Errors that reading a file can bring about which holds something else than it should."""


class JobFailedError(DsrunError):
    """A training job died; `exit_code` is the job's own.

    rank: the one that ended first, where it was one.
    """

    def __init__(self, problems: Iterable[Problem], exit_code: int, rank: int | None = None) -> None:
        super().__init__(problems)
        self.rank = rank
        self.diagnosis: Mapping[str, Any] = {}
        """The cause of its death, in the form of `dsrun diagnose --json`."""
        # A process ended by signal N reports -N; shells show 128 + N.
        self.exit_code = exit_code if exit_code > 0 else 128 - exit_code


class TrainingError(DsrunError):
    """A failure that is no rank's own fault. All ranks meet it alike, such as a loss that is not finite, or one meets
    it in the user's files. Shown without a rank or a traceback."""


def raise_all(problems: Iterable[Problem]) -> None:
    """Raise DsrunError with these problems, where there are any."""
    if all_problems := list(problems):
        raise DsrunError(all_problems)


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a DsrunError to a list and go on, so that all of them are shown together."""
    try:
        yield
    except DsrunError as error:
        problems += error.problems


@dataclass(frozen=True)
class Findings:
    """Problems and notes of the steps on the way to a job, in their order."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def attempt(self, step: Callable[P, T], *args: P.args, **more: P.kwargs) -> T | None:
        """The result of a step; None where it raises DsrunError, whose problems are kept."""
        try:
            return step(*args, **more)
        except DsrunError as error:
            self.problems.extend(error.problems)
            return None

"""A check: a function from the facts of all hosts to a status of each.

A module beside this one is a group of checks: TITLE heads its column, ORDER is the column's place. A check is a
function under @each (of one host) or @across (of all of them). A host that lacks a fact which the check needs is not
judged, and its status is grey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from dsrun.cluster.devices import CPU_RANKS

GREEN, YELLOW, RED, GREY = "green", "yellow", "red", "grey"
"""Fine; a job runs, but look; a job would fail; the check doesn't apply, or a fact isn't known."""
WORST = (RED, YELLOW, GREEN, GREY)
MIB = 2**20
T = TypeVar("T", bound=Hashable)


class Status(NamedTuple):
    """A check's verdict on a host, before it has names."""

    colour: str
    what: str
    fix: str = ""
    """The remedy, in words or as a command; never empty beside yellow and red."""


@dataclass(frozen=True)
class Host:
    """A host by its name, and its answer."""

    name: str
    slots: int | None = None
    """Its devices in the hostfile; None where there is none."""
    facts: Mapping[str, Any] | None = None
    """The probe's facts; None where there was no answer: fault and fix say more."""
    fault: str = ""
    fix: str = ""
    asked_at: float = 0.0
    """This machine's clock before the call, in seconds since 1970."""
    answered_at: float = 0.0
    """The same clock after it."""
    first: bool = False
    """Whether the ranks meet on it."""

    def __getitem__(self, fact: str) -> Any:
        """A fact. It is there: a check without the facts that it names as needed isn't called."""
        return (self.facts or {})[fact]

    def lacks(self, needs: Iterable[str]) -> str:
        """The reason why one of these facts isn't known; empty where all are."""
        for name in needs:
            fact = (self.facts or {}).get(name, {"error": "nothing said"})
            if isinstance(fact, dict) and isinstance(fact.get("error"), str):
                return f"not known: {name}: {fact['error']}"
        return ""

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that its driver shows."""
        fact = (self.facts or {}).get("gpus", {})
        return list(fact.get("gpus", [])) if isinstance(fact, dict) else []

    @property
    def python_minor(self) -> str:
        """The version of its Python: "3.11"."""
        return ".".join(str(self["python"]["version"]).split(".")[:2])

    @property
    def trains_on_gpus(self) -> bool:
        """Whether it has GPUs, and torch isn't a CPU build."""
        torch = (self.facts or {}).get("torch", {})
        return bool(self.gpus) and not torch.get("cpu_build")

    @property
    def ranks(self) -> int:
        """The number of ranks that it would get."""
        return self.slots or (len(self.gpus) if self.trains_on_gpus else CPU_RANKS)


@dataclass(frozen=True)
class CheckResult:
    """A check's verdict on a host."""

    check: str
    host: str
    colour: str
    what: str
    fix: str


def alike(results: Iterable[CheckResult], colour: str) -> dict[str, list[list[CheckResult]]]:
    """The results of a colour by check; those of several hosts with the same words are together."""
    same: dict[str, dict[str, list[CheckResult]]] = {}
    for result in results:
        if result.colour == colour:
            same.setdefault(result.check, {}).setdefault(result.what, []).append(result)
    return {check: list(by_text.values()) for check, by_text in same.items()}


Judge = Callable[[Sequence[Host]], Iterable[tuple[Host, Status]]]


@dataclass(frozen=True)
class Check:
    name: str
    judge: Judge
    needs: tuple[str, ...]
    """Facts without which it isn't called."""
    about: str
    silent_too: bool = False
    """Whether it judges hosts that didn't answer as well."""

    def results(self, hosts: Sequence[Host]) -> list[CheckResult]:
        """One result for each host that answered, in the order of the hosts."""
        judged = [host for host in hosts if self.silent_too or host.facts is not None]
        lacking = {id(host): Status(GREY, why) for host in judged if (why := host.lacks(self.needs))}
        able = [host for host in judged if id(host) not in lacking]
        try:
            statuses = {id(host): status for host, status in self.judge(able)}
        except MALFORMED as error:
            statuses = {id(host): _malformed(error) for host in able}
        statuses |= lacking
        return [CheckResult(self.name, host.name, *statuses[id(host)]) for host in judged]


MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a check on facts of an unexpected form, which another machine may have sent."""


def _malformed(error: Exception) -> Status:
    return Status(GREY, f"not known: the answer is not as expected ({type(error).__name__}: {error})")


def each(name: str, *needs: str) -> Callable[[Callable[[Host], Status]], Check]:
    """Make a function of one host a check."""

    def wrap(function: Callable[[Host], Status]) -> Check:
        def judge(hosts: Sequence[Host]) -> Iterator[tuple[Host, Status]]:
            for host in hosts:
                try:
                    yield host, function(host)
                except MALFORMED as error:
                    yield host, _malformed(error)

        return Check(name, judge, needs, function.__doc__ or "")

    return wrap


def across(
    name: str, *needs: str, silent_too: bool = False, several: bool = False
) -> Callable[[Judge], Check]:
    """Make a function of all hosts a check. several: it compares hosts, and says nothing about one alone."""

    def wrap(function: Judge) -> Check:
        def judge(hosts: Sequence[Host]) -> Iterable[tuple[Host, Status]]:
            if several and len(hosts) < 2:
                return [(host, Status(GREY, "no other host to compare with")) for host in hosts]
            return function(hosts)

        return Check(name, judge, needs, function.__doc__ or "", silent_too)

    return wrap


def commonest(values: Sequence[T]) -> T:
    """The value that most have; of equally frequent ones the first."""
    return Counter(values).most_common(1)[0][0]

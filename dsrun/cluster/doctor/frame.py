"""What a check is: a function from the facts of all hosts to a verdict on each.

A module beside this one is a group of checks, and found by looking: TITLE heads its column, ORDER says where that
stands. A check is a function under @each (of one host) or @across (of all of them); one that lacks a fact that it
needs isn't called, and its verdict is grey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from dsrun.cluster.devices import CPU_RANKS

GREEN, YELLOW, RED, GREY = "green", "yellow", "red", "grey"
"""Fine; runs, but look; a job fails; doesn't apply, or isn't known."""
WORST = (RED, YELLOW, GREEN, GREY)
GIB = 2**30
MIB = 2**20
T = TypeVar("T", bound=Hashable)


class Verdict(NamedTuple):
    """fix: what to do, in words or as a command; never empty beside yellow and red."""

    colour: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Host:
    """A host as it was asked for, and what it answered.

    slots: its devices in the hostfile, None where nobody said. facts: the probe's, None where there was no answer;
    then fault and fix. asked_at, answered_at: this machine's clock before and after. first: the ranks meet on it.
    """

    name: str
    slots: int | None = None
    facts: Mapping[str, Any] | None = None
    fault: str = ""
    fix: str = ""
    asked_at: float = 0.0
    answered_at: float = 0.0
    first: bool = False

    def __getitem__(self, fact: str) -> Any:
        """A fact that is there: checks name the facts that they need."""
        return (self.facts or {})[fact]

    def lacks(self, needs: Iterable[str]) -> str:
        """Why one of these facts isn't known; empty where all are."""
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
    def trains_on_gpus(self) -> bool:
        """Whether it has GPUs, and torch isn't a CPU build."""
        torch = (self.facts or {}).get("torch", {})
        return bool(self.gpus) and not torch.get("cpu_build")

    @property
    def ranks(self) -> int:
        """How many ranks it would get."""
        return self.slots or (len(self.gpus) if self.trains_on_gpus else CPU_RANKS)


@dataclass(frozen=True)
class Result:
    """A check's verdict on a host."""

    check: str
    host: str
    colour: str
    what: str
    fix: str


def alike(results: Iterable[Result], colour: str) -> dict[str, list[list[Result]]]:
    """The results of a colour by check; what is said of several hosts in the same words stands together."""
    same: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        if result.colour == colour:
            same.setdefault(result.check, {}).setdefault(result.what, []).append(result)
    return {check: list(said.values()) for check, said in same.items()}


Judge = Callable[[Sequence[Host]], Iterable[tuple[Host, Verdict]]]


@dataclass(frozen=True)
class Check:
    """needs: facts without which it isn't asked; silent_too: judges hosts that didn't answer as well."""

    name: str
    judge: Judge
    needs: tuple[str, ...]
    about: str
    silent_too: bool = False

    def results(self, hosts: Sequence[Host]) -> list[Result]:
        """One result for each host that answered, in the order of the hosts."""
        judged = [host for host in hosts if self.silent_too or host.facts is not None]
        lacking = {id(host): why for host in judged if (why := host.lacks(self.needs))}
        verdicts = {key: Verdict(GREY, why) for key, why in lacking.items()}
        able = [host for host in judged if id(host) not in lacking]
        try:
            verdicts |= {id(host): verdict for host, verdict in self.judge(able)}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # The facts are another machine's words.
            odd = Verdict(
                GREY, f"not known: the answers are not as expected ({type(error).__name__}: {error})"
            )
            verdicts |= {id(host): odd for host in able}
        return [Result(self.name, host.name, *verdicts[id(host)]) for host in judged]


def each(name: str, *needs: str) -> Callable[[Callable[[Host], Verdict]], Check]:
    """Make a function of one host a check."""

    def wrap(function: Callable[[Host], Verdict]) -> Check:
        def judge(hosts: Sequence[Host]) -> Iterator[tuple[Host, Verdict]]:
            for host in hosts:
                try:
                    yield host, function(host)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                    what = f"not known: the answer is not as expected ({type(error).__name__}: {error})"
                    yield host, Verdict(GREY, what)

        return Check(name, judge, needs, function.__doc__ or "")

    return wrap


def across(name: str, *needs: str, silent_too: bool = False) -> Callable[[Judge], Check]:
    """Make a function of all hosts a check."""

    def wrap(function: Judge) -> Check:
        return Check(name, function, needs, function.__doc__ or "", silent_too)

    return wrap


def commonest(values: Sequence[T]) -> T:
    """What most have; of equally many, what comes first."""
    return Counter(values).most_common(1)[0][0]


def gib(size: float) -> str:
    """Bytes, for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def version(text: str) -> tuple[int, ...]:
    """The numbers a version begins with: "2.13.0+cpu" -> (2, 13, 0)."""
    found = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        found.append(int(digits))
        if digits != part:
            break
    return tuple(found)

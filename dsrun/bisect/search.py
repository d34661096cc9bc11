"""The search: first the packages that it takes, then the release of each. It only asks whether some versions are right.

An outcome is right, wrong, or can't be told (an environment that can't be made, or a probe that fails for another
reason): such a release is passed over, and the answer names what is left between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.errors import DsrunError

RIGHT, WRONG, UNTOLD = "right", "wrong", "can't be told"
Versions = Mapping[str, str]
Ask = Callable[[Versions], str]
"""Versions of the packages -> the outcome."""


@dataclass(frozen=True)
class Culprit:
    """A package that it takes, and where it changes on the way from the right version to the wrong one."""

    package: str
    last_right: str
    first_wrong: str
    untold: tuple[str, ...] = ()
    """Releases between these two of which it can't be told."""


@dataclass(frozen=True)
class BisectResult:
    """What makes the difference: all of these packages together."""

    culprits: tuple[Culprit, ...]
    others: Versions
    """The versions of the packages that make none, as they were tried."""
    tried: int
    """Environments that were asked."""


class Bisection:
    """The search between two sets of versions. releases: package -> its releases, oldest first."""

    def __init__(
        self, good: Versions, bad: Versions, releases: Callable[[str], Sequence[str]], ask: Ask
    ) -> None:
        self.good, self.bad, self.releases, self._ask = dict(good), dict(bad), releases, ask
        self.outcomes: dict[tuple[tuple[str, str], ...], str] = {}

    def ask(self, versions: Versions) -> str:
        """The outcome of some versions, each set asked once."""
        key = tuple(sorted(versions.items()))
        if key not in self.outcomes:
            self.outcomes[key] = self._ask(versions)
        return self.outcomes[key]

    def answer(self) -> BisectResult:
        """Raises DsrunError where the good versions aren't right, or the bad ones aren't wrong."""
        for versions, wanted in ((self.good, RIGHT), (self.bad, WRONG)):
            if (outcome := self.ask(versions)) != wanted:
                raise DsrunError(
                    f"these versions should be {wanted}, and the probe says: {outcome}",
                    where=in_words(versions),
                    hint="Name versions that differ in what the probe sees, or another probe.",
                )
        packages = self._needed()
        culprits = []
        versions = {**self.good, **{name: self.bad[name] for name in packages}}
        for name in packages:
            culprits.append(self._release(name, versions))
            # The next package's release is looked for beside the first wrong release of this one.
            versions[name] = culprits[-1].first_wrong
        others = {name: version for name, version in self.good.items() if name not in packages}
        return BisectResult(tuple(culprits), others, len(self.outcomes))

    def _needed(self) -> list[str]:
        """The packages without whose bad version it is right: none of them can be left out."""
        needed = [name for name in self.bad if self.bad[name] != self.good.get(name)]
        for name in list(needed):
            fewer = [other for other in needed if other != name]
            if fewer and self.ask({**self.good, **{other: self.bad[other] for other in fewer}}) == WRONG:
                needed = fewer
        return needed

    def _release(self, name: str, versions: Versions) -> Culprit:
        """Where a package's releases change from right to wrong, beside these versions of the others."""
        between = self._between(name)
        right, wrong = 0, len(between) - 1
        untold: set[int] = set()
        while middle := nearest_untried(right, wrong, untold):
            outcome = self.ask({**versions, name: between[middle]})
            if outcome == RIGHT:
                right = middle
            elif outcome == WRONG:
                wrong = middle
            else:
                untold.add(middle)
        left = tuple(between[number] for number in sorted(untold) if right < number < wrong)
        return Culprit(name, between[right], between[wrong], left)

    def _between(self, name: str) -> list[str]:
        """The releases from the good version to the bad one; downwards, where the bad one is the older."""
        good, bad = self.good[name], self.bad[name]
        known = list(self.releases(name))
        if good not in known or bad not in known:
            return [good, bad]
        first, last = known.index(good), known.index(bad)
        return known[first : last + 1] if first <= last else known[last : first + 1][::-1]


def nearest_untried(right: int, wrong: int, untold: set[int]) -> int:
    """The number nearest to the middle that may still be asked; 0 where there is none."""
    numbers = [number for number in range(right + 1, wrong) if number not in untold]
    return min(numbers, key=lambda number: abs(2 * number - right - wrong), default=0)


def in_words(versions: Versions) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))

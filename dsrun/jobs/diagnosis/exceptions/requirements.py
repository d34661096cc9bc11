"""A release that a program asks for beside the one that it found, as its message says both: too old, or too new."""

from __future__ import annotations

import re
from typing import NamedTuple

_PACKAGE = r"(?P<package>[A-Za-z][\w.-]{1,40}?)"
_BOUNDS = r"(?P<bounds>(?:\s?(?:[<>~=!]=|[<>])\s?v?\d[\w.*+]{0,20},?){1,4})"
WANTED = re.compile(rf"(?<![\w./-])['\"`]?{_PACKAGE}['\"`]?{_BOUNDS}")
"""A package with the releases that are asked for."""
AT_LEAST = re.compile(
    r"(?i)\b(?P<package>[A-Za-z][\w.-]{1,40})\b(?: package)?(?: version)? (?:to be |>= |must be |should be |is )?"
    r"(?:greater (?:than )?or equal (?:than|to)|at least|>=|or higher than) v?(?P<release>\d[\w.]{0,20})"
)
NAMED = re.compile(r"(?P<package>[A-Za-z][\w.-]{1,40}?)\s?==$")
"""The package before the release that was found, where it is named once more."""
FOUND = re.compile(
    r"(?i)(?:found|detected|installed|you have|got|have|current(?:ly)?|version is|is)\b[^\n\d]{0,40}?"
    r"(?:==|version|[ :=(])\s?v?(?P<release>\d{1,4}(?:\.\d{1,5}){1,3}[\w.+]{0,20})"
)
BOUND = re.compile(r"(?P<sign>[<>~=!]=|[<>])\s?v?(?P<release>\d[\w.*+]{0,20})")


class Requirement(NamedTuple):
    """A release that is asked for, and the one that is there."""

    package: str
    bounds: str
    """As pip takes them."""
    found: str
    is_too_new: bool

    @property
    def spec(self) -> str:
        """What pip installs."""
        return f"{self.package}{self.bounds}"


def requirement(message: str) -> Requirement | None:
    """The requirement that a message says isn't met; None where it doesn't name both releases."""
    wanted = WANTED.search(message)
    least = None if wanted else AT_LEAST.search(message)
    hit = wanted or least
    if hit is None:
        return None
    bounds = "".join(hit["bounds"].split()).strip(",") if wanted else f">={hit['release'].rstrip('.')}"
    found = FOUND.search(message, hit.end())
    if found is None:
        return None
    again = NAMED.search(message[: found.start("release")])
    if again and again["package"].lower() != hit["package"].lower():
        return None  # the release of another package
    release = found["release"].rstrip(".")
    verdicts = [_violated(bound["sign"], bound["release"], release) for bound in BOUND.finditer(bounds)]
    violated = next((sign for sign in verdicts if sign), "")
    return Requirement(hit["package"], bounds, release, violated == "new") if violated else None


def _violated(sign: str, bound: str, release: str) -> str:
    """Whether a release is too "old" or too "new" for a bound; empty where it is neither."""
    here, there = _number(release), _number(bound)
    if sign in (">=", ">", "~="):
        return "old" if here < there or (sign == ">" and here == there) else ""
    if sign in ("<=", "<"):
        return "new" if here > there or (sign == "<" and here == there) else ""
    if sign == "==":
        return "" if here == there else "old" if here < there else "new"
    return "new" if here == there else ""


def _number(release: str) -> tuple[int, ...]:
    parts = [int(part) for part in re.findall(r"\d+", release.partition("+")[0])[:3]]
    return (*parts, *([0] * (3 - len(parts))))


def in_words(asked: Requirement, chinese: bool = False) -> tuple[str, str]:
    """A sentence, and the next step; English or Chinese."""
    package, found = asked.package, asked.found
    if chinese:
        how = "过新" if asked.is_too_new else "过旧"
        return (
            f"{package} {found} {how}：要求 {asked.spec}。",
            f"在各进程的环境中执行 `pip install '{asked.spec}'`（每台主机），或换一个接受 {found} 的调用方版本。",
        )
    how, other = ("new", "a newer") if asked.is_too_new else ("old", "an older")
    return (
        f"{package} {found} is too {how}: {asked.spec} is asked for.",
        f"`pip install '{asked.spec}'` in the environment that the ranks run in, on every host; or {other} release of "
        f"what asks, which takes {package} {found}.",
    )

"""What a text must hold for a pattern to match in it: a line without any of it needs no trying.

As RE2's prefilter does (https://github.com/google/re2/blob/main/re2/prefilter.h): of what a pattern asks for one thing
after another, the longest run that is said letter by letter, with every way to write it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from dsrun.jobs.diagnosis.reading.log_lines import DIGITS, folded

MOST_WAYS = 64
"""To write one run of letters, for which it is still followed."""
MOST_REPEATS = 3


@lru_cache(maxsize=4096)
def needed(pattern: str) -> frozenset[bytes]:
    """Texts in small letters and without digits, of which every text that the pattern matches holds one, whether it is
    folded (`log_lines.folded`) or its letters' size only isn't minded. None where that isn't known."""
    parse = _parser()
    return (
        frozenset(folded(text.encode()) for text in _needed(parse(pattern)) or ()) if parse else frozenset()
    )


@lru_cache(maxsize=1)
def _parser() -> Callable[[str], Iterable[Any]] | None:
    """Python's own parser of patterns: its name is private since 3.11, and a later one may lack it."""
    try:
        found = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse").parse
    except (ImportError, AttributeError):
        return None
    return found if callable(found) else None


def _needed(parts: Iterable[Any]) -> set[str] | None:
    """The best of what stands after one another: a run of letters, or what one of its parts asks for."""
    found: list[set[str]] = []
    run = {""}
    for name, value in parts:
        ways = _ways(str(name), value)
        if ways and len(run) * len(ways) <= MOST_WAYS:
            run = _joined(run, ways)
            continue
        inside = None if ways else _inside(str(name), value)
        found += [run, inside or set()]
        run = ways or {""}
    return max([*found, run], key=_worth, default=None) or None


def _worth(ways: set[str]) -> tuple[int, int]:
    return min(map(len, ways), default=0), -len(ways)


def _inside(name: str, value: Any) -> set[str] | None:
    """What a part asks for that can't be followed letter by letter."""
    if name == "BRANCH":
        branches = [_needed(branch) for branch in value[1]]
        return set().union(*(one or () for one in branches)) if all(map(_is_enough, branches)) else None
    if name == "SUBPATTERN" and not value[1]:  # flags of its own may change what its letters mean
        return _needed(value[3])
    return _needed(value[2]) if name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] else None


def _is_enough(ways: set[str] | None) -> bool:
    return bool(ways) and "" not in (ways or ())


def _ways(name: str, value: Any) -> set[str] | None:
    """Every way to write a part; None where there are too many, or where that isn't known."""
    match name:
        case "LITERAL":
            return _letters([value])
        case "IN" if all(str(kind) == "LITERAL" for kind, _ in value):
            return _letters([letter for _, letter in value])
        case "BRANCH":
            branches = [_all_ways(branch) for branch in value[1]]
            return None if None in branches else set().union(*(one or () for one in branches))
        case "SUBPATTERN" if not value[1]:
            return _all_ways(value[3])
        case "MAX_REPEAT" | "MIN_REPEAT" if value[1] <= MOST_REPEATS:
            once = _all_ways(value[2]) or set()
            if not 0 < len(once) ** value[1] <= MOST_WAYS:
                return None
            counts = range(value[0], value[1] + 1)
            return {"".join(some) for count in counts for some in product(once, repeat=count)}
        case "AT" | "ASSERT" | "ASSERT_NOT":
            return {""}
    return None


def _letters(numbers: Sequence[int]) -> set[str] | None:
    """Characters by their numbers; a digit ends a run, since what is folded has none."""
    letters = {chr(number) for number in numbers}
    return None if letters & set(DIGITS) else letters


def _all_ways(parts: Iterable[Any]) -> set[str] | None:
    found = {""}
    for name, value in parts:
        ways = _ways(str(name), value)
        if ways is None or len(found) * len(ways) > MOST_WAYS:
            return None
        found = _joined(found, ways)
    return found


def _joined(before: set[str], after: set[str]) -> set[str]:
    return {one + other for one in before for other in after}

"""The texts that a line must hold for a pattern to match in it: without one of them it need not be tried.

As in RE2's prefilter (https://github.com/google/re2/blob/main/re2/prefilter.h): of the parts of a pattern that follow
one another, the longest run of known letters counts, with every way to write it.
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
"""Ways to write one run of letters up to which it is followed."""
MOST_REPEATS = 3


@lru_cache(maxsize=4096)
def needed(pattern: str) -> frozenset[bytes]:
    """Texts in small letters and without digits, one of which is in every text that the pattern matches.

    That text may be folded (`log_lines.folded`), or compared without regard to case. Empty where none are known.
    """
    parse = _parser()
    return (
        frozenset(folded(text.encode()) for text in _needed(parse(pattern)) or ()) if parse else frozenset()
    )


@lru_cache(maxsize=1)
def _parser() -> Callable[[str], Iterable[Any]] | None:
    """Python's own parser of patterns: its name is private since 3.11, and a later one may lack it."""
    try:
        parse = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse").parse
    except (ImportError, AttributeError):
        return None
    return parse if callable(parse) else None


def _needed(parts: Iterable[Any]) -> set[str] | None:
    """The best of parts that follow one another: a run of letters, or the texts that one part needs by itself."""
    runs: list[set[str]] = []
    run = {""}
    for name, value in parts:
        ways = _ways(str(name), value)
        if ways and len(run) * len(ways) <= MOST_WAYS:
            # Too many ways, or a part that is no letters: the run ends here, and the next one begins behind it.
            run = _joined(run, ways)
            continue
        inside = None if ways else _inside(str(name), value)
        runs += [run, inside or set()]
        run = ways or {""}
    return max([*runs, run], key=_worth, default=None) or None


def _worth(ways: set[str]) -> tuple[int, int]:
    return min(map(len, ways), default=0), -len(ways)


def _inside(name: str, value: Any) -> set[str] | None:
    """The texts that a part needs which can't be followed letter by letter."""
    if name == "BRANCH":
        branches = [_needed(branch) for branch in value[1]]
        return set().union(*(branch or () for branch in branches)) if all(map(_is_enough, branches)) else None
    if name == "SUBPATTERN" and not value[1]:  # flags of its own may change what its letters mean
        return _needed(value[3])
    return _needed(value[2]) if name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] else None


def _is_enough(ways: set[str] | None) -> bool:
    return bool(ways) and "" not in (ways or ())


def _ways(name: str, value: Any) -> set[str] | None:
    """Every way to write a part; None where there are too many, or where they are not known."""
    match name:
        case "LITERAL":
            return _letters([value])
        case "IN" if all(str(kind) == "LITERAL" for kind, _ in value):
            return _letters([letter for _, letter in value])
        case "BRANCH":
            branches = [_all_ways(branch) for branch in value[1]]
            return None if None in branches else set().union(*(branch or () for branch in branches))
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
    """Characters by their numbers; None with a digit among them, since folded text has none."""
    letters = {chr(number) for number in numbers}
    return None if letters & set(DIGITS) else letters


def _all_ways(parts: Iterable[Any]) -> set[str] | None:
    texts = {""}
    for name, value in parts:
        ways = _ways(str(name), value)
        if ways is None or len(texts) * len(ways) > MOST_WAYS:
            return None
        texts = _joined(texts, ways)
    return texts


def _joined(before: set[str], after: set[str]) -> set[str]:
    return {text + other for text in before for other in after}

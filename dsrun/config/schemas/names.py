"""Likeness of keys' names: which key a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from dsrun.catalog import closest

CONFIDENT = 0.8
"""Likeness (difflib's ratio) from which on renaming a misspelt key is a safe fix."""

CLOSE = 0.85
"""Likeness to a key beside it from which on that key is meant, rather than one of the same name elsewhere."""

TIED = 0.05
"""Difference in likeness up to which two names are both proposed, and neither is written."""

OPPOSITES = (("pre", "post"), ("enable", "disable"), ("min", "max"), ("start", "end"), ("with", "no"))

NEGATIONS = frozenset({"no", "not", "non", "without", "disable", "skip"})

WORDS = {"optim": "optimizer", "params": "param", "parameters": "param", "parameter": "param"}
"""Words that are the same ones in a name: offload_params and offload_param."""

SHORT = {"zero": "zero_optimization", "optim": "optimizer"}
"""Sections by half their name; ds_ before it or _config after it is left out first."""

SHORTEST = 3
"""Letters of a word that is cut short, at least."""

ALTERNATIVES = 0.55
"""Likeness from which on two sections do the same for two things: offload_param and offload_optimizer."""


def alike(left: str, right: str) -> float:
    import difflib

    return difflib.SequenceMatcher(None, left.casefold(), right.casefold()).ratio()


def abbreviated(left: str, right: str) -> bool:
    """Whether two names have the same words, some of them cut short in one: gradient_accumulation and grad_accum."""
    pairs = list(zip(words := left.split("_"), others := right.split("_"), strict=False))
    same = len(words) == len(others) > 1
    return (
        same
        and left != right
        and all(
            one == other
            or (min(len(one), len(other)) >= SHORTEST and (one.startswith(other) or other.startswith(one)))
            for one, other in pairs
        )
    )


def alternatives(left: str, right: str) -> bool:
    """Whether two sections stand side by side under like names, as bf16 and fp16: a key of one has no place there."""
    (above, _, first), (beside, _, second) = left.rpartition("."), right.rpartition(".")
    return above == beside and bool(first and second) and alike(first, second) > ALTERNATIVES


@lru_cache(maxsize=4096)  # every key is asked for at each that is unknown
def words(name: str) -> tuple[str, ...]:
    """The words of a name, in order of the alphabet."""
    return tuple(sorted(WORDS.get(word, word) for word in name.casefold().replace("-", "_").split("_")))


def reordered(left: str, right: str) -> bool:
    """Whether two names are of the same words: comm_overlap and overlap_comm."""
    return words(left) == words(right)


def opposite(left: str, right: str) -> bool:
    """Whether two names differ in a word that turns the meaning round: postscale and prescale."""
    mine, yours = set(words(left)), set(words(right))
    first, second = mine - yours, yours - mine
    pairs = [pair for there in OPPOSITES for pair in (there, there[::-1])]
    for before, after in pairs:
        rests = {word.removeprefix(before) for word in first if word.startswith(before)}
        if rests & {word.removeprefix(after) for word in second if word.startswith(after)}:
            return True
    longer = first if len(first) > len(second) else second if len(second) > len(first) else set()
    return bool(longer & NEGATIONS)


def nearest(key: str, names: Collection[str]) -> str | None:
    """The name of the same words, or else the one that is most alike."""
    return next((name for name in names if reordered(key, name)), None) or closest(key, names)


def tied(key: str, near: str, names: Collection[str]) -> list[str]:
    """Other names that may be meant as well as the nearest one: about as much alike, or with all of the key's words."""
    if reordered(key, near):
        return []
    best, mine = alike(key, near), set(words(key))
    # One letter more or less is a typo: enable is enabled, not enable_cuda_graph.
    typo = abs(len(key) - len(near)) <= 1
    return [
        name
        for name in names
        if name != near and (alike(key, name) > best - TIED or (not typo and mine < set(words(name))))
    ]


def bare(key: str) -> str:
    """A section's name without the words around it that say only that it is a section of DeepSpeed's."""
    name = key.casefold()
    for ahead in ("deepspeed_", "ds_"):
        name = name.removeprefix(ahead)
    for after in ("_config", "_cfg", "_settings", "_options"):
        name = name.removesuffix(after)
    return name

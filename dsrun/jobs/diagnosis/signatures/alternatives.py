"""The alternatives of a pattern at its top, and which of them an example shows.

A signature says one sentence for all its alternatives. Where no example has the wording of one, nobody has shown that
it means that sentence, and the signature is less sure there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

FLAGS = re.compile(r"^\(\?[aiLmsux]+\)")


@lru_cache(maxsize=4096)
def alternatives(pattern: str) -> tuple[re.Pattern[str], ...]:
    """The alternatives of a pattern, each as a pattern with its flags; one where it has none, or where a group's name
    that one uses is another's."""
    flags = FLAGS.match(pattern)
    head = flags[0] if flags else ""
    parts = list(_parts(pattern[len(head) :]))
    try:
        return tuple(re.compile(head + part) for part in parts)
    except re.error:
        return (re.compile(pattern),)


def _parts(pattern: str) -> Iterator[str]:
    """The texts between the bars that no bracket holds."""
    depth, in_class, start, at = 0, False, 0, 0
    while at < len(pattern):
        letter = pattern[at]
        if letter == "\\":
            at += 1
        elif in_class:
            in_class = letter != "]" or pattern[at - 1] == "[" or pattern[at - 2 : at] == "[^"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and not depth:
            yield pattern[start:at]
            start = at + 1
        at += 1
    yield pattern[start:]


@lru_cache(maxsize=4096)
def shown(pattern: str, examples: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """The alternatives of a pattern that a line of an example has."""
    lines = [line for example in examples for line in example.split("\n")]
    return tuple(one for one in alternatives(pattern) if any(one.search(line) for line in lines))

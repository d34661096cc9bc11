"""The signature whose example is most like a line, by sequences of letters: a second opinion, without any pattern.

It names no cause: the answer says "looks like", and how much.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from math import log, sqrt
from typing import NamedTuple

from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.reading.tracebacks import CODE, FRAME
from dsrun.jobs.diagnosis.signatures import HARMLESS, MESSAGE, PLACE, FailureSignature

LETTERS = 5
"""Letters of one sequence."""
SHARE_OF_STRANGE = 0.3
"""Weight of a sequence that no example has, beside that of one that a single example has: names and paths are such."""
LEAST = 0.35
"""Cosine from which a line looks like an example at all."""
OWN_WORDS, NEARLY_OWN_WORDS = 2, 3
"""Words that a line has to share with the example and that no other class's examples have, or that at most one other
class's have. Of examples that were left out by turns 313 of 762 reach LEAST, and 54 % of these are nearest to their own
class's; with that many of them it is about nine of ten of a few dozen."""
LETTERS_OF_WORD = 4
"""Fewest letters of such a word."""
LONGEST = 600
"""Letters of a line that are compared."""
FEWEST_WORDS = 3
"""Words that an example must have beside its type: a key or a name is like anything."""
_TYPE = re.compile(r"^(?:[A-Za-z_]\w{0,80}\.){0,8}\w{1,60}(?:Error|Exception): ")
_NOT_COMPARED = re.compile(r"[\d\W_]+")


class Likeness(NamedTuple):
    """An example that is like a line."""

    signature: FailureSignature
    score: float
    """Cosine, from 0 to 1."""
    example: str
    """The example's line."""


class ExampleIndex:
    """Examples of signatures as weighted sequences of letters."""

    def __init__(self, signatures: Iterable[FailureSignature]) -> None:
        self._examples = [
            (signature, text)
            for signature in signatures
            if signature.kind not in (HARMLESS, PLACE, MESSAGE)
            for example in signature.examples
            for text in [_telling(example)]
            if len(_words(text)) >= FEWEST_WORDS
        ]

    @cached_property
    def _weights(self) -> dict[str, float]:
        """A sequence's weight: the more examples have it, the less it tells."""
        counts = Counter(part for _, text in self._examples for part in set(_parts(text)))
        return {part: log(len(self._examples) / count) + 0.1 for part, count in counts.items()}

    @cached_property
    def _vectors(self) -> list[tuple[FailureSignature, str, dict[str, float]]]:
        return [(signature, text, self._vector(text)) for signature, text in self._examples]

    def _vector(self, text: str) -> dict[str, float]:
        """The sequences of a text with their weights, of length 1."""
        strange = log(len(self._examples) + 1) * SHARE_OF_STRANGE
        weighted = {
            part: (1 + log(count)) * self._weights.get(part, strange)
            for part, count in Counter(_parts(text)).items()
        }
        length = sqrt(sum(weight * weight for weight in weighted.values())) or 1.0
        return {part: weight / length for part, weight in weighted.items()}

    @cached_property
    def _classes(self) -> dict[str, set[str]]:
        """The classes of failures whose examples have a word."""
        classes: dict[str, set[str]] = {}
        for signature, text in self._examples:
            for word in _words(text):
                if len(word) >= LETTERS_OF_WORD:
                    classes.setdefault(word, set()).add(signature.cause)
        return classes

    def like(self, text: str) -> Likeness | None:
        """The nearest signature, where the line shares words with its example that hardly another class has; None
        where none does."""
        nearest = self.nearest(text)
        if nearest is None:
            return None
        shared = set(_words(text)) & set(_words(nearest.example))
        counts = [len(self._classes[word]) for word in shared if word in self._classes]
        own, nearly = (sum(count <= most for count in counts) for most in (1, 2))
        return nearest if own >= OWN_WORDS or nearly >= NEARLY_OWN_WORDS else None

    def nearest(self, text: str, without: Sequence[str] = ()) -> Likeness | None:
        """The signature with the example most like a text; None where none is at all. without: ids left out."""
        vector = self._vector(text)
        scores = (
            Likeness(
                signature, sum(weight * other.get(part, 0.0) for part, weight in vector.items()), example
            )
            for signature, example, other in self._vectors
            if signature.id not in without
        )
        best = max(scores, key=lambda found: found.score, default=None)
        return best if best and best.score >= LEAST else None


@lru_cache(maxsize=2)
def index_of(signatures: tuple[FailureSignature, ...]) -> ExampleIndex:
    """The index of some signatures' examples, made once."""
    return ExampleIndex(signatures)


def _parts(text: str) -> list[str]:
    """The sequences of letters of a text; digits and signs count as blanks."""
    plain = f" {' '.join(_words(text))} "
    return [plain[at : at + LETTERS] for at in range(max(1, len(plain) - LETTERS + 1))]


def _words(text: str) -> list[str]:
    """The words of a text without the exception's type, which many texts share."""
    return _NOT_COMPARED.sub(" ", _TYPE.sub("", text)[:LONGEST].lower()).split()


def _telling(example: str) -> str:
    """The line of an example that says most: its last one that is neither a frame nor code."""
    lines = [peeled(0, 0, line).text.strip() for line in example.split("\n")]
    lines = [line for line in lines if line and not FRAME.search(line) and not CODE.match(line)]
    return lines[-1] if lines else ""

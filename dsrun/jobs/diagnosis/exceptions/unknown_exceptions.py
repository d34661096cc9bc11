"""The explanation of an exception that no signature knows.

Its type may say enough (exception_types.py); else the words of its message, or the file of a library that raised it,
whichever is surer; else that a check of the user's own code failed. A consequence of another failure explains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dsrun.jobs.diagnosis.exceptions import exception_types
from dsrun.jobs.diagnosis.exceptions.assertions import assertion
from dsrun.jobs.diagnosis.exceptions.exception_types import TypeMeaning
from dsrun.jobs.diagnosis.progress import Steps
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine
from dsrun.jobs.diagnosis.reading.tracebacks import RaisedException
from dsrun.jobs.diagnosis.signatures import CONFIDENCES, FailureSignature, SignatureIndex

FRAMES_OF_A_PLACE = 3
"""Innermost frames in which a library's file tells what was being done."""
OF_OTHERS = re.compile(
    r"(?i)\b(?:connections?|sockets?|peers?|timed?[- ]?out|broken pipe|nccl|gloo|cuda (?:error|runtime)|cublas|cudnn"
    r"|core dumped|worker (?:process|died)|died|killed|aborted|segmentation|internal assert|child|crash|exit ?code"
    r"|exited|errored|terminated|(?:previous|above|preceding|earlier) (?:error|exception|message|log|trace)"
    r"|(?:see|as|look|scroll) (?:the )?(?:above|up|root cause)|root cause)"
)
"""Words of an exception that is a consequence of another failure: its message is no reason."""
OF_PYTHON = re.compile(
    r"^'?\w{1,60}'? object (?:is not |has no |does not |cannot )|^(?:unsupported operand|bad operand|can't multiply)\b"
    r"|not supported between instances of|indices must be|values to unpack|^(?:isinstance|issubclass)\(\) arg"
    r"|^cannot unpack|index out of range$|NoneType|I/O operation on closed|^(?:list|tuple|string|pop from)\b"
    r"|^invalid literal for int|NaN to|^could not convert string|^substring not found|truth value of an array"
    r"|^(?:max|min)\(\) arg|^zero-size array|^embedded null|^Boolean value of Tensor"
)
"""Python's own messages on a value of a wrong type: they don't say where it comes from."""
LOGGED = "Error"
"""The type of a line that was only logged."""
ASSERTS = re.compile(r"assert ")
"""The beginning of a pattern that is one of an assertion's source code."""
FEWEST_WORDS = 3
"""Words of a message from which it says something: with fewer it is a key, a name or a number."""


class Explanation(NamedTuple):
    """The explanation of an exception: a meaning, a signature, or neither."""

    meaning: TypeMeaning | None = None
    signature: FailureSignature | None = None

    @property
    def named(self) -> TypeMeaning | FailureSignature | None:
        """The one of the two that is there: each has a cause and a confidence."""
        return self.meaning or self.signature


def first_of(unknown: Sequence[RaisedException], steps: Steps) -> RaisedException:
    """The first exception after which its rank didn't go on; the next one where it is a library's probe in a chain."""
    fatal = [other for other in unknown if not steps.follow(other.line)] or list(unknown)
    # What another process raised stands below the exception that passes it on.
    fatal = [other for other in fatal if not other.is_wrapped] or fatal
    first, *later = fatal
    following = next((other for other in later if other.line.source == first.line.source), None)
    if first.name in exception_types.PROBES and following and following.in_chain:
        return following
    return first


def explained(
    raised: RaisedException, places: Sequence[FailureSignature], index: SignatureIndex
) -> Explanation:
    """The explanation of an exception. places: signatures of libraries' files that stand in the logs."""
    by_message = _said_by(raised, index)
    if meaning := exception_types.meaning(raised):
        says_more = (
            by_message and by_message.confidence == meaning.confidence and raised.name in exception_types.WIDE
        )
        return Explanation(signature=by_message) if says_more else Explanation(meaning)
    if known := [signature for signature in (_raised_in(raised, places), by_message) if signature]:
        return Explanation(
            signature=min(known, key=lambda signature: CONFIDENCES.index(signature.confidence))
        )
    return Explanation(None if came_of_others(raised) else exception_types.own_check(raised))


def _raised_in(raised: RaisedException, places: Sequence[FailureSignature]) -> FailureSignature | None:
    """The signature of a traceback's innermost files."""
    inner = [frame.file for frame in raised.frames[-FRAMES_OF_A_PLACE:]]
    return next((place for file in reversed(inner) for place in places if place.compiled.search(file)), None)


def _said_by(raised: RaisedException, index: SignatureIndex) -> FailureSignature | None:
    """The signature of a message's words."""
    message = _beginning(raised)
    says_nothing = OF_PYTHON.search(message) or len(message.split()) < FEWEST_WORDS
    if says_nothing or came_of_others(raised):
        return None
    signature = index.of_message(f"{raised.name}: {message}")
    # Source code is no message: of one that has none only a signature of that very assertion speaks.
    return (
        signature if signature is None or not assertion(raised) or ASSERTS.match(signature.pattern) else None
    )


def logged(line: PeeledLine, index: SignatureIndex) -> FailureSignature | None:
    """The signature of a line that was logged as an error, if it says what is wrong and not only what it is about."""
    signature = _said_by(RaisedException(LOGGED, line.text.strip(" -:"), line, line.number), index)
    return signature if signature and signature.confidence == "medium" else None


def came_of_others(raised: RaisedException | None) -> bool:
    """Whether an exception is a consequence of another failure, by its own words."""
    return raised is not None and bool(OF_OTHERS.search(_beginning(raised)))


def _beginning(raised: RaisedException) -> str:
    """The first line of a message that says something: a launcher's own may stand below it. Of an assertion without a
    message it is what it asserts."""
    if asserted := assertion(raised):
        return f"assert {asserted.code}"
    lines = [" ".join(line.split()) for line in raised.message.split("\n") if line.strip()]
    first = lines[0] if lines else ""
    return " ".join(lines[:2]) if len(first.split()) < FEWEST_WORDS else first

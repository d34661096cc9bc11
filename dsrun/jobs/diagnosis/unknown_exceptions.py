"""What is said of an exception that no signature knows.

Its type may say enough (exception_types.py); else the words of its message, or the file of a library that it was raised
in, whichever is surer; else that a check of the user's own code failed. Of what came of a failure elsewhere nothing is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from dsrun.jobs.diagnosis import exception_types, progress
from dsrun.jobs.diagnosis.exception_types import TypeMeaning
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine
from dsrun.jobs.diagnosis.reading.tracebacks import RaisedException
from dsrun.jobs.diagnosis.signatures import CONFIDENCES, FailureSignature, SignatureIndex

FRAMES_OF_A_PLACE = 3
"""The innermost frames, in which a library's file tells what was being done."""
OF_OTHERS = re.compile(
    r"(?i)\b(?:connections?|sockets?|peers?|timed?[- ]?out|broken pipe|nccl|gloo|cuda (?:error|runtime)|cublas|cudnn"
    r"|core dumped|worker (?:process|died)|died|killed|aborted|segmentation|internal assert|child|crash|exit ?code"
    r"|exited|errored|terminated|(?:previous|above|preceding|earlier) (?:error|exception|message|log|trace)"
    r"|(?:see|as|look|scroll) (?:the )?(?:above|up|root cause)|root cause)"
)
"""Words of an exception that came of what happened elsewhere: its message is no reason."""
OF_PYTHON = re.compile(
    r"^'?\w{1,60}'? object (?:is not |has no |does not |cannot )|^(?:unsupported operand|bad operand|can't multiply)\b"
    r"|not supported between instances of|indices must be|values to unpack|^(?:isinstance|issubclass)\(\) arg"
    r"|^cannot unpack|index out of range$|NoneType|I/O operation on closed|^(?:list|tuple|string|pop from)\b"
    r"|^invalid literal for int|NaN to|^could not convert string|^substring not found|truth value of an array"
    r"|^(?:max|min)\(\) arg|^zero-size array|^embedded null|^Boolean value of Tensor"
)
"""Python's own words on a value of another type than the code takes: they say nothing of where it comes from."""
LOGGED = "Error"
"""In place of the type, where a line was only logged."""
FEWEST_WORDS = 3
"""Of a message that says something: else it is a key, a name or a number."""


class Explanation(NamedTuple):
    """What is said of an exception: by one of these, or by nothing."""

    meaning: TypeMeaning | None = None
    signature: FailureSignature | None = None

    @property
    def named(self) -> TypeMeaning | FailureSignature | None:
        """What has a cause and a confidence."""
        return self.meaning or self.signature


def first_of(unknown: Sequence[RaisedException], lines: Sequence[PeeledLine]) -> RaisedException:
    """The first exception after which its rank didn't go on; of a chain that begins with a library's probe, the one
    that follows."""
    left = [one for one in unknown if not progress.went_on(one.line, lines)] or unknown
    first, *later = left
    following = next((one for one in later if one.line.source == first.line.source), None)
    if first.name in exception_types.PROBES and following and following.in_chain:
        return following
    return first


def explained(
    raised: RaisedException, places: Sequence[FailureSignature], index: SignatureIndex
) -> Explanation:
    """What is said of an exception. places: signatures of files of libraries that stand in the logs."""
    said = _said_by(raised, index)
    if meaning := exception_types.meaning(raised):
        says_more = said and said.confidence == meaning.confidence and raised.name in exception_types.WIDE
        return Explanation(signature=said) if says_more else Explanation(meaning)
    if found := [one for one in (_raised_in(raised, places), said) if one]:
        return Explanation(signature=min(found, key=lambda one: CONFIDENCES.index(one.confidence)))
    return Explanation(None if came_of_others(raised) else exception_types.own_check(raised))


def _raised_in(raised: RaisedException, places: Sequence[FailureSignature]) -> FailureSignature | None:
    """The signature of the innermost files of a traceback."""
    inner = [frame.file for frame in raised.frames[-FRAMES_OF_A_PLACE:]]
    return next((one for file in reversed(inner) for one in places if one.compiled.search(file)), None)


def _said_by(raised: RaisedException, index: SignatureIndex) -> FailureSignature | None:
    """The signature of a message's words."""
    message = _beginning(raised)
    says_nothing = OF_PYTHON.search(message) or len(message.split()) < FEWEST_WORDS
    if says_nothing or came_of_others(raised):
        return None
    return index.of_message(f"{raised.name}: {message}")


def logged(line: PeeledLine, index: SignatureIndex) -> FailureSignature | None:
    """The signature of what a line says that was logged as an error: one that says what is wrong, and not only what it
    is about."""
    said = _said_by(RaisedException(LOGGED, line.text.strip(" -:"), line, line.number), index)
    return said if said and said.confidence == "medium" else None


def came_of_others(raised: RaisedException | None) -> bool:
    """Whether an exception is what something else did to its rank, by its own words."""
    return raised is not None and bool(OF_OTHERS.search(_beginning(raised)))


def _beginning(raised: RaisedException) -> str:
    """Of a message the first line that says something: a launcher's own may stand below it."""
    lines = [" ".join(line.split()) for line in raised.message.split("\n") if line.strip()]
    first = lines[0] if lines else ""
    return " ".join(lines[:2]) if len(first.split()) < FEWEST_WORDS else first

"""Text that a program prints as data: a sample's prompt, a model's answer. What it says is no failure of the program.

Evaluations and reinforcement learning print such texts beside their metrics, and a model that is asked about errors
answers with tracebacks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine

_SPEAKERS = (
    r"prompts?|completions?|questions?|answers?|instructions?|generat(?:ed|ion)s?(?:[ _](?:text|answer|response))?"
    r"|predict(?:ed|ion)s?|references?|ground[_ ]?truth|chosen|rejected|assistant|hypothesis"
)
_ALSO_IN_QUOTES = (
    rf"{_SPEAKERS}|responses?|inputs?|outputs?|texts?|content|messages?|target|labels?|query|user|human"
)
_NUMBERED = (
    r"\W{0,12}(?:(?:sample|example|case|item|row|record|question|step|rollout)\W{0,3}\d{1,12}\W{1,4})?"
)
LABELLED = re.compile(
    rf"(?i)^{_NUMBERED}(?:(?:{_SPEAKERS})[\"']?\s?\d{{0,6}}\s{{0,2}}(?:[:=>|\])]|-->)"
    rf"|(?:{_ALSO_IN_QUOTES})[\"']?\s?\d{{0,6}}\s{{0,2}}[:=]\s{{0,2}}[\"'\[{{])"
)
"""A line that says whose words follow: plainly for words that no program names otherwise, else before a quotation."""
TURN = re.compile(
    r"^\s{0,4}(?:<\|(?:im_start|start_header_id|user|assistant|system)\|>|\[/?INST\]"
    r"|#{2,4} (?:Instruction|Response|Input|Question|Answer)\b)"
)
"""The beginning of a turn in a chat template's text."""
RATED = re.compile(r"(?i)^\W{0,8}(?:score|rewards?|advantages?|correct|match)\W{0,3}[:=\]]")
"""A line that rates what was printed above it."""
MOST_LINES = 60
"""Lines of one printed text."""


def without(lines: Sequence[PeeledLine]) -> Sequence[PeeledLine]:
    """The lines that are the program's own words."""
    data: set[int] = set()
    opened: dict[tuple[int, int | None, str | None], int] = {}
    for place, line in enumerate(lines):
        if line.level == "ERROR":
            continue
        stream = (line.source, line.rank, line.host)
        begins = bool(LABELLED.match(line.text) or TURN.match(line.text))
        if begins:
            data.add(place)
        # What stands between two such lines is the first one's text: the program went on printing.
        if begins or RATED.match(line.text):
            start = opened.pop(stream, place)
            if line.number - lines[start].number <= MOST_LINES:
                data |= {
                    between
                    for between in range(start, place)
                    if _stream(lines[between]) == stream and lines[between].level != "ERROR"
                }
        if begins:
            opened[stream] = place
    return [line for place, line in enumerate(lines) if place not in data] if data else lines


def _stream(line: PeeledLine) -> tuple[int, int | None, str | None]:
    return line.source, line.rank, line.host

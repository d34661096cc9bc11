"""What a program itself says about its failure: a possible cause, a solution, a hint, "please ..."; quoted as its word.

Nobody checks that it is right, so it never becomes a cause; but where it stands, its reader should see it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsrun.host.hiding import without_secrets
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine, narrow
from dsrun.jobs.diagnosis.reading.tracebacks import CODE

LINES_BELOW, LINES_ABOVE = 12, 3
"""Lines around the deciding one in which a program gives its advice."""
MOST_QUOTES = 3
LONGEST = 300
"""Longest quotation, in characters."""
MARKED = re.compile(
    r"(?i)^\W{0,6}(?:\[?(?:possible (?:cause|reason|solution)s?|solutions?|cause|reason|hint|tip|suggestion|advice|"
    r"resolution|workaround|remedy|(?:how )?to (?:fix|solve|resolve)(?: (?:this|it))?|recommend(?:ed|ation)\w{0,4}"
    r"|help|可能(?:的)?原因|原因|解决(?:方法|方案|办法)|建议|提示)\]?\s?[:：])\s?\S"
)
"""A line, or a sentence, that says what it is."""
CODED = re.compile(
    r"^(?:\[PID: ?\d{1,9}\] )?(?:[\d:.-]{10,40} )?(?:[A-Z]\w{2,60}\()?E[A-Z]\d{4}\)?: (?![^\n]{0,60}Inner Error)\S"
)
"""A line with one of Ascend's codes, which says what failed."""
ADVICE = re.compile(
    r"(?i)^(?:\W{0,4})(?:(?:so |then |also |you )?(?:please|try|consider|make sure|ensure|did you mean|you (?:can|may"
    r"|should|must|need|have to|might)|either (?:set|pass|use|install|provide)|use |set |install |pass |run |increase "
    r"|reduce |lower |upgrade |downgrade |update |reinstall |remove |add |check |specify |provide |to (?:fix|solve"
    r"|avoid|resolve|disable|enable|use|load|run|install))|for (?:more )?debugging|alternatively|请|建议|可以尝试)"
)
"""A sentence that tells its reader what to do."""
IN_SENTENCE = re.compile(
    r"(?i)(?:\bplease\b|\bdid you mean\b|\btry (?:to |setting|using|with|again|lower|reduc|increas|upgrad|install)"
    r"|\b(?:increase|reduce|lower|upgrade|downgrade|install|set) (?:the |your |it|to )?[`'\"A-Z_]|\bpip3? install\b)"
)
REMEDY = re.compile(
    r"(?i)^\W{0,6}\[?(?:solutions?|hint|tip|suggestion|advice|resolution|workaround|remedy|(?:how )?to (?:fix|solve)"
    r"|recommend|解决|建议|提示)"
)
"""The beginning of a quotation that says what to do, and not only why."""
SENTENCE = re.compile(r"(?<=[.!?。！？])\s+(?=[A-Z'\"`(\u4e00-\u9fff])|\n")
IS_CODE = re.compile(
    r"^\s*#|^\s*(?:from|import|def|class|return|if|for|with)\b[^.]*$|[;{}]\s*$|^\s*\w+\s?=\s?\S|^File \""
)


def quotes(line: PeeledLine, message: str, lines: Sequence[PeeledLine]) -> tuple[str, ...]:
    """A program's own advice in the deciding line, in the rest of its message and in the lines around; each without
    secrets, at most MOST_QUOTES."""
    found = list(_advice(SENTENCE.split(narrow(message))))
    place = next((number for number, other in enumerate(lines) if other is line), None)
    if place is not None:
        around = lines[max(0, place - LINES_ABOVE) : place + 1 + LINES_BELOW]
        same = [other for other in around if other.source == line.source and other.rank in (line.rank, None)]
        found += [text for other in same if (text := narrow(other.text.strip())) and _marks(text, other)]
    clean = (without_secrets(" ".join(text.split()))[:LONGEST] for text in found)
    kept: list[str] = []
    for text in clean:
        if not any(text in other or other in text for other in kept):
            kept.append(text)
    return tuple(kept[:MOST_QUOTES])


def remedy(quoted: Sequence[str]) -> str:
    """Of a program's own words those that say what to do, else the first."""
    return next((text for text in quoted if REMEDY.match(text)), quoted[0])


def _advice(sentences: Sequence[str]) -> Iterator[str]:
    """The sentences of a message that are advice; one that ends in a colon with what follows it."""
    for number, text in enumerate(sentences):
        if _advises(text):
            yield " ".join(sentences[number:]) if text.rstrip().endswith(":") else text


def _advises(text: str) -> bool:
    """Whether a sentence of a message is advice."""
    text = text.strip()
    return bool(MARKED.match(text) or ADVICE.match(text) or IN_SENTENCE.search(text))


def _marks(text: str, line: PeeledLine) -> bool:
    """Whether a line near by is marked as a cause, a solution or a hint, and no source code."""
    return (
        bool(MARKED.match(text) or CODED.match(text))
        and not CODE.match(line.text)
        and not IS_CODE.search(text)
    )

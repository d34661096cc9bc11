"""Words in which a program supposes why something failed: a list of possible causes, "may be due to ...", "if you are
trying to ...". Each of them names failures that nobody has seen; what decides is the line before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine

_CAUSES = r"(?:(?:root |common )?(?:causes?|reasons?)|explanations?)"
LIST = re.compile(
    rf"(?i)\b(?:potential|possible|likely|common|several|many|various|typical) {_CAUSES}\b"
    r"|\b(?:may|might|can|could) (?:also )?(?:be|have been|happen|occur|arise)\b[^.:]{0,60}"
    r"\b(?:one of|following|reasons?|because|due to|if|when)\b\s?:?"
    r"|(?:可能|常见)(?:的)?(?:原因|情况)"
)
"""The beginning of a list of causes; all that stands behind it belongs to it."""
SUPPOSED = re.compile(
    r"(?i)\b(?:may|might|can|could) (?:also )?(?:be|have been|mean|happen|occur|indicate|lead to|cause)\b"
    r"|\b(?:possibly|perhaps|maybe|probably|usually|typically|often|sometimes|potentially)\b"
    r"|\b(?:if|in case|when|whenever|unless) (?:you|it|this|the|there|your|an?)\b|\beither\b|可能|也许|如果"
)
"""Words of one sentence that supposes."""
ENDS_SENTENCE = re.compile(r"[.!?;。！？；](?=\s|$)")
ITEM = re.compile(r"^\s{0,12}(?:[-*•]|\(?(?:\d{1,2}|[a-e])[.)])\s")
"""A line that is one item of a list."""
MOST_ITEMS = 8
"""Lines of a list above an item that are looked at."""


def is_supposed(text: str, start: int) -> bool:
    """Whether a place in a line is part of a list of causes, or of a sentence that supposes."""
    before = text[:start]
    if LIST.search(before):
        return True
    ends = [end.end() for end in ENDS_SENTENCE.finditer(before)]
    return SUPPOSED.search(before, ends[-1] if ends else 0) is not None


def is_item_of_list(above: Sequence[PeeledLine], line: PeeledLine) -> bool:
    """Whether a line is an item of a list of causes that a line above it begins. above: the lines before it."""
    if not ITEM.match(line.text):
        return False
    for other in reversed(above[-MOST_ITEMS:]):
        if other.source == line.source and not ITEM.match(other.text):
            text = other.text.rstrip()
            return bool(LIST.search(text) or (text.endswith((":", "：")) and SUPPOSED.search(text)))
    return False

"""Which column of a file holds prompts and which responses, by the words that people name them with.

A name is taken apart into words (user_prompt, questionText, Labels); a column has a role where it is the role's word,
or where the word stands in it. Columns that only count or name something (prompt_id, answer_len) have none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dsrun.catalog import closest

PROMPTS = (
    "prompt", "instruction", "question", "query", "input", "problem", "user", "human", "request", "document", "article",
    "passage", "sentence", "review", "comment", "dialogue", "text", "content", "source", "src", "问题", "提问", "指令",
    "输入", "文本", "内容", "评论",
)  # fmt: skip
"""Words for what a model is asked, or given; the surest first."""
LABELS = (
    "label", "category", "class", "sentiment", "intent", "topic", "标签", "类别", "情感",
)  # fmt: skip
"""Words for a class that a text has."""
RESPONSES = (
    "completion", "response", "output", "answer", "reply", "assistant", "solution", "target", "tgt", "summary",
    "highlight", "回答", "答案", "输出", "回复", "摘要", *LABELS,
)  # fmt: skip
"""Words for what the model is to say; the surest first."""
NO_TEXT = frozenset({
    "id", "ids", "idx", "index", "len", "length", "count", "num", "number", "score", "type", "date", "time", "token",
    "tokens", "url", "hash", "lang", "language", "model", "format", "name", "source",
})  # fmt: skip
"""Last words of columns that say something about a text; alone they may be what they say."""
COUNTED = frozenset({"num", "is", "has", "n"})
"""First words of such columns."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[一-鿿]+")
PREFERENCES = frozenset({"chosen", "rejected"})
VERDICT = frozenset({"label", "kto_tag", "desirable"})
"""Columns that say by true and false whether an answer is a good one (KTO's rows)."""


class Roles(NamedTuple):
    """The columns of prompts and of responses; None where none is known, or more than one equally well."""

    prompt: str | None
    response: str | None

    @property
    def both(self) -> bool:
        """Whether a prompt-response row is known."""
        return self.prompt is not None and self.response is not None

    @property
    def is_class(self) -> bool:
        """Whether the responses are classes."""
        return self.response is not None and _rank(self.response, LABELS) is not None


def roles_of(names: Sequence[str]) -> Roles:
    """The roles of a file's columns."""
    response = _best(names, RESPONSES)
    prompt = _best([name for name in names if name != response], PROMPTS)
    return Roles(prompt, response)


def _best(names: Sequence[str], words: Sequence[str]) -> str | None:
    ranked = [(rank, name) for name in names if (rank := _rank(name, words)) is not None]
    return min(ranked, key=lambda each: each[0])[1] if ranked else None


def _rank(name: str, words: Sequence[str]) -> tuple[int, int] | None:
    """How surely a column has a role, the surest least; None where it hasn't."""
    parts = [_singular(part.lower()) for part in WORD.findall(name)]
    for place, word in enumerate(words):
        if parts == [word]:
            return 0, place
    if not parts or parts[-1] in NO_TEXT or parts[0] in COUNTED:
        return None
    ends = [(1 if parts[-1] == word else 2, place) for place, word in enumerate(words) if word in parts]
    return min(ends) if ends else None


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def nearest(names: Collection[str], words: Sequence[str]) -> str | None:
    """A column whose name is nearly one of these words: a slip of the finger."""
    return next((name for name in names if closest(name, words, 0.75)), None)


def are_preferences(names: Collection[str]) -> bool:
    """Whether rows compare two answers."""
    return set(names) >= PREFERENCES


def verdict_column(row: Mapping[str, object]) -> str | None:
    """The column that says of a row's answer whether it is a good one, beside a prompt and an answer."""
    name = next((name for name in row if name in VERDICT and isinstance(row[name], bool)), None)
    return name if name and roles_of([other for other in row if other != name]).both else None

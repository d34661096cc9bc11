"""Plain text as token ids: documents in windows, so that every token is trained on and none is cut off.

A document is the marks that the tokenizer puts before a text, its tokens, and an end-of-text token. A longer one goes
on in the next window, which begins with the last token of the one before: that token is no target there, but the next
one follows from it. So each token of a document is a target exactly once, but for the marks before it (or the first
token, where there are none). Windows are examples like all others: packed, and kept apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dsrun.data.conversations import TextDocument
from dsrun.errors import DsrunError
from dsrun.training.data.prompts import Encoded, Limits, PromptEncoder


def encode_documents(
    encoder: PromptEncoder, documents: Sequence[TextDocument], limits: Limits
) -> list[list[Encoded]]:
    """The windows of each document, of at most limits.both tokens. Special tokens in a text stay text.

    Raises DsrunError where a window has no room for text, or the tokenizer no end-of-text token.
    """
    start = _start_ids(encoder)
    if limits.both <= len(start):
        what = f"what the tokenizer puts before a text takes {len(start)} of a window's {limits.both} tokens"
        raise DsrunError(what, hint="Raise --max-length, or --max-source-length where it is given.")
    encoded = encoder.encode_texts([document.text for document in documents])
    return [
        _windows(start if document.begins else [], ids, encoder.end_of_text if document.ends else [], limits.both)
        for document, ids in zip(documents, encoded, strict=True)
    ]  # fmt: skip


def _start_ids(encoder: PromptEncoder) -> list[int]:
    """The marks that the tokenizer puts before a text: a begin mark, ChatGLM's [gMASK] sop, or none."""
    tokenizer = encoder.tokenizer
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return list(itertools.takewhile(marks.__contains__, tokenizer("a")["input_ids"]))


def _windows(start: Sequence[int], text: Sequence[int], end: Sequence[int], length: int) -> list[Encoded]:
    ids = [*start, *text, *end]
    windows = []
    for first in range(0, len(ids) - 1, length - 1):
        window = ids[first : first + length]
        before = 1 if first else max(1, len(start))
        if before < len(window):
            windows.append(Encoded(window, ((before, len(window)),), before, None, None))
    return windows

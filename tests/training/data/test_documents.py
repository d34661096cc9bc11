"""Plain text in windows: every token a target once, nothing lost, documents apart."""

from __future__ import annotations

import pytest
from needed import needs

needs("transformers")

import itertools

from plain_tokenizer import plain_tokenizer

from dsrun.data.conversations import TextDocument
from dsrun.errors import DsrunError
from dsrun.training.data.documents import encode_documents
from dsrun.training.data.prompts import Limits, encoder_for

BEGIN, END = 1, 2
"""The plain tokenizer's <s> and </s>."""


@pytest.fixture(scope="module")
def tokenizer():
    return plain_tokenizer()


@pytest.fixture(scope="module", params=["with a begin mark", "without"])
def encoder(request, tokenizer):
    """A tokenizer that puts a begin mark before a text, and one that puts nothing there."""
    if request.param == "without":
        return encoder_for(tokenizer, "plain")
    from tokenizers.processors import TemplateProcessing

    other = plain_tokenizer()
    other._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BEGIN)])
    return encoder_for(other, "plain")


def targets(windows) -> list[int]:
    return [token for window in windows for start, end in window.spans for token in window.ids[start:end]]


@pytest.mark.parametrize("length", [2, 3, 5, 17, 18, 19, 20, 21, 100])
def test_every_token_is_a_target_once(encoder, length):
    text = "a book of words"
    ids = [*encoder.encode_texts([text])[0], END]
    (windows,) = encode_documents(encoder, [TextDocument(text)], Limits(1, length - 1))
    begins = windows[0].ids[0] == BEGIN
    assert targets(windows) == (ids if begins else ids[1:])
    assert all(2 <= len(window.ids) <= length for window in windows)
    for before, window in itertools.pairwise(windows):
        assert window.ids[0] == before.ids[-1], "what its first target is told from"
    assert all(window.question is None and window.answer is None for window in windows)


def test_a_document_in_pieces_begins_and_ends_once(encoder):
    parts = [
        TextDocument("ab", ends=False),
        TextDocument("cd", begins=False, ends=False),
        TextDocument("ef", begins=False),
    ]
    encoded_parts = encode_documents(encoder, parts, Limits(50, 50))
    ids = [token for windows in encoded_parts for window in windows for token in window.ids]
    assert ids.count(END) == 1 and ids[-1] == END
    assert ids.count(BEGIN) <= 1 and BEGIN not in ids[1:]


def test_special_tokens_in_a_text_stay_text(encoder):
    ((window,),) = encode_documents(encoder, [TextDocument("a</s>b<|user|>")], Limits(50, 50))
    assert window.ids.count(END) == 1
    assert encoder.tokenizer.get_added_vocab()["<|user|>"] not in window.ids


def test_a_piece_of_nothing_is_no_window(encoder):
    ((), *_) = encode_documents(encoder, [TextDocument("", begins=False, ends=False)], Limits(5, 5))


def test_chatglm_prefix_is_no_target():
    from tokenizers.processors import TemplateProcessing

    other = plain_tokenizer()
    marks = [(name, other.get_vocab()[name]) for name in ("[gMASK]", "<sop>")]
    other._tokenizer.post_processor = TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=marks)
    encoder = encoder_for(other, "plain")
    ((window, *_),) = encode_documents(encoder, [TextDocument("abc def")], Limits(3, 3))
    assert window.ids[:2] == [token for _, token in marks]
    assert window.spans == ((2, 6),)
    with pytest.raises(DsrunError, match="window's 2 tokens"):
        encode_documents(encoder, [TextDocument("abc")], Limits(1, 1))


def test_a_tokenizer_without_an_end_is_refused(tokenizer):
    other = plain_tokenizer()
    encoder = encoder_for(other, "plain")
    other.eos_token = None
    with pytest.raises(DsrunError, match="end-of-text"):
        encode_documents(encoder, [TextDocument("abc")], Limits(5, 5))

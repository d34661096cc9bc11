"""Columns of prompts and responses, told by their names."""

from __future__ import annotations

import pytest

from dsrun.data.column_roles import RESPONSES, are_preferences, nearest, roles_of, verdict_column


@pytest.mark.parametrize(
    ("names", "prompt", "response"),
    [
        (["prompt", "response"], "prompt", "response"),
        (["prompt", "completion"], "prompt", "completion"),
        (["instruction", "output"], "instruction", "output"),
        (["question", "answer"], "question", "answer"),
        (["query", "answer"], "query", "answer"),
        (["input", "output"], "input", "output"),
        (["text", "label"], "text", "label"),
        (["label", "sentence"], "sentence", "label"),
        (["id", "Question", "Answer", "url"], "Question", "Answer"),
        (["user_prompt", "model_response", "prompt_id"], "user_prompt", "model_response"),
        (["questionText", "answerText"], "questionText", "answerText"),
        (["问题", "回答"], "问题", "回答"),
        (["评论", "标签"], "评论", "标签"),
        (["document", "summary"], "document", "summary"),
        (["source", "target"], "source", "target"),
        (["src", "tgt"], "src", "tgt"),
        (["question", "answers", "source"], "question", "answers"),
        (["review", "sentiment"], "review", "sentiment"),
        (["text"], "text", None),
        (["text", "meta", "url"], "text", None),
        (["a", "b"], None, None),
        (["prompt_id", "answer_len"], None, None),
        (["text", "label_id"], "text", None),
    ],
)
def test_roles(names, prompt, response):
    assert roles_of(names) == (prompt, response)
    assert roles_of(names[::-1]) == (prompt, response)


def test_classes_are_told_from_answers():
    assert roles_of(["text", "label"]).is_class
    assert not roles_of(["question", "answer"]).is_class


def test_a_slip_of_the_finger_is_near():
    assert nearest(["x", "compeltion"], RESPONSES) == "compeltion"
    assert nearest(["x", "y"], RESPONSES) is None


def test_preferences():
    assert are_preferences(["prompt", "chosen", "rejected"])
    assert not are_preferences(["prompt", "chosen"])


def test_answers_that_are_called_good_or_bad():
    assert verdict_column({"prompt": "a", "completion": "b", "label": True}) == "label"
    assert verdict_column({"messages": [], "kto_tag": False}) is None
    assert verdict_column({"text": "a", "label": True}) is None, "two classes"
    assert verdict_column({"prompt": "a", "completion": "b", "label": "good"}) is None

"""Rows that hold more than text are refused in one sentence."""

from __future__ import annotations

import json

import pytest

from dsrun.data.conversations import MESSAGES, PROMPT_RESPONSE, BadRowError, Columns, content_of
from dsrun.data.data_file import check_data_file

COLUMNS = Columns("prompt", "response")
PAIR = {"prompt": "what is it", "response": "a cat"}
TURNS = [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a cat"}]


def with_part(part):
    return {
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "what is it"}]}, TURNS[1]]
    }


ROWS = [
    (PROMPT_RESPONSE, {**PAIR, "image": "cat.png"}, "images"),
    (PROMPT_RESPONSE, {**PAIR, "images": ["cat.png"]}, "images"),
    (PROMPT_RESPONSE, {**PAIR, "videos": [{"path": "x"}]}, "videos"),
    (PROMPT_RESPONSE, {**PAIR, "audio": {"array": [0.0]}}, "sound"),
    (MESSAGES, {"messages": TURNS, "images": ["cat.png"]}, "images"),
    (MESSAGES, with_part({"type": "image"}), "images"),
    (MESSAGES, with_part({"type": "image_url", "image_url": {"url": "x"}}), "images"),
    (MESSAGES, with_part({"type": "input_audio", "input_audio": {}}), "sound"),
    (MESSAGES, with_part({"type": "video", "video": "x.mp4"}), "videos"),
]


@pytest.mark.parametrize(("kind", "row", "word"), ROWS)
def test_more_than_text(kind, row, word, tmp_path):
    with pytest.raises(BadRowError, match=f"holds {word}, and only text is trained on"):
        content_of(row, kind, COLUMNS)
    path = tmp_path / "rows.jsonl"
    plain = PAIR if kind == PROMPT_RESPONSE else {"messages": TURNS}
    path.write_text("".join(json.dumps(each) + "\n" for each in ({**plain}, row)), encoding="utf-8")
    (problem,) = check_data_file(path, COLUMNS)
    assert problem.what == f"holds {word}, and only text is trained on"
    assert problem.hint


@pytest.mark.parametrize(
    ("kind", "row"),
    [(PROMPT_RESPONSE, {**PAIR, "images": []}), (PROMPT_RESPONSE, {**PAIR, "image": None}),
     (PROMPT_RESPONSE, {**PAIR, "image_caption": "a cat"}), (MESSAGES, {"messages": TURNS, "images": ""})],
)  # fmt: skip
def test_text_alone(kind, row):
    assert content_of(row, kind, COLUMNS)


def test_a_column_that_is_named_is_text():
    columns = Columns("image", "response")
    assert content_of({"image": "a text", "response": "an answer"}, PROMPT_RESPONSE, columns)

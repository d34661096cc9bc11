"""Rows of every format as talks, good and bad."""

from __future__ import annotations

import json

import pytest

from dsrun.talks import (
    ALPACA,
    FORMATS,
    MESSAGES,
    PROMPT_RESPONSE,
    SHAREGPT,
    BadRowError,
    Columns,
    EmptyRowError,
    Round,
    Talk,
    detect,
    talk_of,
)

COLUMNS = Columns("content", "summary")


def said(*turns, **more):
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


def shared(*turns, **more):
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **more}


GOOD = [
    (PROMPT_RESPONSE, {"content": "q", "summary": "a"}, Talk((Round("q", "a"),))),
    (PROMPT_RESPONSE, {"content": 1, "summary": 0, "other": []}, Talk((Round("1", "0"),))),
    (
        PROMPT_RESPONSE,
        {"content": "q", "summary": "a", "history": [["q0", "a0"], ["q1", "a1"]]},
        Talk((Round("q0", "a0", trained=False), Round("q1", "a1", trained=False), Round("q", "a"))),
    ),
    (
        PROMPT_RESPONSE,  # as a CSV file has it
        {"content": "q", "summary": "a", "history": '[["q0", "a0"]]'},
        Talk((Round("q0", "a0", trained=False), Round("q", "a"))),
    ),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": ""}, Talk((Round("q", "a"),))),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": None}, Talk((Round("q", "a"),))),
    (ALPACA, {"instruction": "i", "output": "o"}, Talk((Round("i", "o"),))),
    (ALPACA, {"instruction": "i", "input": " ", "output": "o", "system": None}, Talk((Round("i", "o"),))),
    (ALPACA, {"instruction": "i", "input": "x", "output": "o"}, Talk((Round("i", "o", "x"),))),
    (ALPACA, {"instruction": "", "input": "x", "output": "o"}, Talk((Round("x", "o"),))),
    (ALPACA, {"instruction": "i", "input": "", "output": "o", "system": "s"}, Talk((Round("i", "o"),), "s")),
    (MESSAGES, said(("user", "q"), ("assistant", "a")), Talk((Round("q", "a"),))),
    (
        MESSAGES,
        said(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")),
        Talk((Round("q", "a"), Round("r", "b")), "s"),
    ),
    (
        MESSAGES,
        said(("developer", "s"), ("user", "q"), ("assistant", "a"), ("user", "r")),
        Talk((Round("q", "a"),), "s", unanswered=True),
    ),
    (MESSAGES, said(("user", [{"type": "text", "text": "q"}]), ("assistant", "a")), Talk((Round("q", "a"),))),
    (
        MESSAGES,
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "weight": 0},
                {"role": "user", "content": "r"},
                {"role": "assistant", "content": "b", "weight": 1},
            ]
        },
        Talk((Round("q", "a", trained=False), Round("r", "b"))),
    ),
    (SHAREGPT, shared(("human", "q"), ("gpt", "a")), Talk((Round("q", "a"),))),
    (SHAREGPT, shared(("user", "q"), ("GPT", "a"), system="s"), Talk((Round("q", "a"),), "s")),
    (
        SHAREGPT,
        {"conversation": shared(("human", "q"), ("gpt", "a"))["conversations"]},
        Talk((Round("q", "a"),)),
    ),
    (
        SHAREGPT,
        {"conversations": said(("user", "q"), ("assistant", "a"))["messages"]},
        Talk((Round("q", "a"),)),
    ),
    (
        SHAREGPT,
        {"conversations": json.dumps(shared(("human", "问"), ("gpt", "答"))["conversations"])},
        Talk((Round("问", "答"),)),
    ),
]


@pytest.mark.parametrize(("data_format", "row", "talk"), GOOD)
def test_what_a_row_says(data_format, row, talk):
    assert talk_of(row, data_format, COLUMNS) == talk
    assert detect(row, COLUMNS) == data_format


EMPTY = [
    (PROMPT_RESPONSE, {"content": "q"}),
    (PROMPT_RESPONSE, {"content": " ", "summary": "a"}),
    (PROMPT_RESPONSE, {"content": "q", "summary": None}),
    (ALPACA, {"instruction": "i", "output": "\n"}),
    (ALPACA, {"instruction": "", "input": None, "output": "o"}),
    (MESSAGES, {"messages": None}),
    (MESSAGES, {"messages": []}),
    (MESSAGES, said(("user", "q"))),
    (MESSAGES, said(("system", "s"))),
    (MESSAGES, said(("user", "q"), ("assistant", None))),
    (SHAREGPT, shared(("human", ""), ("gpt", "a"))),
]
BAD = [
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": "no list"}, "history"),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": [["q"]]}, "history"),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": [{"q": "a"}]}, "history"),
    (PROMPT_RESPONSE, {"content": "\ud83d", "summary": "a"}, "half of a character"),
    (ALPACA, {"instruction": {"x": 1}, "output": "o"}, "something else than text"),
    (MESSAGES, {"messages": "hello"}, "no list of turns"),
    (MESSAGES, {"messages": [1]}, "no list of turns"),
    (MESSAGES, {"messages": {"role": "user"}}, "no list of turns"),
    (MESSAGES, said(("user", "q"), ("user", "r"), ("assistant", "a")), "two questions in a row: turn 2"),
    (MESSAGES, said(("assistant", "a"), ("user", "r"), ("assistant", "a")), "without a question: turn 1"),
    (MESSAGES, said(("user", "q"), ("assistant", "a"), ("assistant", "b")), "without a question: turn 3"),
    (MESSAGES, said(("user", "q"), ("system", "s"), ("assistant", "a")), "system text inside"),
    (MESSAGES, said(("user", "q"), ("tool", "t"), ("assistant", "a")), "uses tools"),
    (MESSAGES, said(("user", "q"), ("narrator", "t")), "unknown role: 'narrator'"),
    (MESSAGES, said((None, "q")), "unknown role"),
    (MESSAGES, said(("user", {"x": 1}), ("assistant", "a")), "something else than text"),
    (MESSAGES, said(("user", [{"type": "image_url"}]), ("assistant", "a")), "something else than text"),
    (MESSAGES, said(("user", "q"), ("assistant", "\udc00")), "half of a character"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
        "no answer to train on",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"id": 1}]}]},
        "uses tools",
    ),
    (SHAREGPT, shared(("human", "q"), ("observation", "t")), "uses tools"),
]  # fmt: skip


@pytest.mark.parametrize(("data_format", "row"), EMPTY)
def test_a_row_without_a_question_or_an_answer(data_format, row):
    with pytest.raises(EmptyRowError):
        talk_of(row, data_format, COLUMNS)


@pytest.mark.parametrize(("data_format", "row", "why"), BAD)
def test_a_row_that_can_not_be_trained_on(data_format, row, why):
    with pytest.raises(BadRowError, match=why) as caught:
        talk_of(row, data_format, COLUMNS)
    assert not isinstance(caught.value, EmptyRowError)
    assert caught.value.kind in str(caught.value)


def test_a_bad_row_stays_bad():
    for data_format in FORMATS:
        with pytest.raises(BadRowError, match="is not JSON"):
            talk_of(BadRowError("is not JSON: line 1"), data_format, COLUMNS)


def test_the_users_own_columns_come_first():
    row = {"content": "q", "summary": "a", "messages": [], "instruction": "", "output": ""}
    assert detect(row, COLUMNS) == PROMPT_RESPONSE
    assert detect(row, Columns("q", "a")) == MESSAGES
    assert detect({"prompt": 1, "completion": 2}, COLUMNS) is None


def test_each_answer_with_what_came_before_it():
    talk = Talk(
        (Round("1", "a"), Round("2", "b", trained=False), Round("3", "c"), Round("4", "d", trained=False)),
        "s",
    )
    first, second = talk.each_answer()
    assert first == Talk((Round("1", "a"),), "s")
    assert [spoken.trained for spoken in second.rounds] == [False, False, True]
    assert talk.upto_trained.rounds == talk.rounds[:3]

"""Rows of every format as conversations, good and bad."""

from __future__ import annotations

import json

import pytest

from dsrun.data.conversations import (
    ALPACA,
    AUTO,
    FORMATS,
    MESSAGES,
    PROMPT_RESPONSE,
    SHAREGPT,
    TEXT,
    BadRowError,
    Columns,
    Conversation,
    EmptyRowError,
    TextDocument,
    Turn,
    columns_of,
    content_of,
    detect,
    named_format,
    unread_columns,
)
from dsrun.job.job import DataSpec

COLUMNS = Columns("content", "summary")


def messages(*turns, **more):
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


def shared(*turns, **more):
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **more}


GOOD = [
    (PROMPT_RESPONSE, {"content": "q", "summary": "a"}, Conversation((Turn("q", "a"),))),
    (PROMPT_RESPONSE, {"content": 1, "summary": 0, "other": []}, Conversation((Turn("1", "0"),))),
    (
        PROMPT_RESPONSE,
        {"content": "q", "summary": "a", "history": [["q0", "a0"], ["q1", "a1"]]},
        Conversation((Turn("q0", "a0", trained=False), Turn("q1", "a1", trained=False), Turn("q", "a"))),
    ),
    (
        PROMPT_RESPONSE,  # as a CSV file has it
        {"content": "q", "summary": "a", "history": '[["q0", "a0"]]'},
        Conversation((Turn("q0", "a0", trained=False), Turn("q", "a"))),
    ),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": ""}, Conversation((Turn("q", "a"),))),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": None}, Conversation((Turn("q", "a"),))),
    (ALPACA, {"instruction": "i", "output": "o"}, Conversation((Turn("i", "o"),))),
    (
        ALPACA,
        {"instruction": "i", "input": " ", "output": "o", "system": None},
        Conversation((Turn("i", "o"),)),
    ),
    (ALPACA, {"instruction": "i", "input": "x", "output": "o"}, Conversation((Turn("i", "o", "x"),))),
    (ALPACA, {"instruction": "", "input": "x", "output": "o"}, Conversation((Turn("x", "o"),))),
    (
        ALPACA,
        {"instruction": "i", "input": "", "output": "o", "system": "s"},
        Conversation((Turn("i", "o"),), "s"),
    ),
    (MESSAGES, messages(("user", "q"), ("assistant", "a")), Conversation((Turn("q", "a"),))),
    (
        MESSAGES,
        messages(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")),
        Conversation((Turn("q", "a"), Turn("r", "b")), "s"),
    ),
    (
        MESSAGES,
        messages(("developer", "s"), ("user", "q"), ("assistant", "a"), ("user", "r")),
        Conversation((Turn("q", "a"),), "s", unanswered=True),
    ),
    (
        MESSAGES,
        messages(("user", [{"type": "text", "text": "q"}]), ("assistant", "a")),
        Conversation((Turn("q", "a"),)),
    ),
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
        Conversation((Turn("q", "a", trained=False), Turn("r", "b"))),
    ),
    (SHAREGPT, shared(("human", "q"), ("gpt", "a")), Conversation((Turn("q", "a"),))),
    (SHAREGPT, shared(("user", "q"), ("GPT", "a"), system="s"), Conversation((Turn("q", "a"),), "s")),
    (
        SHAREGPT,
        {"conversation": shared(("human", "q"), ("gpt", "a"))["conversations"]},
        Conversation((Turn("q", "a"),)),
    ),
    (
        SHAREGPT,
        {"conversations": messages(("user", "q"), ("assistant", "a"))["messages"]},
        Conversation((Turn("q", "a"),)),
    ),
    (
        SHAREGPT,
        {"conversations": json.dumps(shared(("human", "问"), ("gpt", "答"))["conversations"])},
        Conversation((Turn("问", "答"),)),
    ),
]


@pytest.mark.parametrize(("data_format", "row", "conversation"), GOOD)
def test_what_a_row_says(data_format, row, conversation):
    assert content_of(row, data_format, COLUMNS) == conversation
    assert detect(row, COLUMNS) == data_format


EMPTY = [
    (PROMPT_RESPONSE, {"content": "q"}),
    (PROMPT_RESPONSE, {"content": " ", "summary": "a"}),
    (PROMPT_RESPONSE, {"content": "q", "summary": None}),
    (ALPACA, {"instruction": "i", "output": "\n"}),
    (ALPACA, {"instruction": "", "input": None, "output": "o"}),
    (MESSAGES, {"messages": None}),
    (MESSAGES, {"messages": []}),
    (MESSAGES, messages(("user", "q"))),
    (MESSAGES, messages(("system", "s"))),
    (MESSAGES, messages(("user", "q"), ("assistant", None))),
    (SHAREGPT, shared(("human", ""), ("gpt", "a"))),
]
BAD = [
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": "no list"}, "history"),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": [["q"]]}, "history"),
    (PROMPT_RESPONSE, {"content": "q", "summary": "a", "history": [{"q": "a"}]}, "history"),
    (PROMPT_RESPONSE, {"content": "\ud83d", "summary": "a"}, "half a character"),
    (ALPACA, {"instruction": {"x": 1}, "output": "o"}, "other than text"),
    (MESSAGES, {"messages": "hello"}, "not a list of messages"),
    (MESSAGES, {"messages": [1]}, "not a list of messages"),
    (MESSAGES, {"messages": {"role": "user"}}, "not a list of messages"),
    (MESSAGES, messages(("user", "q"), ("user", "r"), ("assistant", "a")), "two questions in a row: message 2"),
    (MESSAGES, messages(("assistant", "a"), ("user", "r"), ("assistant", "a")), "without a question: message 1"),
    (MESSAGES, messages(("user", "q"), ("assistant", "a"), ("assistant", "b")), "without a question: message 3"),
    (MESSAGES, messages(("user", "q"), ("system", "s"), ("assistant", "a")), "system text inside"),
    (MESSAGES, messages(("user", "q"), ("tool", "t"), ("assistant", "a")), "nobody asked for: message 2"),
    (MESSAGES, messages(("user", "q"), ("narrator", "t")), "unknown role: 'narrator'"),
    (MESSAGES, messages((None, "q")), "unknown role"),
    (MESSAGES, messages(("user", {"x": 1}), ("assistant", "a")), "other than text"),
    (MESSAGES, messages(("user", [{"type": "image_url"}]), ("assistant", "a")), "only text is trained on"),
    (MESSAGES, messages(("user", "q"), ("assistant", "\udc00")), "half a character"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]},
        "no answer to train on",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"id": 1}]}]},
        "unknown form: message 2",
    ),
    (SHAREGPT, shared(("human", "q"), ("function_call", "get it")), "unknown form: message 2"),
    (SHAREGPT, shared(("human", "q"), ("function_call", '{"name": "f", "arguments": [1]}')), "no object"),
    (SHAREGPT, shared(("human", "q"), ("observation", "t")), "nobody asked for: message 2"),
    (MESSAGES, messages(("user", "q"), ("assistant", "a"), tools="get_weather"), "tools that are not a list"),
    (MESSAGES, messages(("user", "q"), ("assistant", "a"), tools=[{"function": "x"}]), "has a tool without a name"),
    (MESSAGES, messages(("user", "q"), ("assistant", "a"), tools=[{"type": "function"}]), "has a tool without a name"),
]  # fmt: skip


@pytest.mark.parametrize(("data_format", "row"), EMPTY)
def test_a_row_without_a_question_or_an_answer(data_format, row):
    with pytest.raises(EmptyRowError):
        content_of(row, data_format, COLUMNS)


@pytest.mark.parametrize(("data_format", "row", "why"), BAD)
def test_a_row_that_can_not_be_trained_on(data_format, row, why):
    with pytest.raises(BadRowError, match=why) as caught:
        content_of(row, data_format, COLUMNS)
    assert not isinstance(caught.value, EmptyRowError)
    assert caught.value.kind in str(caught.value)


def test_a_bad_row_stays_bad():
    for data_format in FORMATS:
        with pytest.raises(BadRowError, match="is not JSON"):
            content_of(BadRowError("is not JSON: line 1"), data_format, COLUMNS)


def test_the_users_own_columns_come_first():
    row = {"content": "q", "summary": "a", "messages": [], "instruction": "", "output": ""}
    assert detect(row, COLUMNS) == PROMPT_RESPONSE
    assert detect(row, Columns("q", "a")) == MESSAGES
    assert detect({"prompt": 1, "completion": 2}, COLUMNS) is None


def test_each_answer_with_what_came_before_it():
    conversation = Conversation(
        (Turn("1", "a"), Turn("2", "b", trained=False), Turn("3", "c"), Turn("4", "d", trained=False)), "s"
    )
    first, second = conversation.each_answer()
    assert first == Conversation((Turn("1", "a"),), "s")
    assert [turn.trained for turn in second.turns] == [False, False, True]
    assert conversation.upto_trained.turns == conversation.turns[:3]


def test_a_row_of_plain_text():
    assert content_of({"text": "a book"}, TEXT, COLUMNS) == TextDocument("a book")
    assert detect({"text": "x", "meta": 1}, COLUMNS) == TEXT
    assert detect({"text": "x", "content": "q", "summary": "a"}, COLUMNS) == PROMPT_RESPONSE
    for row in ({"text": " \n"}, {"text": None}, {}):
        with pytest.raises(EmptyRowError):
            content_of(row, TEXT, COLUMNS)
    with pytest.raises(BadRowError, match="other than text"):
        content_of({"text": ["a"]}, TEXT, COLUMNS)


@pytest.mark.parametrize(
    ("given", "named"),
    [((), AUTO), (("text_column",), TEXT), (("prompt_column",), PROMPT_RESPONSE),
     (("response_column", "text_column"), AUTO)],
)  # fmt: skip
def test_columns_name_a_format(given, named):
    assert named_format(AUTO, given) == named
    assert named_format(MESSAGES, given) == MESSAGES


def test_the_reference_recipe_keeps_white_space():
    """Its script leaves out what is empty to Python: None and ""."""
    official = columns_of(DataSpec(train_file="x", eval_file=None, official=True))
    usual = columns_of(DataSpec(train_file="x", eval_file=None))
    row = {"content": " ", "summary": "\n"}
    assert content_of(row, "prompt-response", official).turns[0][:2] == (" ", "\n")
    with pytest.raises(BadRowError):
        content_of(row, "prompt-response", usual)
    for empty in ("", None):
        with pytest.raises(BadRowError):
            content_of({**row, "summary": empty}, "prompt-response", official)


# Thoughts, tools, and columns that nobody reads

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
WITH_TOOLS = (Turn("q", "", calls=(CALL,)), Turn("", "sunny", results=({"role": "tool", "content": "20"},)))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_stand_apart_from_the_answer(key):
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: " why\n"}]
    }
    assert content_of(row, MESSAGES, COLUMNS).turns == (Turn("q", "a", thoughts="why"),)
    row["messages"][1][key] = ""
    assert content_of(row, MESSAGES, COLUMNS).turns == (Turn("q", "a"),)


@pytest.mark.parametrize("arguments", [{"city": "Paris"}, '{"city": "Paris"}'])
def test_tools_as_openai_has_them(arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "20"},
        {"role": "assistant", "content": "sunny"},
    ]
    conversation = content_of({"messages": messages, "tools": json.dumps([TOOL])}, MESSAGES, COLUMNS)
    assert (conversation.turns, conversation.tools) == (WITH_TOOLS, (TOOL,))
    assert not conversation.is_plain


def test_tools_as_sharegpt_has_them():
    row = shared(
        ("human", "q"), ("function_call", '{"name": "weather", "arguments": {"city": "Paris"}}'),
        ("observation", "20"), ("gpt", "sunny"), tools=json.dumps([TOOL["function"]]),
    )  # fmt: skip
    conversation = content_of(row, SHAREGPT, COLUMNS)
    assert (conversation.turns, conversation.tools) == (WITH_TOOLS, (TOOL,))


def test_a_system_column_is_read_beside_prompts():
    row = {"content": "q", "summary": "a", "system": "Be brief."}
    assert content_of(row, PROMPT_RESPONSE, COLUMNS).system == "Be brief."


@pytest.mark.parametrize(
    ("data_format", "names", "unread"),
    [
        (PROMPT_RESPONSE, ["content", "summary", "history", "system", "source"], ["source"]),
        (MESSAGES, ["messages", "tools", "system", "id", "score"], ["id", "score"]),
        (SHAREGPT, ["conversations", "tools"], []),
        (ALPACA, ["instruction", "input", "output", "category"], ["category"]),
        (TEXT, ["text", "label"], ["label"]),
    ],
)
def test_columns_that_nobody_reads_are_known(data_format, names, unread):
    assert unread_columns(names, data_format, COLUMNS) == unread

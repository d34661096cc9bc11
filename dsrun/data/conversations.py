"""A row of a data file as a conversation or a document, in whichever of the usual formats it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from dsrun.options.table import FormatOptions

AUTO = "auto"
"""Data format: told by the file's columns."""
PROMPT_RESPONSE, ALPACA, SHAREGPT, MESSAGES = "prompt-response", "alpaca", "sharegpt", "messages"
DOLLY = "dolly"
"""Alpaca's rows under Dolly's names."""
TEXT = "text"
"""Plain text, every token of which is trained on."""
ROLES = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "developer": "system",
}  # fmt: skip
CALLERS = {"tool_call", "function_call"}
"""Roles of messages in which the model calls tools, as ShareGPT's rows have them."""
TOOLS = {"tool", "tool_response", "function", "function_response", "observation", "ipython"}
"""Roles of messages with what a tool gave back."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold its thoughts: DeepSeek's and Qwen3's, newer servers', gpt-oss's."""


MEDIA = {"image": "images", "video": "videos", "audio": "sound", "sound": "sound"}
"""A word in a part's type, or a column's name without its plural -> what it holds beside text."""


ONLY_TEXT = "and only text is trained on"
"""The end of the reason for a row that holds images, videos or sound."""
CONTEXT = "context"
"""The column of a text that a question is about, as Dolly's and SQuAD's rows have it."""
EMPTY: tuple[Any, ...] = (None, "", [], {}, ())
"""Values of a column that a row leaves empty."""


class BadRowError(ValueError):
    """A row that can't be trained on. The text says why: the kind, a colon, what is special to this row."""

    @property
    def kind(self) -> str:
        """The kind of fault, by which such rows are counted."""
        return str(self).partition(":")[0]


class EmptyRowError(BadRowError):
    """A row without a question or without an answer, or without a text."""


class TextDocument(NamedTuple):
    """Plain text."""

    text: str
    begins: bool = True
    """Whether the document begins here; else the row before was a part of it."""
    ends: bool = True
    """Whether the document ends here; else the next row goes on with it."""


Row = dict[str, Any] | TextDocument | BadRowError


class Columns(NamedTuple):
    """Names of the columns of prompt-response rows and of plain text, and what counts as empty there."""

    prompt: str
    response: str
    history: str = "history"
    """The column of earlier turns. A file may lack it."""
    text: str = "text"
    blanks: bool = False
    """Whether white space alone fills a prompt or a response, as in the reference recipe."""

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The names of the columns alone."""
        return self[:4]


def columns_of(options: FormatOptions) -> Columns:
    """The columns that a command's options, or a job's data, name.

    ChatGLM2's script leaves out what is empty to Python (ptuning/main.py, preprocess_function_train): " " is not.
    """
    blanks = bool(getattr(options, "official", False))
    return Columns(
        options.prompt_column, options.response_column, options.history_column, options.text_column, blanks
    )


class Turn(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str
    extra: str = ""
    """The text that the question is about: Alpaca's input."""
    trained: bool = True
    """Whether the answer is trained on."""
    thoughts: str | None = None
    """Thoughts that the row keeps apart from the answer; None where it has no field for them."""
    calls: tuple[dict[str, Any], ...] = ()
    """Tools that the answer calls, in OpenAI's form, their arguments as objects."""
    results: tuple[dict[str, Any], ...] = ()
    """Messages of tools before the question, or in its place."""

    @property
    def uses_tools(self) -> bool:
        """Whether only a prompt format with words for tools can hold the turn."""
        return bool(self.calls or self.results)


class Conversation(NamedTuple):
    """One turn or more, of which one at least is trained on."""

    turns: tuple[Turn, ...]
    system: str = ""
    unanswered: bool = False
    """Whether a last question without an answer was left off."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the model may call, as JSON schemas."""

    @property
    def is_plain(self) -> bool:
        """Whether it is nothing but questions and answers, which every prompt format has words for."""
        return not self.tools and not any(turn.uses_tools or turn.thoughts is not None for turn in self.turns)

    @property
    def upto_trained(self) -> Conversation:
        """The conversation without what comes after the last answer that is trained on."""
        last = max(number for number, turn in enumerate(self.turns) if turn.trained)
        return self._replace(turns=self.turns[: last + 1])

    def each_answer(self) -> list[Conversation]:
        """A conversation for each answer that is trained on: this answer, and all turns before it as history."""
        earlier = [turn._replace(trained=False) for turn in self.turns]
        return [
            self._replace(turns=(*earlier[:number], turn))
            for number, turn in enumerate(self.turns)
            if turn.trained
        ]


def named_format(data_format: str, given: Collection[str]) -> str:
    """The format that a user names, by its name or by its columns; AUTO where columns of both kinds are given, or none.

    given: the names of the options that the user gave.
    """
    pairs, text = {"prompt_column", "response_column"} & set(given), "text_column" in given
    if data_format != AUTO or bool(pairs) == text:
        return data_format
    return TEXT if text else PROMPT_RESPONSE


def detect(names: Collection[str], columns: Columns) -> str | None:
    """The format of rows with these columns; None for an unknown one."""
    return next((name for name in FORMATS if not missing_columns(names, name, columns)), None)


def missing_columns(names: Collection[str], data_format: str, columns: Columns) -> list[str]:
    """Columns that a format needs and that are not among these names."""
    chosen = FORMATS.get(data_format, FORMATS[PROMPT_RESPONSE])
    needed = chosen.columns(columns)
    missing = [column for column in needed if column not in names]
    return missing[:1] * (missing == list(needed)) if chosen.one_is_enough else missing


def content_of(row: Row, data_format: str, columns: Columns) -> Conversation | TextDocument:
    """The content of a row. data_format: a key of FORMATS. Raises BadRowError where nothing in it can be trained on."""
    if isinstance(row, BadRowError):
        raise row
    if isinstance(row, dict) and (media := media_of(row, columns)):
        raise BadRowError(f"holds {media}, {ONLY_TEXT}")
    return row if isinstance(row, TextDocument) else FORMATS[data_format].read(row, columns)


def media_of(row: Mapping[str, Any], columns: Columns) -> str:
    """What a row holds beside text, by its columns: "images" for one that is called image or images, and is filled."""
    named = ((MEDIA.get(key.lower().removesuffix("s")), key) for key in row if isinstance(key, str))
    filled = (word for word, key in named if word and key not in columns.names and row[key] not in EMPTY)
    return next(filled, "")


def texts_of(row: Row, columns: tuple[str, str]) -> tuple[str, str] | None:
    """The prompt and the response of a row as texts; None where either is missing or empty."""
    if not isinstance(row, dict):
        return None
    prompt, response = ("" if row.get(column) is None else str(row[column]) for column in columns)
    return (prompt, response) if all(text.strip() and is_text(text) for text in (prompt, response)) else None


def _instructed(row: Mapping[str, Any], columns: Columns) -> Conversation:
    """An instruction with its response, and what it is about in between, as Dolly's rows have it."""
    return _alpaca({**row, "input": _first(row, "context", "input")}, columns, answer="response")


def _prompt_response(row: Mapping[str, Any], columns: Columns) -> Conversation:
    asked, answered = row.get(columns.prompt), row.get(columns.response)
    if _are_messages(asked) and _are_messages(answered):
        return _conversation([*asked, *answered], _text(row.get("system")), _tools(row.get("tools")))
    for value in (asked, answered):
        if isinstance(value, (list, dict)):
            raise BadRowError(f"holds something other than text: {_short(value)}")
    for column in columns[:2]:
        _check_filled(row.get(column), column, blanks=columns.blanks)
    history = _history(row.get(columns.history))
    beside = row.get(CONTEXT) if CONTEXT in _beside(columns) else None
    extra = beside if isinstance(beside, str) and beside.strip() else ""
    turns = (*history, Turn(str(row[columns.prompt]), str(row[columns.response]), extra))
    return Conversation(turns, _text(row.get("system")) if "system" in _beside(columns) else "")


def _beside(columns: Columns) -> tuple[str, ...]:
    """The columns that prompt-response rows may have beside their own. The reference recipe has no words for such
    texts, and reads none."""
    return () if columns.blanks else tuple(name for name in ("system", CONTEXT) if name not in columns.names)


def _are_messages(value: Any) -> TypeGuard[list[Any]]:
    """Whether a prompt or a response is a list of messages, as TRL's conversational data sets have them."""
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _alpaca(row: Mapping[str, Any], columns: Columns, answer: str = "output") -> Conversation:
    instruction, extra, output = (_text(row.get(name)) for name in ("instruction", "input", answer))
    if not instruction.strip():
        instruction, extra = extra, ""
    _check_filled(instruction, "instruction")
    _check_filled(output, answer)
    system = _text(row.get("system"))
    history = _history(row.get(columns.history))
    return Conversation((*history, Turn(instruction, output, extra if extra.strip() else "")), system)


def _document(row: Mapping[str, Any], columns: Columns) -> TextDocument:
    value = row.get(columns.text)
    _check_filled(value, columns.text)
    if not isinstance(value, str):
        raise BadRowError(f"holds something other than text: {_short(value)}")
    return TextDocument(value)


def _messages(row: Mapping[str, Any], names: Sequence[str]) -> Conversation:
    """The messages in the first of these columns that is filled."""
    value = _first(row, *names)
    messages = _parsed(value)
    if messages is None or messages == []:
        raise EmptyRowError(f"{names[0]!r} is empty")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRowError(f"{names[0]!r} is not a list of messages: {_short(value)}")
    return _conversation(messages, _text(row.get("system")), _tools(row.get("tools")))


class DataFormat(NamedTuple):
    """One of the forms that a row may have."""

    read: Callable[[Mapping[str, Any], Columns], Conversation | TextDocument]
    """Makes the content of a row. Raises BadRowError."""
    columns: Callable[[Columns], tuple[str, ...]]
    """The columns that the format needs, and by which it is known."""
    one_is_enough: bool = False
    """Whether one of these columns will do."""
    also: Callable[[Columns], tuple[str, ...]] = lambda _: ()
    """Columns that it reads, too, where a file has them."""


def _of_messages(*names: str) -> DataFormat:
    return DataFormat(
        lambda row, _: _messages(row, names),
        lambda _: names,
        one_is_enough=True,
        also=lambda _: ("system", "tools"),
    )


FORMATS = {
    PROMPT_RESPONSE: DataFormat(
        _prompt_response,
        lambda columns: (columns.prompt, columns.response),
        also=lambda columns: (columns.history, *_beside(columns)),
    ),
    MESSAGES: _of_messages("messages"),
    SHAREGPT: _of_messages("conversations", "conversation"),
    ALPACA: DataFormat(
        _alpaca,
        lambda _: ("instruction", "output"),
        also=lambda columns: ("input", "system", columns.history),
    ),
    DOLLY: DataFormat(
        _instructed,
        lambda _: ("instruction", "response"),
        also=lambda columns: ("context", "input", "system", columns.history),
    ),
    TEXT: DataFormat(_document, lambda columns: (columns.text,)),
}
"""Data formats by name, in the order in which a file's columns are compared with theirs."""


def unread_columns(names: Sequence[str], data_format: str, columns: Columns) -> list[str]:
    """The columns of a file that no example is made from."""
    chosen = FORMATS[data_format]
    read = {*chosen.columns(columns), *chosen.also(columns)}
    return [name for name in names if name not in read]


def _conversation(
    messages: Sequence[Mapping[str, Any]], system: str, tools: tuple[dict[str, Any], ...] = ()
) -> Conversation:
    """The conversation in a list of messages. Raises BadRowError where their order makes none.

    Questions and answers alternate; a system text may come first, a question without an answer last. A tool's result
    takes a question's place, or stands before one.
    """
    turns: list[Turn] = []
    question: str | None = None
    results: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        role, text = _role(message), _text(_first(message, "value", "content", "text"))
        if role == "system":
            if question is not None or turns or results:
                raise BadRowError(f"has a system text inside the conversation: message {number}")
            system = "\n\n".join(filter(None, (system, text)))
            continue
        if role == "tool":
            if not turns or question is not None:
                raise BadRowError(f"has a tool's answer that nobody asked for: message {number}")
            results.append(_result(message, text))
            continue
        if role == "user" and question is not None:
            raise BadRowError(f"has two questions in a row: message {number}")
        if role == "assistant" and question is None and not results:
            raise BadRowError(f"has an answer without a question: message {number}")
        calls = _calls(message, text, number) if role == "assistant" else ()
        if message.get("role", message.get("from")) in CALLERS:
            text = ""  # it was the call itself, in JSON, and is in `calls` now
        if not text.strip() and not calls:
            raise EmptyRowError(f"has an empty message: message {number}")
        if role == "user":
            question = text
        else:
            weight = message.get("weight")
            trained = weight is None or bool(weight)
            thoughts = _text(_first(message, *THOUGHTS)).strip() or None
            turns.append(
                Turn(question or "", text, "", trained, thoughts, calls=calls, results=tuple(results))
            )
            question, results = None, []
    if not turns:
        raise EmptyRowError("has no answer")
    if not any(turn.trained for turn in turns):
        raise BadRowError("has no answer to train on: every weight is 0")
    return Conversation(tuple(turns), system, question is not None or bool(results), tools)


def _role(message: Mapping[str, Any]) -> str:
    """system, user, assistant or tool. Raises BadRowError for a role that is none of them."""
    name = _first(message, "from", "role")
    known = name.lower() if isinstance(name, str) else ""
    if known in TOOLS:
        return "tool"
    role = "assistant" if known in CALLERS else ROLES.get(known)
    if role is None:
        raise BadRowError(f"has an unknown role: {name!r}")
    return role


def _result(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A tool's message, with the name and the call that it belongs to where the row says them."""
    identity = {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    return {"role": "tool", "content": text, **identity}


def _calls(message: Mapping[str, Any], text: str, number: int) -> tuple[dict[str, Any], ...]:
    """The tools that an answer calls. Raises BadRowError for calls in a form that nobody knows.

    OpenAI's `tool_calls`, its older `function_call`, and ShareGPT's messages whose text is the call in JSON. Arguments
    may be JSON in a text, which servers turn into an object before the template sees them.
    """
    calls = _parsed(message.get("tool_calls")) or []
    if message.get("function_call"):
        calls = [_parsed(message["function_call"])]
    elif _first(message, "from", "role") in CALLERS:
        calls = _parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    known = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = _parsed(function.get("arguments", {})) if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRowError(f"calls a tool in an unknown form: message {number}: {_short(call)}")
        if not isinstance(arguments or {}, dict):
            raise BadRowError(
                f"calls a tool with arguments that are no object: message {number}: {_short(call)}"
            )
        function = {"name": function["name"], "arguments": arguments or {}}
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        known.append({**identity, "type": "function", "function": function})
    return tuple(known)


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The functions that a row offers, as OpenAI's list of them, also where it is written as JSON."""
    tools = _parsed(value) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRowError(f"has tools that are not a list of objects: {_short(value)}")
    framed = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    for tool in framed:
        function = tool["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRowError(f"has a tool without a name: {_short(tool)}")
    return tuple(framed)


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _text(value: Any) -> str:
    """A field as text: parts are joined, nothing is empty. Raises BadRowError where it holds no text."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        value = "".join(part["text"] for part in value)
    if value is None:
        return ""
    if isinstance(value, list) and (media := next(filter(None, map(_medium, value)), "")):
        raise BadRowError(f"holds {media}, {ONLY_TEXT}")
    if not isinstance(value, str | int | float):
        raise BadRowError(f"holds something other than text: {_short(value)}")
    text = str(value)
    if not is_text(text):
        raise BadRowError("holds half a character: a lone surrogate")
    return text


def _medium(part: Any) -> str:
    """What a part of a message's content holds beside text, by its type: "images" for image_url, too."""
    kind = part.get("type") if isinstance(part, dict) else None
    return (
        next((word for name, word in MEDIA.items() if name in kind.split("_")), "")
        if isinstance(kind, str)
        else ""
    )


def _check_filled(value: Any, column: str, *, blanks: bool = False) -> None:
    text = "" if value is None else str(value)
    if not (text if blanks else text.strip()):
        raise EmptyRowError(f"{column!r} is {'missing' if value is None else 'empty'}")
    if not is_text(text):
        raise BadRowError("holds half a character: a lone surrogate")


def _history(value: Any) -> tuple[Turn, ...]:
    """Earlier turns, which are not trained on: a list of [question, answer], in a CSV file as JSON."""
    pairs = _parsed(value) or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRowError(f"has a history that is not a list of [question, answer]: {_short(value)}")
    return tuple(Turn(_text(question), _text(answer), trained=False) for question, answer in pairs)


def _parsed(value: Any) -> Any:
    """A list, also where it is written as JSON: a cell of a CSV file is text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON can hold half a character (a lone surrogate), no tokenizer can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

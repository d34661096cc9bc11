"""A row of a data file as a conversation or a document, in whichever of the usual formats it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from dsrun.options.groups import FormatOptions

AUTO = "auto"
"""The format is told by the file's columns."""
PROMPT_RESPONSE, ALPACA, SHAREGPT, MESSAGES = "prompt-response", "alpaca", "sharegpt", "messages"
TEXT = "text"
"""Plain text, every token of which is trained on."""
ROLES = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "developer": "system",
}  # fmt: skip
TOOLS = {
    "tool", "tool_call", "tool_response", "function", "function_call", "function_response", "observation",
}  # fmt: skip


class BadRowError(ValueError):
    """A row that can't be trained on. The text says why: the kind, a colon, what is special to this row."""

    @property
    def kind(self) -> str:
        """What such rows are counted by."""
        return str(self).partition(":")[0]


class EmptyRowError(BadRowError):
    """A row without a question or without an answer, or without a text."""


class TextDocument(NamedTuple):
    """Plain text."""

    text: str
    begins: bool = True
    """Whether the document begins here; else the row before was a part of it."""
    ends: bool = True
    """Whether it ends here; else the next row goes on with it."""


Row = dict[str, Any] | TextDocument | BadRowError


class Columns(NamedTuple):
    """The columns of prompt-response rows, and of plain text; and what of them is empty."""

    prompt: str
    response: str
    history: str = "history"
    """The earlier turns. It may be missing."""
    text: str = "text"
    blanks: bool = False
    """Whether white space alone fills a prompt or a response, as in the reference recipe."""

    @property
    def names(self) -> tuple[str, str, str, str]:
        """The columns alone."""
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
    """What the question is about: Alpaca's input."""
    trained: bool = True
    """Whether the answer is trained on."""


class Conversation(NamedTuple):
    """At least one turn, of which at least one is trained on."""

    turns: tuple[Turn, ...]
    system: str = ""
    unanswered: bool = False
    """A last question without an answer was left off."""

    @property
    def upto_trained(self) -> Conversation:
        """Without what comes after the last answer that is trained on."""
        last = max(number for number, turn in enumerate(self.turns) if turn.trained)
        return self._replace(turns=self.turns[: last + 1])

    def each_answer(self) -> list[Conversation]:
        """A conversation for each answer that is trained on: it, and what came before it as history."""
        earlier = [turn._replace(trained=False) for turn in self.turns]
        return [
            self._replace(turns=(*earlier[:number], turn))
            for number, turn in enumerate(self.turns)
            if turn.trained
        ]


def named_format(data_format: str, said: Collection[str]) -> str:
    """The format that a user names, by its name or by its columns; AUTO where files are of both kinds, or nobody says.

    said: the names of the options that the user gave.
    """
    pairs, text = {"prompt_column", "response_column"} & set(said), "text_column" in said
    if data_format != AUTO or bool(pairs) == text:
        return data_format
    return TEXT if text else PROMPT_RESPONSE


def detect(found: Collection[str], columns: Columns) -> str | None:
    """The format of rows with these columns; None for an unknown one."""
    return next((name for name in FORMATS if not missing_columns(found, name, columns)), None)


def missing_columns(found: Collection[str], data_format: str, columns: Columns) -> list[str]:
    """Columns that a format needs and that are not there."""
    chosen = FORMATS.get(data_format, FORMATS[PROMPT_RESPONSE])
    needed = chosen.columns(columns)
    missing = [column for column in needed if column not in found]
    return missing[:1] * (missing == list(needed)) if chosen.one_is_enough else missing


def content_of(row: Row, data_format: str, columns: Columns) -> Conversation | TextDocument:
    """What a row holds. data_format: a key of FORMATS. Raises BadRowError where that is nothing to train on."""
    if isinstance(row, BadRowError):
        raise row
    return row if isinstance(row, TextDocument) else FORMATS[data_format].read(row, columns)


def texts_of(row: Row, columns: tuple[str, str]) -> tuple[str, str] | None:
    """The prompt and the response of a row as texts; None where either is missing or empty."""
    if not isinstance(row, dict):
        return None
    prompt, response = (row.get(column) for column in columns)
    if prompt is None or response is None:
        return None
    texts = (str(prompt), str(response))
    if not all(map(is_text, texts)):
        return None
    return texts if texts[0].strip() and texts[1].strip() else None


def _prompt_response(row: Mapping[str, Any], columns: Columns) -> Conversation:
    for column in columns[:2]:
        _check_filled(row.get(column), column, blanks=columns.blanks)
    history = _history(row.get(columns.history))
    return Conversation((*history, Turn(str(row[columns.prompt]), str(row[columns.response]))))


def _alpaca(row: Mapping[str, Any], columns: Columns) -> Conversation:
    instruction, extra, output = (_text(row.get(name)) for name in ("instruction", "input", "output"))
    if not instruction.strip():
        instruction, extra = extra, ""
    _check_filled(instruction, "instruction")
    _check_filled(output, "output")
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
    return _conversation(messages, _text(row.get("system")))


class DataFormat(NamedTuple):
    """What a row may be."""

    read: Callable[[Mapping[str, Any], Columns], Conversation | TextDocument]
    """Raises BadRowError."""
    columns: Callable[[Columns], tuple[str, ...]]
    """Those that it needs, and is known by."""
    one_is_enough: bool = False
    """Of its columns."""


def _of_messages(*names: str) -> DataFormat:
    return DataFormat(lambda row, _: _messages(row, names), lambda _: names, one_is_enough=True)


FORMATS = {
    PROMPT_RESPONSE: DataFormat(_prompt_response, lambda columns: (columns.prompt, columns.response)),
    MESSAGES: _of_messages("messages"),
    SHAREGPT: _of_messages("conversations", "conversation"),
    ALPACA: DataFormat(_alpaca, lambda _: ("instruction", "output")),
    TEXT: DataFormat(_document, lambda columns: (columns.text,)),
}
"""In the order in which a file's columns are compared with them."""


def _conversation(messages: Sequence[Mapping[str, Any]], system: str) -> Conversation:
    """Questions and answers alternate; a system text may come first, a question without an answer last."""
    turns: list[Turn] = []
    question: str | None = None
    for number, message in enumerate(messages, 1):
        role, text = _role(message), _text(_first(message, "value", "content", "text"))
        if role == "system":
            if question is not None or turns:
                raise BadRowError(f"has a system text inside the conversation: message {number}")
            system = "\n\n".join(filter(None, (system, text)))
            continue
        if (role == "user") == (question is not None):
            what = "two questions in a row" if role == "user" else "an answer without a question"
            raise BadRowError(f"has {what}: message {number}")
        if role == "assistant" and (message.get("tool_calls") or message.get("function_call")):
            raise BadRowError(f"uses tools: message {number}")
        if not text.strip():
            raise EmptyRowError(f"has an empty message: message {number}")
        if question is None:
            question = text
        else:
            weight = message.get("weight")
            turns.append(Turn(question, text, trained=weight is None or bool(weight)))
            question = None
    if not turns:
        raise EmptyRowError("has no answer")
    if not any(turn.trained for turn in turns):
        raise BadRowError("has no answer to train on: every weight is 0")
    return Conversation(tuple(turns), system, unanswered=question is not None)


def _role(message: Mapping[str, Any]) -> str:
    name = _first(message, "from", "role")
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        used = isinstance(name, str) and name.lower() in TOOLS
        raise BadRowError(f"uses tools: a message of {name!r}" if used else f"has an unknown role: {name!r}")
    return role


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
    if not isinstance(value, str | int | float):
        raise BadRowError(f"holds something other than text: {_short(value)}")
    text = str(value)
    if not is_text(text):
        raise BadRowError("holds half a character: a lone surrogate")
    return text


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

"""What a row of data says: a talk of questions and answers, in whichever of the usual formats it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

AUTO = "auto"
"""The format that a file's columns tell."""
PROMPT_RESPONSE, ALPACA, SHAREGPT, MESSAGES = "prompt-response", "alpaca", "sharegpt", "messages"
TALK_COLUMNS = {MESSAGES: ("messages",), SHAREGPT: ("conversations", "conversation")}
"""The columns that hold whole talks, by format."""
ROLES = {
    "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "developer": "system",
}  # fmt: skip
TOOLS = {
    "tool",
    "tool_call",
    "tool_response",
    "function",
    "function_call",
    "function_response",
    "observation",
}


class BadRowError(ValueError):
    """A row that can't be trained on; the text says why: what it is, and behind a colon what of this row."""

    @property
    def kind(self) -> str:
        """What rows are counted by."""
        return str(self).partition(":")[0]


class EmptyRowError(BadRowError):
    """A row without a question or without an answer."""


Row = dict[str, Any] | BadRowError


class Columns(NamedTuple):
    """The columns of prompt-response rows; the one of earlier rounds need not be there."""

    prompt: str
    response: str
    history: str = "history"


class Round(NamedTuple):
    """A question and its answer. extra: what the question is about (alpaca's input); trained: whether the answer is."""

    question: str
    answer: str
    extra: str = ""
    trained: bool = True


class Talk(NamedTuple):
    """At least one round, of which at least one is trained on. unanswered: a last question was left off."""

    rounds: tuple[Round, ...]
    system: str = ""
    unanswered: bool = False

    @property
    def upto_trained(self) -> Talk:
        """Without what comes after the last answer that is trained on."""
        last = max(number for number, spoken in enumerate(self.rounds) if spoken.trained)
        return self._replace(rounds=self.rounds[: last + 1])

    def each_answer(self) -> list[Talk]:
        """A talk for each answer that is trained on: it, and what came before it as history."""
        found = []
        for number, spoken in enumerate(self.rounds):
            if spoken.trained:
                before = tuple(earlier._replace(trained=False) for earlier in self.rounds[:number])
                found.append(self._replace(rounds=(*before, spoken)))
        return found


def detect(found: Collection[str], columns: Columns) -> str | None:
    """The format of rows with these columns; None where it is none that is known."""
    if columns.prompt in found and columns.response in found:
        return PROMPT_RESPONSE
    for name, places in TALK_COLUMNS.items():
        if any(place in found for place in places):
            return name
    return ALPACA if {"instruction", "output"} <= set(found) else None


def missing_columns(found: Collection[str], data_format: str, columns: Columns) -> list[str]:
    """Columns that a format needs and that are not there."""
    if data_format in TALK_COLUMNS:
        places = TALK_COLUMNS[data_format]
        return [] if any(place in found for place in places) else [places[0]]
    needed = ("instruction", "output") if data_format == ALPACA else (columns.prompt, columns.response)
    return [column for column in needed if column not in found]


def talk_of(row: Row, data_format: str, columns: Columns) -> Talk:
    """What a row says. data_format: a key of FORMATS. Raises BadRowError where it is nothing to train on."""
    if isinstance(row, BadRowError):
        raise row
    return FORMATS[data_format](row, columns)


def texts_of(row: Row, columns: tuple[str, str]) -> tuple[str, str] | None:
    """The prompt and the response of a row as texts; None where either is missing or empty."""
    if isinstance(row, BadRowError):
        return None
    prompt, response = (row.get(column) for column in columns)
    if prompt is None or response is None:
        return None
    texts = (str(prompt), str(response))
    if not all(map(is_text, texts)):
        return None
    return texts if texts[0].strip() and texts[1].strip() else None


def _prompt_response(row: Mapping[str, Any], columns: Columns) -> Talk:
    for column in columns[:2]:
        _check_filled(row.get(column), column)
    history = _history(row.get(columns.history))
    return Talk((*history, Round(str(row[columns.prompt]), str(row[columns.response]))))


def _alpaca(row: Mapping[str, Any], columns: Columns) -> Talk:
    instruction, extra, output = (_text(row.get(name)) for name in ("instruction", "input", "output"))
    if not instruction.strip():
        instruction, extra = extra, ""
    _check_filled(instruction, "instruction")
    _check_filled(output, "output")
    system = _text(row.get("system"))
    history = _history(row.get(columns.history))
    return Talk((*history, Round(instruction, output, extra if extra.strip() else "")), system)


def _conversation(names: Sequence[str]) -> Callable[[Mapping[str, Any], Columns], Talk]:
    def read(row: Mapping[str, Any], _: Columns) -> Talk:
        value = next((row[name] for name in names if row.get(name) is not None), None)
        turns = _parsed(value)
        if turns is None or turns == []:
            raise EmptyRowError(f"{names[0]!r} is empty")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRowError(f"{names[0]!r} is no list of turns: {_short(value)}")
        return _talk(turns, _text(row.get("system")))

    return read


FORMATS: dict[str, Callable[[Mapping[str, Any], Columns], Talk]] = {
    PROMPT_RESPONSE: _prompt_response,
    ALPACA: _alpaca,
    **{name: _conversation(places) for name, places in TALK_COLUMNS.items()},
}


def _talk(turns: Sequence[Mapping[str, Any]], system: str) -> Talk:
    """Turns that alternate; a system text may come first, a question without an answer last."""
    rounds: list[Round] = []
    question: str | None = None
    for number, turn in enumerate(turns, 1):
        role, text = _role(turn), _text(_first(turn, "value", "content", "text"))
        if role == "system":
            if question is not None or rounds:
                raise BadRowError(f"has a system text inside of the talk: turn {number}")
            system = "\n\n".join(filter(None, (system, text)))
            continue
        if (role == "user") == (question is not None):
            what = "two questions in a row" if role == "user" else "an answer without a question"
            raise BadRowError(f"has {what}: turn {number}")
        if role == "assistant" and (turn.get("tool_calls") or turn.get("function_call")):
            raise BadRowError(f"uses tools: turn {number}")
        if not text.strip():
            raise EmptyRowError(f"has an empty turn: turn {number}")
        if question is None:
            question = text
        else:
            weight = turn.get("weight")
            rounds.append(Round(question, text, trained=weight is None or bool(weight)))
            question = None
    if not rounds:
        raise EmptyRowError("has no answer")
    if not any(spoken.trained for spoken in rounds):
        raise BadRowError("has no answer to train on: every weight is 0")
    return Talk(tuple(rounds), system, unanswered=question is not None)


def _role(turn: Mapping[str, Any]) -> str:
    name = _first(turn, "from", "role")
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        used = isinstance(name, str) and name.lower() in TOOLS
        raise BadRowError(f"uses tools: a turn of {name!r}" if used else f"has an unknown role: {name!r}")
    return role


def _first(turn: Mapping[str, Any], *names: str) -> Any:
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _text(value: Any) -> str:
    """A field as text: parts are joined, nothing is empty. Raises BadRowError where it holds no text."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in value
    ):
        value = "".join(part["text"] for part in value)
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise BadRowError(f"holds something else than text: {_short(value)}")
    text = str(value)
    if not is_text(text):
        raise BadRowError("holds half of a character: a lone surrogate")
    return text


def _check_filled(value: Any, column: str) -> None:
    text = "" if value is None else str(value)
    if not text.strip():
        raise EmptyRowError(f"{column!r} is {'missing' if value is None else 'empty'}")
    if not is_text(text):
        raise BadRowError("holds half of a character: a lone surrogate")


def _history(value: Any) -> tuple[Round, ...]:
    """Earlier rounds, which are not trained on: a list of [question, answer], in a CSV file as JSON."""
    pairs = _parsed(value) or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRowError(f"has a history that is no list of [question, answer]: {_short(value)}")
    return tuple(Round(_text(question), _text(answer), trained=False) for question, answer in pairs)


def _parsed(value: Any) -> Any:
    """A list, also where it is written as JSON: cells of CSV files are texts."""
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
    """Whether it can be written as UTF-8: JSON can hold half of a character (a lone surrogate), no tokenizer can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""A data file before the start: whether its first rows can be trained on, and what to do where they can't."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from dsrun.catalog import closest
from dsrun.data.column_roles import (
    PROMPTS,
    RESPONSES,
    Roles,
    are_preferences,
    nearest,
    roles_of,
    verdict_column,
)
from dsrun.data.conversations import (
    AUTO,
    ONLY_TEXT,
    PROMPT_RESPONSE,
    TEXT,
    BadRowError,
    Columns,
    TextDocument,
    content_of,
    detect,
    missing_columns,
    texts_of,
)
from dsrun.data.rows import FORMATS, PLAIN, first_lines, first_rows, format_of, keys_of, kind_of, read_rows
from dsrun.errors import DsrunError, Problem
from dsrun.options.declare import flag_of
from dsrun.options.table import FormatOptions

COLUMN_FLAGS = tuple(
    flag_of(FormatOptions, name)
    for name in ("prompt_column", "response_column", "history_column", "text_column")
)
"""The options that name the fields of Columns."""
UNNAMED = (FormatOptions.prompt_column, FormatOptions.response_column)
"""The columns where nobody names any."""
LOOKED_AT = 20_000
"""Rows of a file that are looked at before the start; all of them are when they are prepared."""
MOST_BAD = 0.05
"""Share of a file's rows that may be left out unasked."""


def unusable(path: Path, columns: Columns, data_format: str = AUTO, most: int = 20) -> list[Problem]:
    """Every row of a file that can't be trained on, the first `most` of them; reads the whole file."""
    kind = format_of(path, columns, data_format)
    problems: list[Problem] = []
    for number, row in read_rows(path):
        try:
            content_of(row, kind, columns)
        except BadRowError as error:
            problems.append(Problem(str(error), f"{path}:{number}"))
            if len(problems) == most:
                break
    return problems


def check_data_file(path: Path, columns: Columns, data_format: str = AUTO) -> list[Problem]:
    """Problems of a data file, by its first rows.

    data_format: a key of dsrun.data.conversations.FORMATS, or "auto": by the columns.
    """
    where = str(path)
    if not os.path.exists(path):  # noqa: PTH110  (a name that is too long is no error here)
        if os.path.lexists(path):
            return [Problem("is a link to what isn't there", where, "Check where it leads.")]
        return [Problem("no such file", where, _neighbours(path))]
    if not path.is_file():  # a pipe is read once, and a device has no end
        kind = "a folder" if path.is_dir() else "a pipe, a socket or a device"
        return [Problem(f"is {kind}, not a data file", where, f"Name a file: {', '.join(FORMATS)}.")]
    try:
        rows = first_rows(path)
    except DsrunError as error:
        return error.problems
    if not rows:
        hint = "Expected one JSON object, CSV record or Parquet row per example, or plain text."
        return [Problem("holds no rows", where, hint)]
    good = [row for row in rows if isinstance(row, dict)]
    plain = any(isinstance(row, TextDocument) for row in rows)
    if plain and data_format not in (AUTO, TEXT):
        hint = "Leave --data-format out; beside the columns of other files, say --text-column text."
        return [Problem(f"is plain text, and the files are to be {data_format}", where, hint)]
    if not good:
        unread = f"no row can be read; the first {rows[0]}"
        return [] if plain else [Problem(unread, where, _other_form(path))]
    names = keys_of(rows)
    if are_preferences(names) and data_format == AUTO:
        hint = f"The chosen ones alone are answers: {COLUMN_FLAGS[0]} prompt {COLUMN_FLAGS[1]} chosen."
        fault = "has chosen and rejected answers, and dsrun trains on answers, not on preferences"
        return [Problem(fault, where, hint)]
    if data_format == AUTO and (verdict := next(filter(None, map(verdict_column, good)), None)):
        fault = f"column {verdict!r} says which answers are good ones, and dsrun trains on all of them"
        return [Problem(fault, where, f"Keep those: {_jq(path, f'select(.{verdict})')}")]
    kind = data_format if data_format != AUTO else detect(names, columns) or PROMPT_RESPONSE
    absent = missing_columns(names, kind, columns)
    if (
        kind == PROMPT_RESPONSE
        and len(absent) == 2
        and tuple(columns.names[:2]) == UNNAMED
        and len(names) > 1
    ):
        return [_unknown_roles(names, where, _unpacking(path, good))]
    if absent and kind == PROMPT_RESPONSE and (unpacking := _unpacking(path, good)):
        return [Problem(f"no column {absent[0]!r}; there are: {', '.join(names)}", where, unpacking)]
    if absent:
        read_in = " in its first line" if kind_of(path) == "csv" else ""
        return [
            Problem(
                f"no column {column!r}{read_in}; there are: {', '.join(names)}",
                where,
                _hint_for(column, kind, columns, names),
            )
            for column in absent
        ]
    if media := next(filter(None, (_media(row, kind, columns) for row in good)), ""):
        return [Problem(media, where, "Train on rows of text alone: leave out those that need more.")]
    why = _all_bad(good, kind, columns)
    return [] if why is None else [Problem(why, where, _taking_texts(path, good[0], kind, columns))]


def _media(row: dict[str, Any], kind: str, columns: Columns) -> str:
    """Why a row that holds more than text can't be trained on; empty where it is text alone."""
    try:
        content_of(row, kind, columns)
    except BadRowError as error:
        return str(error) if str(error).endswith(ONLY_TEXT) else ""
    return ""


def _jq(path: Path, program: str) -> str:
    """The command that makes another JSONL file of a file's rows."""
    rows = ""
    if kind_of(path) == "json":  # one list, or the one list in an object
        rows = ".[] | " if first_lines(path, 1)[0].startswith("[") else ".[][]? | "
    return f"jq -c {quote(rows + program)} {quote(path.name)} > new.jsonl"


def _unpacking(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """A hint at the columns or messages that lie in an object or a list of each row; empty where a row has texts of its
    own that could be a prompt and an answer, or where nothing lies so."""
    row = rows[0]
    names = [name for name, value in row.items() if isinstance(value, (dict, list)) and value]
    if kind_of(path) not in ("json", "jsonl") or not names or roles_of([*row.keys() - set(names)]).both:
        return ""
    name, value = names[0], row[names[0]]
    if isinstance(value, dict):
        return f"{name!r} holds an object; its keys as columns: {_jq(path, _key(name))}"
    if all(isinstance(part, dict) for part in value) and {"role", "from"} & value[0].keys():
        return f"{name!r} holds messages: {_jq(path, f'{{messages: {_key(name)}}}')}"
    kinds = f"objects with {', '.join(value[0])}" if isinstance(value[0], dict) else type(value[0]).__name__
    return f"{name!r} holds a list ({kinds}): make a row of a question and an answer of each, or of messages."


def _key(name: str) -> str:
    """A column in jq's words."""
    return (
        f".{name}" if name.isidentifier() and name.isascii() else f".[{json.dumps(name, ensure_ascii=False)}]"
    )


def _taking_texts(path: Path, row: dict[str, Any], kind: str, columns: Columns) -> str:
    """A hint at the texts that lie deeper in a prompt or an answer than in the column itself; empty where none does."""
    if kind != PROMPT_RESPONSE or kind_of(path) not in ("json", "jsonl"):
        return ""
    found = {name: inside for name in columns[:2] if (inside := _inside(row.get(name)))}
    changes = " | ".join(f"{_key(name)} = {_key(name)}{inside}" for name, inside in found.items())
    return f"Take the texts out: {_jq(path, changes)}" if found else ""


def _inside(value: Any) -> str:
    """The way to the first text in an object or a list, in jq's words; empty where there is none, or it is a text."""
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        parts = ((_key(str(key)), part) for key, part in value.items())
    elif isinstance(value, list):
        parts = [("[0]", value[0])] if value else []
    for step, part in parts:
        if isinstance(part, str):
            return step
        if way := _inside(part):
            return step + way
    return ""


def _unknown_roles(names: list[str], where: str, unpacking: str = "") -> Problem:
    """The problem of a file of which nobody knows what is asked and what is answered. unpacking: a hint for rows whose
    texts lie deeper."""
    known = roles_of(names)
    prompt = known.prompt or nearest(names, PROMPTS) or "COLUMN"
    response = known.response or nearest([name for name in names if name != prompt], RESPONSES) or "COLUMN"
    fault = f"which columns are prompts and responses isn't plain; there are: {', '.join(names)}"
    near = "Did you mean: " if "COLUMN" not in (prompt, response) else "Name them: "
    hint = f"{near}{COLUMN_FLAGS[0]} {quote(prompt)} {COLUMN_FLAGS[1]} {quote(response)}"
    if unpacking:
        return Problem(fault, where, unpacking)
    return Problem(fault, where, f"{hint}; plain text: {COLUMN_FLAGS[3]} NAME.")


def roles_in(path: Path, columns: Columns, data_format: str = AUTO) -> Roles | None:
    """The columns that a file's rows show by their names to be prompts and responses, where no format is known by its
    own; None where one is, or the names don't show it.

    A column of text beside one of answers or classes is a prompt: as plain text the answers would be dropped.
    """
    try:
        there = os.path.isfile(path)  # noqa: PTH113  (a name that is too long is no error here)
        names = keys_of(first_rows(path)) if there and kind_of(path) != PLAIN else []
    except DsrunError:
        return None  # which the check of the file says
    found = detect(names, columns)
    if data_format not in (AUTO, PROMPT_RESPONSE) or are_preferences(names) or columns[:2] != UNNAMED:
        return None
    if found not in (None, TEXT) and (data_format == AUTO or found == PROMPT_RESPONSE):
        return None
    known = roles_of(names)
    return known if known.both else None


class BadRows(NamedTuple):
    """Rows that can't be trained on, among those that were looked at."""

    read: int
    bad: int
    why: tuple[tuple[str, int], ...]
    """The kinds of faults with their counts, the most frequent first."""

    @property
    def words(self) -> str:
        """In words: "75 of 100 rows can't be trained on (75 is not JSON)"."""
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in self.why[:3])
        return f"{self.bad:,} of {self.read:,} rows can't be trained on ({reasons})"

    @property
    def too_many(self) -> bool:
        """Whether they are more than may be left out unasked."""
        return self.bad > MOST_BAD * self.read


def bad_rows(path: Path, columns: Columns, data_format: str = AUTO) -> BadRows:
    """The bad rows among a file's first LOOKED_AT. Raises DsrunError for a file that can't be read."""
    kind = format_of(path, columns, data_format)
    why: Counter[str] = Counter()
    read = 0
    for read, (_, row) in enumerate(islice(read_rows(path), LOOKED_AT), 1):  # noqa: B007 (the last one counts)
        try:
            content_of(row, kind, columns)
        except BadRowError as error:
            why[error.kind] += 1
    return BadRows(read, sum(why.values()), tuple(why.most_common()))


def _other_form(path: Path) -> str:
    """A hint at the form of a file whose rows can't be read, where its beginning tells; else empty."""
    first, second = first_lines(path, 2)
    kind = kind_of(path)
    if kind == "jsonl" and first.replace(" ", "").startswith("[{"):
        return f"Each row is a list of messages: {_jq(path, '{messages: .}')}"
    if kind == "jsonl" and first == "{":
        return f"Each row has to be on one line: jq -c . {path.name} > new.jsonl"
    if kind == "jsonl" and first.startswith("{'"):
        return "That is Python: write the rows with json.dumps(row, ensure_ascii=False)."
    if kind == "json" and first.startswith("[") and (first + second)[1:].lstrip().startswith("["):
        return 'A list in a list: expected is one list of objects, [{"content": ...}, ...].'
    if kind == "csv":
        return "A text with a comma in it stands in quotation marks."
    return ""


def _delimiter(header: str) -> str:
    """A word for the sign that divides the columns, where a CSV's whole header was read as one column; else empty."""
    words = {";": "semicolons", "\t": "tabs", "|": "bars"}
    return next((word for sign, word in words.items() if sign in header), "")


def _hint_for(column: str, kind: str, columns: Columns, names: list[str]) -> str:
    """The next step for a missing column: the option that names it, and the likeliest name."""
    if kind not in (PROMPT_RESPONSE, TEXT):
        return f"The format {kind} needs it; --data-format names another."
    flags = dict(zip(columns.names, COLUMN_FLAGS, strict=True))
    near = closest(column, names)
    if near and near.strip().casefold() == column.casefold():
        return f"Did you mean {near!r}? {flags[column]} {quote(near)}"
    if kind == PROMPT_RESPONSE and len(names) == 1 and (word := _delimiter(names[0])):
        return f"Its columns are divided by {word}: save it with commas, or with tabs as .tsv."
    if kind == PROMPT_RESPONSE and len(names) == 1:  # there can't be two
        return f"If it is plain text: {flags[columns.text]} {quote(names[0])}."
    return (
        f"Did you mean {near!r}? {flags[column]} {quote(near)}" if near else f"Name it with {flags[column]}."
    )


def _all_bad(rows: list[dict[str, Any]], kind: str, columns: Columns) -> str | None:
    """The reason that none of the rows can be trained on; None where one can."""
    reasons = []
    for row in rows:
        try:
            content_of(row, kind, columns)
        except BadRowError as error:
            reasons.append(str(error))
        else:
            return None
    if kind == PROMPT_RESPONSE and all(texts_of(row, columns[:2]) is None for row in rows):
        return f"every row has an empty {columns.prompt!r} or {columns.response!r}"
    return f"no row can be trained on as {kind}; the first {reasons[0]}"


def _neighbours(path: Path) -> str:
    """A hint at what is meant by the name of a file that isn't there."""
    first, comma, _ = str(path).partition(",")
    if comma and Path(first).is_file():
        return "Several files: name each with a --train-file of its own."
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either."
    match = closest(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"Did you mean {path.parent / match}?" if match else "Check the path."

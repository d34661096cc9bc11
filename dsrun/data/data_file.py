"""A data file before the start: whether its first rows can be trained on, and what to do where they can't."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Any

from dsrun.catalog import closest
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
from dsrun.data.rows import FORMATS, first_rows, format_of, keys_of, kind_of, read_rows
from dsrun.errors import DsrunError, Problem
from dsrun.options.declare import flag_of
from dsrun.options.table import FormatOptions

COLUMN_FLAGS = tuple(
    flag_of(FormatOptions, name)
    for name in ("prompt_column", "response_column", "history_column", "text_column")
)
"""The options that name the fields of Columns."""


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
    kind = data_format if data_format != AUTO else detect(names, columns) or PROMPT_RESPONSE
    if absent := missing_columns(names, kind, columns):
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
    return [] if (why := _all_bad(good, kind, columns)) is None else [Problem(why, where)]


def _media(row: dict[str, Any], kind: str, columns: Columns) -> str:
    """Why a row that holds more than text can't be trained on; empty where it is text alone."""
    try:
        content_of(row, kind, columns)
    except BadRowError as error:
        return str(error) if str(error).endswith(ONLY_TEXT) else ""
    return ""


def _other_form(path: Path) -> str:
    """A hint at the form of a file whose rows can't be read, where its beginning tells; else empty."""
    with path.open(encoding="utf-8-sig") as file:
        first, second = file.readline().strip(), file.readline().strip()
    kind = kind_of(path)
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
    return f"Name it with {flags[column]}."


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

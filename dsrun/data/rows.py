"""Rows of a data file: JSONL, JSON, CSV (and TSV), Parquet or plain text, read one by one."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsrun.data.conversations import (
    AUTO,
    PROMPT_RESPONSE,
    TEXT,
    BadRowError,
    Columns,
    Row,
    TextDocument,
    content_of,
    detect,
    missing_columns,
    texts_of,
)
from dsrun.errors import DsrunError, Problem
from dsrun.options.groups import FormatOptions
from dsrun.options.table import flag_of

__all__ = [
    "BadRowError", "Row", "about_how_many", "check_data_file", "file_columns", "format_of", "read_rows", "texts_of",
    "unusable",
]  # fmt: skip

PLAIN = "txt"
FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": PLAIN,
}  # fmt: skip
FIELD_BYTES = 64 << 20  # a whole book; csv's own limit of 128 KiB is a long answer
CHECKED_ROWS = 200
"""How many rows the check before a launch reads."""
PIECE_CHARACTERS = 1 << 20
"""About how much of a plain text is one row: a whole corpus in one would be tokenised by one process, in one go."""
COLUMN_FLAGS = tuple(
    flag_of(FormatOptions, name)
    for name in ("prompt_column", "response_column", "history_column", "text_column")
)
"""The options that name the fields of Columns."""

WEIGHTED = re.compile(r"(?P<file>.+):(?P<weight>\d+(\.\d+)?|\.\d+)")


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Every row of a file as (number, row); number counts lines (JSONL), else rows, from 1.

    A row that can't be read comes as a BadRowError in its place; a file that can't be read raises DsrunError.
    """
    kind = _format(path)
    try:
        yield from _READERS[kind](path)
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror or error}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise DsrunError(
            f"is not UTF-8 (byte {error.start}: {error.object[error.start]:#04x})",
            where=str(path),
            hint="Convert it first, for example: iconv -f GB18030 -t UTF-8 FILE > NEW",
        ) from error


def weighted_file(text: str) -> tuple[Path, float]:
    """What --train-file names: FILE or FILE:WEIGHT. A file whose own name ends like that is the file."""
    found = WEIGHTED.fullmatch(text)
    if found is None or Path(text).exists():
        return Path(text), 1.0
    return Path(found["file"]), float(found["weight"])


def _format(path: Path) -> str:
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        known = ", ".join(FORMATS)
        raise DsrunError(
            f"unknown kind of data file {path.suffix!r}", where=str(path), hint=f"Known: {known}"
        )
    return kind


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _json_object(line)


def _json_object(line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRowError(f"is not JSON: {error}")
    return (
        value if isinstance(value, dict) else BadRowError(f"is not a JSON object but {type(value).__name__}")
    )


def _read_json(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise DsrunError(
            f"is not JSON: {error}",
            where=str(path),
            hint="One object a line? Then the file is JSONL: give it the ending .jsonl",
        ) from error
    if isinstance(value, dict):  # {"data": [...]}: the one list in it
        lists = [entry for entry in value.values() if isinstance(entry, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DsrunError(
            "does not hold a list of rows", where=str(path), hint='Expected: [{"content": ...}, ...]'
        )
    for number, row in enumerate(value, 1):
        yield (
            number,
            row if isinstance(row, dict) else BadRowError(f"is not an object but {type(row).__name__}"),
        )


def _read_csv(path: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(FIELD_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            for number, row in enumerate(reader, 1):
                if None in row:
                    yield number, BadRowError("has more fields than the header")
                else:
                    yield number, dict(row)
        except csv.Error as error:
            raise DsrunError(f"is not CSV: {error}", where=f"{path}:{reader.line_num}") from error


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise DsrunError(
            "Parquet needs pyarrow", where=str(path), hint="Install it: pip install pyarrow"
        ) from error
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise DsrunError(f"is not Parquet: {error}", where=str(path)) from error


def _read_plain(path: Path) -> Iterator[tuple[int, Row]]:
    """The file is one document, in pieces that end with a line."""

    def piece() -> str:
        return file.read(PIECE_CHARACTERS) + file.readline(PIECE_CHARACTERS)

    with path.open(encoding="utf-8-sig") as file:
        number, text = 1, piece()
        while following := piece():
            yield number, TextDocument(text, begins=number == 1, ends=False)
            number, text = number + 1, following
        if number > 1 or text.strip():
            yield number, TextDocument(text, begins=number == 1)


_READERS = {
    "jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "parquet": _read_parquet, PLAIN: _read_plain,
}  # fmt: skip


def about_how_many(path: Path) -> int | None:
    """About how many rows a file has, for the progress line: its lines, or its metadata's number; None if unknown."""
    kind = _format(path)
    if kind == "parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    if kind in ("json", PLAIN):
        return None
    with path.open("rb") as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return lines - (kind == "csv")


def format_of(path: Path, columns: Columns, data_format: str = AUTO) -> str:
    """The format of a file's rows: the given one, else by the columns of the first rows.

    A .txt file is always text. Without known columns it is prompt-response, so that errors name its columns as missing.
    """
    if _format(path) == PLAIN:
        return TEXT
    if data_format != AUTO:
        return data_format
    return detect(_columns_of(_first_rows(path)), columns) or PROMPT_RESPONSE


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


def _first_rows(path: Path) -> list[Row]:
    return [row for _, (_, row) in zip(range(CHECKED_ROWS), read_rows(path), strict=False)]


def file_columns(path: Path) -> list[str]:
    """The columns of a file's first rows. Raises DsrunError for a file that can't be read."""
    return _columns_of(_first_rows(path))


def _columns_of(rows: list[Row]) -> list[str]:
    return list(
        dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row if isinstance(key, str))
    )


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
        rows = _first_rows(path)
    except DsrunError as error:
        return error.problems
    if not rows:
        hint = "Expected one JSON object, CSV record or Parquet row per example, or plain text."
        return [Problem("holds no rows", where, hint)]
    good = [row for row in rows if isinstance(row, dict)]
    if any(isinstance(row, TextDocument) for row in rows) and data_format not in (AUTO, TEXT):
        hint = "Leave --data-format out; beside the columns of other files, say --text-column text."
        return [Problem(f"is plain text, and the files are to be {data_format}", where, hint)]
    if not good:
        plain = any(isinstance(row, TextDocument) for row in rows)
        return [] if plain else [Problem(f"no row can be read; the first {rows[0]}", where)]
    found = _columns_of(rows)
    kind = data_format if data_format != AUTO else detect(found, columns) or PROMPT_RESPONSE
    if absent := missing_columns(found, kind, columns):
        return [
            Problem(
                f"no column {column!r}; there are: {', '.join(found)}",
                where,
                _hint_for(column, kind, columns, found),
            )
            for column in absent
        ]
    return [] if (why := _all_bad(good, kind, columns)) is None else [Problem(why, where)]


def _hint_for(column: str, kind: str, columns: Columns, found: list[str]) -> str:
    """How a missing column is named."""
    if kind not in (PROMPT_RESPONSE, TEXT):
        return f"The format {kind} needs it; --data-format names another."
    flags = dict(zip(columns.names, COLUMN_FLAGS, strict=True))
    if kind == PROMPT_RESPONSE and len(found) == 1:  # there can't be two
        return f"If it is plain text: {flags[columns.text]} {found[0]}."
    return f"Name it with {flags[column]}."


def _all_bad(rows: list[dict[str, Any]], kind: str, columns: Columns) -> str | None:
    """Why none of the rows can be trained on; None where one can."""
    whys = []
    for row in rows:
        try:
            content_of(row, kind, columns)
        except BadRowError as error:
            whys.append(str(error))
        else:
            return None
    if kind == PROMPT_RESPONSE and all(texts_of(row, columns[:2]) is None for row in rows):
        return f"every row has an empty {columns.prompt!r} or {columns.response!r}"
    return f"no row can be trained on as {kind}; the first {whys[0]}"


def _neighbours(path: Path) -> str:
    from dsrun.catalog import closest

    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either."
    match = closest(path.name, [entry.name for entry in path.parent.iterdir()])
    return f"Did you mean {path.parent / match}?" if match else "Check the path."

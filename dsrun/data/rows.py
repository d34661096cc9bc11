"""Rows of a data file: JSONL, JSON, CSV (and TSV), Parquet or plain text, read one by one."""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from dsrun.data.conversations import (
    AUTO,
    PROMPT_RESPONSE,
    TEXT,
    BadRowError,
    Columns,
    Row,
    TextDocument,
    detect,
    texts_of,
)
from dsrun.errors import DsrunError
from dsrun.words import listed

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = [
    "BadRowError", "Row", "about_how_many", "ending", "file_columns", "first_rows", "format_of", "keys_of", "kind_of",
    "read_rows", "texts_of",
]  # fmt: skip

PLAIN, PARQUET = "txt", "parquet"
FORMATS = {
    ".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": PARQUET, ".txt": PLAIN,
}  # fmt: skip
PACKED = {".gz": "gzip", ".bz2": "bz2"}
"""Endings of compressed files -> the module that unpacks them."""
PACKED_BEGINS = {".gz": b"\x1f\x8b", ".bz2": b"BZh"}
"""The same endings -> the first bytes of such files."""
FIELD_BYTES = 64 << 20  # a whole book; csv's own limit of 128 KiB is a long answer
CHECKED_ROWS = 200
"""Rows of a file that are read to tell its format and columns, and to check it before a launch."""
BLOCK_BYTES = 1 << 20
PIECE_CHARACTERS = 1 << 20
"""Length of a plain text's rows, about: a corpus in one row would be tokenised by one process, in one go."""

WEIGHTED = re.compile(r"(?P<file>.+):(?P<weight>\d+(\.\d+)?|\.\d+)")


def read_rows(path: Path, digest: _Hash | None = None) -> Iterator[tuple[int, Row]]:
    """Every row of a file as (number, row); number counts lines (JSONL), else rows, from 1.

    digest: gets the bytes that the rows are made of, all of the file's once the last row was taken. Parquet is not read
    in order; its bytes are read after the last row, by themselves.
    A row that can't be read comes as a BadRowError in its place; a file that can't be read raises DsrunError.
    """
    kind = kind_of(path)
    try:
        with _opened(path, digest) as file:
            yield from _READERS[kind](path, file)
            while digest is not None and kind == PARQUET and file.read(BLOCK_BYTES):
                pass  # pyarrow reads by the path, in its own order; the others have come to the end of `file`
    except (OSError, EOFError, zlib.error) as error:  # the last two: of a compressed file
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise DsrunError(f"can't be read: {reason}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise DsrunError(
            f"is not UTF-8 (byte {error.start}: {error.object[error.start]:#04x})",
            where=str(path),
            hint=_how_to_convert(path),
        ) from error


class _Tapped(io.RawIOBase):
    """A file that gives its bytes to a digest as they are read."""

    def __init__(self, path: Path, digest: _Hash) -> None:
        self._file = path.open("rb", buffering=0)
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _opened(path: Path, digest: _Hash | None = None) -> BinaryIO:
    """The bytes of a file, unpacked where its ending says that it is compressed; the digest gets them as they lie."""
    file = path.open("rb") if digest is None else io.BufferedReader(_Tapped(path, digest), BLOCK_BYTES)
    module = PACKED.get(path.suffix.lower())
    return file if module is None else cast("BinaryIO", importlib.import_module(module).open(file, "rb"))


def ending(path: Path) -> str:
    """The ending that says what a file is: ".jsonl", or ".jsonl.gz"."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last in PACKED else last


def _text(file: BinaryIO, newline: str | None = None) -> io.TextIOWrapper:
    """The file as text; a mark at its beginning, as Windows writes it, is left out."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)


def _how_to_convert(path: Path) -> str:
    """The command that makes UTF-8 of a file, or says that it is compressed. UTF-16 has a mark; Excel's other encoding
    in China is GB18030."""
    with _opened(path) as file:
        mark = file.read(3)
    utf16 = mark[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    packed = next((suffix for suffix, begin in PACKED_BEGINS.items() if mark.startswith(begin)), "")
    if packed:
        return f"It is compressed ({packed}): name it so, mv {quote(str(path))} {quote(str(path) + packed)}"
    new = quote(f"{path.stem}-utf8{path.suffix}")
    if utf16:
        return f"It is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 {quote(str(path))} > {new}"
    return f"Convert it first; a Chinese one: iconv -f GB18030 -t UTF-8 {quote(str(path))} > {new}"


def weighted_file(text: str) -> tuple[Path, float]:
    """The path and weight of --train-file: FILE or FILE:WEIGHT. A file whose name itself ends like that wins."""
    match = WEIGHTED.fullmatch(text)
    if match is None or Path(text).exists():
        return Path(text), 1.0
    return Path(match["file"]), float(match["weight"])


def kind_of(path: Path) -> str:
    """How a file is read, by its ending: a value of FORMATS. Raises DsrunError for another ending."""
    name, _, packed = ending(path).rpartition(".")
    kind = FORMATS.get(name or f".{packed}")
    if kind is None or (
        name and kind == PARQUET
    ):  # Parquet packs its own columns, and is read from any place
        sheet = path.suffix.lower() in (".xlsx", ".xls", ".ods", ".numbers")
        known = f"Known: {', '.join(FORMATS)}, or packed: .jsonl.gz"
        hint = f"{'Save it as CSV (UTF-8) in the spreadsheet. ' * sheet}{known}"
        raise DsrunError(f"unknown kind of data file {ending(path)!r}", where=str(path), hint=hint)
    return kind


def _read_jsonl(path: Path, file: BinaryIO) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(_text(file), 1):
        if line.strip():
            row = _json_object(line)
            if number == 1 and isinstance(row, BadRowError) and line.lstrip().startswith("["):
                # Refused at the first line: of a list with one object a line only the last, without a comma, is a row.
                _refuse_json(path)
            yield number, row


def _refuse_json(path: Path) -> None:
    """Raise DsrunError where the file is one list in JSON."""
    try:
        with _opened(path) as file:
            value = json.loads(_text(file).read())
    except (ValueError, RecursionError):
        return
    if isinstance(value, list) and any(isinstance(row, dict) for row in value):
        message = "is one list in JSON, not JSONL, which has an object a line"
        raise DsrunError(message, where=str(path), hint="Give it the ending .json")


def _json_object(line: str) -> Row:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRowError(f"is not JSON: {error}")
    return (
        value if isinstance(value, dict) else BadRowError(f"is not a JSON object but {type(value).__name__}")
    )


def _read_json(path: Path, file: BinaryIO) -> Iterator[tuple[int, Row]]:
    try:
        value = json.loads(_text(file).read())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise
        raise DsrunError(
            f"is not JSON: {error}",
            where=str(path),
            hint="One object a line? Then the file is JSONL: give it the ending .jsonl",
        ) from error
    if isinstance(value, dict):  # {"data": [...]}: the one list in it
        lists = {key: entry for key, entry in value.items() if isinstance(entry, list)}
        if len(lists) > 1:
            message = f"holds {len(lists)} lists, and one is to be the rows: {listed(list(lists)[:5])}"
            raise DsrunError(message, where=str(path), hint="Write each into a file of its own.")
        value = next(iter(lists.values()), value)
    if not isinstance(value, list):
        raise DsrunError(
            "does not hold a list of rows", where=str(path), hint='Expected: [{"content": ...}, ...]'
        )
    for number, row in enumerate(value, 1):
        yield (
            number,
            row if isinstance(row, dict) else BadRowError(f"is not an object but {type(row).__name__}"),
        )


def _read_csv(path: Path, file: BinaryIO) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(FIELD_BYTES)
    delimiter = "\t" if ending(path).startswith(".tsv") else ","
    reader = csv.DictReader(_text(file, newline=""), delimiter=delimiter)
    try:
        for number, row in enumerate(reader, 1):
            if None in row:
                yield number, BadRowError("has more fields than the header")
            else:
                yield number, dict(row)
    except csv.Error as error:
        raise DsrunError(f"is not CSV: {error}", where=f"{path}:{reader.line_num}") from error


def _read_parquet(path: Path, _file: BinaryIO) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise DsrunError(
            "Parquet needs pyarrow", where=str(path), hint="Install it: pip install pyarrow"
        ) from error
    try:
        with pq.ParquetFile(path) as table:
            batches = table.iter_batches(batch_size=1024)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except pa.ArrowException as error:
        raise DsrunError(f"is not Parquet: {error}", where=str(path)) from error


def _read_plain(_path: Path, file: BinaryIO) -> Iterator[tuple[int, Row]]:
    """The file is one document, in pieces that end with a line."""
    source = _text(file)

    def piece() -> str:
        return source.read(PIECE_CHARACTERS) + source.readline(PIECE_CHARACTERS)

    number, text = 1, piece()
    while following := piece():
        yield number, TextDocument(text, begins=number == 1, ends=False)
        number, text = number + 1, following
    if number > 1 or text.strip():
        yield number, TextDocument(text, begins=number == 1)


_READERS = {
    "jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, PARQUET: _read_parquet, PLAIN: _read_plain,
}  # fmt: skip


def about_how_many(path: Path) -> int | None:
    """About how many rows a file has, for the progress line: its lines, or its metadata's number; None if unknown."""
    kind = kind_of(path)
    if kind == PARQUET:
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    if kind in ("json", PLAIN):
        return None
    with _opened(path) as file:
        lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    return lines - (kind == "csv")


def format_of(path: Path, columns: Columns, data_format: str = AUTO) -> str:
    """The format of a file's rows: the given one, else by the columns of the first rows.

    A .txt file is always text. Without known columns it is prompt-response, so that errors name its columns as missing.
    """
    if kind_of(path) == PLAIN:
        return TEXT
    if data_format != AUTO:
        return data_format
    return detect(keys_of(first_rows(path)), columns) or PROMPT_RESPONSE


def first_rows(path: Path) -> list[Row]:
    """The first CHECKED_ROWS rows of a file. Raises DsrunError for a file that can't be read."""
    return [row for _, (_, row) in zip(range(CHECKED_ROWS), read_rows(path), strict=False)]


def first_lines(path: Path, count: int) -> list[str]:
    """The first lines of a text file, without white space around them; empty ones where it has fewer."""
    with _opened(path) as file:
        text = _text(file)
        return [text.readline().strip() for _ in range(count)]


def file_columns(path: Path) -> list[str]:
    """The columns of a file's first rows. Raises DsrunError for a file that can't be read."""
    return keys_of(first_rows(path))


def keys_of(rows: list[Row]) -> list[str]:
    """The columns of rows, each once, in the order in which they come."""
    return list(
        dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row if isinstance(key, str))
    )

"""Rows of training files that are chosen before anything is trained: the first ones, and those that are held out.

They become JSONL files in the cache, named after what they are made of, as a data set of the Hub does
(dsrun/data/hub_data.py): what trains, resumes and evaluates then reads files as always.
"""

from __future__ import annotations

import hashlib
import json
import random
import secrets
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from dsrun.data.cache import cache_root
from dsrun.data.conversations import BadRowError, Row, TextDocument
from dsrun.data.inputs import TRAIN, digest_of
from dsrun.data.rows import PLAIN, ending, kind_of, read_rows
from dsrun.errors import DsrunError
from dsrun.files import explained

WRITTEN = 1
"""Raise it when the same options choose other rows, or write them otherwise."""
HELD_OUT, MOST = "--val-size", "--max-samples"


def chosen(
    files: Sequence[Path], *, val_size: float | None, max_samples: int | None, seed: int
) -> tuple[tuple[Path, ...], Path | None]:
    """The files of the rows to train on, one for each file, and the file of the rows that are held out.

    val_size: a share of all rows below 1, else their number. max_samples: of each file only the first rows. The
    same seed holds out the same rows. Raises DsrunError where a file has no rows to choose from, or too few.
    """
    if val_size is None and max_samples is None:
        return tuple(files), None
    option = MOST if val_size is None else HELD_OUT
    for path in files:
        if kind_of(path) == PLAIN:
            hint = "Write it as JSONL, a text a row, or name a held-out file: --eval-file."
            raise DsrunError(
                "is one text, and has no rows to choose from", where=f"{option}: {path}", hint=hint
            )
    key = _key(files, val_size, max_samples, seed)
    folder = cache_root() / "datasets"
    trained = tuple(folder / f"{path.stem}-{key}-{number}.jsonl" for number, path in enumerate(files))
    held_out = None if val_size is None else folder / f"held-out-{key}.jsonl"
    if not all(path.exists() for path in (*trained, *([held_out] if held_out else []))):
        counts = [sum(1 for _ in islice(read_rows(path), max_samples)) for path in files]
        out = frozenset[int]() if val_size is None else _drawn(sum(counts), val_size, seed)
        held = _write_trained(zip(files, trained, counts, strict=True), out)
        if held_out is not None:
            _atomically(held_out, held)
    return trained, held_out


def _key(files: Sequence[Path], *choice: object) -> str:
    """A name for these rows of these files' content."""
    digest = hashlib.sha256(repr((WRITTEN, *choice)).encode())
    for path in files:
        with explained("can't be read", path):
            digest.update(digest_of(path, TRAIN).encode())
        digest.update(ending(path).encode())
    return digest.hexdigest()[:12]


def _write_trained(files: Iterable[tuple[Path, Path, int]], out: frozenset[int]) -> list[str]:
    """Write the rows to train on, and return the lines of the others. files: each file with its new one and how many of
    its rows count; out: places of held-out rows, counted through all files."""
    held: list[str] = []
    before = 0
    for path, target, count in files:
        lines = (_line(row) for _, row in islice(read_rows(path), count))
        kept: list[str] = []
        for place, line in enumerate(lines, before):
            (held if place in out else kept).append(line)
        _atomically(target, kept)
        before += count
    return held


def _drawn(rows: int, val_size: float, seed: int) -> frozenset[int]:
    """The places of the rows that are held out. Raises DsrunError where none would be left to train on, or none held
    out."""
    count = round(rows * val_size) if val_size < 1 else int(val_size)
    if val_size >= 1 and val_size != count:
        hint = "A share is below 1, as 0.1; from 1 on it is a number of rows."
        raise DsrunError(f"can't be {val_size:g}", where=HELD_OUT, hint=hint)
    if not 0 < count < rows:
        raise DsrunError(
            f"{val_size:g} of {rows:,} rows holds out {count:,}, and leaves {max(0, rows - count):,} to train on",
            where=HELD_OUT,
            hint="A share below 1, or a number of rows.",
        )
    return frozenset(random.Random(seed).sample(range(rows), count))  # noqa: S311 (nothing secret)


def _line(row: Row) -> str:
    """A row's line. One that can't be read stays one that can't be read, with its reason, so that it is counted."""
    if isinstance(row, (BadRowError, TextDocument)):
        return f"# {row}\n"
    return json.dumps(row, ensure_ascii=False, default=str) + "\n"


def _atomically(target: Path, lines: Iterable[str]) -> None:
    """Write the whole file or none. Two processes that write it at once write the same."""
    with explained("can't be written", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
        try:
            # A lone surrogate, which UTF-8 has no bytes for, is written as JSON's escape of it.
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(lines)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

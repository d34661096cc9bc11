"""Logs as they are given: files, folders of them, stdin. Which rank or host each is of, as its name says."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, NamedTuple, cast

from dsrun.errors import DsrunError, Problem
from dsrun.files import why_not_readable
from dsrun.job.log_parts import in_order
from dsrun.jobs.diagnosis.flight_recorder import dumps
from dsrun.jobs.diagnosis.flight_recorder import lines as flight_recorder
from dsrun.jobs.diagnosis.reading.log_lines import PeeledLine, clipped, peeled, pieces
from dsrun.jobs.diagnosis.reading.sieve import BLOCK, Sieve
from dsrun.jobs.diagnosis.reading.tracebacks import BEGIN
from dsrun.jobs.diagnosis.signatures import SignatureIndex

STDIN = "-"
NAMES = re.compile(
    r"\.(?:log|out|err|txt|stdout|stderr)(?:\.\d{1,3})?(?:\.gz)?$|^(?:stdout|stderr|output|nohup\.out|log)$",
    re.I,
)
"""Names of files in a folder that are taken for logs."""
RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker|task|proc(?:ess)?)[-_.]?(\d{1,5})(?:\D|$)", re.I)
TORCHRUN = re.compile(r"/attempt_\d{1,4}/(\d{1,5})/std(?:out|err)\.log$")
"""Logs of torchrun --log-dir: a folder for each attempt, in it one for each local rank."""
HOST = re.compile(r"(?:^|[-_.])((?:node|host|gpu|worker|n)-?\d{1,5})(?:\D|$)", re.I)
MOST_FILES = 4096
PACKED = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
"""First bytes of compressed files. Rotated logs are often gzip's, which are read as they are."""
UNPACKERS = {"xz": "xzcat", "bzip2": "bzcat", "zstd": "zstdcat", "zip": "unzip -p"}
LARGE_BYTES, MOST_PROCESSES = 128 << 20, 4
"""Size from which several processes read a log, as far as there are cores, and how many at most."""
BINARY = 0.08
"""Share of control characters (line ends and NULs aside) from which a file is no text: programs and numbers have a
tenth and more of them, logs in any encoding and colour next to none."""


class LogSource(NamedTuple):
    """A log to be read."""

    name: str
    """Name for the user: its path, or "stdin"."""
    path: Path | None
    """None: stdin, or `content`."""
    rank: int | None = None
    host: str | None = None
    since: int = 0
    """Bytes at its beginning that belong to an earlier attempt."""
    content: bytes | None = None
    """The log itself, where no file holds it."""


def sources(given: Iterable[str]) -> list[LogSource]:
    """The logs that some names stand for. Raises DsrunError with every name that stands for none."""
    problems: list[Problem] = []
    logs: list[LogSource] = []
    for name in given:
        if name == STDIN:
            logs.append(LogSource("stdin", None))
        else:
            logs += _of_path(Path(name).expanduser(), problems)
    if problems:
        raise DsrunError(problems)
    return logs


def _of_path(path: Path, problems: list[Problem]) -> list[LogSource]:
    if why := why_not_readable(path):
        problems.append(Problem(f"can't be read: {why}", where=str(path)))
        return []
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            paths = in_order(_logs_in(path))
            if not paths:
                fault = "holds no log (a file that ends in .log, .out, .err or .txt)"
                problems.append(Problem(fault, where=str(path), hint="Name the file itself."))
            return [named(log) for log in paths]
    except (OSError, ValueError) as error:
        problems.append(
            Problem(f"can't be read: {getattr(error, 'strerror', None) or error}", where=str(path))
        )
        return []
    return [named(path)]


def _logs_in(folder: Path) -> Iterator[Path]:
    """Files of a folder that are logs by their names. Raises DsrunError where there are too many."""
    count = 0
    for here, below, names in os.walk(folder):
        below[:] = sorted(name for name in below if not name.startswith("."))
        for name in names:
            if NAMES.search(name) or dumps.NAME.search(name):
                count += 1
                if count > MOST_FILES:
                    raise DsrunError(
                        f"holds more than {MOST_FILES} logs", where=str(folder), hint="Name fewer."
                    )
                yield Path(here) / name


def named(path: Path) -> LogSource:
    """A log, with the rank and host in its path."""
    local = TORCHRUN.search(str(path.absolute()))
    rank = local or RANK.search(path.name) or RANK.search(path.parent.name)
    host = HOST.search(path.name)
    return LogSource(str(path), path, int(rank[1]) if rank else None, host[1] if host else None)


def read(logs: Sequence[LogSource], index: SignatureIndex) -> list[PeeledLine]:
    """The lines of some logs that matter. Raises DsrunError where one can't be read, or where none has any text."""
    lines = lines_of(logs, index)
    if not any(line.text for line in lines):
        hint = "Name the log that the job wrote."
        raise DsrunError([Problem("is empty", where=source.name, hint=hint) for source in logs])
    return lines


def lines_of(logs: Sequence[LogSource], index: SignatureIndex) -> list[PeeledLine]:
    """The lines of some logs that matter; there may be none. Raises DsrunError where one can't be read."""
    recorded = {number: source.path for number, source in enumerate(logs) if source.path and _is_dump(source)}
    lines = [
        peeled(number, at, piece, source.rank, source.host)
        for number, source in enumerate(logs)
        if number not in recorded
        for at, line in _kept(source, index)
        for piece in pieces(line.decode("utf-8", errors="replace"))
    ]
    return lines + flight_recorder.lines_of(recorded)


def _is_dump(source: LogSource) -> bool:
    try:
        return bool(source.path and source.path.is_file() and dumps.is_dump(source.path))
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=source.name) from error


def _kept(source: LogSource, index: SignatureIndex) -> list[tuple[int, bytes]]:
    try:
        if source.path is None:
            file = sys.stdin.buffer if source.content is None else io.BytesIO(source.content)
            return _sifted(source, file, index)
        size = source.path.stat().st_size - source.since if source.path.is_file() else 0
        if size > LARGE_BYTES and not _packing(source, source.path):
            return _in_parts(source.path, source.since, index)
        with _unpacked(source, source.path) if size else source.path.open("rb") as log:
            if source.since:
                log.seek(source.since)
            return _sifted(source, log, index)
    except (OSError, EOFError, zlib.error) as error:
        raise DsrunError(
            f"can't be read: {getattr(error, 'strerror', None) or error}", where=source.name
        ) from error


def _packing(source: LogSource, path: Path) -> str:
    """The program that compressed a file; empty for a plain one."""
    if source.since:
        return ""
    with path.open("rb") as file:
        head = file.read(6)
    return next((name for begin, name in PACKED.items() if head.startswith(begin)), "")


def _unpacked(source: LogSource, path: Path) -> IO[bytes]:
    """An open file, unpacked where gzip packed it. Raises DsrunError for other compression."""
    packing = _packing(source, path)
    if packing in UNPACKERS:
        hint = f"Unpack it first: {UNPACKERS[packing]} {source.name} | dsrun diagnose -"
        raise DsrunError(f"is compressed by {packing}", where=source.name, hint=hint)
    return cast(IO[bytes], gzip.open(path)) if packing else path.open("rb")


def _in_parts(path: Path, since: int, index: SignatureIndex) -> list[tuple[int, bytes]]:
    """The kept lines of a large file, read by several processes, each a part of it."""
    from concurrent.futures import ProcessPoolExecutor

    _ = (
        index.search
    )  # built here once: each process gets a copy, and would otherwise parse all patterns itself
    places = _line_starts(path, since, min(MOST_PROCESSES, len(os.sched_getaffinity(0))))
    with ProcessPoolExecutor(len(places) - 1) as pool:
        parts = list(pool.map(_part, *zip(*((path, *span, index) for span in pairwise(places)), strict=True)))
    kept: list[tuple[int, bytes]] = []
    before = 0
    for lines, count in parts:
        kept += [(before + number, line) for number, line in lines]
        before += count
    return kept


def _line_starts(path: Path, since: int, parts: int) -> list[int]:
    """Offsets at which parts of a file begin, each at a line, and the end of the last; UTF-16 is not cut."""
    size = path.stat().st_size
    starts = [since]
    with path.open("rb") as file:
        parts = 1 if file.read(2) in (b"\xff\xfe", b"\xfe\xff") else parts
        for part in range(1, parts):
            file.seek(since + (size - since) * part // parts)
            file.readline(BLOCK)
            starts.append(file.tell())
    return [*sorted(set(starts)), size]


def _part(path: Path, begin: int, end: int, index: SignatureIndex) -> tuple[list[tuple[int, bytes]], int]:
    """The kept lines of a part of a file, and the number of its lines."""
    sieve = _sieve(index, large=True)
    with path.open("rb") as file:
        file.seek(begin)
        return sieve.read(_Part(file, end - begin)), sieve.lines


class _Part:
    """A file that ends `left` bytes after its place."""

    def __init__(self, file: IO[bytes], left: int) -> None:
        self._file, self._left = file, left

    def read(self, size: int) -> bytes:
        piece = self._file.read(min(size, self._left))
        self._left -= len(piece)
        return piece


def _sieve(index: SignatureIndex, large: bool = False) -> Sieve:
    return Sieve(index.search, partial(_matters, index), large)


def _matters(index: SignatureIndex, line: str) -> bool:
    return BEGIN in line or index.is_in(clipped(line))


def _sifted(source: LogSource, file: IO[bytes], index: SignatureIndex) -> list[tuple[int, bytes]]:
    kept = _sieve(index).read(file)
    text = b"".join(line for _, line in kept[:200]).replace(b"\x00", b"")
    odd = sum(byte < 32 and byte not in b"\t\n\r\x0b\x0c\x1b\x08" for byte in text)
    if text and odd > BINARY * len(text):
        raise DsrunError("is not a text", where=source.name, hint="Name a log; unpack one first: zcat FILE |")
    return kept

"""One rank's log, read line by line and in little memory, over all of its parts (job/log_parts.py)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dsrun.files import open_inside
from dsrun.job.log_parts import part, part_numbers

BLOCK_BYTES = 64 << 10
LONGEST_BYTES = 1 << 20
"""A longer line is cut; of a bar that is drawn over itself the last state is enough."""
KEY_CHARACTERS = 200
TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d+))?")
VARYING = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?|\[\d\d:\d\d<.*?\]|\brank ?\d+\b|0x[0-9a-f]+", re.I
)
"""Parts of a line that differ between ranks which print the same: times, a bar's speed, rank numbers, addresses."""
WORDS = re.compile(r"(\(\?i\))?([\w :=,/'\"@<>~!;#%&-]+)", re.ASCII)
"""A pattern of plain words, in any case or as they are written."""


class LogLine(NamedTuple):
    """key: the text without what differs between ranks, or a digest of it; when: the last time that the rank's log
    told; arrived: when it was read, in seconds of the monotonic clock."""

    text: str
    key: str
    when: str
    arrived: float


class _Words(NamedTuple):
    """ASCII words that a pattern consists of, in small letters where `any_case` is true."""

    text: bytes
    any_case: bool

    def in_block(self, block: bytes) -> bool:
        """Whether they may stand in it."""
        if not self.any_case:
            return self.text in block
        return not block.isascii() or self.text in block.lower()  # a Kelvin sign is a small k, too


def _words_of(pattern: re.Pattern[str] | None) -> _Words | None:
    """The words that a pattern is no more than; None where it is more."""
    if pattern is None:
        return None
    found = WORDS.fullmatch(pattern.pattern)
    if not found or pattern.flags & re.VERBOSE:
        return None
    text, any_case = found[2].encode("ascii"), bool(pattern.flags & re.IGNORECASE)
    return _Words(text.lower() if any_case else text, any_case)


class RankLog:
    """Reads the whole lines that were added to a rank's log since the last look.

    from_end: not those that it has. start: number of a part (that it is, or will be) and offset in it to begin at.
    grep: only lines with this pattern.
    """

    def __init__(
        self,
        path: Path,
        *,
        from_end: bool = False,
        start: tuple[int, int] | None = None,
        grep: re.Pattern[str] | None = None,
    ) -> None:
        self.path = path
        self._matches = grep.search if grep else str.strip
        self._words = _words_of(grep)
        self.unread = False
        """Whether the last look left something for the next."""
        self._half, self._when = b"", ""
        self._inode = -1  # of the file that is no part yet, as it was last seen
        numbers = part_numbers(path) if start is not None or from_end else []
        self._number, self._place = start or ((max(numbers, default=0) + 1, 0) if from_end else (0, 0))
        if from_end and path.exists():
            self._place = path.stat().st_size

    def lines(self, *, last: bool = False) -> list[LogLine]:
        """New lines without blank ones, of at most a block; see `unread`. last: nothing more will come, so half a line
        counts."""
        whole = self._whole(self._block())
        if last and not self.unread and self._half:
            whole, self._half = [*whole, self._half], b""
        # Words that a block of lines has nowhere, no line has: most of a long log is skipped so.
        if self._words and not self._words.in_block(b"\n".join(whole)):
            return []
        return [self._line(text) for raw in whole if (text := _drawn(raw)).strip() and self._matches(text)]

    def _block(self) -> bytes:
        """The next bytes; none where nothing was added."""
        while opened := self._opened():
            file, is_part = opened
            with file:
                file.seek(self._place)
                block = file.read(BLOCK_BYTES)
                self._place += len(block)
                self.unread = is_part or self._place < os.fstat(file.fileno()).st_size
            if block or not is_part:
                return block
            self._number, self._place = self._number + 1, 0
        self.unread = False
        return b""

    def _opened(self) -> tuple[BinaryIO, bool] | None:
        """The file to read from, and whether it is a part; None where there is none."""
        if not self._number:  # the beginning, whatever its number is
            self._number = min(part_numbers(self.path), default=1)
        while True:  # the log may be renamed between two steps
            with contextlib.suppress(OSError):
                return _opened_piece(part(self.path, self._number)), True
            try:
                file = _opened_piece(self.path)
            except OSError:
                return None
            stat = os.fstat(file.fileno())
            if stat.st_ino == self._inode and stat.st_size >= self._place:
                return file, False
            later = [number for number in part_numbers(self.path) if number >= self._number]
            if not later:
                self._inode = stat.st_ino
                self._place = min(self._place, stat.st_size)
                return file, False
            file.close()
            if later[0] > self._number:
                removed = f"\n({later[0] - self._number} parts of this log were removed: --log-limit)\n"
                self._half += removed.encode()
                self._number, self._place = later[0], 0

    def _whole(self, block: bytes) -> list[bytes]:
        """The whole lines up to a block's end."""
        *whole, self._half = (self._half + block).split(b"\n")
        if len(self._half) > LONGEST_BYTES:
            drawn_over, _, rest = self._half.rpartition(b"\r")
            if drawn_over:
                self._half = rest
            else:
                whole, self._half = [*whole, self._half], b""
        return whole

    def _line(self, text: str) -> LogLine:
        if stamp := TIME.search(text):
            day, clock, fraction = stamp.groups()
            self._when = f"{day} {clock}.{fraction or ''}"
        key = VARYING.sub("#", text)
        if len(key) > KEY_CHARACTERS:
            key = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return LogLine(text, key, self._when, time.monotonic())


def _opened_piece(path: Path) -> BinaryIO:
    """A piece of a log, of any size; others may write into its folder. Raises OSError."""
    return open_inside(path.parent, path.name, most=sys.maxsize)


def _drawn(raw: bytes) -> str:
    """The text of a line; of a bar that was drawn over itself the last state."""
    return raw.decode("utf-8", errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


def place_of_last(log: Path, lines: int) -> tuple[int, int]:
    """Number and offset in a log behind which at least that number of lines are not blank; (0, 0): its beginning."""
    numbers = part_numbers(log)
    numbered = [*((number, part(log, number)) for number in numbers), (max(numbers, default=0) + 1, log)]
    wanted = lines
    for number, path in reversed(numbered if log.is_file() else numbered[:-1]):
        with _opened_piece(path) as file:
            for offset, count in _backwards(file):
                wanted -= count
                if wanted <= 0:
                    return number, offset
    return 0, 0


def _backwards(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """(offset of a line's beginning, how many lines that are not blank stand from there to the last one), from a
    file's end, a block at a time."""
    offset = file.seek(0, os.SEEK_END)
    rest = b""
    while offset > 0:
        size = min(BLOCK_BYTES, offset)
        offset -= size
        file.seek(offset)
        block = file.read(size) + rest
        head, newline, tail = block.partition(b"\n")
        if offset and not newline:
            rest = block[:LONGEST_BYTES]
            continue
        rest = head + newline if offset else b""
        whole = tail if offset else block
        yield offset + len(block) - len(whole), sum(1 for line in whole.split(b"\n") if line.strip())

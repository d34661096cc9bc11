"""A rank's log on disk: one file, and where it grows large numbered parts before it.

    logs/rank-0.log.1  logs/rank-0.log.2  ...  logs/rank-0.log    in the order in which they were written
    logs/rank-0.times                                             when each had which size

The rank itself renames its log once it has a sixteenth of what is kept, and goes on in a new one; nothing is copied,
and no line is lost between them. Where all parts together are more than what is kept, the oldest are removed, but for
the first: what a rank says at its start (versions, devices, settings) and what it said last is what a diagnosis needs.
A process that the rank has started keeps the file that it was given, and goes on writing into that part.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

GIB = 1 << 30
PARTS = 16
"""Parts that the kept bytes of a log are divided into."""
LOOK_S = 1.0
"""Time between two looks at the log's size."""
TIMES_S = 10.0
"""Time between two entries in the file of times, where the log has grown."""
STREAMS = (1, 2)
TIMES = ".times"


def part(log: Path, number: int) -> Path:
    """Part number `number` of a log, from 1."""
    return log.with_name(f"{log.name}.{number}")


def part_numbers(log: Path) -> list[int]:
    """The numbers of the parts that there are, in order."""
    prefix = f"{log.name}."
    with contextlib.suppress(OSError):
        names = [entry.name for entry in log.parent.iterdir() if entry.name.startswith(prefix)]
        numbers = [name.removeprefix(prefix) for name in names]
        return sorted(int(number) for number in numbers if number.isdecimal())
    return []


def pieces(log: Path) -> list[Path]:
    """The files that a log consists of, the oldest first; none where nothing was printed."""
    return [*(part(log, number) for number in part_numbers(log)), *([log] if log.is_file() else [])]


def log_of(piece: Path) -> Path:
    """The log that a file is a piece of: `logs/rank-0.log` of `logs/rank-0.log.3`."""
    return piece.with_suffix("") if _number(piece) else piece


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Logs by their names, the parts of each before it and in the order in which they were written."""
    return sorted(paths, key=lambda path: (str(log_of(path)), _number(path) or math.inf))


def _number(piece: Path) -> int:
    """The number of a part; 0 for a file that is no part."""
    return int(piece.suffix[1:]) if piece.suffix[1:].isdecimal() and piece.stem.endswith(".log") else 0


def begins_at(log: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    """Offset in each piece of a log from which it is newer than some moment, in bytes. sizes: of all pieces at that
    moment, by path."""
    known = [number for number in part_numbers(log) if str(part(log, number)) in sizes]
    # What was the log at that moment may have become a part since: the one after the last part known then.
    was_log = max(known, default=0) + 1
    later = [number for number in part_numbers(log) if number >= was_log]
    begins = {str(log): 0, **{str(part(log, number)): sizes[str(part(log, number))] for number in known}}
    piece = part(log, was_log) if was_log in later else None if later else log
    return begins | ({str(piece): sizes.get(str(log), 0)} if piece else {})


def extents(logs: Iterable[Path]) -> tuple[tuple[int, int], ...]:
    """Inode and size of each log: they change where anything is printed."""
    stamps = []
    for log in logs:
        with contextlib.suppress(OSError):
            stat = log.stat()
            stamps.append((stat.st_ino, stat.st_size))
    return tuple(stamps)


def times_file(log: Path) -> Path:
    """The file of a log's times: lines "SECONDS NUMBER BYTES", where NUMBER is that of the part which the log
    becomes."""
    return log.with_suffix(TIMES)


def place_at(log: Path, when: float) -> tuple[int, int] | None:
    """Number and offset of where a log was at a moment (seconds since 1970), at most TIMES_S earlier; (0, 0) where it
    began later. None where no times were kept."""
    with contextlib.suppress(OSError):
        if (stat := log.stat()).st_mtime < when:  # nothing was printed since
            return max(part_numbers(log), default=0) + 1, stat.st_size
    try:
        lines = times_file(log).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    place = (0, 0)
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line, on a full disk
            seconds, number, size = line.split()
            if float(seconds) > when:
                break
            place = int(number), int(size)
    return place


class LogKeeper:
    """Sends what this process and its children print to a log, and keeps that log in parts.

    kept_bytes: how much of the log is kept; 0: all of it, in one piece.
    """

    def __init__(self, log: Path, kept_bytes: int) -> None:
        self._log, self._kept = log, kept_bytes
        self._number = max(part_numbers(log), default=0) + 1
        """Number that the current file gets once it becomes a part."""
        self._noted_at, self._noted = 0.0, -1
        log.parent.mkdir(exist_ok=True)
        self._handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for stream in STREAMS:
            os.dup2(self._handle, stream)
        threading.Thread(target=self._keep, daemon=True, name="dsrun-log").start()

    def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk: the rank itself will say so
                self.look()
            time.sleep(LOOK_S)

    def look(self) -> None:
        """Note the size, and begin another part where the log is large enough. Raises OSError."""
        size = os.fstat(self._handle).st_size
        if size != self._noted and time.monotonic() - self._noted_at >= TIMES_S:
            self._noted_at, self._noted = time.monotonic(), size
            with times_file(self._log).open("a", encoding="ascii") as file:
                file.write(f"{time.time():.0f} {self._number} {size}\n")
        if self._kept and size >= self._kept // PARTS:
            self._begin_part()

    def _begin_part(self) -> None:
        """Go on in a new file. Printing moves there first, so that a part is complete when it gets its name."""
        before, new = self._handle, self._log.with_name(f".{self._log.name}.new")
        # A file that is renamed is still written to through open handles: first the streams, then the names.
        self._handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._send(before, self._handle)
            self._log.rename(part(self._log, self._number))
            new.rename(self._log)
        except OSError:
            self._send(self._handle, before)
            os.close(self._handle)
            self._handle = before
            raise
        self._number += 1
        os.close(before)
        _, *later = part_numbers(self._log)
        for number in later[: max(0, len(later) + 2 - PARTS)]:
            part(self._log, number).unlink()

    @staticmethod
    def _send(before: int, after: int) -> None:
        """Send to another file the streams that go to `before`; a stream that the script has redirected stays."""
        for stream in STREAMS:
            if os.path.samestat(os.fstat(stream), os.fstat(before)):
                os.dup2(after, stream)

"""The end of a log, as an error shows it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsrun.job.log_parts import pieces

TAIL_LINES, TAIL_BYTES = 12, 256 << 10
FRAME = re.compile(r"^(?:\[rank\d{1,6}\]: ?)? {2}File \"(?P<file>[^\"\n]{1,500})\", line \d")
CODE = re.compile(r"^(?:\[rank\d{1,6}\]: ?)? {4}")
"""A frame of a traceback, and the lines of code below it."""
STARTS_RANKS = re.compile(
    r"/dsrun/jobs/supervision/\w{1,40}\.py$|^<frozen runpy>$|/lib/python[\d.]{1,5}/runpy\.py$"
)
"""Files that start a rank: no user looks there for a mistake of theirs."""


def end_of(path: Path, since: int = 0) -> bytes:
    """The end of a log, which may have gigabytes. since: its size before this attempt, in bytes."""
    *before, last = pieces(path) or [path]
    with last.open("rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        content = file.read(TAIL_BYTES)
    if before and not since and len(content) < TAIL_BYTES // 2:  # it has just begun another part
        with before[-1].open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            content = file.read(TAIL_BYTES) + content
    return content


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; says so where there are none."""
    try:
        text = end_of(path).decode("utf-8", errors="replace")
    except OSError:
        text = ""
    # A bar is drawn over itself: only its last state counts, and a finished one says nothing.
    drawn = [line.rsplit("\r", 1)[-1] for line in text.split("\n")]
    last_lines = [line for line in without_own_frames(drawn) if line.strip() and "100%|" not in line][-lines:]
    return "\n".join(f"    | {line[:240]}" for line in last_lines) or "    | (its log is empty)"


def without_own_frames(lines: Iterable[str]) -> Iterator[str]:
    """A log's lines without the frames in which dsrun starts a rank."""
    hidden = False
    for line in lines:
        if frame := FRAME.match(line):
            hidden = bool(STARTS_RANKS.search(frame["file"]))
        elif not CODE.match(line):
            hidden = False
        if not hidden:
            yield line

"""One line of a log: what stands in front of its text (rank, host, time, level), and the forms it is searched in.

Logs come through launchers, batch systems and containers, each of which puts something in front; the prefixes are
also stacked: `node2: [rank3]: 2024-09-15 20:18:01 [INFO] text`.
"""

from __future__ import annotations

import contextlib
import re
from datetime import datetime, timezone
from typing import NamedTuple

MOST_CHARACTERS = 8000
"""Characters of a line that are looked at, half at either end: a progress bar can make a line of megabytes."""
MOST_PREFIXES = 8
COLOURS = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]|\x1b\][^\x07\n]{0,200}\x07")

_DATE = r"(?P<date>\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?:Z|[+-]\d\d:?\d\d)?"
PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"[\[【(]?" + _DATE + r"[\]】)]?,?\s{0,3}(?:-\s)?",
        r"\[?(?P<glog>[EWIF]\d{3,4} \d\d:\d\d:\d\d\.\d{1,9})(?:\s{1,6}\d{1,9})?\s",
        # torch before 2.3 wrote the level's letter without a time.
        r"\[(?P<letter>[EWIF]) [\w./-]{1,80}\.(?:cpp|cu|h|hpp|py):\d{1,6}\]\s?",
        r"\[rank(?P<rank>\d{1,6})\]:?\s?",
        r"\[(?:default|local_rank)(?P<local>\d{1,4})\]:?\s?",
        r"\[\d{1,6},(?P<mpi>\d{1,6})\]<std(?:err|out)>:?\s?",
        r"\((?:(?P<actor>[\w.-]{1,80}) )?pid=\d{1,9}(?:, ip=(?P<ip>[\w.:-]{1,60}))?\)\s?",
        # srun --label pads to the width of the last task's number; a Rust backtrace's frames are padded to four.
        r"(?: {1,2}(?=\d:)| (?=\d\d:))?(?P<task>\d{1,5}): (?=\s{0,12}\S)",
        r"\[pod/(?P<pod>[\w.-]{1,120})(?:/[\w.-]{1,120})?\]\s?",
        r"(?:stderr|stdout|err|out)\s?[:|]\s",
        r"(?P<lower>warning): (?=\S)",
        r"(?P<passed>PASSED|SKIPPED|XFAIL) (?=\S)",
        r"\[?(?P<level>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?:\|[\w./-]{1,80}:\d{1,6})?\]?[:,]?\s{1,8}"
        r"(?!in\b)",
        # logging's own default; torch warns in it of what ends a job.
        r"(?P<logged>ERROR|CRITICAL):[\w.]{1,80}:(?=\S)",
        r"\[?[Rr]ank:? ?(?P<spoken>\d{1,6})\]?\s?[:|]\s?",
        r"\[[\w.]{1,60}\.(?:py|cpp|cc|cu|go|rs):\d{1,6}(?::\w{1,60})?\]\s?",
        r"(?P<host>(?=[\w.-]{0,80}\d)[A-Za-z0-9][\w.-]{1,80}): (?!\d)(?=\S| )",
        r"(?P<nccl>[A-Za-z][\w.-]{0,80}):\d{1,9}:\d{1,9}(?: \[(?P<gpu>\d{1,3})\])?\s",
        r"(?P<service>[\w.-]{1,60}-\d{1,5})\s{1,10}\|\s?",
        r"(?:>{1,3} |[│|❱]\s{1,4})",
    )
)
RANK_FIELDS = ("rank", "mpi", "task", "local", "spoken")
HOST_FIELDS = ("host", "ip", "pod", "nccl", "service")
"""Groups of PREFIXES, the surest first."""
NO_HOSTS = re.compile(
    r"Error$|Exception$|Warning$|^(?:E[A-Z]|ERR)\d{4,6}$|^(python|File|line|torch|cuda|sm_|step|epoch|loss|gpu)\d*",
    re.I,
)
"""Words with a digit before a colon that are no host's name, codes of errors among them."""
PYTHON_WARNING = re.compile(r"\.py:\d{1,7}: \w{0,60}Warning: ")
"""A line of Python's warnings module: the program goes on."""
SPEAKS_OF_RANK = re.compile(
    r"\[(?:PG [^\]\n]{0,80} )?[Rr]ank (\d{1,6})\]|\brank[ =:]{1,3}(\d{1,6})\b(?! (?:and|to|out)\b)"
)
"""The rank that a line of torch's is about, as NCCL's watchdog writes it."""

GOES_ON = ("DEBUG", "INFO", "WARNING")
"""Levels at which a program goes on."""
WIDE = "："
LOOSE = "rror : "
"""Colons that are read as plain ones: what an input method makes of them, and those after a blank behind "Error"."""
MIDDLE = re.compile(r"(?<!^)(?=\[rank\d{1,6}\]:)")

DIGITS = "0123456789"
_SMALL = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")


class PeeledLine(NamedTuple):
    """One line of one log."""

    source: int
    """Number of its log, from 0."""
    number: int
    """Line number from 1, as editors count; lines drawn over one another share it."""
    whole: str
    """The line without colours."""
    text: str
    """The line without prefixes; its indentation stays where no prefix stood before it."""
    rank: int | None = None
    host: str | None = None
    when: float | None = None
    """Seconds since 1970, if the line has a time (taken for UTC: times are only compared)."""
    level: str = ""
    """"DEBUG", "INFO", "WARNING", "ERROR" or empty."""


def peeled(
    source: int, number: int, raw: str, rank: int | None = None, host: str | None = None
) -> PeeledLine:
    """A line with its prefixes taken off. rank, host: those of the whole log, as its name says them."""
    whole = COLOURS.sub("", raw) if "\x1b" in raw else raw
    whole = whole.replace("\x00", "")
    whole = clipped(whole).rstrip()
    text, when, level = whole, None, ""
    for _ in range(MOST_PREFIXES):
        prefix = next((hit for form in PREFIXES if (hit := form.match(text)) and _is_prefix(hit)), None)
        if prefix is None:
            break
        fields = {name: value for name, value in prefix.groupdict().items() if value is not None}
        rank = next((int(fields[name]) for name in RANK_FIELDS if name in fields), rank)
        host = next((fields[name] for name in HOST_FIELDS if name in fields), host)
        when = when if when is not None else _time(fields)
        level = level or _level(fields)
        text = text[prefix.end() :]
    if not level and "Warning: " in text and PYTHON_WARNING.search(text):
        level = "WARNING"
    return PeeledLine(source, number, whole, text, rank, host, when, level)


def pieces(raw: str) -> list[str]:
    """A line as it stands in a log, taken apart where a rank's begins behind another's unfinished one."""
    parts = MIDDLE.split(raw) if "[rank" in raw and len(raw) <= MOST_CHARACTERS else [raw]
    lines = parts[:1]
    for part in parts[1:]:
        if peeled(0, 0, f"{lines[-1]}x").text == "x":  # nothing but prefixes
            lines[-1] += part
        else:
            lines.append(part)
    return lines


def clipped(text: str) -> str:
    """A long line's first and last part."""
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def narrow(text: str) -> str:
    """A text with the colons that programs write (WIDE, LOOSE)."""
    text = text.replace(WIDE, ": ") if WIDE in text else text
    return text.replace(LOOSE, "rror: ") if LOOSE in text else text


def narrow_bytes(text: bytes) -> bytes:
    """The same of bytes."""
    # Every byte of a log comes through here. isascii() takes a tenth of the time that looking for WIDE would.
    text = text if text.isascii() else text.replace(WIDE.encode(), b": ")
    return text.replace(LOOSE.encode(), b"rror: ") if LOOSE.encode() in text else text


def folded(text: bytes) -> bytes:
    """A text in small letters, without digits: the steps of a training are so a handful of different lines."""
    return text.translate(_SMALL, DIGITS.encode())


def _is_prefix(hit: re.Match[str]) -> bool:
    host = hit.groupdict().get("host")
    return hit.end() > hit.start() and not (host and NO_HOSTS.search(host))


def _level(fields: dict[str, str]) -> str:
    if "passed" in fields:  # a test's outcome, whose name may hold any words
        return "INFO"
    letter = (fields.get("glog") or fields.get("letter") or "")[:1]
    by_letter = {"E": "ERROR", "W": "WARNING", "I": "INFO", "F": "ERROR"}.get(letter, "")
    level = fields.get("level") or fields.get("lower", "").upper() or fields.get("logged") or by_letter
    return {"WARN": "WARNING", "CRITICAL": "ERROR", "FATAL": "ERROR"}.get(level, level)


def _time(fields: dict[str, str]) -> float | None:
    """Seconds since 1970; glog names no year (2000 is taken, a leap year), and torch's no leading zero."""
    if date := fields.get("date"):
        text = date.replace("/", "-").replace(",", ".").replace("_", " ").replace("T", " ")
        with contextlib.suppress(ValueError):
            day, _, fraction = text.partition(".")
            parsed = datetime.strptime(day, "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
            return parsed.timestamp() + float(f"0.{fraction or 0}")
    if glog := fields.get("glog"):
        day, _, clock = glog[1:].partition(" ")
        with contextlib.suppress(ValueError):
            parsed = datetime.strptime(f"2000 {day.zfill(4)} {clock[:8]}", "%Y %m%d %H:%M:%S")
            return parsed.replace(tzinfo=timezone.utc).timestamp() + float(f"0.{clock[9:] or 0}")
    return None

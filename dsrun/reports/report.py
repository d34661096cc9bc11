"""`dsrun report`: one or several runs in one file, which needs nothing else and shows itself in any browser."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.files import write_atomic
from dsrun.jobs.runs.metrics_file import StepColumns
from dsrun.reports.comparison import compared
from dsrun.reports.page import MARK, POLICY, render
from dsrun.reports.run_page import RunPage, page_of
from dsrun.words import counted, time_text

WATCH_S = 10.0
"""Seconds between two looks at a run with --watch, and between two reloads of the page in a browser."""
HEAD_BYTES = 4096


@dataclass(frozen=True)
class ReportedRun:
    """A run of a report, with what was read of its metrics so far."""

    path: Path
    name: str
    columns: StepColumns


def of_runs(paths: Sequence[Path]) -> list[ReportedRun]:
    """The runs of a report; those of one name are told apart by their folders."""
    names = [path.name for path in paths]
    return [
        ReportedRun(path, name if names.count(name) == 1 else str(path), StepColumns(path))
        for path, name in zip(paths, names, strict=True)
    ]


def write(runs: Sequence[ReportedRun], file: Path, *, watched: bool = False) -> bool:
    """Write the report as it is now, in one step. Returns whether something is still to come: one of the runs goes on.

    watched: it will be written again, so the browser is told to look again.
    """
    pages = [page_of(run.path, run.name, run.columns) for run in runs]
    alive = any(page.alive for page in pages)
    # Only scripts with this number run: text of a run that looked like a script would not.
    nonce = secrets.token_urlsafe(16)
    text = render(
        "report.html.j2",
        nonce=nonce,
        policy=f"{POLICY.format(nonce=nonce)}; form-action 'none'",
        title=_title(pages),
        pages=pages,
        compared=compared([(run.path, run.name, run.columns) for run in runs]),
        written=time_text(time.time()),
        refresh_s=round(WATCH_S) if watched and alive else None,
    )
    write_atomic(file, text)
    return alive


def _title(pages: Sequence[RunPage]) -> str:
    return pages[0].name if len(pages) == 1 else f"{counted(len(pages), 'run')} side by side"


def watch(runs: Sequence[ReportedRun], file: Path, sleep: Callable[[float], None] = time.sleep) -> int:
    """Write the report again and again until every run has ended. Returns how often it was written."""
    count = 1
    while write(runs, file, watched=True):
        sleep(WATCH_S)
        count += 1
    return count


def check_replaceable(file: Path, *, force: bool) -> None:
    """Raise DsrunError where the report would take the place of something that is no report."""
    if force or not file.exists():
        return
    if file.is_dir():
        raise DsrunError("is a folder", where=f"-o {file}", hint="Name a file in it.")
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError as error:
        raise DsrunError(f"can't be read: {error.strerror}", where=f"-o {file}") from error
    if head and MARK.encode() not in head:
        raise DsrunError(
            "exists, and is no report of dsrun's", where=f"-o {file}", hint="Name another, or add --force."
        )

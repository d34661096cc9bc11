"""The board's pages as HTML: the table, a run, several runs, and the users of the GPUs."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any, NamedTuple

from dsrun.cluster.devices import Machine, detect
from dsrun.jobs.runs.run_summaries import Summary
from dsrun.reports.board.known_runs import OF_A_PAGE, UNREAD, KnownRuns, key_of, signature
from dsrun.reports.comparison import compared
from dsrun.reports.figures import AXES
from dsrun.reports.page import render
from dsrun.reports.run_page import kind_of, page_of
from dsrun.words import counted, gib_text, loss_text, span_text, time_text

MOST_COMPARED = 12
"""Runs in one chart; more colours can't be told apart."""
MOST_PAGES = 48
GPUS_S = 5.0
"""Seconds that an answer of NVML holds."""
GPUS_WAIT_S = 0.03


class Cell(NamedTuple):
    """A cell of the table. value: its place in the order; share: the length of a bar, from 0 to 1."""

    text: str
    note: str = ""
    value: float | str = ""
    share: float | None = None
    over: bool = False


class GpuRow(NamedTuple):
    """A GPU of this machine, and its user. key: that of the user's run, where it is on the board."""

    number: int
    name: str
    memory: str
    holder: str
    key: str = ""


class Views:
    """The board's pages. For several threads: a run's pages are made one after the other, other runs' beside them."""

    def __init__(self, runs: KnownRuns) -> None:
        self.runs = runs
        runs.on_read = _row
        self._lock = threading.Lock()
        self._of_run: dict[str, threading.Lock] = {}
        """Held while a run is read, so that one whose files are slow holds up nobody else's page."""
        self._pages: OrderedDict[tuple[str, str], tuple[object, str]] = OrderedDict()
        self._gpus: list[GpuRow] = []
        self._asked_gpus = float("-inf")
        self._asking = threading.Lock()

    def table(self) -> dict[str, Any]:
        """The values of the table's page. Raises DsrunError where the folder is gone."""
        lines = self.runs.lines()
        kinds = [kind_of(line.state) for line in lines]
        unread = sum(line.state == UNREAD for line in lines)
        counts = {"running": kinds.count("live"), "failed": kinds.count("bad"), UNREAD: unread}
        return {
            "folder": str(self.runs.folder.absolute()),
            "rows": [_row(line) for line in lines],
            "told": ", ".join(f"{count} {word}" for word, count in counts.items() if count),
            "count": counted(len(lines), "run"),
            "gpus": self.gpus(lines),
        }

    def run(self, name: str, by: str) -> str | None:
        """The body of a run's page; None where the board has no such run."""
        path = self.runs.path_of(name)
        if path is None:
            return None
        now = (self.runs.state_of(name), *signature(path, OF_A_PAGE))
        # Two locks: this run's own while its page is made, which may take a second, and the board's only for the table
        # of pages. Who opens another run's page waits for neither.
        with self._reading(name):
            page_kept = self._pages.get((name, by))
            if page_kept is None or page_kept[0] != now:
                page = page_of(path, name, self.runs.columns(path), by)
                page_kept = (
                    now,
                    render("board_run_body.html.j2", page=page, by=by, axes=AXES, key=key_of(name)),
                )
        with self._lock:
            self._pages[name, by] = page_kept
            self._pages.move_to_end((name, by))
            while len(self._pages) > MOST_PAGES:
                self._pages.popitem(last=False)
        return page_kept[1]

    def comparison(self, names: Sequence[str], by: str) -> str:
        """The body of a page of several runs; those that the board doesn't have are left out."""
        chosen = [(path, name) for name in names[:MOST_COMPARED] if (path := self.runs.path_of(name))]
        with ExitStack() as locks:
            # In one order for everybody: of two comparisons of the same runs, none waits for the other's half.
            for name in sorted(name for _, name in chosen):
                locks.enter_context(self._reading(name))
            side_by_side = compared([(path, name, self.runs.columns(path)) for path, name in chosen], by)
        keys = [key_of(name) for _, name in chosen]
        return render("board_compare_body.html.j2", found=side_by_side, by=by, axes=AXES, keys=keys)

    def _reading(self, name: str) -> threading.Lock:
        with self._lock:
            return self._of_run.setdefault(name, threading.Lock())

    def gpus(self, runs: Sequence[Summary]) -> list[GpuRow]:
        """This machine's GPUs by the last answer, which is renewed every GPUS_S seconds. The driver may take a second:
        nobody waits for it longer than GPUS_WAIT_S. runs: those that the board knows."""
        if time.monotonic() - self._asked_gpus > GPUS_S and self._asking.acquire(blocking=False):
            asks = threading.Thread(target=self._ask_gpus, args=(runs,), daemon=True)
            asks.start()
            asks.join(GPUS_WAIT_S)
        return self._gpus

    def _ask_gpus(self, runs: Sequence[Summary]) -> None:
        try:
            # For CPUs it is never refused: a board without GPUs is better than none.
            self._gpus = gpu_rows(detect({"DS_ACCELERATOR": "cpu"}), runs)
        finally:
            self._asked_gpus = time.monotonic()
            self._asking.release()


def gpu_rows(machine: Machine, runs: Sequence[Summary]) -> list[GpuRow]:
    """A row for each GPU, with its user. runs: those that the board knows."""
    rows = []
    names = {os.path.realpath(line.path): line.name for line in runs} if machine.gpus else {}
    for gpu in machine.gpus:
        used = gpu.use.used_bytes if gpu.use else None
        memory = (
            f"{gib_text(used)} of {gib_text(gpu.memory_bytes)}"
            if used is not None
            else gib_text(gpu.memory_bytes)
        )
        holder = gpu.use.holder if gpu.use else None
        name = names.get(os.path.realpath(holder.run_dir)) if holder and holder.run_dir else None
        rows.append(
            GpuRow(gpu.index, gpu.name, memory, str(gpu.use or "unknown"), key_of(name) if name else "")
        )
    return rows


@lru_cache(maxsize=4096)
def _row(line: Summary) -> Any:
    """A row of the table as HTML: the same line is written once."""
    from markupsafe import Markup

    cells = {} if line.state == UNREAD else {
        "step": _steps(line),
        "loss": Cell(
            _loss(line.loss), f"eval {loss_text(line.eval_loss)}" if line.eval_loss is not None else "",
            _sortable(line.loss),
        ),
        "tokens/s": Cell(
            f"{line.tokens_per_second:,.0f}" if line.tokens_per_second else "-", "", line.tokens_per_second or -1.0
        ),
        "memory": _memory(line),
        "devices": Cell(line.devices or "-", counted(line.ranks, "rank") if line.ranks else "", line.devices or ""),
        "started": Cell(time_text(line.started), f"took {span_text(line.seconds)}", line.started or 0.0),
    }  # fmt: skip
    about = " · ".join(filter(None, (line.model, line.preset)))
    text = render(
        "board_row.html.j2", line=line, about=about, kind=kind_of(line.state), key=key_of(line.name),
        why=_why(line), cells=cells,
    )  # fmt: skip
    return Markup(text)  # noqa: S704  (a template's)


def _why(line: Summary) -> str:
    """The rank that failed first, and the reason."""
    reason = line.problem or line.cause or ""
    return f"rank {line.first_rank}: {reason}" if line.first_rank is not None and reason else reason


def _steps(line: Summary) -> Cell:
    if line.steps is None:
        return Cell("-", "", -1.0)
    share = min(1.0, line.steps / line.total_steps) if line.total_steps else None
    left = f"{span_text(line.seconds_left)} left" if line.seconds_left is not None else ""
    total = "?" if line.total_steps is None else f"{line.total_steps:,}"
    return Cell(f"{line.steps:,} of {total}", left, float(line.steps), share)


def _memory(line: Summary) -> Cell:
    if line.memory_bytes is None:
        return Cell("-", "", -1.0)
    planned = line.planned_bytes
    share = min(1.0, line.memory_bytes / planned) if planned else None
    note = f"planned {gib_text(planned)}" if planned else ""
    return Cell(
        gib_text(line.memory_bytes),
        note,
        line.memory_bytes,
        share,
        bool(planned and line.memory_bytes > planned),
    )


def _loss(value: float | None) -> str:
    return "not finite" if value is not None and value - value != 0 else loss_text(value)


def _sortable(value: float | None) -> float:
    """Losses that are not finite, and those that are not there, come last."""
    return value if value is not None and value - value == 0 else 1e300

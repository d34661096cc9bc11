"""How a rank tells what it does: files in the run folder, read by `dsrun` while it watches and afterwards.

events.jsonl (rank 0): what phase the run is in, evaluations, checkpoints, results. metrics.jsonl (rank 0): one line
per optimizer step and evaluation. state/rank-N.json (every rank): whether it lives, and how it ended.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from dsrun.jobs.layout import EVENTS, METRICS, STATE


class Report:
    """A rank's pen. On ranks other than 0 events and metrics are not written."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self._state = {
            "rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time(),
            "status": "running",
        }  # fmt: skip
        self._write_state()

    def phase(self, text: str) -> None:
        """A new phase, in words for the user: "loading the model"."""
        self.event("phase", text=text)

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        self._append(EVENTS, {"time": round(time.time(), 3), "event": kind, **fields})

    def metrics(self, **fields: Any) -> None:
        """Append to metrics.jsonl. Floats keep every digit: runs are compared by them."""
        self._append(METRICS, {"time": round(time.time(), 3), **fields})

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines after `step`: a resumed run writes them again."""
        path = self.run_dir / METRICS
        if self.rank == 0 and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            temporary = path.with_suffix(".new")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(path)

    def finished(self) -> None:
        """This rank did all its work."""
        self._end("finished")

    def failed(self, error: BaseException) -> None:
        """This rank can't go on: the last line of the error, and the whole of it."""
        text = "".join(traceback.format_exception(error))
        summary = traceback.format_exception_only(error)[-1].strip()
        self._end("failed", error=summary, traceback=text)

    def _end(self, status: str, **fields: str) -> None:
        self._state |= {"status": status, "ended": time.time(), **fields}
        self._write_state()

    def _write_state(self) -> None:
        folder = self.run_dir / STATE
        folder.mkdir(exist_ok=True)
        temporary = folder / f".rank-{self.rank}.new"
        temporary.write_text(json.dumps(self._state, ensure_ascii=False), encoding="utf-8")
        temporary.replace(folder / f"rank-{self.rank}.json")

    def _append(self, name: str, fields: dict[str, Any]) -> None:
        if self.rank == 0:
            with (self.run_dir / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields, ensure_ascii=False) + "\n")

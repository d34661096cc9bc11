"""A rank's own state: state/rank-N.json in the run folder, written by the rank, read by those who watch."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from dsrun.files import SHORT, is_full, json_text, read_inside, write_over
from dsrun.host.hiding import shown_value
from dsrun.job.layout import SUPERVISOR, state_file
from dsrun.job.run_folder import json_object

FINISHED, FAILED, RUNNING, STOPPED = "finished", "failed", "running", "stopped"
"""stopped: it ended early on request, after a checkpoint."""
GONE = "the launcher or dsrun is gone; this rank ends too"


def read_state(run_dir: Path, rank: int) -> dict[str, Any]:
    """The state of a rank, as it wrote it; empty where there is none that can be read."""
    with contextlib.suppress(OSError):
        return json_object(read_inside(run_dir, state_file(rank)))
    return {}


class RankState:
    """A rank's state. Made once in a process, by what starts the rank; see `of`."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.run_dir, self.rank = run_dir, rank
        self.fields: dict[str, Any] = {
            "rank": rank, "pid": os.getpid(), "supervisor": int(os.environ.get(SUPERVISOR, "0")),
            "host": socket.gethostname(), "started": time.time(), "status": RUNNING,
        }  # fmt: skip
        self._put()

    @property
    def ended(self) -> bool:
        """Whether the rank has written how it ended."""
        return bool(self.fields["status"] != RUNNING)

    def end(self, status: str, **fields: Any) -> None:
        """The last word: "finished", "failed" (with error, traceback and exit code; 1 where none is given) or
        "stopped"."""
        code = {"code": 1} if status == FAILED else {}
        self.write(status=status, ended=time.time(), **{**code, **fields})

    def write(self, **fields: Any) -> None:
        """Add fields, and write the file as one."""
        self.fields |= fields
        if self.is_own:
            self._put()

    @property
    def is_own(self) -> bool:
        """Whether the file is still this rank's. A host that was lost may come back after the job was started again
        elsewhere: a rank that is left there must not write over its successor's state."""
        there = read_state(self.run_dir, self.rank)
        return all(there.get(name) == self.fields[name] for name in ("pid", "host", "started"))

    @property
    def _path(self) -> Path:
        return self.run_dir / state_file(self.rank)

    def _put(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f".rank-{self.rank}.new")
        text = json_text(shown_value("", self.fields))
        try:
            # Errors name files, which need not be UTF-8.
            temporary.write_bytes(text.encode("utf-8", "replace"))
            temporary.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not is_full(error):
                raise
            self._put_in_place()

    def _put_in_place(self) -> None:
        """Write over the file, in short: on a full disk there is no room for a new one."""
        short = {
            **shown_value("", self.fields),
            "traceback": "",
            "error": str(self.fields.get("error", ""))[:SHORT],
        }
        write_over(self._path, json_text(short))


_states: dict[tuple[str, int], RankState] = {}


def of(run_dir: Path, rank: int) -> RankState:
    """This process's state of the rank, made if it is not there yet."""
    key = (str(run_dir), rank)
    if key not in _states:
        _states[key] = RankState(run_dir, rank)
    return _states[key]

"""A job's folder on disk: what lies where, who holds it, and what state it is in.

job.json  secrets.json  run.toml  deepspeed.json  command.sh  environment.json
prepare.log  logs/launcher.log  logs/launcher-N.log  logs/agents.log  logs/rank-N.log
events.jsonl  metrics.jsonl  state/rank-N.json  run.json
checkpoints/step-N/  model/  generated_predictions.jsonl  loss.png
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from dsrun.errors import BOUNDLESS, DsrunError, Problem
from dsrun.file_lock import FileLock, holder_of, is_held
from dsrun.files import (
    SHORT,
    explained,
    is_full,
    json_text,
    open_inside,
    read_inside,
    why_not_readable,
    why_not_writable,
    write_atomic,
    write_over,
)
from dsrun.host.hiding import shown_value
from dsrun.host.system import nearest_there
from dsrun.job import layout
from dsrun.job.layout import SAVE_REQUEST, STOP_WORD

JOB, CONFIG, COMMAND, ENVIRONMENT = layout.JOB, "deepspeed.json", "command.sh", "environment.json"
STATE = "run.json"
LOGS, LAUNCHER_LOG, PREPARE_LOG = "logs", "logs/launcher.log", "prepare.log"
CONTROL = ".control"
"""File that tells host agents how to reach the coordinator."""
AGENTS_LOG = "logs/agents.log"
"""Output of the programs that lead to the hosts: ssh, pdsh, mpirun, srun."""
OWN_LOG = "logs/dsrun.log"
"""dsrun's own output without a terminal (--detach)."""
FLIGHT_RECORDER = "logs/flight-recorder.rank-"
"""Start of the names of torch's flight recorder dumps, where it is on; the rank's number follows."""
MARK = "logs/.shared"
"""A file by which a host sees whether it has the same folder."""
SUBMITTED = "submit.sbatch"
"""The script that `dsrun submit` sent. It and Slurm's log, logs/slurm-N.out, are there before the job is."""
LINES_AT_ONCE = 500
"""JSON lines that are parsed in one piece: it takes milliseconds, in which no other thread runs."""
MOST_LINES_BYTES, LONGEST_LINE = 4 << 30, 16 << 20
"""Largest file of JSON lines that is followed, and its longest line, in bytes."""
BLOCK_BYTES = 1 << 20
"""Bytes of a file of JSON lines that are read in one piece, for the same reason."""
LOCK = ".lock"
TEMPORARY = re.compile(
    r"\.(job|deepspeed|environment|run)\.json\.[0-9a-f]{12}\.tmp|\.command\.sh\.[0-9a-f]{12}\.tmp"
)
"""Temporary files that `write_atomic` leaves where it is killed."""
STAMP = re.compile(r"(-\d{8}-\d{6})+$")


def stamped(name: str) -> str:
    """A run's name with the present time at its end, in place of an earlier time."""
    return f"{STAMP.sub('', name)}-{datetime.now():%Y%m%d-%H%M%S}"


def launcher_log(host: int) -> str:
    """The log of DeepSpeed's launcher on host number `host`."""
    return f"logs/launcher-{host}.log" if host else LAUNCHER_LOG


def rank_log(rank: int) -> str:
    """The log of a rank's output."""
    return f"{LOGS}/rank-{rank}.log"


def check_new(run_dir: Path) -> list[Problem]:
    """Why a new run can't go into this folder; empty if it can."""
    where = str(run_dir)
    if why := why_not_readable(run_dir):
        return [Problem(f"can't be used: {why}", where, "Choose another --output-dir.")]
    if run_dir.exists() and not run_dir.is_dir():
        return [Problem("is not a folder", where, "Choose another --output-dir.")]
    if run_dir.is_dir():
        if in_use(run_dir):
            return [_held_problem(run_dir)]
        if (run_dir / JOB).exists():
            state = describe_state(run_dir)
            other = "Choose another --output-dir."
            hint = other if state == "finished" else f"Continue it with --resume, or: {other}"
            return [Problem(f"holds a run already ({state})", where, hint)]
        if not all(map(_may_precede_job, run_dir.iterdir())):
            return [Problem("is not empty", where, "Choose another --output-dir; nothing is overwritten.")]
    if why := why_not_writable(nearest_there(run_dir.absolute())):
        return [Problem(f"can't be made: {why}", where, "Choose another --output-dir.")]
    return []


def check_unfinished(run_dir: Path) -> list[Problem]:
    """Why there is no run in this folder that can go on; empty if there is one."""
    where = str(run_dir)
    if why := why_not_readable(run_dir / JOB):
        return [Problem(f"can't be read: {why}", where)]
    if not (run_dir / JOB).is_file():
        return [Problem("holds no run to continue", where, "Leave --resume out.")]
    if in_use(run_dir):
        hint = f"`dsrun logs {where} -f` follows it, `dsrun stop {where}` ends it."
        return [Problem("is still running", where, hint)]
    if describe_state(run_dir) == "finished":
        hint = (
            f"`dsrun rerun {where}` does it again; `dsrun finetune {where}/model` trains its model further."
        )
        return [Problem("is finished; there is nothing to continue", where, hint)]
    return []


def _may_precede_job(path: Path) -> bool:
    """Whether a file of a run folder comes from sending the job to a queue, or from a start that failed before the
    job was written down: a queue that starts the job again has to get through."""
    if path.name == LOGS and path.is_dir():
        return all(
            entry.name.startswith("slurm-") or entry.name == Path(OWN_LOG).name for entry in path.iterdir()
        )
    return (
        path.name in (SUBMITTED, LOCK)
        or path.name.startswith(f"{LOCK}.")
        or bool(TEMPORARY.fullmatch(path.name))
    )


def describe_state(run_dir: Path) -> str:
    """The run's state in words: "finished", "failed", "running", "stopped: the terminal was closed", ..."""
    record = record_of(run_dir)
    state, why = record.get("state", "not started"), record.get("why")
    if state in ("preparing", "running") and not in_use(run_dir):
        return "interrupted"
    # Of a failed run it may be anything; Run.why has it.
    return f"{state}: {why}" if why and state != "failed" else str(state)


def record_of(run_dir: Path) -> dict[str, Any]:
    """The content of run.json; empty where there is none, or no JSON."""
    with contextlib.suppress(OSError):
        return json_object(read_inside(run_dir, STATE))
    return {}


def write_state(run_dir: Path, state: str, **fields: Any) -> None:
    """Write run.json. state: "preparing", "running", "finished", "failed", "interrupted" or "stopped".

    why: the reason for an end, in a line. On a full disk the old file is written over, with short fields alone.
    """
    content = shown_value("", {"state": state, "time": time.time(), "pid": os.getpid(), **fields})
    try:
        write_atomic(run_dir / STATE, json_text(content, indent=2) + "\n")
    except DsrunError as error:
        if not is_full(error.__cause__):
            raise
        short = {name: value for name, value in content.items() if len(str(value)) <= SHORT}
        try:
            write_over(run_dir / STATE, json_text(short) + "\n")
        except OSError:
            raise error from None


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the run folder as long as this process lives; a second dsrun is refused. Makes the folder."""
    lock = FileLock(run_dir / LOCK)
    with explained("can't be written", run_dir):
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        locked = lock.take()
    if not locked:
        raise DsrunError([_held_problem(run_dir)])
    try:
        for path in run_dir.iterdir():
            if TEMPORARY.fullmatch(path.name):  # nobody else writes here now
                path.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def in_use(run_dir: Path) -> bool:
    """Whether a living process holds the folder, as far as that can be told from here (dsrun/file_lock.py)."""
    return is_held(run_dir / LOCK)


def _held_problem(run_dir: Path) -> Problem:
    holder = holder_of(run_dir / LOCK)
    who = f": {holder}" if holder and holder.pid else ""
    return Problem(
        f"another dsrun is training in this folder{who}", str(run_dir), "Choose another --output-dir."
    )


def request_checkpoint(run_dir: Path, *, then_stop: bool) -> None:
    """Have the ranks of a running fine-tune write a checkpoint after their next step, and end if wanted."""
    write_atomic(run_dir / SAVE_REQUEST, STOP_WORD if then_stop else "save", overwrite=True)


def put_mark(run_dir: Path) -> str:
    """Mark the folder for the other hosts, and return the mark."""
    mark = secrets.token_hex(8)
    (run_dir / MARK).write_text(mark, encoding="ascii")
    return mark


def mark_of(run_dir: Path) -> str | None:
    """The folder's mark as it is seen from here; None where there is none."""
    with contextlib.suppress(OSError):
        return (run_dir / MARK).read_text(encoding="ascii")
    return None


class Follower:
    """Reads the whole lines that were added to a file since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._place, self._inode = 0, -1
        self.began_again = False
        """Whether the last look found another file, and so began at its start."""
        if from_end and path.exists():
            stat = path.stat()
            self._place, self._inode = stat.st_size, stat.st_ino

    def lines(self) -> list[dict[str, Any]]:
        """New JSON lines. A line that is no JSON (a full disk cut it, a resumed run wrote on) is left out."""
        return [line for block in self.blocks() for line in block]

    def blocks(self) -> Iterator[list[dict[str, Any]]]:
        """New JSON lines, BLOCK_BYTES of the file at a time: a long run's lines are never all in memory."""
        try:
            file = open_inside(self._path.parent, self._path.name, most=MOST_LINES_BYTES)
        except FileNotFoundError:
            return iter(())
        stat = os.fstat(file.fileno())
        self.began_again = stat.st_ino != self._inode or stat.st_size < self._place
        if self.began_again:  # a resumed run wrote it again
            self._place, self._inode = 0, stat.st_ino
        return self._blocks(file, stat.st_size)

    def _blocks(self, file: BinaryIO, end: int) -> Iterator[list[dict[str, Any]]]:
        """The blocks up to `end`, the file's size at the start, so that a file that grows is not followed forever."""
        with file:
            half = b""  # the last line so far: it is read again next time where its end is not there yet
            while block := file.read(min(BLOCK_BYTES, end - file.seek(self._place + len(half)))):
                whole, newline, half = (half + block).rpartition(b"\n")
                if len(half) > LONGEST_LINE:  # what follows of it is no JSON either
                    self._place, half = self._place + len(half), b""
                self._place += len(whole) + len(newline)
                yield json_objects(whole + newline)


def json_objects(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects among the whole lines."""
    lines = content.split(b"\n")[:-1]
    pieces = (lines[start : start + LINES_AT_ONCE] for start in range(0, len(lines), LINES_AT_ONCE))
    return [value for piece in pieces for value in _values(piece) if value]


def _values(lines: list[bytes]) -> list[dict[str, Any]]:
    """The JSON object of each line. They are read as one list, in a third of the time; where a line is none, alone."""
    with contextlib.suppress(ValueError, *BOUNDLESS):
        values = json.loads(b"[%b]" % b",".join(lines))
        if len(values) == len(lines) and all(value.__class__ is dict for value in values):
            return values  # type: ignore[no-any-return]
    return [json_object(line) for line in lines]


def json_object(content: bytes) -> dict[str, Any]:
    """A JSON object; empty where the content is none."""
    with contextlib.suppress(ValueError, *BOUNDLESS):
        value = json.loads(content)
        return value if isinstance(value, dict) else {}
    return {}

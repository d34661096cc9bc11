"""--detach: the job goes on in a session of its own, whatever becomes of the terminal.

The command forks before it looks at anything that counts. The child leaves the terminal (its own session, no stdin,
SIGHUP ignored as under nohup), does all of the work, and writes into a nameless file until the run's folder is there,
then into its log. The parent shows what the child writes, and waits until the ranks are started; so whatever is wrong
before that is shown in the terminal, with its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from dsrun.cli.output.results import print_json
from dsrun.errors import DsrunError
from dsrun.files import explained

if TYPE_CHECKING:
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.supervision.run import View

POLL_S = 0.1
QUEUES = "The queue starts the job without a terminal: dsrun submit"


class Detached:
    """The child's side. early: what was written before there was a run folder."""

    def __init__(self, pipe: int, early: IO[bytes]) -> None:
        self._pipe, self._early = pipe, early

    def settle(self, run_dir: Path) -> None:
        """Send all further output of this process to the run's log. Raises DsrunError where it can't be written."""
        from dsrun.job.run_folder import OWN_LOG

        log = run_dir / OWN_LOG
        with explained("can't be written", log):
            log.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        # A run that is continued has a log already: the parent goes on behind what was in it before, plus what this
        # process wrote early, which the parent has shown.
        before = os.fstat(handle).st_size
        _flush()
        os.write(handle, os.pread(self._early.fileno(), 1 << 30, 0))
        _become_output(handle)
        os.close(handle)
        self._tell({"run_dir": str(run_dir), "log": str(log), "pid": os.getpid(), "before": before})

    @contextlib.contextmanager
    def watching(self, view: View) -> Iterator[Callable[[], bool]]:
        """A view that tells the parent at its first look, when the ranks of every host are started."""
        with view as watch:

            def look() -> bool:
                self._tell({"started": True})
                return watch()

            yield look

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(self._pipe, (json.dumps(message) + "\n").encode())


def detached(wanted: bool, connection: ConnectionOptions, *, as_json: bool, dry_run: bool) -> Detached | None:
    """The child's side of --detach, in the child, which goes on; the parent exits from here. None without --detach.

    Raises click.UsageError for a dry run, DsrunError inside of a queue's job, which ends with this command.
    """
    if not wanted:
        return None
    if dry_run:
        raise click.UsageError("--detach: nothing is started that could go on without this terminal.")
    _refuse_in_queue(connection)
    pipe, child_pipe = os.pipe()
    early = tempfile.TemporaryFile("a+b")  # noqa: SIM115  (the child's output as long as it lives)
    # Text that is still buffered would be printed by both.
    _flush()
    pid = os.fork()
    if pid:
        os.close(child_pipe)
        sys.exit(_Parent(pid, pipe, early, as_json=as_json).wait())
    os.close(pipe)
    _leave_terminal(early.fileno())
    return Detached(child_pipe, early)


def _refuse_in_queue(connection: ConnectionOptions) -> None:
    from dsrun.jobs.launchers import KUBERNETES

    inside = "a pod" if connection.launcher == KUBERNETES else None
    inside = "a job of Slurm's" if os.environ.get("SLURM_JOB_ID") else inside
    if inside:
        raise DsrunError(
            f"is of no use in {inside}, which ends with this command", where="--detach", hint=QUEUES
        )


def _leave_terminal(output: int) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.__stdin__.fileno() if sys.__stdin__ else 0)
    os.close(nothing)
    _become_output(output)


def _become_output(handle: int) -> None:
    for number in (1, 2):
        os.dup2(handle, number)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class _Parent:
    """The terminal's side: shows what the child writes until its ranks are started."""

    def __init__(self, child: int, pipe: int, early: IO[bytes], *, as_json: bool) -> None:
        self._child, self._pipe, self._as_json = child, pipe, as_json
        self._file, self._shown = early.fileno(), 0
        self._run: dict[str, object] = {}
        self._text = b""

    def wait(self) -> int:
        """The exit code: 0 once the ranks are started, else the child's own."""
        while True:
            try:
                started = self._followed()
                break
            except KeyboardInterrupt:  # the job isn't detached yet, and ends with its terminal
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._child, signal.SIGINT)
        if started:
            self._tell_started()
            return 0
        _, status = os.waitpid(self._child, 0)
        self._show()
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _followed(self) -> bool:
        """Whether the ranks were started; False where the child ended before."""
        while True:
            ready, _, _ = select.select([self._pipe], [], [], POLL_S)
            self._show()
            if not ready:
                continue
            new = os.read(self._pipe, 1 << 16)
            if not new:
                return False
            *lines, self._text = (self._text + new).split(b"\n")
            if any(map(self._take, lines)):
                self._show()
                return True

    def _take(self, line: bytes) -> bool:
        """Take a message of the child's. Returns whether the ranks are started."""
        message = json.loads(line)
        if "log" in message:
            self._show()
            self._shown += message.pop("before")
            self._file = os.open(message["log"], os.O_RDONLY)
            self._run = message
            if not self._as_json:
                self._tell_where()
        return "started" in message

    def _show(self) -> None:
        new = os.pread(self._file, 1 << 20, self._shown)
        self._shown += len(new)
        with contextlib.suppress(OSError):  # the terminal is gone
            sys.stderr.buffer.write(new)
            sys.stderr.flush()

    def _tell_where(self) -> None:
        from shlex import quote

        run_dir = quote(str(self._run["run_dir"]))
        with contextlib.suppress(OSError):
            click.echo(f"run folder  {self._run['run_dir']}  (process {self._run['pid']})")
            click.echo(f"follow it   dsrun logs {run_dir} -f; dsrun show {run_dir}; {self._run['log']}")
            click.echo(f"end it      dsrun stop {run_dir}")

    def _tell_started(self) -> None:
        with contextlib.suppress(OSError):
            if self._as_json:
                print_json("detached", self._run)
            click.echo("started: it goes on without this terminal", err=True)

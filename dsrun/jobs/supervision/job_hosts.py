"""The coordinator's side of the hosts: it starts their agents, connects to them, and hangs up. It decides nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.files import explained
from dsrun.job.job import AnyJob
from dsrun.job.processes import end_processes
from dsrun.job.run_folder import AGENTS_LOG, CONTROL
from dsrun.jobs import launchers
from dsrun.jobs.diagnosis.ends import HostEnd
from dsrun.jobs.launchers.common.agent_command import agent_command
from dsrun.jobs.supervision.protocol import CONNECT_S, HEARTBEAT_S, Connection, Listener, own_addresses

FILES_A_HOST, SPARE_FILES = 2, 512
"""Open files; 1024 are usual, which are not enough for 500 hosts."""
OWN_AGENT = "dsrun's host agent"
POLL_S = 0.05
LEAVE_S, KILL_S = 2.0, 1.0
"""Time for the programs that lead to the hosts to end by themselves, and again after SIGTERM."""


@dataclass
class JobHost:
    """A host of the job as the coordinator sees it."""

    number: int
    name: str
    connection: Connection | None = None
    process: subprocess.Popen[bytes] | None = None
    """The process that leads to this host alone: ssh, or the agent itself on this machine."""
    program: str = ""
    """That process's name."""
    hello: dict[str, Any] | None = None
    """The agent's first message: its addresses, and a free port."""
    reached: list[str] | None = None
    """The first host's addresses that this one reaches."""
    end: HostEnd | None = None
    """The end of its part, as its agent reported it."""
    stackless: tuple[str, ...] = ()
    """Ranks that could not print their stacks when they were to, and why."""
    logs: tuple[tuple[int, int], ...] = ()
    """Extents of its ranks' logs at the last look; see `log_parts.extents`."""
    behind_s: float | None = None
    """Delay of its clock and of its first message of a rank's end. The same for all its ranks: messages
    take unequally long on a busy machine, and the order of the ranks' ends says which one failed first."""

    @property
    def lost(self) -> bool:
        """Whether its agent hung up or went silent before it said how its part ended."""
        return self.end is None and self.connection is not None and self.connection.lost

    @property
    def running(self) -> bool:
        """Whether its agent is there and has not said how its part ended."""
        return self.end is None and self.connection is not None and not self.connection.lost

    def send(self, **message: Any) -> None:
        """Tell its agent, where there is one."""
        if self.connection:
            self.connection.send(**message)


class JobHosts:
    """All hosts of a job, in the order of ranks. environ: of this machine's processes; say: called with a line for the
    user."""

    def __init__(self, job: AnyJob, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.all = [JobHost(number, host.host) for number, host in enumerate(job.hosts)]
        self.launcher = launchers.get(job.launcher)
        self.process: subprocess.Popen[bytes] | None = None
        """The process that leads to all hosts: pdsh, mpirun, srun; or host 0's agent where the others are started by
        hand."""
        self._environ, self._say = environ, say
        self._log = Path(job.run_dir) / AGENTS_LOG
        self._control = Path(job.run_dir) / CONTROL
        self._listener: Listener | None = None
        self._silence_s = 0.0
        self._closing = threading.Event()
        self._heartbeats = threading.Thread(target=self._beat, daemon=True, name="dsrun-heartbeats")

    def __iter__(self) -> Iterator[JobHost]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    # Starting

    def start(self, setup: Mapping[str, Any]) -> None:
        """Start an agent on every host. setup: the first message to each, with "env" for those that lack this
        machine's environment. Raises DsrunError where a program is missing."""
        program = self.launcher.program
        if program and not shutil.which(program, path=self._environ.get("PATH")):
            raise DsrunError(
                f"launcher {self.launcher.name} needs {program}, which is not installed here",
                hint=f"Install it ({self.launcher.package}), or take another way: --launcher.",
            )
        _allow_files(FILES_A_HOST * len(self.all) + SPARE_FILES)
        # Before the first agent: starting a thousand takes longer than one waits for a heartbeat.
        self._heartbeats.start()
        command = agent_command(self._environ)
        with self._log.open("ab") as log:
            if self.launcher.to_each:
                for host in self.all:
                    words = self.launcher.to_each(host.name, [*command, "--node", str(host.number)])
                    self._start_one(host, words, log, setup, remote=words[0] != command[0])
                return
            self._silence_s = setup["silence_s"]
            self._listen(setup)
            names = [host.name for host in self.all]
            control = [*command, "--control", str(self._control)]
            if self.launcher.to_all:
                words = self.launcher.to_all(names, control, self._environ)
                self.process = self._popen(words, subprocess.DEVNULL, log, log)
            elif self.launcher.by_hand:
                for line in self.launcher.by_hand(names, control):
                    self._say(line)
                if self.launcher.own_first:
                    self.process = self._popen([*control, "--node", "0"], subprocess.DEVNULL, log, log)

    def _start_one(
        self, host: JobHost, words: Sequence[str], log: Any, setup: Mapping[str, Any], *, remote: bool
    ) -> None:
        """Start what leads to one host, and exchange messages with its agent over the process's pipes."""
        host.process = process = self._popen(words, subprocess.PIPE, subprocess.PIPE, log)
        host.program = Path(words[0]).name if remote else OWN_AGENT
        assert process.stdin and process.stdout  # noqa: S101  (both are pipes)
        with process.stdin, process.stdout:
            read, write = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        host.connection = Connection(read, write, remote=remote)
        host.connection.silence_s = setup["silence_s"]
        host.send(setup={**setup, "env": setup["env"] if remote else {}, "remote": remote})

    def _popen(self, words: Sequence[str], stdin: int, stdout: Any, stderr: Any) -> subprocess.Popen[bytes]:
        with explained("can't be started", words[0]):
            return subprocess.Popen(
                words, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(self._environ), start_new_session=True
            )  # fmt: skip

    def _listen(self, setup: Mapping[str, Any]) -> None:
        """Wait for calls, and write how to call: for nobody but this user, as it holds the job's environment."""
        token = secrets.token_hex(16)
        self._listener = Listener(token)
        calling = {"token": token, "port": self._listener.port, "addresses": own_addresses()}
        self._control.unlink(missing_ok=True)
        handle = os.open(self._control, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({**setup, "remote": True, **calling}, file)

    def hide_control(self) -> None:
        """Every agent has called: the file that says how is not needed any more."""
        self._control.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            for host in self.all:
                if host.connection:
                    host.connection.heartbeat()

    # Talking

    def receive(self) -> Iterator[tuple[JobHost, dict[str, Any]]]:
        """The agents' messages since the last call."""
        if self._listener and any(not host.connection for host in self.all):
            while caller := self._listener.accept():
                self._identify(caller)
        for host in self.all:
            for message in host.connection.receive() if host.connection else ():
                yield host, message

    def _identify(self, caller: Connection) -> None:
        """Find out whose agent it is that has called."""
        number = (caller.expect("number", CONNECT_S) or {}).get("number")
        host = self.all[number] if isinstance(number, int) and 0 <= number < len(self.all) else None
        if host is None or host.connection is not None:
            caller.close()
            return
        host.connection = caller
        caller.silence_s = self._silence_s
        if self.launcher.by_hand:
            there = sum(1 for one in self.all if one.connection)
            self._say(f"{host.name} is there ({there} of {len(self.all)})")

    def send(self, **message: Any) -> None:
        """Tell every agent."""
        for host in self.all:
            host.send(**message)

    def suspend(self) -> None:
        """Ctrl-Z stops dsrun, not the job: the agents are told not to wait for heartbeats."""
        self.send(asleep=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for host in self.all:
            if host.connection:
                host.connection.awake()
        self.send(asleep=False)

    # Ending

    def close(self) -> None:
        """Hang up, and end the processes that led to the hosts."""
        self._closing.set()
        self.send(bye=True)
        for host in self.all:
            if host.connection:
                host.connection.close()
        if self._heartbeats.is_alive():
            self._heartbeats.join()
        _end_all([process for process in [self.process, *(host.process for host in self.all)] if process])
        if self._listener:
            self._listener.close()
        self.hide_control()


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for them; then end those that are left, all at once: there may be a thousand."""
    until = time.monotonic() + LEAVE_S
    while time.monotonic() < until and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    left = [process for process in processes if process.poll() is None]
    for process in left:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + KILL_S
    for process in left:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        if process.returncode is None:
            end_processes(process.pid, [], 0.0)
            process.wait()


def _allow_files(wanted: int) -> None:
    """Let this process open that many files, as far as it may decide that itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))

"""Run a job on all of its hosts and watch it to its end.

It starts the agents through a launcher, tells them where to meet, hears how their ranks end, and ends them all when
one fails, when a host is gone, or when the user says so.

A job has succeeded only if every rank said that it did.
"""

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from dsrun.cluster import ssh
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.jobs import launchers, wire
from dsrun.jobs.agent_command import agent_command
from dsrun.jobs.deepspeed_command import LOOPBACK
from dsrun.jobs.diagnosis import NodeEnd, RankEnd, again, diagnose, is_cause, tail
from dsrun.jobs.job import LOCAL, AnyJob, Job
from dsrun.jobs.layout import STATE
from dsrun.jobs.processes import GRACE_S, TerminatedError, TimeLimitError, end_processes
from dsrun.jobs.rank_state import FINISHED, STOPPED
from dsrun.jobs.run_folder import AGENTS_LOG, CONTROL, request_checkpoint
from dsrun.jobs.shared import put_mark

POLL_S = 0.1
SETTLE_S = 3.0
"""After the first rank's end, so long for the others' to be told and the launcher to say its code."""
CALL_S = 60.0
"""So long the agents may take to call in where a launcher starts them."""
TIME_LIMIT_SAVE_S = 1800.0
"""For the checkpoint that is written when a scheduler says that the time is nearly over; it ends the job anyway."""
HANDLES, SPARE_HANDLES = 2, 512
"""Open files for a host, and for everything else; 1024 are usual, which are not enough for 500 hosts."""
ONE_REQUEST_S = 0.5
"""An agent that was asked to end, and dsrun itself within so long, are one request."""
RANKS_S = 600.0
"""Until the first rank is there a hang is not one: libraries come from slow disks."""
STACKS_S = 2.0
"""What the ranks get to print their stacks."""


@dataclass(frozen=True)
class Wishes:
    """What the user wants of the way a job is run.

    resume: the ranks go on from the newest whole checkpoint, where there is one. env: what the ranks on other hosts get
    of the user's variables. master_addr, master_port: where the ranks meet; empty and 0: found. hang_timeout_s: so long
    nothing may happen, 0: for ever. save_s: how long the checkpoint may take that is written when the job is asked to
    end; 0: none is.
    """

    resume: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    master_addr: str = ""
    master_port: int = 0
    hang_timeout_s: float = 0.0
    save_s: float = 0.0


class StoppedError(Exception):
    """The ranks have written a checkpoint and ended, as they were asked to. cause: the request."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


@dataclass
class _Host:
    """A host of the job as the head sees it. end: set when its agent has said how its part ended."""

    number: int
    name: str
    peer: wire.Peer | None = None
    process: subprocess.Popen[bytes] | None = None
    way: str = ""
    hello: dict[str, Any] | None = None
    end: NodeEnd | None = None


class Head:
    """One attempt at a job. environ: of this machine's processes; watch: called again and again, tells the user what is
    new, and returns whether anything was; say: called with a line for the user."""

    def __init__(
        self,
        job: AnyJob,
        environ: Mapping[str, str],
        wishes: Wishes,
        watch: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.job, self.environ, self.wishes, self.watch, self.say = job, environ, wishes, watch, say
        self.run_dir = Path(job.run_dir)
        self.launcher = launchers.get(job.launcher)
        self.hosts = [_Host(number, host.host) for number, host in enumerate(job.hosts)]
        self.ends: list[RankEnd] = []
        self._way: subprocess.Popen[bytes] | None = None
        self._listener: wire.Listener | None = None
        self._control = self.run_dir / CONTROL
        self._asked: list[int] = []
        self._was_asked = False
        self._told_at = 0.0
        self._to_sleep = False
        self._beating = threading.Event()

    def run(self) -> None:
        """Carry the job out.

        Raises JobFailedError unless every rank said that it finished, DsrunError where it can't be started,
        StoppedError where the ranks ended early as asked, and KeyboardInterrupt, TerminatedError or TimeLimitError
        where they were ended. Nothing of the job is left on any host that can be reached, whatever happens.
        """
        self._check_program()
        _allow_files(HANDLES * len(self.hosts))
        for path in (self.run_dir / STATE).glob("*"):
            path.unlink()
        with self._signals(), ExitStack() as stack:
            stack.callback(self._end)
            # Before the first agent: starting a thousand takes longer than one waits for a sign of life.
            threading.Thread(target=self._beat, daemon=True, name="dsrun-beats").start()
            self._start_agents()
            self._meet()
            self._watch()

    # Starting

    def _check_program(self) -> None:
        program = self.launcher.program
        if program and not shutil.which(program, path=self.environ.get("PATH")):
            raise DsrunError(
                f"launcher {self.launcher.name} needs {program}, which is not installed here",
                hint=f"Install it ({self.launcher.package}), or take another way: --launcher.",
            )

    def _start_agents(self) -> None:
        orders = {
            "run_dir": str(self.run_dir), "mark": put_mark(self.run_dir), "hosts": [host.name for host in self.hosts],
            "env": dict(self.wishes.env), "extra": ["--resume"] if self.wishes.resume else [],
            "master_port": self.wishes.master_port, "save_s": self.wishes.save_s,
            # What this machine has the head itself holds.
            "hold": [host.number for host in self.hosts if host.name != LOCAL and not ssh.is_here(host.name)],
        }  # fmt: skip
        command = agent_command(self.environ)
        log = (self.run_dir / AGENTS_LOG).open("ab")
        with log:
            if self.launcher.to_each:
                for host in self.hosts:
                    words = self.launcher.to_each(host.name, [*command, "--node", str(host.number)])
                    host.process = self._popen(words, subprocess.PIPE, subprocess.PIPE, log)
                    assert host.process.stdin and host.process.stdout  # noqa: S101  (both are pipes)
                    far = words[0] != command[0]
                    host.way = Path(words[0]).name if far else "dsrun's agent"
                    host.peer = wire.Peer(
                        os.dup(host.process.stdout.fileno()), os.dup(host.process.stdin.fileno()), far=far
                    )
                    host.process.stdin.close()
                    host.process.stdout.close()
                    env = orders["env"] if far else {}
                    host.peer.send(orders={**orders, "env": env, "far": far})
                return
            self._listen(orders)
            control = [*command, "--control", str(self._control)]
            names = [host.name for host in self.hosts]
            if self.launcher.to_all:
                words = self.launcher.to_all(names, control, self.environ)
                self._way = self._popen(words, subprocess.DEVNULL, log, log)
            elif self.launcher.by_hand:
                for line in self.launcher.by_hand(names, control):
                    self.say(line)
                if self.launcher.own_first:
                    self._way = self._popen([*control, "--node", "0"], subprocess.DEVNULL, log, log)

    def _popen(self, words: Sequence[str], stdin: int, stdout: Any, stderr: Any) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                words,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(self.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise DsrunError(f"{words[0]} can't be started: {error.strerror}") from error

    def _listen(self, orders: Mapping[str, Any]) -> None:
        """Wait for calls, and write how to call: for nobody but this user, as it holds the job's environment."""
        token = secrets.token_hex(16)
        self._listener = wire.Listener(token)
        content = {
            **orders, "far": True, "token": token, "port": self._listener.port, "addresses": wire.own_addresses(),
        }  # fmt: skip
        self._control.unlink(missing_ok=True)
        handle = os.open(self._control, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)

    def _beat(self) -> None:
        while not self._beating.wait(wire.BEAT_S):
            for host in self.hosts:
                if host.peer:
                    host.peer.beat()

    def _meet(self) -> None:
        """Hear from every agent, and tell all where the ranks meet."""
        self._until(lambda: all(host.hello for host in self.hosts), self._check_calls)
        self._control.unlink(missing_ok=True)
        first = self.hosts[0].hello or {}
        address, port = LOOPBACK, int(first["port"])
        if len(self.hosts) > 1:
            address = self._common_address(
                [self.wishes.master_addr] if self.wishes.master_addr else first["addresses"], port
            )
        for host in self.hosts:
            assert host.peer  # noqa: S101  (it has called)
            host.peer.send(start=[address, port])

    def _common_address(self, addresses: list[str], port: int) -> str:
        """The master's first address that every other host reaches. Raises DsrunError where there is none."""
        reached: dict[int, list[str]] = {}
        others = self.hosts[1:]
        for host in others:
            assert host.peer  # noqa: S101  (it has called)
            host.peer.send(reach=addresses, port=port)
        self._answers = reached
        self._until(lambda: len(reached) == len(others), self._check_calls)
        for address in addresses:
            if all(address in found for found in reached.values()):
                return address
        none = [host.name for host in others if not reached[host.number]]
        if none:
            what = (
                f"{', '.join(none)} can't reach port {port} of {self.hosts[0].name} at {', '.join(addresses)}"
            )
            hint = "Is a firewall between them? Name a port that is open (--master-port), or an address: --master-addr."
            raise DsrunError(what, hint=hint)
        shown = "; ".join(f"{host.name}: {', '.join(reached[host.number])}" for host in others)
        raise DsrunError(
            f"no address of {self.hosts[0].name} is reached by all hosts ({shown})",
            hint="Name one: --master-addr.",
        )

    def _until(self, done: Callable[[], bool], check: Callable[[float], None]) -> None:
        began = time.monotonic()
        while not done():
            self._hear()
            self._obey()
            for host in self.hosts:
                if host.end or (host.peer and host.peer.lost):
                    raise self._gone(host)
            check(time.monotonic() - began)
            time.sleep(POLL_S / 2)

    def _check_calls(self, waited_s: float) -> None:
        """Raise where the launcher has ended, or the agents had their time and did not call."""
        missing = [host.name for host in self.hosts if not host.peer]
        ended = self._way is not None and self._way.poll() is not None
        if not missing or (self.launcher.by_hand and not ended):
            return
        if ended or waited_s > CALL_S:
            what = f"{', '.join(missing)} did not call in"
            if ended and self._way:
                way = self.launcher.program or "dsrun's agent here"
                what += f": {way} ended with exit code {self._way.returncode}"
            raise JobFailedError(
                [Problem(f"{what}\n{self._said()}", hint="`dsrun doctor --hostfile` looks at every host.")], 1
            )

    def _said(self) -> str:
        return tail(self.run_dir / AGENTS_LOG)

    # While it runs

    _answers: dict[int, list[str]]

    def _hear(self) -> None:
        """Take in what the agents say."""
        if self._to_sleep:
            self._sleep()
        if self._listener and any(not host.peer for host in self.hosts):
            while peer := self._listener.accept():
                self._place(peer)
        for host in self.hosts:
            for message in host.peer.receive() if host.peer else ():
                self._take(host, message)

    def _place(self, peer: wire.Peer) -> None:
        """Find out whose agent it is that has called."""
        said = peer.expect("node", wire.CONNECT_S) or {}
        number = said.get("node")
        host = self.hosts[number] if isinstance(number, int) and 0 <= number < len(self.hosts) else None
        if host is None or host.peer is not None:
            peer.close()
            return
        host.peer = peer
        if self.launcher.by_hand:
            self.say(
                f"{host.name} is there ({sum(1 for one in self.hosts if one.peer)} of {len(self.hosts)})"
            )

    def _take(self, host: _Host, message: dict[str, Any]) -> None:
        if "hello" in message:
            host.hello = message
        elif "reached" in message:
            self._answers[host.number] = message["reached"]
        elif "note" in message:
            where = f"{host.name}: " if len(self.hosts) > 1 else ""
            self.say(f"{where}{message['note']}")
        elif "asked" in message:
            self.say(f"{host.name}: dsrun's agent was asked to end ({message['asked']})")
            if self.wishes.save_s and not self._was_asked:  # else the agent ends its ranks by itself
                self._was_asked, self._told_at = True, time.monotonic()
                self._asked.append(signal.SIGTERM)
        elif "rank_end" in message:
            end = RankEnd(**message["rank_end"])
            self.ends.append(end._replace(when=time.time() - end.when))
        elif "exit" in message:
            host.end = NodeEnd(**message["exit"])
        elif "problems" in message:
            raise DsrunError([Problem(**entry) for entry in message["problems"]])

    def _watch(self) -> None:
        """Watch until every host's part has ended well. Raises as `run` says."""
        moved = settle = 0.0
        moved = time.monotonic()
        save_until: float | None = None
        cause: BaseException | None = None
        there = False
        while not all(host.end for host in self.hosts):
            self._hear()
            if not there and any((self.run_dir / STATE).glob("rank-*.json")):
                there, moved = True, time.monotonic()
            if self.watch():
                moved = time.monotonic()
            for host in self.hosts:
                if not host.end and host.peer and host.peer.lost and not self.ends:
                    raise self._gone(host)
            failed = bool(self.ends) or any(host.end and _badly(host.end) for host in self.hosts)
            if failed:
                settle = settle or time.monotonic()
                ended = all(host.end or (host.peer and host.peer.lost) for host in self.hosts)
                if ended or time.monotonic() - settle > self._patience_s():
                    break
            elif self._asked and cause is None and (limit_s := self._may_save(self._asked[0])):
                cause = _raised(self._asked.pop(0))
                save_until = time.monotonic() + limit_s
                request_checkpoint(self.run_dir, then_stop=True)
                self.say("asked to end: a checkpoint is written first (again to end at once)")
            elif self._asked:
                raise _raised(self._asked.pop(0))
            elif save_until and time.monotonic() > save_until and cause:
                self.say("the checkpoint takes too long: it is given up")
                raise cause
            limit_s = self.wishes.hang_timeout_s
            if limit_s and time.monotonic() - moved > (limit_s if there else max(limit_s, RANKS_S)):
                self._hung()
            time.sleep(POLL_S)
        self._finish_well(cause)

    def _patience_s(self) -> float:
        """What the others get to tell of their ends after the first rank's. Ranks that only lost their peers may have
        lost them with a host, whose silence has to last before it is one."""
        only_lost = bool(self.ends) and not any(map(is_cause, self.ends))
        return wire.LOST_S + 1 if only_lost and len(self.hosts) > 1 else SETTLE_S

    def _may_save(self, number: int) -> float:
        """The seconds for a checkpoint before the job is ended by a signal; 0: none is written."""
        if not isinstance(self.job, Job):
            return 0.0
        return self.wishes.save_s or (TIME_LIMIT_SAVE_S if number == signal.SIGUSR1 else 0.0)

    def _finish_well(self, cause: BaseException | None) -> None:
        if not any(map(is_cause, self.ends)):
            for host in self.hosts:
                if not host.end and host.peer and host.peer.lost:
                    raise self._gone(host)
        if self.ends:
            # The hosts' last words tell of what: end them, and hear them.
            self._end()
        self.watch()
        statuses = {
            int(rank): status for host in self.hosts if host.end for rank, status in host.end.statuses.items()
        }
        done = list(statuses.values())
        codes = [host.end.code for host in self.hosts if host.end]
        if not self.ends and len(done) == self.job.world_size and not any(codes):
            if all(status == FINISHED for status in done):
                return
            if all(status in (FINISHED, STOPPED) for status in done):
                raise StoppedError(cause or TerminatedError())  # or it was asked for in the run folder
        problem, code = diagnose(self.job, self.ends, [host.end for host in self.hosts if host.end])
        raise JobFailedError([problem], code)

    def _hung(self) -> None:
        """Nothing has happened for too long: every rank prints its stack, and the job ends."""
        for host in self.hosts:
            if host.peer:
                host.peer.send(stacks=True)
        time.sleep(STACKS_S)
        what = f"no step and no word for {self.wishes.hang_timeout_s:g} s: the job hangs, and was ended"
        hint = f"Every rank's stack is in its log: {self.run_dir / 'logs'}{again(self.job)}"
        raise JobFailedError([Problem(what, hint=hint)], 1)

    def _gone(self, host: _Host) -> JobFailedError:
        """The error of a host whose agent is not heard any more."""
        if host.process and host.peer and host.peer.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its pipes close a moment before it ends
                host.process.wait(0.5)
        if host.process and (code := host.process.poll()):
            what = f"{host.name}: {host.way} ended with exit code {code}"
        elif host.peer and host.peer.closed:
            what = f"dsrun's agent on {host.name} is gone"
        else:
            what = f"no sign of life from {host.name} for {wire.LOST_S:g} s: it is down, or the network is"
        return JobFailedError([Problem(f"{what}\n{self._said()}", hint=again(self.job).strip())], 1)

    def _obey(self) -> None:
        if self._asked:
            raise _raised(self._asked.pop(0))

    def _sleep(self) -> None:
        """Ctrl-Z stops dsrun, not the job: the agents are told not to wait for signs of life."""
        self._to_sleep = False
        peers = [host.peer for host in self.hosts if host.peer]
        for peer in peers:
            peer.send(asleep=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        for peer in peers:
            peer.woken()
            peer.send(asleep=False)

    # Ending

    def _end(self) -> None:
        """End what there is of the job on every host, and the ways to them."""
        for host in self.hosts:
            if host.peer and not host.end:
                host.peer.send(stop=GRACE_S)
        until = time.monotonic() + GRACE_S + 3
        while time.monotonic() < until and any(
            host.peer and not host.end and not host.peer.lost for host in self.hosts
        ):
            with contextlib.suppress(DsrunError):
                self._hear()
            if self._asked:  # again: at once
                self._asked.clear()
                for host in self.hosts:
                    if host.peer:
                        host.peer.send(stop=0)
            time.sleep(POLL_S)
        self._beating.set()
        for host in self.hosts:
            if host.peer:
                host.peer.send(bye=True)
                host.peer.close()
        ways = [process for process in [self._way, *(host.process for host in self.hosts)] if process]
        until = time.monotonic() + 2
        while time.monotonic() < until and any(process.poll() is None for process in ways):
            time.sleep(POLL_S / 2)
        left = [process for process in ways if process.poll() is None]
        for process in left:  # all at once: there may be a thousand
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
        until = time.monotonic() + 1
        for process in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.returncode is None:
                end_processes(process.pid, [], 0.0)
                process.wait()
        if self._listener:
            self._listener.close()
        self._control.unlink(missing_ok=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals are noted, and obeyed between two looks: none can interrupt the ending."""

        def note(number: int, _frame: FrameType | None) -> None:
            # A scheduler asks all processes of a job: that an agent has told so already is no second request.
            self._was_asked = True
            if time.monotonic() - self._told_at > ONE_REQUEST_S:
                self._asked.append(number)

        def pause(_number: int, _frame: FrameType | None) -> None:
            self._to_sleep = True

        wanted = {signal.SIGINT: note, signal.SIGTERM: note, signal.SIGUSR1: note, signal.SIGTSTP: pause}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            wanted[signal.SIGHUP] = note
        before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _allow_files(more: int) -> None:
    """See to it that this process may open so many more files, as far as it may say so itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more + SPARE_HANDLES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _badly(end: NodeEnd) -> bool:
    return bool(end.code) or any(status not in (FINISHED, STOPPED) for status in end.statuses.values())


def _raised(number: int) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return TimeLimitError() if number == signal.SIGUSR1 else TerminatedError()

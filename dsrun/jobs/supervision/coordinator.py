"""The coordinator: the `dsrun` that was started. It runs a job on all of its hosts, and alone decides when it is over.

How a job goes:

1. Start. The launcher starts a host agent on every host. Each gets the setup, prepares its host, and says hello with
   its addresses and a free port.
2. Meet. The other hosts try the first one's addresses. The first address that all of them reach is where the ranks
   meet; every agent is told, and starts its host's ranks through DeepSpeed's launcher.
3. Watch. The agents tell how ranks end, and last how their host's part ended. The coordinator ends the job when
   - a rank or a host's part ended badly: the others get SETTLE_S to tell of their ends, since the first to be heard of
     is not always the cause;
   - a host is lost, which is to say that its agent hung up, or sent no heartbeat for RunOptions.host_timeout (longer
     while its ranks' logs grow). Where ranks have ended too, they may only have lost that host's: then a silence of
     BLAME_S is waited for before anybody is blamed;
   - it is asked to by a signal: a fine-tune may write a checkpoint first (RunOptions.save_on_stop), once;
   - nothing has moved for RunOptions.hang_timeout.
4. End. Whatever came, every agent still there is told to stop. An agent that hears nothing any more (this process was
   killed, the network is down) stops its ranks by itself.

A job has succeeded only if every rank said that it did.
"""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from dsrun.cluster import ssh
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.job.job import LOCAL, AnyJob, Job, ranks_of
from dsrun.job.layout import STATE
from dsrun.job.log_parts import extents
from dsrun.job.processes import GRACE_S, REQUESTS, TerminatedError, end_processes, handled
from dsrun.job.rank_state import FINISHED, STOPPED, read_state
from dsrun.job.run_folder import AGENTS_LOG, LOGS, put_mark, rank_log, request_checkpoint
from dsrun.jobs.diagnosis.causes import diagnose, resume_hint
from dsrun.jobs.diagnosis.ends import HostEnd, RankEnd, causes, may_have_waited
from dsrun.jobs.diagnosis.killed import killed_in_words
from dsrun.jobs.diagnosis.logs import tail
from dsrun.jobs.diagnosis.reading import stacks as stacks_of
from dsrun.jobs.diagnosis.reading.stacks import hanging_in_words
from dsrun.jobs.supervision import protocol
from dsrun.jobs.supervision.commands import LOOPBACK
from dsrun.jobs.supervision.job_hosts import OWN_AGENT, JobHost, JobHosts
from dsrun.jobs.supervision.run_options import RunOptions

POLL_S = 0.1
LOOK_S = 1.0
"""Until the first rank has written its state: between two looks at their folder."""
SETTLE_S = 3.0
"""After the first rank's end: for the others' to be told, and for the launcher to say its code."""
SILENT_S = 1.5
"""A host that was silent for this long: the logs of its ranks are looked at, each LOOK_S."""
QUIET_S, BLAME_S = 2.5, 10.0
"""Once ranks have lost others: a host that was silent for the first may be why, and is after the second."""
CALL_S = 60.0
"""Time for agents to call in where a launcher starts them."""
TIME_LIMIT_SAVE_S = 1800.0
"""Time for the checkpoint when a scheduler says that the job's time is nearly over; it ends the job anyway."""
ONE_REQUEST_S = 0.5
"""An agent and dsrun itself that are asked to end within this time were asked once."""
FIRST_RANK_S = 600.0
"""Until the first rank is there nothing counts as a hang before this: libraries come from slow disks."""
STACKS_S = 2.0
"""Time for the ranks to print their stacks."""


class StoppedError(Exception):
    """The ranks have written a checkpoint and ended, as they were asked to. cause: the request."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__()
        self.cause = cause


class _Saving(NamedTuple):
    """A checkpoint that is written before the job ends. until: when it is given up, by the monotonic clock."""

    cause: BaseException
    until: float


class Coordinator:
    """One attempt at a job.

    Its methods stand in the order in which `run` comes to them: `_meet`, `_watch_ranks`, `_conclude`. What agents say
    is only noted (`_note_message`); what follows from it is decided in `_watch_ranks`, between two polls.

    environ: of this machine's processes. watch: called again and again, tells the user what is new, and returns
    whether anything was. say: called with a line for the user. resume: the ranks continue from the newest whole
    checkpoint, where there is one.
    """

    def __init__(
        self,
        job: AnyJob,
        environ: Mapping[str, str],
        options: RunOptions,
        watch: Callable[[], bool],
        say: Callable[[str], None],
        *,
        resume: bool = False,
    ) -> None:
        self.job, self.options, self.watch, self.say, self.resume = job, options, watch, say, resume
        self.run_dir = Path(job.run_dir)
        self.hosts = JobHosts(job, environ, say)
        self.rank_ends: list[RankEnd] = []
        """Ranks that ended badly, in the order of the messages."""
        self._signals = _PendingSignals()
        # Moments below are of the monotonic clock, in seconds.
        self._ranks_are_up = False
        self._moved_at = 0.0
        """When a step or an output was last seen."""
        self._looked_at = 0.0
        """When a rank's state was last looked for."""
        self._logs_looked_at = 0.0
        """When the logs of silent hosts' ranks were last looked at."""
        self._failed_at: float | None = None
        """When the first bad end was heard of."""
        self._saving: _Saving | None = None
        self._stop_until: float | None = None
        """Until when agents may end their ranks; None: they weren't told to yet."""

    def run(self) -> None:
        """Carry the job out.

        Raises JobFailedError unless every rank said that it finished, DsrunError where it can't be started,
        StoppedError where the ranks ended early as asked, and what processes.REQUESTS says of the signal where they
        were ended. Nothing of the job is left on any host that can be reached, whatever happens.
        """
        with self._signals.noted(), ExitStack() as stack:
            stack.callback(self.hosts.close)
            stack.callback(self._stop_agents)
            self.hosts.start(self._setup())
            for path in (self.run_dir / STATE).glob("*"):  # of an earlier attempt
                path.unlink()
            self._meet()
            self._watch_ranks()
            self._conclude()

    def _setup(self) -> dict[str, Any]:
        """The first message to every agent."""
        return {
            "run_dir": str(self.run_dir),
            "mark": put_mark(self.run_dir),
            "hosts": [host.name for host in self.hosts],
            "env": dict(self.options.env),
            "resume": self.resume,
            "master_port": self.options.master_port,
            "save_s": self.options.save_on_stop_s,
            "silence_s": self.options.host_timeout_s,
            "log_bytes": self.options.log_bytes,
            # This machine's GPUs the coordinator itself has locked.
            "lock": [host.number for host in self.hosts if host.name != LOCAL and not ssh.is_here(host.name)],
        }

    # Meeting

    def _meet(self) -> None:
        """Hear from every agent, and tell all where the ranks meet."""
        self._wait_for(lambda host: host.hello)
        self.hosts.hide_control()
        first = self.hosts.all[0].hello or {}
        address, port = LOOPBACK, int(first["port"])
        if len(self.hosts) > 1:
            named = [self.options.master_addr] if self.options.master_addr else first["addresses"]
            address = self._common_address(named, port)
        self.hosts.send(start=[address, port])

    def _common_address(self, addresses: list[str], port: int) -> str:
        """The first host's first address that every other one reaches. Raises DsrunError where there is none."""
        first, *others = self.hosts
        for host in others:
            host.send(reach=addresses, port=port)
        self._wait_for(lambda host: host is first or host.reached is not None)
        for address in addresses:
            if all(address in (host.reached or ()) for host in others):
                return address
        if none := [host.name for host in others if not host.reached]:
            raise DsrunError(
                f"{', '.join(none)} can't reach port {port} of {first.name} at {', '.join(addresses)}",
                hint="Is a firewall between them? Name an open port (--master-port), or an address (--master-addr).",
            )
        reached = "; ".join(f"{host.name}: {', '.join(host.reached or ())}" for host in others)
        raise DsrunError(
            f"no address of {first.name} is reached by all hosts ({reached})", hint="Name one: --master-addr."
        )

    def _wait_for(self, ready: Callable[[JobHost], Any]) -> None:
        """Wait until every host is ready. Raises where one is lost, or never called in."""
        started_at = time.monotonic()
        while not all(map(ready, self.hosts)):
            self._receive()
            if self._signals.pending:
                raise self._signals.take()
            for host in self.hosts:
                if host.end or host.lost:
                    raise self._host_lost(host)
            self._check_calls(time.monotonic() - started_at)
            time.sleep(POLL_S / 2)

    def _check_calls(self, waited_s: float) -> None:
        """Raise where the launcher has ended, or agents had their time and did not call in."""
        missing = [host.name for host in self.hosts if not host.connection]
        launcher, process = self.hosts.launcher, self.hosts.process
        ended = process is not None and process.poll() is not None
        if not missing or not (ended or (waited_s > CALL_S and not launcher.by_hand)):
            return
        fault = f"{', '.join(missing)} did not call in"
        if process and ended:
            fault += (
                f": {launcher.program or 'the host agent here'} ended with exit code {process.returncode}"
            )
        hint = "`dsrun doctor --hostfile` looks at every host."
        raise JobFailedError([Problem(f"{fault}\n{tail(self.run_dir / AGENTS_LOG)}", hint=hint)], 1)

    # Messages

    def _receive(self) -> None:
        """Take in what the agents say."""
        if self._signals.suspend:
            self._signals.suspend = False
            self.hosts.suspend()
        for host, message in self.hosts.receive():
            self._note_message(host, message)

    def _note_message(self, host: JobHost, message: dict[str, Any]) -> None:
        """Keep what one message says. Raises DsrunError for problems that an agent found on its host."""
        match message:
            case {"hello": _}:
                host.hello = message
            case {"reached": addresses}:
                host.reached = addresses
            case {"note": text}:
                self.say(f"{host.name}: {text}" if len(self.hosts) > 1 else text)
            case {"asked": signal_name}:
                self.say(f"{host.name}: its agent was asked to end ({signal_name})")
                if self.options.save_on_stop:  # else the agent ends its ranks by itself
                    self._signals.forward()
            case {"rank_end": fields, "clock": clock}:
                if host.behind_s is None:
                    host.behind_s = time.time() - clock
                self.rank_ends.append(RankEnd(**{**fields, "when": fields["when"] + host.behind_s}))
                if may_have_waited(self.rank_ends[-1]):  # for a rank of another host, maybe
                    for other in self.hosts:
                        if other is not host and other.running:
                            other.send(where=True)
            case {"stackless": ranks}:
                host.stackless = tuple(ranks)
            case {"exit": fields}:
                host.end = HostEnd(**fields)
            case {"problems": problems}:
                raise DsrunError([Problem(**fields) for fields in problems])

    # Watching

    def _watch_ranks(self) -> None:
        """Watch until every host's part has ended, or enough is known of a failure. Raises as `run` says."""
        self._moved_at = time.monotonic()
        while not all(host.end for host in self.hosts):
            # Messages first: a host that is lost may have told before why. Nothing below sees an older state.
            self._receive()
            self._note_progress()
            if not self.rank_ends:  # after a bad end hosts go by themselves, which is no failure of its own
                self._check_lost()
            if self._has_failed():
                if self._all_ends_are_known():
                    return
            else:
                self._answer_request()
            self._check_hang()
            time.sleep(POLL_S)

    def _note_progress(self) -> None:
        if self.watch():
            self._moved_at = time.monotonic()
        now = time.monotonic()
        if not self._ranks_are_up and now - self._looked_at >= LOOK_S:
            self._looked_at = now  # the folder is on a file system that all hosts share
            if any((self.run_dir / STATE).glob("rank-*.json")):
                self._ranks_are_up, self._moved_at = True, now
        if now - self._logs_looked_at >= LOOK_S:
            self._logs_looked_at = now
            for host in self.hosts:
                if host.connection and host.connection.silent_s > SILENT_S:
                    self._look_at_logs(host, host.connection)

    def _look_at_logs(self, host: JobHost, connection: protocol.Connection) -> None:
        """Note whether the ranks of a silent host work on: their logs lie in the folder that all hosts share."""
        ranks = ranks_of(self.job.hosts, host.number)
        logs = extents(self.run_dir / rank_log(rank) for rank in ranks)
        if host.logs and logs != host.logs:
            connection.moved_at = time.monotonic()
        host.logs = logs

    def _check_lost(self, silence_s: float = math.inf) -> None:
        """Raise where a host is lost, or was silent for that long."""
        for host in self.hosts:
            quiet = host.running and host.connection and host.connection.silent_s > silence_s
            if host.lost or quiet:
                raise self._host_lost(host)

    def _has_failed(self) -> bool:
        """Whether a rank or a host's part has ended badly."""
        failed = bool(self.rank_ends) or any(host.end and _badly(host.end) for host in self.hosts)
        if failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        return failed

    def _all_ends_are_known(self) -> bool:
        """After a failure: whether no host still runs, or those that do had the time to tell of their ranks' ends.

        Ranks that only lost their peers may have lost them with a host, whose silence has to last before it counts.
        """
        only_lost = len(self.hosts) > 1 and bool(self.rank_ends) and not causes(self.rank_ends)
        quiet = [
            host
            for host in self.hosts
            if host.running and host.connection and host.connection.silent_s > QUIET_S
        ]
        patience_s = BLAME_S + 1 if only_lost and quiet else SETTLE_S
        over = time.monotonic() - (self._failed_at or 0.0) > patience_s
        return over or not any(host.running for host in self.hosts)

    def _answer_request(self) -> None:
        """Have a checkpoint written if the job is asked to end, the first time; else end it."""
        if self._signals.pending:
            number = self._signals.pending[0]
            cause = self._signals.take()
            limit_s = 0.0 if self._saving else self._save_limit_s(number)
            if not limit_s:
                raise cause
            self._saving = _Saving(cause, time.monotonic() + limit_s)
            request_checkpoint(self.run_dir, then_stop=True)
            self.say("asked to end: a checkpoint is written first (again to end at once)")
        elif self._saving and time.monotonic() > self._saving.until:
            self.say("the checkpoint takes too long: it is given up")
            raise self._saving.cause

    def _save_limit_s(self, number: int) -> float:
        """Seconds for a checkpoint before the job is ended by a signal; 0: none is written."""
        if not isinstance(self.job, Job):
            return 0.0
        return self.options.save_on_stop_s or (TIME_LIMIT_SAVE_S if number == signal.SIGUSR1 else 0.0)

    def _check_hang(self) -> None:
        """Have every rank print its stack, and end the job, where nothing has moved for too long."""
        timeout_s = self.options.hang_timeout_s
        limit_s = timeout_s if self._ranks_are_up else max(timeout_s, FIRST_RANK_S)
        if not timeout_s or time.monotonic() - self._moved_at <= limit_s:
            return
        self.hosts.send(stacks=True)
        time.sleep(STACKS_S)
        self._receive()
        hanging = stacks_of.hanging(self.run_dir)
        alone = hanging[0] if len(hanging) == 1 and not hanging[0].waits else None
        fault = f"no step and no output for {timeout_s:g} s: the job hangs, and was ended"
        fault += f"; {hanging_in_words(hanging)}, and the others wait" if alone else ""
        unable = [text for host in self.hosts for text in host.stackless]
        stacks = f"{'; '.join(unable)}. Of the others, each one's" if unable else "Every rank's"
        hint = f"{stacks} stack is in its log: {self.run_dir / LOGS}{resume_hint(self.job)}"
        raise JobFailedError([Problem(fault, hint=hint)], 1, alone.rank if alone else None)

    def _host_lost(self, host: JobHost) -> JobFailedError:
        """The error of a host whose agent is not heard any more."""
        closed = host.connection is not None and host.connection.closed
        if host.process and closed:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its pipes close a moment before it ends
                host.process.wait(0.5)
        if host.process and (code := host.process.poll()):
            how = f"ended with exit code {code}"
            if code < 0 and host.program == OWN_AGENT:
                how = f"was {killed_in_words(code, 0)}"
                self._end_orphans(host)
            fault = f"{host.name}: {host.program} {how}"
        elif closed:
            fault = f"the host agent on {host.name} is gone"
        else:
            silent_s = host.connection.silent_s if host.connection else 0.0
            fault = f"no heartbeat from {host.name} for {silent_s:.0f} s: it is down, or the network is"
        log = tail(self.run_dir / AGENTS_LOG)
        return JobFailedError([Problem(f"{fault}\n{log}", hint=resume_hint(self.job).strip())], 1)

    def _end_orphans(self, host: JobHost) -> None:
        """End the ranks of an agent that is gone from this machine. They end by themselves, within seconds in which
        nothing keeps their devices for them."""
        orphans = [read_state(self.run_dir, rank) for rank in ranks_of(self.job.hosts, host.number)]
        pids = [state["pid"] for state in orphans if isinstance(state.get("pid"), int)]
        if host.process:
            end_processes(host.process.pid, pids, SETTLE_S)

    # Ending

    def _conclude(self) -> None:
        """Return where every rank finished; else raise what ended the job."""
        # Ranks that only lost their peers are no cause: a host that was silent all the while is the likelier one.
        if not causes(self.rank_ends):
            self._check_lost(BLAME_S)
        if self.rank_ends:
            self._stop_agents()  # the hosts' last messages tell more
        self.watch()
        ends = [host.end for host in self.hosts if host.end]
        statuses = [status for end in ends for status in end.statuses.values()]
        whole = len(statuses) == self.job.world_size and not any(map(_badly, ends))
        if whole and not self.rank_ends:
            if all(status == FINISHED for status in statuses):
                return
            # Asked for by a signal, or in the run folder.
            raise StoppedError(self._saving.cause if self._saving else TerminatedError())
        cause = diagnose(self.job, self.rank_ends, ends)
        raise JobFailedError([cause.problem], cause.exit_code, cause.rank)

    def _stop_agents(self) -> None:
        """Have every agent end its ranks, and hear their last messages. One more signal: at once."""
        if self._stop_until is None:
            self._stop_until = time.monotonic() + GRACE_S + 3
            for host in self.hosts:
                if not host.end:
                    host.send(stop=GRACE_S)
        while time.monotonic() < self._stop_until and any(host.running for host in self.hosts):
            with contextlib.suppress(DsrunError):
                self._receive()
            if self._signals.pending:
                self._signals.pending.clear()
                self.hosts.send(stop=0)
            time.sleep(POLL_S)


class _PendingSignals:
    """Signals that ask this process to end: noted as they come, and answered between two polls, so that none can
    interrupt the ending."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        """Signal numbers that nobody has answered yet, the oldest first."""
        self.suspend = False
        """Ctrl-Z was pressed: the ranks are to be suspended, too."""
        self._ever = False
        """One came before, answered or not."""
        self._hung_up = False
        self._forwarded_at = 0.0
        """When an agent told of its own (monotonic)."""

    def take(self) -> BaseException:
        """The exception of the oldest pending signal."""
        return REQUESTS[self.pending.pop(0)]()

    def forward(self) -> None:
        """Treat an agent's request to end as this process's own, unless that came before."""
        if not self._ever:
            self._ever, self._forwarded_at = True, time.monotonic()
            self.pending.append(signal.SIGTERM)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take the signals over, and give them back."""
        with handled({**dict.fromkeys(REQUESTS, self._note), signal.SIGTSTP: self._note_suspend}):
            yield

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # A scheduler asks all processes of a job: that an agent has told so already is no second request.
        self._ever = True
        if number == signal.SIGHUP:
            if self._hung_up:  # the kernel sends it, and the shell once more
                return
            self._hung_up = True
        if time.monotonic() - self._forwarded_at > ONE_REQUEST_S:
            self.pending.append(number)

    def _note_suspend(self, _number: int, _frame: FrameType | None) -> None:
        self.suspend = True


def _badly(end: HostEnd) -> bool:
    """Whether a host's part failed: its launcher, or a rank that neither finished nor stopped as it was asked to."""
    return bool(end.code) or any(status not in (FINISHED, STOPPED) for status in end.statuses.values())

"""The host agent, dsrun's part on one host of a job: `python -m dsrun.jobs.supervision.host_agent`.

A launcher starts it. It connects to the coordinator (the `dsrun` that was started): over stdin and stdout, or over TCP
to the address that the --control file names. Then it does what it is told, by messages (protocol.py):

1. Setup: check that the run folder is the same one, lock the GPUs, compile the operators that are missing.
2. Meet: say hello with this host's addresses and a free port; on host 0 listen there, elsewhere try host 0's addresses.
3. Start: start this host's worker group through DeepSpeed's launcher, and tell which of its ranks end.
4. Stop: end the worker group, say how it ended, and leave.

It decides one thing by itself: to end its worker group when the coordinator is silent or gone, or when it is itself
asked to end and the coordinator doesn't follow. So nothing of a job outlives the rest by more than seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dsrun.cluster.ports import free_port
from dsrun.errors import DsrunError, Problem
from dsrun.files import explained
from dsrun.job.job import AnyJob, ScriptJob, ranks_of, read
from dsrun.job.layout import LOG_LIMIT, NODE, SUPERVISOR, VISIBLE_DEVICES
from dsrun.job.log_parts import extents
from dsrun.job.processes import end_processes
from dsrun.job.run_folder import JOB, PREPARE_LOG, mark_of
from dsrun.jobs.diagnosis.ends import may_have_waited
from dsrun.jobs.diagnosis.logs import tail
from dsrun.jobs.launchers.common.environment import of_ranks
from dsrun.jobs.supervision import protocol
from dsrun.jobs.supervision.commands import ranks_command
from dsrun.jobs.supervision.preparation import build_operators
from dsrun.jobs.supervision.worker_group import WorkerGroup

LOOK_S = 1.0
"""Between two looks at the ranks' logs, while the coordinator is silent."""
POLL_S, WATCH_S = 0.05, 0.25
"""Between two looks: while the host is prepared, while its ranks run."""
SETUP_S = 30.0
"""Time for the coordinator's first message."""
FAREWELL_S = 5.0
"""Time for its "bye"."""
SHORT_GRACE_S = 3.0
"""Time for processes to end by themselves where nobody is left to wait for them."""


class EndedError(Exception):
    """The job is to end here. grace_s: what processes get to end by themselves."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self.grace_s = grace_s


class HostAgent:
    """This host's agent. setup: the coordinator's first message; number: this host's in the job, from 0."""

    def __init__(self, connection: protocol.Connection, setup: Mapping[str, Any], number: int) -> None:
        self.connection, self.setup, self.number = connection, setup, number
        self.group: WorkerGroup | None = None
        self.asked_to_end: str | None = None
        """The signal that this process got."""
        self._inbox: list[dict[str, Any]] = []
        self._logs: tuple[tuple[int, int], ...] = ()
        self._logs_looked_at = 0.0
        self._asked_at: float | None = None
        threading.Thread(target=self._beat, daemon=True, name="dsrun-heartbeats").start()

    def _beat(self) -> None:
        """Heartbeats, from a thread: asking a GPU's driver or ending processes takes longer than anybody waits."""
        while not self.connection.closed:
            self.connection.heartbeat()
            time.sleep(protocol.HEARTBEAT_S)

    # Messages

    def _receive(self) -> None:
        """Take in messages. Raises EndedError."""
        messages = self.connection.receive()
        for message in messages:
            if "stop" in message:  # one that is more urgent may have come with it
                raise EndedError(min(float(message["stop"]) for message in messages if "stop" in message))
            if "where" in message and self.group:
                self.group.take_stacks()
            elif "stacks" in message and self.group:
                self.connection.send(stackless=self.group.print_stacks())
            else:
                self._inbox.append(message)
        if self.asked_to_end and self._asked_at is None:
            self._asked_at = time.monotonic()
            self.connection.send(asked=self.asked_to_end)
        # A scheduler that ends a job asks all of its processes; the coordinator may have a checkpoint written first.
        patience_s = self.setup["save_s"]
        impatient = self._asked_at is not None and time.monotonic() - self._asked_at >= patience_s
        self._look_at_logs()
        if self.connection.lost or impatient:
            raise EndedError(SHORT_GRACE_S)

    def _look_at_logs(self) -> None:
        """While the coordinator is silent: whether the ranks work on, so that only the way to it may be cut."""
        now = time.monotonic()
        if self.group and self.connection.silent_s > LOOK_S and now - self._logs_looked_at >= LOOK_S:
            self._logs_looked_at = now
            logs = extents(self.group.logs)
            if self._logs and logs != self._logs:
                self.connection.moved_at = now
            self._logs = logs

    def _expect(self, key: str) -> dict[str, Any]:
        """Wait for the message with this key."""
        while True:
            self._receive()
            for place, message in enumerate(self._inbox):
                if key in message:
                    return self._inbox.pop(place)
            time.sleep(POLL_S)

    def _pause(self) -> None:
        self._receive()
        time.sleep(POLL_S)

    def _note(self, text: str) -> None:
        self.connection.send(note=text)

    # Work

    def work(self) -> None:
        """Everything, from the setup to the end. Raises DsrunError where the host can't do its part."""
        job = self._job()
        with _locked_gpus(job, self.number, wanted=self.number in self.setup["lock"]):
            env = {**os.environ, **of_ranks(job, os.environ, self.number)}
            build_operators(job, env, lambda argv: self._step(argv, env, job), self._note, self._pause)
            master, interface = self._meet()
            if interface:  # Gloo takes the address of the host's name, often 127.0.1.1
                env.setdefault("GLOO_SOCKET_IFNAME", interface)
            self._run_ranks(job, env, master)

    def _job(self) -> AnyJob:
        """The job, from a run folder that is the coordinator's."""
        run_dir = Path(self.setup["run_dir"])
        mark = mark_of(run_dir)
        if mark != self.setup["mark"]:
            fault = "is not there" if mark is None else "is another one"
            hint = "The run folder has to be on a file system that all hosts share, under one path: --output-dir."
            raise DsrunError(f"{fault} on {socket.gethostname()}", where=str(run_dir), hint=hint)
        job = read(run_dir / JOB)
        if isinstance(job, ScriptJob):
            with explained(f"can't be opened on {socket.gethostname()}", job.cwd):
                os.chdir(job.cwd)
        return job

    def _step(self, argv: list[str], env: Mapping[str, str], job: AnyJob) -> None:
        """Run a preparing command to its end, its output into the log."""
        log = Path(job.run_dir) / PREPARE_LOG
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )  # fmt: skip
        try:
            while process.poll() is None:
                self._pause()
        finally:
            end_processes(process.pid, [], SHORT_GRACE_S)
        if process.returncode:
            failed = f"{' '.join(argv[2:])} failed on {socket.gethostname()} (exit code {process.returncode})"
            raise DsrunError(f"{failed}\n{tail(log)}", hint=f"The whole log: {log}")

    def _meet(self) -> tuple[tuple[str, int], str | None]:
        """Address and port of the ranks, from the coordinator; and this host's interface to it, if there are others."""
        port = int(self.setup["master_port"]) or free_port()
        alone = len(self.setup["hosts"]) == 1
        with _listening(port) if self.number == 0 else nullcontext():
            self.connection.send(
                hello=self.number,
                host=socket.gethostname(),
                pid=os.getpid(),
                addresses=protocol.own_addresses(os.environ.get("GLOO_SOCKET_IFNAME", "")),
                port=port,
            )
            if self.number > 0:
                message = self._expect("reach")
                self.connection.send(reached=self._reached(message["reach"], int(message["port"])))
            address, port = self._expect("start")["start"]
        own = address if self.number == 0 else _own_address_towards(address)
        return (address, port), protocol.interface_of(own) if own and not alone else None

    def _reached(self, addresses: list[str], port: int) -> list[str]:
        """The addresses of host 0 that answer."""
        answering = []
        for address in addresses:
            self._receive()
            with suppress(OSError):
                socket.create_connection((address, port), timeout=protocol.CONNECT_S).close()
                answering.append(address)
        return answering

    def _run_ranks(self, job: AnyJob, env: Mapping[str, str], master: tuple[str, int]) -> None:
        """Start this host's ranks, tell how they end, and end them when the job does."""
        ranks = ranks_of(job.hosts, self.number)
        self.group = group = WorkerGroup(Path(job.run_dir), self.number, ranks)
        own = {
            SUPERVISOR: str(os.getpid()),
            NODE: str(self.number),
            VISIBLE_DEVICES: visible_devices(job, self.number, os.environ),
            LOG_LIMIT: str(self.setup["log_bytes"]),
        }
        grace_s = SHORT_GRACE_S
        try:
            group.start(
                ranks_command(job, self.number, master, resume=self.setup["resume"]), {**env, **own}, master
            )
            while group.code is None:
                self._tell_ends(group)
                self._receive()
                group.ranks.gone.wait(WATCH_S)
                group.ranks.gone.clear()
        except EndedError as error:
            grace_s = error.grace_s
            raise
        finally:
            self._tell_ends(group)
            self.connection.send(exit=group.end(grace_s, self._hurried)._asdict())

    def _tell_ends(self, group: WorkerGroup) -> None:
        """Tell which ranks have ended, and what this host's clock says now: hosts' clocks differ."""
        new = group.new_ends()
        for end in new:
            self.connection.send(rank_end=end._asdict(), clock=time.time())
        if any(may_have_waited(end) for end in new):  # the launcher ends the one that did not come next
            group.take_stacks()

    def _hurried(self) -> bool:
        """Whether the coordinator, while the ranks are ended already, wants it done at once."""
        return any(message.get("stop") == 0 for message in self.connection.receive())


def visible_devices(job: AnyJob, number: int, environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a host's ranks. Under Slurm the job's devices are places in what it gave the host."""
    host = job.hosts[number]
    given = [entry for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    if job.launcher != "slurm" or host.visible or not given:
        return host.cuda_visible_devices
    if max(host.devices) >= len(given):
        fault = f"Slurm gave {host.host} {len(given)} GPUs ({','.join(given)}), and the job needs {len(host.devices)}"
        raise DsrunError(fault, hint="Ask for as many on every node: --gpus-per-node.")
    return ",".join(given[device] for device in host.devices)


@contextmanager
def _locked_gpus(job: AnyJob, number: int, *, wanted: bool) -> Iterator[None]:
    """The GPUs that the host's ranks will use, kept from other jobs of dsrun's; nothing on a CPU."""
    if not wanted or job.accelerator != "cuda":
        yield
        return
    from dsrun.cluster import gpu_locks
    from dsrun.cluster.devices import detect

    chosen = visible_devices(job, number, os.environ).split(",")
    uuids = [gpu.uuid for gpu in detect(os.environ).gpus if {str(gpu.index), gpu.uuid} & {*chosen}]
    with gpu_locks.locked(uuids, gpu_locks.this_process()):
        yield


def _listening(port: int) -> socket.socket:
    """A socket on the port that the ranks will meet at, so that the others can try the way. Raises DsrunError."""
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        hint = "Choose another --master-port, or none: a free one is taken."
        raise DsrunError(
            f"port {port} on {socket.gethostname()}: {error.strerror}", where="--master-port", hint=hint
        ) from error
    return listener


def _own_address_towards(address: str) -> str | None:
    """This host's address on the way to another."""
    try:
        family, kind, *_, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as trial:
            trial.connect(place)  # sends nothing
            return str(trial.getsockname()[0])
    except OSError:
        return None


def main() -> NoReturn:
    """Find the coordinator, take its setup, carry it out."""
    parser = argparse.ArgumentParser()
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--node", type=int, help="number of this host in the job, from 0")
    which.add_argument("--node-from", metavar="VARIABLE", help="the variable that holds it")
    parser.add_argument(
        "--control", type=Path, help="the file that says how to reach the coordinator; else stdin and stdout"
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="for that file to be written"
    )
    arguments = parser.parse_args()
    if arguments.control:
        connection, setup, number = _called(arguments)
    else:
        number = _number(arguments, [])
        connection = protocol.Connection(os.dup(0), os.dup(1))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what is printed from here on is not for the coordinator
        setup = (connection.expect("setup", SETUP_S) or _fail("the coordinator sends nothing"))["setup"]
    connection.remote, connection.silence_s = setup["remote"], setup["silence_s"]
    os.environ.update(setup["env"])
    agent = HostAgent(connection, setup, number)

    def end(received: int, _frame: FrameType | None) -> None:
        agent.asked_to_end = signal.Signals(received).name

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, end)
    sys.exit(_carry_out(agent))


def _carry_out(agent: HostAgent) -> int:
    """Have the agent work, and wait for the coordinator's last message. The exit code."""
    connection = agent.connection
    try:
        agent.work()
    except EndedError:
        if agent.group is None:
            return 0  # there is nothing to tell of
    except DsrunError as error:
        connection.send(problems=[vars(problem) for problem in error.problems])
    except Exception as error:
        traceback.print_exc()
        fault = f"internal error (bug in dsrun) in the host agent on {socket.gethostname()}: {error!r}"
        connection.send(problems=[vars(Problem(fault))])
        return 1
    until = time.monotonic() + FAREWELL_S
    while time.monotonic() < until and not connection.lost:
        if any("bye" in message or "stop" in message for message in connection.receive(0.2)):
            break
    return 0


def _number(arguments: argparse.Namespace, hosts: list[str]) -> int:
    """This host's number in the job: as it is told, or by the host's name."""
    if arguments.node is not None:
        return int(arguments.node)
    value = os.environ.get(arguments.node_from)
    if value in hosts:
        return hosts.index(value)
    if value is None or not value.isdecimal():
        here = f"{arguments.node_from}={value} on {socket.gethostname()}"
        _fail(f"{here} is none of the job's hosts: {', '.join(hosts)}")
    return int(value)


def _called(arguments: argparse.Namespace) -> tuple[protocol.Connection, dict[str, Any], int]:
    """The coordinator, its setup, and this host's number; waited for if it has not begun yet."""
    until = time.monotonic() + arguments.wait
    while True:
        try:
            setup: dict[str, Any] = json.loads(arguments.control.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = f"{arguments.control} can't be read on {socket.gethostname()} ({error}): all hosts have to share it"
        else:
            if connection := protocol.call(setup["addresses"], setup["port"], setup["token"]):
                number = _number(arguments, setup["hosts"])
                connection.send(number=number)
                return connection, setup, number
            why = f"no way from {socket.gethostname()} to {setup['addresses']}, port {setup['port']}"
        if time.monotonic() > until:
            _fail(why)
        time.sleep(1)


def _fail(text: str) -> NoReturn:
    sys.exit(f"dsrun: {text}")


if __name__ == "__main__":
    main()

"""dsrun's part on one host of a job: `python -m dsrun.jobs.agent`, started by a launcher.

It does what the head (the `dsrun` that the user started) orders: prepares the host, finds the way to the master, starts
DeepSpeed's launcher, tells which ranks end. It ends everything of the job on its host when it is told to, when it is
ended itself, and when the head or the way to it is gone: nothing of a job outlives the others by more than seconds.

Orders and answers are JSON lines (dsrun.jobs.wire): over stdin and stdout, or over TCP to the head that --control
names.
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
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dsrun.cluster.ports import free_port
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import deepspeed_command, operators, wire
from dsrun.jobs.diagnosis import tail
from dsrun.jobs.environment import of_ranks
from dsrun.jobs.job import AnyJob, ScriptJob, read
from dsrun.jobs.layout import NODE, SUPERVISOR, VISIBLE_DEVICES
from dsrun.jobs.node import Node
from dsrun.jobs.processes import end_processes
from dsrun.jobs.run_folder import JOB, PREPARE_LOG
from dsrun.jobs.shared import mark_of

POLL_S, WATCH_S = 0.05, 0.25
"""Between two looks: while the host is prepared, while its ranks run."""
ORDERS_S = 30.0
"""So long the head may take with its first words."""
FAREWELL_S = 5.0
SHORT_GRACE_S = 3.0
"""What processes get to end by themselves where nobody is left who would wait for them."""


class EndedError(Exception):
    """The job is to end here: by the head's order, because it is gone, or by a signal. grace_s: what processes get."""

    def __init__(self, grace_s: float) -> None:
        super().__init__()
        self.grace_s = grace_s


class Agent:
    """See the module's text."""

    def __init__(self, peer: wire.Peer, orders: Mapping[str, Any], number: int) -> None:
        self.peer, self.orders, self.number = peer, orders, number
        self.inbox: list[dict[str, Any]] = []
        self.node: Node | None = None
        self.asked_to_end: str | None = None
        self._since = 0.0
        threading.Thread(target=self._beat, daemon=True, name="dsrun-beats").start()

    def _beat(self) -> None:
        """Signs of life, from a thread: asking a GPU's driver or ending processes takes longer than the head waits."""
        while not self.peer.closed:
            self.peer.beat()
            time.sleep(wire.BEAT_S)

    def tick(self) -> None:
        """Take orders. Raises EndedError."""
        for message in self.peer.receive():
            if "stop" in message:
                raise EndedError(float(message["stop"]))
            if "stacks" in message and self.node:
                self.node.stacks()
            else:
                self.inbox.append(message)
        if self.asked_to_end and not self._since:
            self._since = time.monotonic()
            self.peer.send(asked=self.asked_to_end)
        # A scheduler that ends a job asks all of its processes; the head may have the ranks write a checkpoint first.
        patience_s = self.orders.get("save_s", 0.0)
        if self.peer.lost or (self._since and time.monotonic() - self._since >= patience_s):
            raise EndedError(SHORT_GRACE_S)

    def hurried(self) -> bool:
        """Whether the head, which has ordered the end already, has lost its patience."""
        return any(message.get("stop") == 0 for message in self.peer.receive())

    def order(self, name: str) -> dict[str, Any]:
        """Wait for an order."""
        while True:
            self.tick()
            for place, message in enumerate(self.inbox):
                if name in message:
                    return self.inbox.pop(place)
            time.sleep(POLL_S)

    def work(self) -> None:
        """Everything, from the first check to the last word. Raises DsrunError where the host can't do its part."""
        job = self._job()
        with ExitStack() as stack:
            stack.enter_context(_held(job, self.number, self.number in self.orders["hold"]))
            env = {**os.environ, **of_ranks(job, os.environ, self.number)}
            operators.build(job, env, lambda argv: self._step(argv, env, job), self._note, self._pause)
            master, interface = self._meet()
            if interface and "GLOO_SOCKET_IFNAME" not in env:
                env["GLOO_SOCKET_IFNAME"] = (
                    interface  # Gloo takes the address of the host's name, often 127.0.1.1
                )
            self._train(job, env, master)

    def _job(self) -> AnyJob:
        run_dir = Path(self.orders["run_dir"])
        mark = mark_of(run_dir)
        if mark != self.orders["mark"]:
            what = "is not there" if mark is None else "is another one"
            hint = "The run folder has to be on a file system that all hosts share, under one path: --output-dir."
            raise DsrunError(f"{what} on {socket.gethostname()}", where=str(run_dir), hint=hint)
        job = read(run_dir / JOB)
        if isinstance(job, ScriptJob):
            try:
                os.chdir(job.cwd)
            except OSError as error:
                raise DsrunError(
                    f"can't be gone to on {socket.gethostname()}: {error.strerror}", where=job.cwd
                ) from error
        return job

    def _note(self, text: str) -> None:
        self.peer.send(note=text)

    def _pause(self) -> None:
        self.tick()
        time.sleep(POLL_S)

    def _step(self, argv: list[str], env: Mapping[str, str], job: AnyJob) -> None:
        """Run a preparing command to its end, its words into the log."""
        log = Path(job.run_dir) / PREPARE_LOG
        with log.open("ab") as output:
            process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                self._pause()
        finally:
            end_processes(process.pid, [], SHORT_GRACE_S)
        if process.returncode:
            failed = f"{' '.join(argv[2:])} failed on {socket.gethostname()} (exit code {process.returncode})"
            raise DsrunError(f"{failed}\n{tail(log)}", hint=f"The whole log: {log}")

    def _meet(self) -> tuple[tuple[str, int], str | None]:
        """Where the ranks meet, as the head decides from what all hosts tell; and this host's interface to it."""
        port = int(self.orders.get("master_port") or 0) or free_port()
        listener = None
        try:
            if self.number == 0:
                listener = _listening(port)
            self.peer.send(
                hello=self.number,
                host=socket.gethostname(),
                pid=os.getpid(),
                addresses=wire.own_addresses(os.environ.get("GLOO_SOCKET_IFNAME", "")),
                port=port,
            )
            if len(self.orders["hosts"]) > 1 and self.number > 0:
                asked = self.order("reach")
                self.peer.send(reached=self._reached(asked["reach"], int(asked["port"])))
            order = self.order("start")
        finally:
            if listener:
                listener.close()
        address, port = order["start"]
        if len(self.orders["hosts"]) == 1:
            return (address, port), None
        own = address if self.number == 0 else _own_address_towards(address)
        return (address, port), wire.interface_of(own) if own else None

    def _reached(self, addresses: list[str], port: int) -> list[str]:
        """Those of the master's addresses that answer."""
        found = []
        for address in addresses:
            self.tick()
            try:
                socket.create_connection((address, port), timeout=wire.CONNECT_S).close()
            except OSError:
                continue
            found.append(address)
        return found

    def _train(self, job: AnyJob, env: dict[str, str], master: tuple[str, int]) -> None:
        first = sum(len(host.devices) for host in job.hosts[: self.number])
        ranks = range(first, first + len(job.hosts[self.number].devices))
        self.node = node = Node(Path(job.run_dir), self.number, ranks)
        env |= {
            SUPERVISOR: str(os.getpid()),
            NODE: str(self.number),
            VISIBLE_DEVICES: visible_devices(job, self.number, os.environ),
        }
        argv = deepspeed_command.command(job, self.number, master, self.orders.get("extra", ()))
        grace_s = SHORT_GRACE_S
        try:
            node.start(argv, env, master)
            while node.code is None:
                self._tell_ends()
                self.tick()
                time.sleep(WATCH_S)
        except EndedError as error:
            grace_s = error.grace_s
            raise
        finally:
            self._tell_ends()
            self.peer.send(exit=node.end(grace_s, self.hurried)._asdict())

    def _tell_ends(self) -> None:
        assert self.node is not None  # noqa: S101  (it has been started)
        for end in self.node.look():
            self.peer.send(**self.node.message(end))


def visible_devices(job: AnyJob, number: int, environ: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES of a host's ranks. Under Slurm the job's devices are places in what it gave the host."""
    host = job.hosts[number]
    given = [entry for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    if job.launcher != "slurm" or host.visible or not given:
        return host.cuda_visible_devices
    if max(host.devices) >= len(given):
        what = f"Slurm gave {host.host} {len(given)} GPUs ({','.join(given)}), and the job needs {len(host.devices)}"
        raise DsrunError(what, hint="Ask for as many on every node: --gpus-per-node.")
    return ",".join(given[device] for device in host.devices)


def _held(job: AnyJob, number: int, wanted: bool) -> ExitStack:
    """The GPUs that the host's ranks will use, kept from other jobs of dsrun's; nothing on a CPU."""
    stack = ExitStack()
    if wanted and job.accelerator == "cuda":
        from dsrun.cluster import gpu_locks
        from dsrun.cluster.devices import detect

        chosen = visible_devices(job, number, os.environ).split(",")
        uuids = [
            gpu.uuid for gpu in detect(os.environ).gpus if str(gpu.index) in chosen or gpu.uuid in chosen
        ]
        stack.enter_context(gpu_locks.hold(uuids, gpu_locks.me(job.run_dir)))
    return stack


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
    """Find the head, take its orders, carry them out."""
    parser = argparse.ArgumentParser()
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--node", type=int, help="number of this host in the job, from 0")
    which.add_argument("--node-from", metavar="VARIABLE", help="the variable that holds it")
    parser.add_argument(
        "--control", type=Path, help="where the head writes how to reach it; else stdin and stdout"
    )
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="for the head to write that"
    )
    arguments = parser.parse_args()
    if arguments.control:
        peer, orders, number = _called(arguments)
    else:
        number = _number(arguments, [])
        peer = wire.Peer(os.dup(0), os.dup(1))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what is printed from here on is not for the head
        orders = (peer.expect("orders", ORDERS_S) or _fail("the head says nothing"))["orders"]
    peer.far = orders["far"]
    os.environ.update(orders["env"])
    agent = Agent(peer, orders, number)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, _ender(agent))
    sys.exit(_carry_out(agent))


def _carry_out(agent: Agent) -> int:
    peer = agent.peer
    try:
        agent.work()
    except EndedError:
        if agent.node is None:
            return 0  # there is nothing to tell of
    except DsrunError as error:
        peer.send(problems=[vars(problem) for problem in error.problems])
    except Exception as error:
        import traceback

        traceback.print_exc()
        peer.send(problems=[vars(Problem(f"dsrun's agent on {socket.gethostname()}: {error!r}"))])
        return 1
    until = time.monotonic() + FAREWELL_S
    while time.monotonic() < until and not peer.lost:
        if any("bye" in message or "stop" in message for message in peer.receive(0.2)):
            break
    return 0


def _ender(agent: Agent) -> Any:
    def end(number: int, _frame: FrameType | None) -> None:
        agent.asked_to_end = signal.Signals(number).name

    return end


def _number(arguments: argparse.Namespace, hosts: list[str]) -> int:
    """This host's number in the job: as it is told, or by the host's name."""
    if arguments.node is not None:
        return int(arguments.node)
    value = os.environ.get(arguments.node_from)
    if value in hosts:
        return hosts.index(value)
    if value is None or not value.isdecimal():
        _fail(
            f"{arguments.node_from}={value} on {socket.gethostname()} is none of the job's hosts: {', '.join(hosts)}"
        )
    return int(value)


def _called(arguments: argparse.Namespace) -> tuple[wire.Peer, dict[str, Any], int]:
    """The head, what it orders, and this host's number; waited for if it has not begun yet."""
    until = time.monotonic() + arguments.wait
    while True:
        try:
            orders: dict[str, Any] = json.loads(arguments.control.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            why = f"{arguments.control} can't be read on {socket.gethostname()} ({error}): all hosts have to share it"
        else:
            if peer := wire.call(orders["addresses"], orders["port"], orders["token"]):
                number = _number(arguments, orders["hosts"])
                peer.send(node=number)
                return peer, orders, number
            why = f"no way from {socket.gethostname()} to {orders['addresses']}, port {orders['port']}"
        if time.monotonic() > until:
            _fail(why)
        time.sleep(1)


def _fail(text: str) -> NoReturn:
    sys.exit(f"dsrun: {text}")


if __name__ == "__main__":
    main()

"""How the coordinator and the host agents communicate: messages, JSON objects, one a line, over pipes or TCP.

From the coordinator: setup (over TCP it is read from the run folder), reach, start, stacks (into the ranks'
logs), where (into files of their own), stop, bye. From an agent: number, hello, reached, note, asked, rank_end,
stackless, exit, problems. From both: heartbeat, asleep.

Over TCP both sides prove that they know the job's token before anything else is sent; the token itself never is.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

HEARTBEAT_S = 1.0
"""Between two heartbeats."""
PATIENCE = 5
"""Factor by which a longer silence is borne while the other side's work is seen to go on."""
START_S = 60.0
"""Time for the first heartbeat: a login, and Python from a slow file system."""
SEND_S = 5.0
"""Time for the other side to read a message."""
CONNECT_S = 3.0
ANSWER_S = 20.0
"""Time for the coordinator's first message: it may have a thousand callers at once."""
BLOCK_BYTES, BLOCKS = 1 << 16, 64
"""Bytes of a read, and reads in a row: a side that never stops talking must not keep the others waiting."""
MOST_BYTES = 4 << 20
"""A longer line is no message."""


class Connection:
    """A connection to the other side: messages out, messages in, and when it was last heard.

    remote: the other side is on another host; on one machine only hanging up counts, as a process may be suspended.
    silence_s: without a heartbeat for this long, it counts as gone (--host-timeout).
    """

    def __init__(
        self, read: int, write: int, *, owner: socket.socket | None = None, remote: bool = True
    ) -> None:
        self._read, self._write, self._owner = read, write, owner
        self._handles = {read, write}  # to be closed, once
        self._sending = threading.Lock()
        self._ever = False
        self.remote = remote
        self.silence_s = START_S
        self.moved_at = 0.0
        """When the job was last seen to go on where the other side is, by the monotonic clock."""
        self._asleep = False
        self._mute = False  # nobody reads any more; what was said before that is still to be heard
        self._half = b""
        self._ready: list[dict[str, Any]] = []
        self.closed = False
        self.heard = time.monotonic()
        os.set_blocking(read, False)
        os.set_blocking(write, False)

    def fileno(self) -> int:
        """What to wait for."""
        return self._read

    @property
    def lost(self) -> bool:
        """Whether it has hung up, or been silent for too long."""
        limit_s = self.silence_s if self._ever else max(self.silence_s, START_S)
        if time.monotonic() - self.moved_at <= limit_s:
            limit_s *= PATIENCE
        return self.closed or self.silent_s > limit_s

    @property
    def silent_s(self) -> float:
        """Seconds since it was last heard; 0 where its silence means nothing."""
        return time.monotonic() - self.heard if self.remote and not self._asleep else 0.0

    def send(self, **message: Any) -> None:
        """Send a message. One that can't be sent any more is dropped; the connection closes when all was read."""
        rest = memoryview(json.dumps(message).encode() + b"\n")
        until = time.monotonic() + SEND_S
        with self._sending:
            while rest and not self.closed and not self._mute:
                try:
                    rest = rest[os.write(self._write, rest) :]
                except BlockingIOError:
                    _wait(self._write, select.POLLOUT, 0.2)
                    self.closed = time.monotonic() > until
                except OSError:
                    self._mute = True

    def heartbeat(self) -> None:
        """A sign of life; none to one who sleeps, and would find them all when it wakes up."""
        if not self._asleep:
            self.send(heartbeat=True)

    def receive(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """The messages that have arrived, without heartbeats; waits up to wait_s for the first."""
        if wait_s and not self._ready and not self.closed:
            _wait(self._read, select.POLLIN, wait_s)
        for _ in range(BLOCKS):
            if self.closed:
                break
            try:
                block = os.read(self._read, BLOCK_BYTES)
            except BlockingIOError:
                self.closed = self._mute
                break
            except OSError:
                block = b""
            # An endless line is no message, and would fill the memory: whoever sends it is hung up on.
            if not block or len(self._half) > MOST_BYTES:
                self.closed = True
                break
            self.heard, self._ever = time.monotonic(), True
            *whole, self._half = (self._half + block).split(b"\n")
            for line in whole:
                with contextlib.suppress(ValueError, RecursionError):  # a greeting that a login shell prints
                    message = json.loads(line)
                    if isinstance(message, dict) and "asleep" in message:
                        self._asleep = bool(message["asleep"])
                    elif isinstance(message, dict) and "heartbeat" not in message:
                        self._ready.append(message)
        messages, self._ready = self._ready, []
        return messages

    def expect(self, key: str, wait_s: float) -> dict[str, Any] | None:
        """The next message that has this key; those before it are lost. None where none comes in time."""
        until = time.monotonic() + wait_s
        while True:
            messages = self.receive(max(0.0, min(until - time.monotonic(), 0.2)))
            for place, message in enumerate(messages):
                if key in message:
                    self._ready = messages[place + 1 :] + self._ready
                    return message
            if self.closed or time.monotonic() >= until:
                return None

    def awake(self) -> None:
        """This side has slept: the other's silence meanwhile doesn't count."""
        self.heard = time.monotonic()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        with self._sending:  # the handles' numbers may be another file's in a moment
            handles, self._handles = self._handles, set()
            if self._owner:
                self._owner.close()
                return
            for handle in handles:
                with contextlib.suppress(OSError):
                    os.close(handle)


def _wait(handle: int, event: int, wait_s: float) -> None:
    """Wait until it can be read or written. Not select.select, which knows handles below 1024 only."""
    poll = select.poll()
    poll.register(handle, event)
    poll.poll(wait_s * 1000)


def _proves(answer: object, token: str, nonce: str, side: str) -> bool:
    return hmac.compare_digest(str(answer).encode(errors="replace"), _proof(token, nonce, side).encode())


def _proof(token: str, nonce: str, side: str) -> str:
    return hmac.new(token.encode(), f"{side}:{nonce}".encode(), "sha256").hexdigest()


class _Caller(NamedTuple):
    """Somebody who has called in and has yet to prove the token, until then."""

    connection: Connection
    nonce: str
    until: float


class Listener:
    """A listener for agents that call in over TCP, at every address of this machine and one free port."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._callers: list[_Caller] = []
        self._socket = socket.create_server(
            ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        ) if socket.has_dualstack_ipv6() else socket.create_server(("", 0), backlog=1024)  # fmt: skip
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        """What to wait for."""
        return self._socket.fileno()

    def accept(self) -> Connection | None:
        """The next caller that has proved to know the token; None for nobody. Waits for none."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                break
            caller = _Caller(_over(accepted), secrets.token_hex(16), time.monotonic() + CONNECT_S)
            caller.connection.send(nonce=caller.nonce)
            self._callers.append(caller)
        for caller in list(self._callers):
            connection = caller.connection
            answer = connection.expect("proof", 0.0)
            if answer is None and not connection.closed and time.monotonic() < caller.until:
                continue
            self._callers.remove(caller)
            if answer and _proves(answer["proof"], self._token, caller.nonce, "agent"):
                connection.send(proof=_proof(self._token, str(answer.get("nonce")), "coordinator"))
                return connection
            connection.close()
        return None

    def close(self) -> None:
        """Take no more calls."""
        self._socket.close()
        for caller in self._callers:
            caller.connection.close()
        self._callers.clear()


def call(addresses: Sequence[str], port: int, token: str) -> Connection | None:
    """Call the coordinator at the first of its addresses where it answers and proves to be it; None where none does."""
    for address in addresses:
        try:
            connected = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError:
            continue
        connection = _over(connected)
        challenge = connection.expect("nonce", ANSWER_S)
        if challenge:
            nonce = secrets.token_hex(16)
            connection.send(proof=_proof(token, str(challenge["nonce"]), "agent"), nonce=nonce)
            answer = connection.expect("proof", ANSWER_S) or {}
            if _proves(answer.get("proof"), token, nonce, "coordinator"):
                return connection
        connection.close()
    return None


def _over(connected: socket.socket) -> Connection:
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.fileno(), connected.fileno(), owner=connected)


def own_addresses(interface: str = "") -> list[str]:
    """This machine's addresses: of `interface` first, then those that others may reach it at, the loopback last."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses: list[tuple[int, str]] = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries if name in up else ():
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80"):
                loopback = entry.address.startswith("127.") or entry.address == "::1"
                # Other hosts have the same addresses there.
                bridge = name.startswith(("docker", "virbr", "br-"))
                later = 4 * loopback + 2 * bridge + (entry.family == socket.AF_INET6)
                addresses.append((-1 if name == interface else later, entry.address))
    return [address for _, address in sorted(addresses, key=lambda pair: pair[0])]


def interface_of(address: str) -> str | None:
    """The name of the interface that has one of this machine's addresses."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None

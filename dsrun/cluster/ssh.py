"""The facts of hosts: probe.py is run on all of them at once, through the user's own ssh.

Nothing that a user wrote becomes part of a shell's text: a host is an argument of ssh behind `--`, the command is
always `python3 -I -`, and what is asked for is inside the script, on stdin. Keys, known hosts and jump hosts are as the
user's ssh has them; all that is set here is that ssh asks nobody (BatchMode) and gives up early.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.cluster import probe
from dsrun.words import printable

VARIABLE = "DSRUN_SSH"
"""The variable that names the ssh program (a path, not a command line); without it PATH is searched."""
AT_ONCE = 64
CONNECT_S = 5
MOST_BYTES = 4 << 20
"""Bytes of an answer that are read: the probe's has some 10 KB."""
COMMAND = ("python3", "-I", "-")
NAME = re.compile(r"(?!-)[\w.:@%+\[\]-]{1,255}")
"""Names that are handed to ssh; newer versions of it refuse most others, too (ssh.c, valid_hostname)."""


@dataclass(frozen=True)
class HostAnswer:
    host: str
    facts: Mapping[str, Any] | None = None
    """The probe's facts; None where there was no answer."""
    fault: str = ""
    """The reason why there was none."""
    fix: str = ""
    """The remedy for that."""
    asked_at: float = 0.0
    """This machine's clock before the call, in seconds since 1970."""
    answered_at: float = 0.0
    """The same clock after it."""


class Reason(NamedTuple):
    """The meaning of words in a host's answer. {host} stands for its name."""

    words: str
    """A regular expression."""
    fault: str
    fix: str


SSH_REASONS = (
    Reason("Permission denied|Too many authentication failures",
        "no login without a password", "ssh-copy-id {host}"),
    Reason("IDENTIFICATION HAS CHANGED",
        "its host key has changed", "If it was installed again: ssh-keygen -R {host}, then once: ssh {host}"),
    Reason("Host key verification failed|host key is known",
        "its host key is not known here", "Once, and compare the key: ssh {host}"),
    Reason("Could not resolve hostname|Name or service not known",
        "nobody knows this name", "Check the spelling; a name belongs to DNS, /etc/hosts or ~/.ssh/config."),
    Reason("No route to host|Network is unreachable",
        "there is no route to it", "Is it switched on, and in a network that this machine reaches? ping {host}"),
    Reason("Connection refused", "it refuses the connection: no ssh server listens there",
        "On it: systemctl start ssh; or name its port in ~/.ssh/config."),
    Reason("timed out",
        "nothing answers at its address", "Is it switched on, with no firewall in between? ping {host}"),
    Reason("Connection (closed|reset)|kex_exchange", "its ssh server hangs up before the login",
        "Its log says why (journalctl -u ssh); many logins at once need a higher MaxStartups."),
)  # fmt: skip
"""Reasons of ssh itself, which ends with 255."""
PYTHON_REASONS = (
    Reason(r"annotations is not defined|No module named .?importlib\.metadata", "its python3 is older than 3.8",
        "Install a newer one in front of it on the PATH that `ssh {host} python3 --version` sees."),
    Reason("python3.*(not found|No such file)|not found.*python3", "it has no python3",
        "Install it, or put it on the PATH that `ssh {host} env` shows."),
)  # fmt: skip


def ask(
    hosts: Sequence[str], options: Mapping[str, Any], timeout_s: float, *, at_once: int = AT_ONCE
) -> list[HostAnswer]:
    """The answers of all hosts, in their order; each has timeout_s seconds. options: the probe's (probe.OPTIONS).

    This machine's own names are asked without ssh.
    """
    with tempfile.TemporaryDirectory(prefix="dsrun-probe-") as folder:
        script = Path(folder) / "probe.py"
        script.write_text(probe.script({**options, "seconds": timeout_s}), encoding="utf-8")
        calls = _Calls(script, timeout_s, program())
        pool = ThreadPoolExecutor(max_workers=max(1, min(at_once, len(hosts))))
        try:
            return list(pool.map(calls.ask, hosts))
        except BaseException:  # Ctrl-C: nothing of ours stays behind
            calls.end()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def is_here(host: str) -> bool:
    """Whether a name or address is this machine's own.

    Other names for it (in /etc/hosts, DNS, ~/.ssh/config) go through ssh, as the launcher's do.
    """
    name = socket.gethostname()
    if host.lower() in {"localhost", name.lower(), name.partition(".")[0].lower()}:
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as trial:
            trial.bind((host, 0))  # only an address of one's own can be bound to
    except OSError:
        return False
    return not address.is_unspecified and not address.is_multicast


def words(program: str, host: str, command: Sequence[str]) -> list[str]:
    """The command line of ssh that runs a command there, quoted for the shell that ssh gives it to."""
    # -T: no terminal; an answer has no business there.
    settings = ("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}")
    return [program, *settings, "--", host, shlex.join(command)]


def program() -> str | None:
    """The ssh program; None where there is none."""
    return shutil.which(os.environ.get(VARIABLE) or "ssh")


class _Output(NamedTuple):
    code: int | None
    """The exit code; None where the time was over."""
    out: bytes
    err: bytes
    at: float
    """This machine's clock at the end."""


class _Calls:
    """The calls under way: one a host, each a process group of its own, so that none outlives its time."""

    def __init__(self, script: Path, timeout_s: float, program: str | None) -> None:
        self._script = script
        self._timeout_s = timeout_s
        self._program = program
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended = False

    def end(self) -> None:
        """Kill what runs, and start nothing more."""
        self._ended = True
        for process in list(self._running):
            _kill(process)

    def ask(self, host: str) -> HostAnswer:
        if self._ended:
            return HostAnswer(host, fault="was not asked")
        if is_here(host):
            argv = [sys.executable, *COMMAND[1:]]
        elif not NAME.fullmatch(host):
            return HostAnswer(
                host, fault=f"{host!a} is not a host's name", fix="Letters, digits, dots and dashes."
            )
        elif self._program is None:
            named = os.environ.get(VARIABLE)
            fix = f"{VARIABLE}={named} names no program." if named else "apt-get install openssh-client"
            return HostAnswer(host, fault="there is no ssh on this machine", fix=fix)
        else:
            argv = words(self._program, host, COMMAND)
        asked_at = time.time()
        try:
            output = self._run(argv)
        except OSError as error:
            return HostAnswer(host, fault=f"{argv[0]} can't be started: {error.strerror}", fix="Check it.")
        answer = read(host, output.code, output.out, output.err, self._timeout_s)
        return replace(answer, asked_at=asked_at, answered_at=output.at)

    def _run(self, argv: list[str]) -> _Output:
        """One process's output, for at most the time and the bytes that it has."""
        until = time.monotonic() + self._timeout_s
        with (
            self._script.open("rb") as script,
            subprocess.Popen(
                argv,
                stdin=script,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            ) as process,
        ):
            self._running.add(process)
            # end() may have come between the check in ask() and this line, and has then not seen the process.
            if self._ended:
                _kill(process)
            try:
                out, err = _read_both(process, until)
                code: int | None = None
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(max(0.0, until - time.monotonic()))
                return _Output(code, out, err, time.time())
            finally:
                _kill(process)
                self._running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: ssh may have a ProxyCommand."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_both(process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bytes]:
    """stdout and stderr, until both are closed, the process has ended, the time is over, or there is too much."""
    parts: dict[int, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            assert stream is not None  # noqa: S101  (both are pipes)
            parts[stream.fileno()] = bytearray()
            selector.register(stream.fileno(), selectors.EVENT_READ)
        while selector.get_map() and time.monotonic() < until:
            ended = process.poll() is not None
            ready = selector.select(0 if ended else min(0.5, max(0.0, until - time.monotonic())))
            # A process that it left behind may keep the pipes open for ever: with the program gone, what is in them now
            # is all that counts.
            if ended and not ready:
                break
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                parts[key.fd] += block
                if not block or len(parts[key.fd]) > MOST_BYTES:
                    selector.unregister(key.fd)
            if any(len(text) > MOST_BYTES for text in parts.values()):
                _kill(process)
                break
    out, err = parts.values()
    return bytes(out), bytes(err)


def read(host: str, code: int | None, out: bytes, err: bytes, timeout_s: float = 0.0) -> HostAnswer:
    """The answer in a call's output. code: its exit code, None where its time was over."""
    for line in reversed(out.decode(errors="replace").splitlines()):
        if (facts := _facts(line)) is not None:
            return HostAnswer(host, facts)
    error, end = (text.decode(errors="replace") for text in (err, out[-2000:]))
    if code is None:
        fault = f"no answer within {timeout_s:g} s"
        return HostAnswer(host, fault=fault, fix=f"Try: ssh {host} true; for a slow host: --timeout 120")
    if reason := _reason(code, f"{error} {end}"):
        return HostAnswer(host, fault=reason.fault, fix=reason.fix.format(host=host))
    if code:
        fault = f"ended with {code}, and said: {last_line(error, 300)}"
        return HostAnswer(host, fault=fault, fix=f"Try: ssh {host} true")
    fix = f"See what this prints: ssh {host} true; a start file as ~/.bashrc must not end the shell."
    return HostAnswer(host, fault=f"answers with something else: {last_line(end, 200)}", fix=fix)


def _reason(code: int, text: str) -> Reason | None:
    reasons = SSH_REASONS if code == 255 else PYTHON_REASONS
    reason = next((reason for reason in reasons if re.search(reason.words, text)), None)
    return reason or (PYTHON_REASONS[-1] if code == 127 else None)


def last_line(text: str, most: int) -> str:
    """The last line of a program's output, without codes that would steer a terminal."""
    return next(
        (printable(line.strip(), most) for line in reversed(text.split("\n")) if line.strip()), "nothing"
    )


def _facts(line: str) -> dict[str, Any] | None:
    """The probe's answer, if the line is one: greetings may stand before it."""
    start = line.find('{"probe": ')
    if start < 0:
        return None
    try:
        facts, _ = json.JSONDecoder().raw_decode(line[start:])
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and facts.get("probe") == probe.VERSION else None

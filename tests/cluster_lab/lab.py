"""Hosts of a small cluster, made of namespaces on this machine: own network, own name, own /dev/shm, own sshd.

A *keeper* process stands behind every lab. It holds the hosts' namespaces and ends everything when its standard input
closes: at the end of `with Lab()`, and as well when the tests are killed. All that a lab starts lives in the lab's own
network namespaces, so that is what the keeper ends; the rest of the machine is not touched.

The hosts share this machine's files and process ids; /dev/shm, /run, /etc/hosts, the host name and the network are
their own. Names are resolved by /etc/hosts on the hosts, and by the `ssh` on `Lab.environ`'s PATH everywhere else.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

NEEDED = ("ip", "nsenter", "unshare", "mount", "hostname", "ssh", "scp", "ssh-keygen", "sshd")
CONTROLLER = "controller"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"


class UnavailableError(Exception):
    """This machine cannot hold a lab; the message is the reason."""


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


def demand_programs(names: Sequence[str]) -> None:
    """Raises `UnavailableError` with everything that is missing."""
    missing = [name for name in names if find_program(name) is None]
    if missing:
        raise UnavailableError(f"not installed: {', '.join(missing)}")


def wait_for(condition: Callable[[], bool], timeout_s: float = 120, interval_s: float = 0.05) -> bool:
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval_s)
    return True


def ip(*args: str) -> str:
    return _said("ip", *args)


def _said(*argv: str) -> str:
    done = subprocess.run(
        argv, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"{shlex.join(argv)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def network_id(path: str | Path) -> tuple[int, int] | None:
    """Id that processes of one network share; None where the process is gone."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def processes_in(networks: set[tuple[int, int]]) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():
        where = f"/proc/{pid}/ns/net"
        if network_id(where) in networks:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if network_id(where) in networks:  # Still: a process id may have changed hands.
                    found.append(process)
    return found


@contextmanager
def pinned(pids: Iterable[int]) -> Iterator[set[tuple[int, int]]]:
    """The networks of these processes; meanwhile they stay, so that no new network gets the number of one of them."""
    with ExitStack() as stack:
        networks = set()
        for pid in pids:
            opened = stack.enter_context(Path(f"/proc/{pid}/ns/net").open("rb"))
            status = os.fstat(opened.fileno())
            networks.add((status.st_dev, status.st_ino))
        yield networks


@dataclass(eq=False)
class Host:
    """One host. `pids`: the lab's own processes on it, by name ("holder", "sshd", ...)."""

    name: str
    address: str
    lab: Lab
    pids: dict[str, int]
    network: tuple[int, int]
    cable: str
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def enter(self, argv: Sequence[object], cwd: str | Path = "/") -> list[str]:
        """The command line that runs `argv` on this host, started from anywhere on this machine."""
        inside = ["nsenter", f"--target={self.pids['holder']}", "--net", "--mount", "--uts"]
        return [*inside, "env", f"--chdir={cwd}", *map(str, argv)]

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**os.environ, **self.lab.environ, "HOSTNAME": self.name, **(env or {})}

    def run(
        self,
        argv: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
        timeout_s: float = 300,
        text_in: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs `argv` here to its end, by default in this process's folder.

        `env` comes on top of this process's environment and the lab's.
        """
        done = subprocess.run(
            self.enter(argv, cwd or Path.cwd()), check=False, env=self.environment(env), input=text_in or "",
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        if check and done.returncode:
            said = f"{done.stdout}{done.stderr}"
            raise RuntimeError(f"{self.name}: {shlex.join(map(str, argv))}: exit {done.returncode}\n{said}")
        return done

    def popen(
        self,
        argv: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options,
    ) -> subprocess.Popen:
        """Starts `argv` here; the process id is the command's own. `options` are Popen's."""
        return subprocess.Popen(self.enter(argv, cwd or Path.cwd()), env=self.environment(env), **options)

    def start_daemon(self, name: str, argv: Sequence[object], env: Mapping[str, str] | None = None) -> None:
        """Starts one of the lab's own processes, in the foreground; what it says goes to `log(name)`."""
        with self.log(name).open("ab") as log:
            daemon = self.popen(
                argv,
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started[name] = daemon
        self.pids[name] = daemon.pid

    def end_daemon(self, name: str, timeout_s: float = 30) -> None:
        """Ends what `start_daemon` started: SIGTERM, then SIGKILL."""
        daemon = self.started.pop(name, None)
        self.pids.pop(name, None)
        if daemon is None:
            return
        daemon.terminate()
        try:
            daemon.wait(timeout_s)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def log(self, name: str) -> Path:
        return self.lab.folder / f"{self.name}.{name}.log"

    def processes(self) -> list[psutil.Process]:
        """Processes that run here now, without the lab's own and without zombies: sessions of sshd, jobs, leftovers."""
        own = set(self.pids.values())
        return [process for process in processes_in({self.network}) if process.pid not in own]

    def named(self, start: str) -> list[psutil.Process]:
        """Processes whose name begins so."""
        return self._those(lambda process: process.name().startswith(start))

    def running(self, module: str) -> list[psutil.Process]:
        """Processes that run a module of Python's."""

        def runs(process: psutil.Process) -> bool:
            words = process.cmdline()
            return module in words and Path(words[0]).name.startswith("python")

        return self._those(runs)

    def _those(self, wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
        """Processes that are wanted, without those that end meanwhile."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if wanted(process):
                    found.append(process)
        return found

    def shm(self) -> list[str]:
        """The names in this host's /dev/shm."""
        return sorted(path.name for path in Path(f"/proc/{self.pids['holder']}/root/dev/shm").iterdir())

    def start_sshd(self) -> None:
        key = self.lab.folder / f"{self.name}.key"
        if not key.exists():
            _said("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        program = find_program("sshd")
        assert program
        config = self.lab.folder / "sshd_config"
        self.start_daemon("sshd", [program, "-D", "-e", "-f", config, "-o", f"HostKey={key}"])
        if not wait_for(self.answers):
            raise RuntimeError(f"{self.name}: sshd does not answer\n{self.log('sshd').read_text()}")

    def kill_sshd(self, sessions: bool = True) -> None:
        """Kill sshd, with its sessions or without, as a crash would; what they ran stays. `start_sshd` starts it."""
        found = self.named("sshd") if sessions else []
        if daemon := self.started.pop("sshd", None):
            daemon.kill()
            daemon.wait()
        self.pids.pop("sshd", None)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def answers(self, port: int = 22, timeout_s: float = 1) -> bool:
        """Whether something takes connections at this host's port."""
        try:
            socket.create_connection((self.address, port), timeout_s).close()
        except OSError:
            return False
        return True

    def cut(self) -> None:
        """Pulls the network cable."""
        ip("link", "set", self.cable, "down")

    def mend(self) -> None:
        """Plugs the network cable in again, and waits until packets pass."""
        ip("link", "set", self.cable, "up")
        # What was tried in between stands as "no such neighbour" for some seconds on both sides.
        ip("neigh", "flush", "dev", self.lab.bridge)
        self.run([str(find_program("ip")), "neigh", "flush", "dev", "eth0"])
        if "sshd" in self.pids and not wait_for(self.answers):
            raise RuntimeError(f"{self.name} does not answer after mending its cable")


class Lab:
    """`with Lab() as lab:` makes `count` hosts named node1, node2, ... and one more, `controller`, without sshd.

    `environ` is what a program on this machine needs to reach them by their names, with ssh, scp, pdsh or an MPI's
    launcher; `Host.run` sets it as well. `address` is this machine's own among them.

    Raises `UnavailableError` where namespaces may not be made or a program is missing.
    """

    def __init__(self, count: int = 2) -> None:
        self._names = [*(f"node{number + 1}" for number in range(count)), CONTROLLER]
        self.hosts: list[Host] = []
        self.environ: dict[str, str] = {}

    def __enter__(self) -> Lab:
        if os.geteuid():
            raise UnavailableError("only root may make network namespaces")
        demand_programs(NEEDED)
        tried = subprocess.run(
            ["unshare", "--net", "--mount", "--uts", "true"], check=False, capture_output=True, text=True
        )
        if tried.returncode:
            raise UnavailableError(f"namespaces may not be made here: {tried.stderr.strip()}")
        self.folder = Path(tempfile.mkdtemp(prefix="dsrun-lab-"))
        self.folder.chmod(0o755)  # As munged wants it; the keys in it are their owner's alone.
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), *self._names],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._keeper.stdin and self._keeper.stdout
        self._keeper.stdin.close()
        self._keeper.wait(300)
        self._keeper.stdout.close()
        for host in self.hosts:
            for daemon in host.started.values():
                daemon.wait(60)

    @property
    def controller(self) -> Host:
        """Host of a cluster's own services, such as a scheduler. Not one of `hosts`."""
        return self._controller

    def __getitem__(self, name: str) -> Host:
        return next(host for host in [*self.hosts, self._controller] if host.name == name)

    def hostfile(self, slots: int = 2) -> Path:
        path = self.folder / f"hostfile-{slots}"
        path.write_text("".join(f"{host.name} slots={slots}\n" for host in self.hosts))
        return path

    def networks(self) -> set[tuple[int, int]]:
        return {host.network for host in [*self.hosts, self._controller]}

    def _build(self) -> None:
        assert self._keeper.stdout
        line = self._keeper.stdout.readline()
        if not line:
            raise RuntimeError(f"the keeper ended with {self._keeper.wait()}")
        kept = json.loads(line)
        if "unavailable" in kept:
            raise UnavailableError(kept["unavailable"])
        self.bridge: str = kept["bridge"]
        subnet = ipaddress.ip_network(kept["subnet"])
        self.address = str(subnet[254])
        outside = [
            found["local"]
            for link in json.loads(ip("-json", "-4", "address", "show", "scope", "global"))
            for found in link["addr_info"]
        ]
        ip("address", "add", f"{self.address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for number, (name, pid) in enumerate(kept["holders"].items(), start=1):
            network = network_id(f"/proc/{pid}/ns/net")
            assert network
            cable = f"{self.bridge}-{number}"
            address = str(subnet[253 if name == CONTROLLER else number])
            host = Host(name, address, self, {"holder": pid}, network, cable)
            if name == CONTROLLER:
                self._controller = host
            else:
                self.hosts.append(host)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            ip("link", "set", cable, "master", self.bridge, "up")
            inside = ["link set lo up", f"address add {address}/24 dev eth0", "link set eth0 up"]
            # Not a default route: what tries to reach the world fails at once, as it should in a test.
            inside += [
                f"route add {there}/32 via {self.address}" for there in outside if there != self.address
            ]
            _set_up_network(pid, inside)
        self._write_files()
        for host in self.hosts:
            host.start_sshd()

    def _write_files(self) -> None:
        folder = self.folder
        everyone = [*self.hosts, self._controller]
        names = [(host.address, host.name) for host in everyone] + [(self.address, socket.gethostname())]
        # The hosts see this file as their /etc/hosts; it must stay the same file.
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in names))

        _said("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "identity"))
        shutil.copy(folder / "identity.pub", folder / "authorized_keys")
        (folder / "ssh_config").write_text(
            "".join(f"Host {host.name}\n    HostName {host.address}\n" for host in self.hosts)
            + "Host *\n    User root\n    Port 22\n"
            + f"    IdentityFile {folder}/identity\n    IdentitiesOnly yes\n    LogLevel ERROR\n"
            + "    StrictHostKeyChecking no\n    UserKnownHostsFile /dev/null\n    GlobalKnownHostsFile /dev/null\n"
        )
        programs = folder / "bin"
        programs.mkdir()
        for name in ("ssh", "scp"):
            wrapper = programs / name
            real = shlex.quote(str(find_program(name)))
            wrapper.write_text(f'#!/bin/sh\nexec {real} -F {folder}/ssh_config "$@"\n')
            wrapper.chmod(0o755)
        (folder / "sshd_config").write_text(
            "Port 22\nPidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n"
            "MaxStartups 100\nMaxSessions 100\nPermitUserRC no\nSubsystem sftp internal-sftp\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nSetEnv PATH={programs}:{SYSTEM_PATH}\n"
        )
        self.environ = {
            "PATH": f"{programs}:{os.environ.get('PATH', SYSTEM_PATH)}",
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS_APPEND": f"-F {folder}/ssh_config",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }


def _set_up_network(pid: int, lines: Sequence[str]) -> None:
    """`lines`: what `ip` shall do in that process's network."""
    argv = ["nsenter", f"--target={pid}", "--net", str(find_program("ip")), "-batch", "-"]
    done = subprocess.run(
        argv, check=False, input="\n".join([*lines, ""]), capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"{list(lines)}\n{done.stdout}{done.stderr}")


# The keeper, a process of its own.

# Runs in a host's new namespaces. $1: the lab's folder, $2: the host's name.
HOLDER = """set -e
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/sshd /run/lock
mount --bind "$1/hosts" /etc/hosts
hostname "$2"
echo ready
exec sleep infinity
"""


def keep(folder: Path, names: Sequence[str]) -> None:
    """Makes the hosts' namespaces and a bridge, says so, and ends them all when standard input does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    bridge = f"dsl{os.getpid()}"
    holders: dict[str, subprocess.Popen[str]] = {}
    made = False
    try:
        _claim, subnet = claim_subnet()  # Held as long as this process lives.
        make_bridge(bridge)
        made = True
        (folder / "hosts").touch()
        for host in names:
            argv = ["unshare", "--net", "--mount", "--uts", "sh", "-c", HOLDER, "holder", str(folder), host]
            holders[host] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
        for host, holder in holders.items():
            assert holder.stdout
            if holder.stdout.readline() != "ready\n":
                raise RuntimeError(f"{host}: its namespaces could not be set up")
        pids = {host: holder.pid for host, holder in holders.items()}
        with pinned(pids.values()) as networks:
            assert network_id("/proc/self/ns/net") not in networks
            try:
                print(json.dumps({"bridge": bridge, "subnet": subnet, "holders": pids}), flush=True)
                sys.stdin.read()
            finally:
                end_networks(networks)
    except UnavailableError as error:
        print(json.dumps({"unavailable": str(error)}), flush=True)
    finally:
        for holder in holders.values():
            holder.kill()
            holder.wait()
        if made:
            delete_links(bridge)
        shutil.rmtree(folder, ignore_errors=True)


def make_bridge(name: str) -> None:
    try:
        ip("link", "add", name, "type", "bridge")
    except RuntimeError as error:
        raise UnavailableError(f"no bridge can be made: {' '.join(str(error).split())}") from None


def delete_links(bridge: str) -> None:
    """Deletes the bridge and the cables at it."""
    for link in json.loads(ip("-json", "link")):
        if link["ifname"] == bridge or link["ifname"].startswith(f"{bridge}-"):
            with suppress(
                RuntimeError
            ):  # The host's end of a cable may just have gone, and this end with it.
                ip("link", "delete", link["ifname"])


def end_networks(networks: set[tuple[int, int]], timeout_s: float = 120) -> None:
    """Kills what lives in these networks, and what it has started meanwhile."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_in(networks)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def claim_subnet() -> tuple[socket.socket, str]:
    """A /24 that nobody else has, and the socket that keeps other labs from it as long as it is open."""
    routes = [
        ipaddress.ip_network(route["dst"], strict=False)
        for route in json.loads(ip("-json", "-4", "route", "show", "table", "all"))
        if route["dst"] != "default"
    ]
    for subnet in _candidates():
        if any(ipaddress.ip_network(subnet).overlaps(route) for route in routes):
            continue
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0dsrun-lab {subnet}")
        except OSError:
            claim.close()
            continue
        return claim, subnet
    raise UnavailableError("no 10.77.x.0/24 is free")


def _candidates() -> Iterator[str]:
    for step in range(256):
        yield f"10.77.{(os.getpid() + step) % 256}.0/24"


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])

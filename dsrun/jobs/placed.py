"""A job's place as a value: what was asked for, and the table of hosts, devices and ranks that came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.cluster import ssh
from dsrun.cluster.devices import Machine
from dsrun.cluster.ssh import Answer
from dsrun.jobs import launchers
from dsrun.jobs.job import HostDevices, world_size_of

AUTO, ON_THIS_MACHINE, SLURM, SSH, KUBERNETES = launchers.AUTO, "local", "slurm", "ssh", "kubernetes"
ASK_S = 30.0
FEW = 4
"""Hosts that a line names before it only counts."""

Ask = Callable[[Sequence[str]], Sequence[Answer]]
"""Asks hosts for their facts, in their order."""


@dataclass(frozen=True)
class Wanted:
    """What the user says of where a job runs; None where he says nothing. gpus: of each host, where hosts are named."""

    hostfile: Path | None = None
    hosts: str | None = None
    include: str | None = None
    exclude: str | None = None
    devices: str | None = None
    gpus: int | None = None
    nodes: int | None = None

    @property
    def option(self) -> str:
        """The one that names devices, as the user wrote it; empty where none does."""
        given = {"include": self.include, "exclude": self.exclude, "devices": self.devices}
        return next((f"--{name} {value}" for name, value in given.items() if value is not None), "")

    @staticmethod
    def of(given: Mapping[str, Any]) -> Wanted:
        """From options by name, among others."""
        return Wanted(**{one.name: given.get(one.name) for one in fields(Wanted)})

    def or_as(self, hosts: tuple[HostDevices, ...], launcher: str) -> Wanted:
        """This, or where nothing is said what a job had before: as many devices of this machine or under Slurm, all of
        today's pods, the very same of other hosts."""
        if self != Wanted() or launcher == KUBERNETES:
            return self
        if launcher == ON_THIS_MACHINE:
            return Wanted(gpus=world_size_of(hosts))
        if launcher == SLURM:
            return Wanted(gpus=max(len(host.devices) for host in hosts), nodes=len(hosts))
        return Wanted(devices=",".join(f"{host.host}:{','.join(map(str, host.devices))}" for host in hosts))


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached. check: ask them before they are relied on; env: texts of --env, NAME or NAME=VALUE.

    master_addr, master_port: where the ranks meet; None: chosen. site: the variables that the cluster's file gives.
    """

    launcher: str = AUTO
    check: bool = True
    master_addr: str | None = None
    master_port: int | None = None
    env: tuple[str, ...] = ()
    site: Mapping[str, str] = field(default_factory=dict)


USUAL = Reach()


@dataclass(frozen=True)
class Share:
    """A host's part in a job. machine: what is known of the host, or what stands for it; None: nothing.

    gpus: the devices as `machine` numbers them; under Slurm the job's own numbers are positions among what Slurm gave.
    here: it is this machine. asked: `machine` is the host's own.
    """

    host: HostDevices
    machine: Machine | None
    gpus: tuple[int, ...]
    here: bool = False
    asked: bool = True


@dataclass(frozen=True)
class Placed:
    """A job's devices, host by host in the order of ranks. notes: lines for the user."""

    shares: tuple[Share, ...]
    accelerator: str
    launcher: str
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[HostDevices, ...]:
        return tuple(share.host for share in self.shares)

    @property
    def here(self) -> tuple[int, ...]:
        """This machine's GPUs that the job uses, by their indices."""
        if self.accelerator == "cpu":
            return ()
        return tuple(index for share in self.shares if share.here for index in share.gpus)

    @property
    def known(self) -> bool:
        """Whether it is known of any host what it has."""
        return any(share.machine for share in self.shares)

    @property
    def machine(self) -> Machine:
        """What the planner counts with. One host: the host. Several: a machine that has the GPUs of all, numbered by
        rank, the fewest cores, and of memory what a host with the most ranks would have if each of them had as little
        as the scarcest host gives."""
        if len(self.shares) == 1 and self.shares[0].machine:
            return self.shares[0].machine
        return _together(self.shares, self.accelerator)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of `machine`, one for each rank."""
        return self.shares[0].gpus if len(self.shares) == 1 and self.known else tuple(range(self.world_size))

    @property
    def world_size(self) -> int:
        return world_size_of(self.hosts)

    def seen_again(self, machine: Machine) -> Placed:
        """The same, with this machine as it is now."""
        shares = (
            replace(share, machine=machine) if share.here and share.asked else share for share in self.shares
        )
        return replace(self, shares=tuple(shares))


class Row(NamedTuple):
    """A rank and where it runs. device: as CUDA is told; local_rank: its place on its host."""

    host: str
    device: str
    rank: int
    local_rank: int


def table(hosts: Sequence[HostDevices]) -> list[Row]:
    """A row for each rank, from 0."""
    places = (
        (host.host, device, local_rank)
        for host in hosts
        for local_rank, device in enumerate(host.visible or map(str, host.devices))
    )
    return [Row(host, device, rank, local_rank) for rank, (host, device, local_rank) in enumerate(places)]


def table_text(hosts: Sequence[HostDevices]) -> str:
    """The table in aligned columns, with a line above."""
    rows = [("host", "device", "rank"), *((row.host, row.device, str(row.rank)) for row in table(hosts))]
    host, device, rank = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{row[0]:<{host}}  {row[1]:>{device}}  {row[2]:>{rank}}" for row in rows)


def in_words(hosts: Sequence[HostDevices]) -> str:
    """ "w1: 0,1; w2: 0,1", in one line that stays short."""
    said = [f"{host.host}: {host.cuda_visible_devices}" for host in hosts[:FEW]]
    return "; ".join([*said, f"and {len(hosts) - FEW} hosts more"] if len(hosts) > FEW else said)


def ask_hosts(hosts: Sequence[str]) -> Sequence[Answer]:
    """What `dsrun doctor` asks, too."""
    return ssh.ask(hosts, {"python": sys.executable}, ASK_S)


def remembered(ask: Ask) -> Ask:
    """The same, asking each host once."""
    found: dict[str, Answer] = {}

    def again(hosts: Sequence[str]) -> Sequence[Answer]:
        if new := [host for host in hosts if host not in found]:
            found.update(zip(new, ask(new), strict=True))
        return [found[host] for host in hosts]

    return again


def _together(shares: Sequence[Share], accelerator: str) -> Machine:
    known = [(share, share.machine) for share in shares if share.machine is not None]
    most = max(len(share.host.devices) for share in shares)
    rams = [
        machine.host_memory_bytes / len(share.host.devices)
        for share, machine in known
        if machine.host_memory_bytes is not None
    ]
    cores = min((machine.cpu_cores for _, machine in known), default=1)
    memory = int(min(rams) * most) if rams else None
    on = f"{len(shares)} host{'s' * (len(shares) > 1)}"
    if accelerator == "cpu" or not known:
        return Machine(accelerator, (), cores, on, memory)
    gpus = []
    for share, machine in known:
        by_index = {gpu.index: gpu for gpu in machine.gpus}
        gpus += [by_index[index] for index in share.gpus]
    kinds = " and ".join(dict.fromkeys(gpu.name for gpu in gpus))
    numbered = tuple(replace(gpu, index=rank, parent=None) for rank, gpu in enumerate(gpus))
    return Machine(accelerator, numbered, cores, f"{len(gpus)} x {kinds} on {on}", memory)


def few(hosts: Sequence[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(hosts) if len(hosts) <= FEW else f"{', '.join(hosts[:FEW])} and {len(hosts) - FEW} more"

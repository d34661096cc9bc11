"""An allocation: a job's devices on its hosts, and its ranks' places on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsrun.cluster import ssh
from dsrun.cluster.devices import Machine, free_first
from dsrun.cluster.ssh import HostAnswer
from dsrun.job.job import HostDevices, world_size_of

ASK_S = 30.0
FEW = 4
"""Host names in a line; the rest are only counted."""

Ask = Callable[[Sequence[str]], Sequence[HostAnswer]]
"""Asks hosts for their facts; the answers are in the hosts' order."""


@dataclass(frozen=True)
class HostAllocation:
    """A host's part of a job's devices."""

    host: HostDevices
    """The host and its devices as job.json has them: under Slurm, positions among what Slurm gave."""
    machine: Machine | None
    """The host as far as it is known, or a machine that stands for it; None: unknown."""
    gpus: tuple[int, ...]
    """The devices as `machine` numbers them."""
    here: bool = False
    """Whether the host is this machine."""
    asked: bool = True
    """Whether `machine` is the host itself, not one that stands for it."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""


@dataclass(frozen=True)
class Allocation:
    """A job's devices, host by host in the order of ranks."""

    entries: tuple[HostAllocation, ...]
    accelerator: str
    """ "cuda" or "cpu"."""
    launcher: str
    notes: tuple[str, ...] = ()
    """Lines for the user."""

    @property
    def hosts(self) -> tuple[HostDevices, ...]:
        """The hosts as job.json has them."""
        return tuple(entry.host for entry in self.entries)

    @property
    def gpus_here(self) -> tuple[int, ...]:
        """This machine's GPUs that the job uses, by their indices."""
        if self.accelerator == "cpu":
            return ()
        return tuple(index for entry in self.entries if entry.here for index in entry.gpus)

    @property
    def known(self) -> bool:
        """Whether any host's devices are known."""
        return any(entry.machine for entry in self.entries)

    @property
    def machine(self) -> Machine:
        """The machine that the planner counts with.

        One host: the host. Several: a machine with the GPUs of all, numbered by rank, the fewest cores, and as much
        memory as a host with the most ranks would have if each rank had as little as on the scarcest host.
        """
        if len(self.entries) == 1 and self.entries[0].machine:
            return self.entries[0].machine
        return _together(self.entries, self.accelerator)

    @property
    def own_machine(self) -> Machine:
        """`machine` with the job's GPUs alone, where they are known: other kinds of GPU in it don't count."""
        machine = self.machine
        own = tuple(gpu for gpu in machine.gpus if self.known and gpu.index in self.devices)
        return replace(machine, gpus=own) if own else machine

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of `machine`, one for each rank."""
        return (
            self.entries[0].gpus if len(self.entries) == 1 and self.known else tuple(range(self.world_size))
        )

    @property
    def world_size(self) -> int:
        """Ranks over all hosts."""
        return world_size_of(self.hosts)

    def seen_again(self, machine: Machine) -> Allocation:
        """The same allocation, with this machine as it is now."""
        entries = (
            replace(entry, machine=machine) if entry.here and entry.asked else entry for entry in self.entries
        )
        return replace(self, entries=tuple(entries))


def unnamed_hosts(gpus: int, nodes: int) -> tuple[HostDevices, ...]:
    """Hosts with `gpus` devices each, of which nothing else is known."""
    return tuple(HostDevices(f"host{number}", tuple(range(gpus))) for number in range(nodes))


def alike(machine: Machine, gpus: int, nodes: int) -> Allocation:
    """`gpus` devices of each of so many hosts that are like this machine."""
    gpu_indices = free_first(machine, gpus, {})
    hosts = unnamed_hosts(gpus, nodes)
    return Allocation(
        tuple(HostAllocation(host, machine, gpu_indices, asked=False) for host in hosts),
        machine.accelerator,
        launcher="",
    )


class RankPlace(NamedTuple):
    """The place of a rank."""

    host: str
    device: str
    """The device's name for CUDA."""
    rank: int
    local_rank: int
    """The rank's number on its host."""


def rank_places(hosts: Sequence[HostDevices]) -> list[RankPlace]:
    """The places of all ranks, in order."""
    places = (
        (host.host, device, local_rank)
        for host in hosts
        for local_rank, device in enumerate(host.visible or map(str, host.devices))
    )
    return [
        RankPlace(host, device, rank, local_rank) for rank, (host, device, local_rank) in enumerate(places)
    ]


def rank_table(hosts: Sequence[HostDevices]) -> str:
    """The ranks' places in aligned columns, under a heading."""
    rows = [("host", "device", "rank"), *((at.host, at.device, str(at.rank)) for at in rank_places(hosts))]
    host, device, rank = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{row[0]:<{host}}  {row[1]:>{device}}  {row[2]:>{rank}}" for row in rows)


def in_words(hosts: Sequence[HostDevices]) -> str:
    """ "w1: 0,1; w2: 0,1", in one line that stays short."""
    texts = [f"{host.host}: {host.cuda_visible_devices}" for host in hosts[:FEW]]
    return "; ".join([*texts, f"and {len(hosts) - FEW} hosts more"] if len(hosts) > FEW else texts)


def ask_hosts(hosts: Sequence[str]) -> Sequence[HostAnswer]:
    """Ask hosts for their facts, as `dsrun doctor` does."""
    return ssh.ask(hosts, {"python": sys.executable}, ASK_S)


def remembered(ask: Ask) -> Ask:
    """The same, but each host is asked once."""
    answers: dict[str, HostAnswer] = {}

    def again(hosts: Sequence[str]) -> Sequence[HostAnswer]:
        if new := [host for host in hosts if host not in answers]:
            answers.update(zip(new, ask(new), strict=True))
        return [answers[host] for host in hosts]

    return again


def _together(entries: Sequence[HostAllocation], accelerator: str) -> Machine:
    known = [(entry, entry.machine) for entry in entries if entry.machine is not None]
    most = max(len(entry.host.devices) for entry in entries)
    rams = [
        machine.host_memory_bytes / len(entry.host.devices)
        for entry, machine in known
        if machine.host_memory_bytes is not None
    ]
    cores = min((machine.cpu_cores for _, machine in known), default=1)
    memory = int(min(rams) * most) if rams else None
    where = f"{len(entries)} host{'s' * (len(entries) > 1)}"
    if accelerator == "cpu" or not known:
        return Machine(accelerator, (), cores, where, memory)
    gpus = []
    for entry, machine in known:
        by_index = {gpu.index: gpu for gpu in machine.gpus}
        gpus += [by_index[index] for index in entry.gpus]
    kinds = " and ".join(dict.fromkeys(gpu.name for gpu in gpus))
    numbered = tuple(replace(gpu, index=rank, parent=None) for rank, gpu in enumerate(gpus))
    return Machine(accelerator, numbered, cores, f"{len(gpus)} x {kinds} on {where}", memory)


def few(hosts: Sequence[str]) -> str:
    """The first names, and how many more."""
    return ", ".join(hosts) if len(hosts) <= FEW else f"{', '.join(hosts[:FEW])} and {len(hosts) - FEW} more"

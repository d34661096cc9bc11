"""The user's request for where a job runs: which devices, and how other hosts are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsrun.job.job import HostDevices, world_size_of
from dsrun.jobs.launchers import AUTO, KUBERNETES, ON_THIS_MACHINE, SLURM
from dsrun.options.table import DeviceOptions


class DeviceRequest(DeviceOptions):
    """A request for devices of hosts; None for each option that isn't given."""

    @property
    def option(self) -> str:
        """The option that names devices, as the user wrote it; empty where none does."""
        given = {"include": self.include, "exclude": self.exclude, "devices": self.devices}
        return next((f"--{name} {value}" for name, value in given.items() if value is not None), "")

    def or_like(self, hosts: tuple[HostDevices, ...], launcher: str) -> DeviceRequest:
        """This request, or where it is empty that of an earlier job: as many devices of this machine or under Slurm,
        all of today's pods, the very same devices of other hosts."""
        if self != DeviceRequest() or launcher == KUBERNETES:
            return self
        if launcher == ON_THIS_MACHINE:
            return DeviceRequest(gpus=world_size_of(hosts))
        if launcher == SLURM:
            return DeviceRequest(gpus=max(len(host.devices) for host in hosts), nodes=len(hosts))
        devices = ",".join(f"{host.host}:{','.join(map(str, host.devices))}" for host in hosts)
        return DeviceRequest(devices=devices)


@dataclass(frozen=True)
class ConnectionOptions:
    """How other hosts are reached."""

    launcher: str = AUTO
    check: bool = True
    """Whether hosts are asked for their facts before they are relied on."""
    master_addr: str | None = None
    """Address where the ranks meet; None: the first host."""
    master_port: int | None = None
    """Port there; None: a free one."""
    env: tuple[str, ...] = ()
    """More variables for the ranks: NAME, or NAME=VALUE."""
    cluster_env: Mapping[str, str] = field(default_factory=dict)
    """Variables from the cluster's file."""

"""What the user says of where a job runs: which devices, and how other hosts are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dsrun.job.job import HostDevices, world_size_of
from dsrun.jobs.launchers import AUTO, KUBERNETES, ON_THIS_MACHINE, SLURM
from dsrun.options.table import DeviceOptions


class DeviceRequest(DeviceOptions):
    """Which devices of which hosts; None where the user says nothing."""

    @property
    def option(self) -> str:
        """The one that names devices, as the user wrote it; empty where none does."""
        given = {"include": self.include, "exclude": self.exclude, "devices": self.devices}
        return next((f"--{name} {value}" for name, value in given.items() if value is not None), "")

    def or_like(self, hosts: tuple[HostDevices, ...], launcher: str) -> DeviceRequest:
        """This, or where nothing is said what a job had before: as many devices of this machine or under Slurm, all of
        today's pods, the very same of other hosts."""
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
    """Ask the hosts what they have before relying on them."""
    master_addr: str | None = None
    """Where the ranks meet; None: the first host."""
    master_port: int | None = None
    """None: a free one."""
    env: tuple[str, ...] = ()
    """Variables that the ranks are to have, too: NAME, or NAME=VALUE."""
    cluster_env: Mapping[str, str] = field(default_factory=dict)
    """The variables that the cluster's file gives."""

"""A job's devices: only previewed, or locked until the job has ended, and waited for if need be."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from dsrun.cluster import gpu_locks, gpu_use
from dsrun.cluster.devices import Machine
from dsrun.cluster.gpu_use import BusyError
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.allocation.allocate import allocate
from dsrun.jobs.allocation.allocation import Allocation, Ask, ask_hosts, remembered
from dsrun.jobs.allocation.request import ConnectionOptions, DeviceRequest

POLL_S = 5.0
"""Time between two looks at the GPUs while waiting."""
RACES = 5
"""How often another dsrun may take the devices first before that is an error."""


class Allocator(Protocol):
    """Chooses a job's devices: a Reservation locks them, a Preview only looks."""

    @property
    def machine(self) -> Machine:
        """This machine, as last looked at."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines about the last allocation, for the user."""

    @property
    def connection(self) -> ConnectionOptions:
        """How hosts are reached, and the variables of their ranks."""

    def allocate(self, request: DeviceRequest) -> Allocation:
        """The devices of a job. Raises DsrunError where they can't be had."""


@dataclass
class Preview:
    """The allocation that a job would get now; nothing is locked."""

    machine: Machine
    environ: Mapping[str, str]
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    ask: Ask = ask_hosts
    """Asks other hosts for their facts."""
    notes: tuple[str, ...] = ()

    def allocate(self, request: DeviceRequest) -> Allocation:
        """The allocation that the job would get."""
        allocation = allocate(request, self.connection, self.machine, self.environ, self.ask)
        self.notes = allocation.notes
        return allocation


def idle(machine: Machine) -> Machine:
    """The machine as if nobody used its GPUs: a job that waits will find it so."""
    gpus = (replace(gpu, use=None, memory_free_bytes=None) for gpu in machine.gpus)
    return replace(machine, gpus=tuple(gpus))


@dataclass
class Reservation:
    """Locks this machine's part of what it allocates until its `with` block ends, or this process does.

    Other hosts' devices are locked by the agents there. CPUs are not locked.
    """

    machine: Machine
    environ: Mapping[str, str]
    look: Callable[[], Machine]
    """Looks at this machine again."""
    tell: Callable[[str], None]
    """Shows the user a line."""
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    ask: Ask = ask_hosts
    """Asks other hosts for their facts."""
    wait_min: float | None = None
    """Longest wait for free devices, in minutes; None: no wait."""
    notes: tuple[str, ...] = ()
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.ask = remembered(self.ask)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def allocate(self, request: DeviceRequest) -> Allocation:
        """Lock devices. Raises BusyError where they are in use, and DsrunError where they don't get free in time."""
        allocation = self._locked(request)
        self.notes = allocation.notes
        if not allocation.gpus_here:
            return allocation
        self._look()  # the free memory that counts is that of GPUs that no other dsrun takes any more
        return allocation.seen_again(self.machine)

    def _locked(self, request: DeviceRequest) -> Allocation:
        start, notified, races = time.monotonic(), False, 0
        while True:
            try:
                allocation = self._chosen(request)
            except BusyError as error:
                if self.wait_min is None:
                    raise
                if time.monotonic() - start >= self.wait_min * 60:
                    raise _too_late(error, self.wait_min) from error
                if not notified:
                    self.tell(f"waiting ({'; '.join(error.lines)})")
                    notified = True
                time.sleep(POLL_S)
                self._look()
                continue
            # Another dsrun may lock the same devices between the look and the lock. While waiting that is no error:
            # the next round takes others. Without --wait a few lost races are enough to say so.
            try:
                self._lock(allocation.gpus_here)
            except BusyError:
                races += 1
                if races == RACES and self.wait_min is None:
                    raise
                self._look()
                continue
            return allocation

    def _chosen(self, request: DeviceRequest) -> Allocation:
        allocation = allocate(request, self.connection, self.machine, self.environ, self.ask)
        busy = {
            index: use for index, use in gpu_use.in_use(self.machine).items() if index in allocation.gpus_here
        }
        if busy and self.wait_min is not None:  # GPUs that are named are waited for, too
            lines = [gpu_use.in_words(index, use) for index, use in busy.items()]
            raise BusyError(f"{request.option}: in use", lines)
        return allocation

    def _lock(self, indices: tuple[int, ...]) -> None:
        uuids = [gpu.uuid for gpu in self.machine.gpus if gpu.index in indices]
        if uuids:
            self._stack.enter_context(gpu_locks.locked(uuids, gpu_locks.this_process()))

    def _look(self) -> None:
        machine = self.look()
        if machine.accelerator != self.machine.accelerator:
            raise DsrunError(
                f"the GPUs do not answer any more: {machine.reason}", hint="Does nvidia-smi show them?"
            )
        self.machine = machine


def _too_late(error: BusyError, wait_min: float) -> DsrunError:
    (problem,) = error.problems
    return DsrunError([Problem(f"waited {wait_min:g} minutes; {problem.what}", problem.where)])

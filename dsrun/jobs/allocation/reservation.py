"""A job's devices, chosen: looked at only, or locked until the job has ended, and waited for if need be."""

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
"""Between two looks at the GPUs while waiting."""
RACES = 5
"""How often another dsrun may be faster before that is an error."""


class Allocator(Protocol):
    """Chooses a job's devices: a Reservation locks them, a Preview only looks."""

    @property
    def machine(self) -> Machine:
        """This machine, as last looked at."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Of the last allocation, for the user."""

    @property
    def connection(self) -> ConnectionOptions:
        """How hosts are reached, and what their environment gets."""

    def allocate(self, request: DeviceRequest) -> Allocation:
        """Raises DsrunError where they can't be had."""


@dataclass
class Preview:
    """What a job would get now; nothing is locked."""

    machine: Machine
    environ: Mapping[str, str]
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    ask: Ask = ask_hosts
    """How other hosts are asked."""
    notes: tuple[str, ...] = ()

    def allocate(self, request: DeviceRequest) -> Allocation:
        """What it would get."""
        found = allocate(request, self.connection, self.machine, self.environ, self.ask)
        self.notes = found.notes
        return found


def idle(machine: Machine) -> Machine:
    """The machine as it is when nobody uses its GPUs: what a job that waits will find."""
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
    """Asks this machine again what it has."""
    tell: Callable[[str], None]
    """Called with a line for the user."""
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)
    ask: Ask = ask_hosts
    """How other hosts are asked."""
    wait_min: float | None = None
    """How long to wait for free devices at most, in minutes; None: not at all."""
    notes: tuple[str, ...] = ()
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.ask = remembered(self.ask)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def allocate(self, request: DeviceRequest) -> Allocation:
        """Lock them. Raises BusyError where they are in use, and DsrunError where they are not free in time."""
        found = self._locked(request)
        self.notes = found.notes
        if not found.gpus_here:
            return found
        self._look()  # the free memory that counts is that of GPUs that no other dsrun takes any more
        return found.seen_again(self.machine)

    def _locked(self, request: DeviceRequest) -> Allocation:
        start, told, races = time.monotonic(), False, 0
        while True:
            try:
                found = self._chosen(request)
            except BusyError as error:
                if self.wait_min is None:
                    raise
                if time.monotonic() - start >= self.wait_min * 60:
                    raise _too_late(error, self.wait_min) from error
                if not told:
                    self.tell(f"waiting ({'; '.join(error.lines)})")
                    told = True
                time.sleep(POLL_S)
                self._look()
                continue
            try:
                self._lock(found.gpus_here)
            except BusyError:
                races += 1
                if races == RACES and self.wait_min is None:
                    raise
                self._look()
                continue
            return found

    def _chosen(self, request: DeviceRequest) -> Allocation:
        found = allocate(request, self.connection, self.machine, self.environ, self.ask)
        busy = {index: use for index, use in gpu_use.in_use(self.machine).items() if index in found.gpus_here}
        if busy and self.wait_min is not None:  # GPUs that are named are waited for, too
            lines = [gpu_use.in_words(index, use) for index, use in busy.items()]
            raise BusyError(f"{request.option}: in use", lines)
        return found

    def _lock(self, indices: tuple[int, ...]) -> None:
        uuids = [gpu.uuid for gpu in self.machine.gpus if gpu.index in indices]
        if uuids:
            self._stack.enter_context(gpu_locks.locked(uuids, gpu_locks.this_process()))

    def _look(self) -> None:
        found = self.look()
        if found.accelerator != self.machine.accelerator:
            raise DsrunError(
                f"the GPUs do not answer any more: {found.reason}", hint="Does nvidia-smi show them?"
            )
        self.machine = found


def _too_late(error: BusyError, wait_min: float) -> DsrunError:
    (problem,) = error.problems
    return DsrunError([Problem(f"waited {wait_min:g} minutes; {problem.what}", problem.where)])

"""Taking devices for a job: chosen among the free ones, waited for if need be, and held until the job has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from dsrun.cluster import devices as choice
from dsrun.cluster import gpu_locks, gpu_use
from dsrun.cluster.devices import Machine
from dsrun.cluster.gpu_use import BusyError
from dsrun.errors import DsrunError, Problem

POLL_S = 5.0
"""Between two looks at the GPUs while waiting."""
RACES = 5
"""So often another dsrun may be faster before that is an error."""


@dataclass(frozen=True)
class Taken:
    """A job's devices in rank order. machine: as it was when they had been taken; notes: lines for the user."""

    machine: Machine
    devices: tuple[int, ...]
    notes: tuple[str, ...] = ()


class Take(Protocol):
    """Called with --gpus and --devices, takes devices. Raises DsrunError where they can't be had.

    machine: as last looked at; notes: of the devices that were taken last.
    """

    @property
    def machine(self) -> Machine: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def __call__(self, gpus: int | None, devices: str | None) -> Taken: ...


@dataclass
class Look:
    """What would be taken now; nothing is held."""

    machine: Machine
    environ: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __call__(self, gpus: int | None, devices: str | None) -> Taken:
        chosen = choice.choose(self.machine, gpus, devices, self.environ)
        self.notes = choice.notes(self.machine, chosen, devices, self.environ)
        return Taken(self.machine, chosen, self.notes)


def left_alone(machine: Machine) -> Machine:
    """The machine as it is when nobody uses its GPUs: what a job that waits will find."""
    gpus = (replace(gpu, use=None, memory_free_bytes=None) for gpu in machine.gpus)
    return replace(machine, gpus=tuple(gpus))


@dataclass
class Claim:
    """Devices that are taken when it is called, and held until `claim` ends. On a CPU machine nothing is held.

    look: asks this machine anew; wait_min: how long to wait for free ones at most, in minutes; None: not at all; say:
    called with a line for the user.
    """

    machine: Machine
    environ: Mapping[str, str]
    look: Callable[[], Machine]
    wait_min: float | None
    say: Callable[[str], None]
    stack: ExitStack
    held: gpu_locks.Held | None = None
    notes: tuple[str, ...] = ()

    def __call__(self, gpus: int | None, devices: str | None) -> Taken:
        """Take them. Raises BusyError where they are not to be had, and DsrunError where they are not in time."""
        if self.machine.accelerator == "cpu":
            return Look(self.machine, self.environ)(gpus, devices)
        chosen = self._take(gpus, devices)
        self.notes = choice.notes(self.machine, chosen, devices, self.environ)
        self._look()  # the free memory that counts is that of GPUs that no other dsrun takes any more
        return Taken(self.machine, chosen, self.notes)

    def name(self, run_dir: str) -> None:
        """Say in the locks what the devices are held for."""
        if self.held:
            self.held.describe(gpu_locks.me(run_dir))

    def _take(self, gpus: int | None, devices: str | None) -> tuple[int, ...]:
        start, said, races = time.monotonic(), False, 0
        while True:
            try:
                chosen = self._choose(gpus, devices)
            except BusyError as error:
                if self.wait_min is None:
                    raise
                if time.monotonic() - start >= self.wait_min * 60:
                    raise _too_late(error, self.wait_min) from error
                if not said:
                    self.say(f"waiting ({'; '.join(error.lines)})")
                    said = True
                time.sleep(POLL_S)
                self._look()
                continue
            try:
                self._hold(chosen)
            except BusyError:
                races += 1
                if races == RACES and self.wait_min is None:
                    raise
                self._look()
                continue
            return chosen

    def _choose(self, gpus: int | None, devices: str | None) -> tuple[int, ...]:
        chosen = choice.choose(self.machine, gpus, devices, self.environ)
        busy = {index: use for index, use in gpu_use.in_use(self.machine).items() if index in chosen}
        if busy and self.wait_min is not None:  # GPUs that are named are waited for, too
            lines = [gpu_use.in_words(index, use) for index, use in busy.items()]
            raise BusyError(f"--devices {devices}: in use", lines)
        return chosen

    def _hold(self, chosen: tuple[int, ...]) -> None:
        uuids = [gpu.uuid for gpu in self.machine.gpus if gpu.index in chosen]
        self.held = self.stack.enter_context(gpu_locks.hold(uuids, gpu_locks.me()))

    def _look(self) -> None:
        found = self.look()
        if found.accelerator != self.machine.accelerator:
            raise DsrunError(
                f"the GPUs do not answer any more: {found.reason}", hint="Does nvidia-smi show them?"
            )
        self.machine = found


@contextmanager
def claim(
    machine: Machine,
    environ: Mapping[str, str],
    look: Callable[[], Machine],
    say: Callable[[str], None],
    *,
    wait_min: float | None = None,
) -> Iterator[Claim]:
    """A Claim; what it takes is held until the block ends, or this process does."""
    with ExitStack() as stack:
        yield Claim(machine, environ, look, wait_min, say, stack)


def _too_late(error: BusyError, wait_min: float) -> DsrunError:
    (problem,) = error.problems
    return DsrunError([Problem(f"waited {wait_min:g} minutes; {problem.what}", problem.where)])

"""Taking devices for a job: chosen among the free ones, waited for if need be, and held until the job has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from dsrun.cluster import gpu_locks, gpu_use
from dsrun.cluster.devices import Machine
from dsrun.cluster.gpu_use import BusyError
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.placed import USUAL, Ask, Placed, Reach, Wanted, ask_hosts, remembered
from dsrun.jobs.placement import place

POLL_S = 5.0
"""Between two looks at the GPUs while waiting."""
RACES = 5
"""So often another dsrun may be faster before that is an error."""


class Take(Protocol):
    """Called with what the user says of where a job runs, takes devices. Raises DsrunError where they can't be had.

    machine: this one, as last looked at; notes: of the devices that were taken last.
    """

    @property
    def machine(self) -> Machine: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def __call__(self, wanted: Wanted) -> Placed: ...


@dataclass
class Look:
    """What would be taken now; nothing is held. ask: how other hosts are asked."""

    machine: Machine
    environ: Mapping[str, str]
    reach: Reach = USUAL
    ask: Ask = ask_hosts
    notes: tuple[str, ...] = ()

    def __call__(self, wanted: Wanted) -> Placed:
        placed = place(wanted, self.reach, self.machine, self.environ, self.ask)
        self.notes = placed.notes
        return placed


def left_alone(machine: Machine) -> Machine:
    """The machine as it is when nobody uses its GPUs: what a job that waits will find."""
    gpus = (replace(gpu, use=None, memory_free_bytes=None) for gpu in machine.gpus)
    return replace(machine, gpus=tuple(gpus))


@dataclass
class Claim:
    """Devices that are taken when it is called, and held until `claim` ends: this machine's GPUs. Other hosts' are held
    by the agents there. On a CPU machine nothing is held.

    look: asks this machine anew; wait_min: how long to wait for free ones at most, in minutes; None: not at all; say:
    called with a line for the user; ask: how other hosts are asked.
    """

    machine: Machine
    environ: Mapping[str, str]
    look: Callable[[], Machine]
    wait_min: float | None
    say: Callable[[str], None]
    stack: ExitStack
    reach: Reach = USUAL
    ask: Ask = ask_hosts
    held: gpu_locks.Held | None = None
    notes: tuple[str, ...] = ()

    def __call__(self, wanted: Wanted) -> Placed:
        """Take them. Raises BusyError where they are not to be had, and DsrunError where they are not in time."""
        placed = self._take(wanted)
        self.notes = placed.notes
        if not placed.here:
            return placed
        self._look()  # the free memory that counts is that of GPUs that no other dsrun takes any more
        return placed.seen_again(self.machine)

    def name(self, run_dir: str) -> None:
        """Say in the locks what the devices are held for."""
        if self.held:
            self.held.describe(gpu_locks.me(run_dir))

    def _take(self, wanted: Wanted) -> Placed:
        start, said, races = time.monotonic(), False, 0
        while True:
            try:
                placed = self._choose(wanted)
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
                self._hold(placed.here)
            except BusyError:
                races += 1
                if races == RACES and self.wait_min is None:
                    raise
                self._look()
                continue
            return placed

    def _choose(self, wanted: Wanted) -> Placed:
        placed = place(wanted, self.reach, self.machine, self.environ, self.ask)
        busy = {index: use for index, use in gpu_use.in_use(self.machine).items() if index in placed.here}
        if busy and self.wait_min is not None:  # GPUs that are named are waited for, too
            lines = [gpu_use.in_words(index, use) for index, use in busy.items()]
            raise BusyError(f"{wanted.option}: in use", lines)
        return placed

    def _hold(self, chosen: tuple[int, ...]) -> None:
        uuids = [gpu.uuid for gpu in self.machine.gpus if gpu.index in chosen]
        if uuids:
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
    reach: Reach = USUAL,
    ask: Ask = ask_hosts,
    wait_min: float | None = None,
) -> Iterator[Claim]:
    """A Claim; what it takes is held until the block ends, or this process does."""
    with ExitStack() as stack:
        yield Claim(machine, environ, look, wait_min, say, stack, reach, remembered(ask))


def _too_late(error: BusyError, wait_min: float) -> DsrunError:
    (problem,) = error.problems
    return DsrunError([Problem(f"waited {wait_min:g} minutes; {problem.what}", problem.where)])

"""Steps 3 to 6 of `allocate`: hosts that are named are asked, and their slots become devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dsrun.cluster import devices as choice
from dsrun.cluster import gpu_use, selection, ssh
from dsrun.cluster.devices import CPU_RANKS, VISIBLE, Machine, VisibleDevices
from dsrun.cluster.gpu_use import BusyError
from dsrun.cluster.hostfile import HostSlots
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.job.job import HostDevices
from dsrun.jobs.allocation.allocation import Allocation, Ask, HostAllocation, few
from dsrun.jobs.allocation.candidates import HostCandidates
from dsrun.jobs.allocation.request import ConnectionOptions, DeviceRequest
from dsrun.jobs.launchers import AUTO, ON_THIS_MACHINE, SLURM, SSH
from dsrun.jobs.launchers.slurm.allocation import current_job

OTHERS = "choose others: --gpus N for fewer, --devices, or --exclude {host}"
WAIT = f"Wait for them: --wait; or {OTHERS}"
NO_WAIT = f"--wait is for this machine's GPUs only; {OTHERS}"


class _Host(NamedTuple):
    """A host that was selected."""

    entry: HostSlots
    slots: tuple[int, ...]
    """The slots that the options leave of it."""
    whole: bool
    """Whether no single slot of it was named."""
    machine: Machine | None
    """The host as far as it is known."""
    here: bool
    """Whether it is this machine."""


@dataclass(frozen=True)
class HostsAllocator:
    """Allocates devices of named hosts."""

    request: DeviceRequest
    connection: ConnectionOptions
    machine: Machine
    """This machine."""
    environ: Mapping[str, str]
    ask: Ask
    candidates: HostCandidates

    def allocation(self) -> Allocation:
        """The job's allocation. Raises DsrunError and BusyError as `allocate` does."""
        request, candidates, entries = self.request, self.candidates, self.candidates.entries
        self._check_launcher()
        machines: dict[str, Machine | None] = {}
        if candidates.every_slot and not candidates.slurm:
            machines = self._machines([entry.host for entry in entries])
            entries = tuple(replace(entry, slots=_slots(machines[entry.host])) for entry in entries)
        selected = selection.select(
            entries,
            request.include,
            request.exclude,
            devices=request.devices,
            gpus=request.gpus,
            nodes=request.nodes,
            source=candidates.name,
        )
        by_name = {entry.host: entry for entry in entries}
        names = [name for name, _ in selected.hosts]
        if candidates.pods and len(names) < len(entries):
            left = [name for name in by_name if name not in names]
            raise DsrunError(
                f"{few(left)} would be left out, and every pod waits for its part", hint="Ask for fewer pods."
            )
        machines = machines or self._machines(names)
        hosts = [
            _Host(by_name[name], slots, name in selected.whole, machines[name], ssh.is_here(name))
            for name, slots in selected.hosts
        ]
        accelerator = self._accelerator(hosts)
        if accelerator == "cuda":
            self._check_slots(hosts)
        allocated = self._entries(hosts, accelerator)
        notes = [*candidates.notes, *(note for entry in allocated for note in entry.notes)]
        notes += self._ignored_restriction(hosts, accelerator)
        allocated, more = _with_stand_ins(allocated, self.machine, accelerator)
        return Allocation(tuple(allocated), accelerator, self._launcher(hosts), (*notes, *more))

    def _launcher(self, hosts: Sequence[_Host]) -> str:
        if self.connection.launcher != AUTO:
            return self.connection.launcher
        if self.candidates.slurm:
            return SLURM
        return ON_THIS_MACHINE if len(hosts) == 1 and hosts[0].here else SSH

    def _check_launcher(self) -> None:
        """Raise DsrunError for Slurm's launcher with hosts that are not Slurm's."""
        if self.connection.launcher != SLURM or self.candidates.slurm:
            return
        job = current_job(self.environ)
        if job is None:
            hint = "Ask Slurm for hosts: salloc --nodes 2, or dsrun submit."
            raise DsrunError("--launcher slurm: this is not inside a job of Slurm's", hint=hint)
        if strange := [entry.host for entry in self.candidates.entries if entry.host not in job.hosts]:
            where = f"in {self.candidates.name}, but not in Slurm's job {job.job_id}"
            raise DsrunError(
                f"--launcher slurm: {few(strange)} is {where}", hint=f"That has {few(job.hosts)}."
            )

    # Asking

    def _machines(self, hosts: Sequence[str]) -> dict[str, Machine | None]:
        """The machine of each host, None where it isn't known. Raises DsrunError with all hosts that don't answer."""
        machines: dict[str, Machine | None] = {
            host: self.machine if self.candidates.pods or ssh.is_here(host) else None for host in hosts
        }
        others = [host for host, machine in machines.items() if machine is None]
        if self.candidates.slurm or not self.connection.check or not others:
            return machines
        cpu = choice.cpu_reason(self.machine, self.environ)
        problems = []
        for host, answer in zip(others, self.ask(others), strict=True):
            if answer.facts is None:
                hint = f"{answer.fix.rstrip('.') or 'See ssh'}; or go on without asking: --no-check"
                problems.append(Problem(f"does not answer: {answer.fault}", host, hint))
                continue
            try:
                machines[host] = choice.from_facts(answer.facts, cpu)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                fault = f"gives an answer that dsrun can't read: {type(error).__name__}: {error}"
                problems.append(Problem(fault, host, f"See: dsrun doctor --hosts {host}"))
        raise_all(problems)
        return machines

    def _accelerator(self, hosts: Sequence[_Host]) -> str:
        """The accelerator of all hosts: "cuda" or "cpu". Raises DsrunError where they differ."""
        kinds: dict[str, list[_Host]] = {}
        for host in hosts:
            if host.machine is not None and not (self.candidates.slurm and self.candidates.slurm.gpus):
                kinds.setdefault(host.machine.accelerator, []).append(host)
        if len(kinds) > 1:
            on_gpus, on_cpus = ([host.entry.host for host in kinds[kind]] for kind in ("cuda", "cpu"))
            first, machine = on_cpus[0], kinds["cpu"][0].machine
            fault = f"{few(on_gpus)} would train on GPUs, and {few(on_cpus)} on CPUs"
            hint = f"{first}: {machine.reason if machine else ''}. Leave it out: --exclude {first}"
            raise DsrunError(fault, hint=f"{hint}; or DS_ACCELERATOR=cpu for all.")
        if choice.cpu_reason(self.machine, self.environ):
            return "cpu"
        # Slurm's hosts were not asked: there are CPU slots only where it gave no GPUs (candidates.py).
        if self.candidates.slurm:
            return "cpu" if self.candidates.every_slot else "cuda"
        return next(iter(kinds), "cuda")

    def _check_slots(self, hosts: Sequence[_Host]) -> None:
        """Raise DsrunError for slots without a device, and for one machine under two names."""
        problems = []
        here = [host.entry for host in hosts if host.here]
        if len(here) > 1:
            fault = f"{' and '.join(entry.host for entry in here)} are both this machine"
            problems.append(Problem(fault, self.candidates.where(here[1]), "Name it once."))
        for entry, machine in ((host.entry, host.machine) for host in hosts):
            count = _slots(machine)
            if machine is not None and not self.candidates.slurm and entry.slots > count:
                fault = f"host {entry.host} has {count} GPU{'s' * (count != 1)}, and {entry.slots} slots"
                hint = f"Write slots={count}, or see nvidia-smi on it."
                problems.append(Problem(fault, self.candidates.where(entry), hint))
        raise_all(problems)

    # Slots become devices

    def _entries(self, hosts: Sequence[_Host], accelerator: str) -> list[HostAllocation]:
        """The allocations of all hosts. Raises DsrunError with the problems of all hosts."""
        entries: list[HostAllocation] = []
        errors: list[DsrunError] = []
        for host in hosts:
            try:
                entries.append(self._entry(host, accelerator))
            except DsrunError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]  # a BusyError can be waited for
        if errors:
            raise DsrunError(problem for error in errors for problem in error.problems)
        return entries

    def _entry(self, host: _Host, accelerator: str) -> HostAllocation:
        name, slots, machine = host.entry.host, host.slots, host.machine
        if accelerator == "cpu":
            if self.candidates.every_slot and host.whole and self.request.gpus is None:
                slots = slots[:CPU_RANKS]
            return HostAllocation(HostDevices(name, slots), machine, slots, host.here)
        if self.candidates.slurm:
            return self._slurm_entry(name, slots, here=host.here)
        if machine is None:
            return HostAllocation(HostDevices(name, slots), None, slots)
        try:
            chosen, lines = self._chosen(host, machine, self._visible(host, machine))
        except BusyError as error:
            fault = error.problems[0].what
            if host.here:
                first = f"{name}: {fault.splitlines()[0]}"
                raise BusyError(first, error.lines, hint=WAIT.format(host=name)) from error
            raise DsrunError(fault, where=name, hint=NO_WAIT.format(host=name)) from error
        devices = HostDevices(name, chosen, choice.cuda_uuids(machine, chosen))
        if devices.visible and self.candidates.pods and len(self.candidates.entries) > 1:
            hint = "Train in one pod, or give the pods whole GPUs."
            raise DsrunError("the other pods' slices of GPUs have names that are not known here", hint=hint)
        notes = tuple(f"{name}: {line}" for line in lines)
        return HostAllocation(devices, machine, chosen, host.here, notes=notes)

    def _visible(self, host: _Host, machine: Machine) -> VisibleDevices:
        """The slots that CUDA_VISIBLE_DEVICES leaves of a host: it counts on this machine, and in pods like it."""
        visible, entry = VisibleDevices(machine.indices), host.entry
        if host.here or self.candidates.pods:
            visible = choice.visible_devices(machine, self.environ)
        visible = VisibleDevices(
            tuple(index for index in visible.indices if index < entry.slots), visible.limit
        )
        if not visible.indices:
            raise DsrunError(
                f"{visible.limit or 'it'} leaves none of the {entry.slots} slots of host {entry.host}",
                where=self.candidates.where(entry),
                hint=f"Unset {VISIBLE}, or name other devices." if visible.limit else "",
            )
        return visible

    def _chosen(
        self, host: _Host, machine: Machine, visible: VisibleDevices
    ) -> tuple[tuple[int, ...], Sequence[str]]:
        """The devices of a host whose GPUs are known, and notes. Raises BusyError where others use them."""
        name, slots, request, limit = host.entry.host, host.slots, self.request, visible.limit
        notes = []
        # --gpus N takes free ones; whole hosts are narrowed by CUDA_VISIBLE_DEVICES; slots that are named are taken as
        # they are, in use or not, since the user looked at them.
        if request.gpus is not None:
            chosen = choice.free(machine, request.gpus, visible)
            return chosen, choice.notes(machine, chosen, visible)
        if host.whole and limit:
            kept = tuple(index for index in visible.indices if index in slots)
            if left := [index for index in slots if index not in kept]:
                notes.append(f"{limit} leaves out {','.join(map(str, left))}")
            slots = kept
        elif request.include is not None:
            slots = ordered(slots, visible)
        if not slots:
            raise DsrunError(f"{request.option} leaves nothing of {limit} on host {name}")
        option = request.option or f"{self.candidates.name}, {name}"
        chosen = choice.named(machine, slots, option, visible)
        busy = gpu_use.in_use(machine)
        by_name = request.include is not None or request.devices is not None
        if not by_name and (taken := [index for index in chosen if index in busy]):
            fault = f"{len(taken)} of {len(chosen)} GPUs {'is' if len(taken) == 1 else 'are'} in use"
            raise BusyError(fault, [gpu_use.in_words(index, busy[index]) for index in taken])
        return chosen, [*notes, *choice.notes(machine, chosen, visible, by_name=True)]

    def _slurm_entry(self, host: str, slots: tuple[int, ...], *, here: bool) -> HostAllocation:
        """A host of Slurm's. Slots are numbered from 0; Slurm sets CUDA_VISIBLE_DEVICES to their meaning on each
        host."""
        value = self.environ.get(VISIBLE)
        if not here or self.machine.accelerator == "cpu" or value is None:
            return HostAllocation(HostDevices(host, slots), None, slots)
        indices = choice.visible_devices(self.machine, self.environ).indices
        if max(slots) >= len(indices):
            raise DsrunError(
                f"{self.candidates.name} has {max(slots) + 1} GPUs or more on {host}, and {VISIBLE}={value} leaves "
                f"{len(indices)}",
                hint=f"Leave {VISIBLE} as Slurm sets it.",
            )
        names = [part.strip() for part in value.split(",")]
        devices = HostDevices(host, slots, tuple(names[slot] for slot in slots))
        return HostAllocation(devices, self.machine, tuple(indices[slot] for slot in slots), here=True)

    def _ignored_restriction(self, hosts: Sequence[_Host], accelerator: str) -> Iterator[str]:
        """A note where this shell restricts devices, and only those of other hosts are used."""
        value = self.environ.get(VISIBLE)
        if value is None or accelerator == "cpu" or self.candidates.slurm or any(host.here for host in hosts):
            return
        names = few([host.entry.host for host in hosts])
        yield f"{VISIBLE}={value} is this machine's, and doesn't count on {names}: name devices with --devices"


def _slots(machine: Machine | None) -> int:
    """Number of slots that a host can have."""
    if machine is None:
        return 0
    if machine.accelerator == "cpu":
        return machine.cpu_cores
    return sum(gpu.parent is None for gpu in machine.gpus)


def _with_stand_ins(
    entries: list[HostAllocation], machine: Machine, accelerator: str
) -> tuple[list[HostAllocation], tuple[str, ...]]:
    """The allocations with this machine in place of hosts that are not known, and a note about it."""
    unknown = [entry.host.host for entry in entries if entry.machine is None]
    if not unknown:
        return entries, ()
    unasked = f"{few(unknown)} {'was' if len(unknown) == 1 else 'were'} not asked"
    if machine.accelerator != accelerator:
        return entries, (f"{unasked}: what they have is not known",)
    indices = machine.indices

    def stand_in(entry: HostAllocation) -> HostAllocation:
        gpus = tuple(indices[number % len(indices)] for number, _ in enumerate(entry.gpus))
        return replace(entry, machine=machine, gpus=gpus, asked=False)

    completed = [entry if entry.machine else stand_in(entry) for entry in entries]
    return completed, (f"{unasked}: the plan takes every one of them to be like this machine",)


def ordered(slots: tuple[int, ...], visible: VisibleDevices) -> tuple[int, ...]:
    """Slots in the order of CUDA_VISIBLE_DEVICES. (DeepSpeed's filters keep no order of their own.)"""
    return (*(i for i in visible.indices if i in slots), *(i for i in slots if i not in visible.indices))

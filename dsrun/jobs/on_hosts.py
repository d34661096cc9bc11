"""Choosing devices among hosts that are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsrun.cluster import devices as choice
from dsrun.cluster import gpu_use, resources, ssh
from dsrun.cluster.devices import CPU_RANKS, VISIBLE, Machine, Seen
from dsrun.cluster.gpu_use import BusyError
from dsrun.cluster.hostfile import Entry
from dsrun.cluster.resources import Allocation
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import slurm
from dsrun.jobs.host_sources import Source
from dsrun.jobs.job import HostDevices
from dsrun.jobs.placed import AUTO, ON_THIS_MACHINE, SLURM, SSH, Ask, Placed, Reach, Share, Wanted, few

WAIT = "Wait for them: --wait; or choose others: --gpus N for fewer, --devices, or --exclude {host}"
NO_WAIT = (
    "Choose others: --gpus N for fewer, --devices, or --exclude {host}. --wait waits for this machine's GPUs."
)


@dataclass(frozen=True)
class Choice:
    """Choosing among hosts that are named."""

    wanted: Wanted
    reach: Reach
    machine: Machine
    environ: Mapping[str, str]
    ask: Ask
    source: Source

    def placed(self) -> Placed:
        entries, machines = self.source.entries, None
        self._check_launcher(entries)
        if self.source.loose and self.source.slurm is None:
            machines = self._machines([entry.host for entry in entries])
            entries = tuple(replace(entry, slots=_count(machines[entry.host])) for entry in entries)
        found = resources.select(
            entries,
            self.wanted.include,
            self.wanted.exclude,
            devices=self.wanted.devices,
            gpus=self.wanted.gpus,
            nodes=self.wanted.nodes,
            source=self.source.name,
        )
        hosts = [host for host, _ in found.hosts]
        if self.source.alike and len(hosts) < len(entries):
            left = [entry.host for entry in entries if entry.host not in hosts]
            raise DsrunError(
                f"{few(left)} would be left out, and every pod waits for its part", hint="Ask for fewer pods."
            )
        if machines is None:
            machines = self._machines(hosts)
        accelerator = self._accelerator({host: machines[host] for host in hosts})
        by_name = {entry.host: entry for entry in entries}
        if accelerator == "cuda":
            self._check_slots([by_name[host] for host in hosts], machines)
        shares, notes = self._shares(found, by_name, machines, accelerator)
        shares, more = _with_stand_ins(shares, self.machine, accelerator)
        notes = [*self.source.notes, *notes, *self._unheard(hosts, accelerator), *more]
        return Placed(tuple(shares), accelerator, self._launcher(hosts), tuple(notes))

    def _shares(
        self,
        found: Allocation,
        entries: Mapping[str, Entry],
        machines: Mapping[str, Machine | None],
        accelerator: str,
    ) -> tuple[list[Share], list[str]]:
        """Every host's part, and notes. Raises DsrunError with the problems of all hosts."""
        shares: list[Share] = []
        notes: list[str] = []
        problems: list[Problem] = []
        busy: BusyError | None = None
        for host, slots in found.hosts:
            try:
                share, said = self._share(
                    entries[host], slots, machines[host], accelerator, whole=host in found.whole
                )
            except BusyError as error:
                busy = error
            except DsrunError as error:
                problems += error.problems
            else:
                shares.append(share)
                notes += said
        if busy and not problems:
            raise busy
        if problems:
            raise DsrunError([*problems, *(busy.problems if busy else ())])
        return shares, notes

    def _launcher(self, hosts: Sequence[str]) -> str:
        if self.reach.launcher != AUTO:
            return self.reach.launcher
        if self.source.slurm:
            return SLURM
        return ON_THIS_MACHINE if len(hosts) == 1 and ssh.is_here(hosts[0]) else SSH

    def _check_launcher(self, entries: Sequence[Entry]) -> None:
        if self.reach.launcher != SLURM or self.source.slurm:
            return
        given = slurm.allocation(self.environ)
        if given is None:
            hint = "Ask Slurm for hosts: salloc --nodes 2, or dsrun submit."
            raise DsrunError("--launcher slurm: this is no job of Slurm's", hint=hint)
        if strange := [entry.host for entry in entries if entry.host not in given.hosts]:
            what = f"--launcher slurm: {few(strange)} is in {self.source.name}, but not in Slurm's job {given.job_id}"
            raise DsrunError(what, hint=f"That has {few(given.hosts)}.")

    def _machines(self, hosts: Sequence[str]) -> dict[str, Machine | None]:
        """What is known of each host. Raises DsrunError with all that don't answer."""
        found: dict[str, Machine | None] = {
            host: self.machine if self.source.alike or ssh.is_here(host) else None for host in hosts
        }
        others = [host for host, machine in found.items() if machine is None]
        if self.source.slurm or not self.reach.check or not others:
            return found
        cpu = choice.cpu_reason(self.machine, self.environ)
        problems = []
        for host, answer in zip(others, self.ask(others), strict=True):
            if answer.facts is None:
                hint = f"{answer.fix.rstrip('.') or 'See ssh'}; or go on without asking: --no-check"
                problems.append(Problem(f"does not answer: {answer.fault}", host, hint))
                continue
            try:
                found[host] = choice.of_facts(answer.facts, cpu)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"answers in a way that is not understood: {type(error).__name__}: {error}"
                problems.append(Problem(what, host, f"See: dsrun doctor --hosts {host}"))
        if problems:
            raise DsrunError(problems)
        return found

    def _accelerator(self, machines: Mapping[str, Machine | None]) -> str:
        """ "cuda" or "cpu", for all. Raises DsrunError where hosts differ."""
        kinds: dict[str, list[str]] = {}
        for host, machine in machines.items():
            if machine is not None and not (self.source.slurm and self.source.slurm.gpus):
                kinds.setdefault(machine.accelerator, []).append(host)
        if len(kinds) > 1:
            host = kinds["cpu"][0]
            machine = machines[host]
            what = f"{few(kinds['cuda'])} would train on GPUs, and {few(kinds['cpu'])} on CPUs"
            hint = f"{host}: {machine.reason if machine else ''}. Leave it out: --exclude {host}"
            raise DsrunError(what, hint=f"{hint}; or DS_ACCELERATOR=cpu for all.")
        if choice.cpu_reason(self.machine, self.environ):
            return "cpu"
        if self.source.slurm:
            return "cpu" if self.source.loose else "cuda"
        return next(iter(kinds), "cuda")

    def _check_slots(self, entries: Sequence[Entry], machines: Mapping[str, Machine | None]) -> None:
        """Slots that are not there, and one machine under two names."""
        problems = []
        here = [entry for entry in entries if ssh.is_here(entry.host)]
        if len(here) > 1:
            names = " and ".join(entry.host for entry in here)
            problems.append(
                Problem(f"{names} are both this machine", self.source.where(here[1]), "Name it once.")
            )
        for entry in entries:
            machine = machines[entry.host]
            count = _count(machine)
            if machine is not None and not self.source.slurm and entry.slots > count:
                what = f"host {entry.host} has {count} GPU{'s' * (count != 1)}, and {entry.slots} slots"
                hint = f"Write slots={count}, or see nvidia-smi on it."
                problems.append(Problem(what, self.source.where(entry), hint))
        if problems:
            raise DsrunError(problems)

    def _share(
        self, entry: Entry, slots: tuple[int, ...], machine: Machine | None, accelerator: str, *, whole: bool
    ) -> tuple[Share, list[str]]:
        """A host's part, and what is worth saying of it. slots: what the options leave; whole: no slot was named."""
        here = ssh.is_here(entry.host)
        if accelerator == "cpu":
            if self.source.loose and whole and self.wanted.gpus is None:
                slots = slots[:CPU_RANKS]
            return Share(HostDevices(entry.host, slots), machine, slots, here), []
        if self.source.slurm:
            return self._slurms_share(entry.host, slots, here=here), []
        if machine is None:
            return Share(HostDevices(entry.host, slots), None, slots), []
        heard = here or self.source.alike
        there = choice.seen(machine, self.environ) if heard else Seen(machine.indices)
        there = Seen(tuple(index for index in there.indices if index < entry.slots), there.limit)
        if not there.indices:
            raise DsrunError(
                f"{there.limit or 'it'} leaves none of the {entry.slots} slots of host {entry.host}",
                where=self.source.where(entry),
                hint=f"Unset {VISIBLE}, or name other devices." if there.limit else "",
            )
        try:
            chosen, notes = self._chosen(entry, slots, machine, there, whole=whole)
        except BusyError as error:
            what = error.problems[0].what
            if here:
                first = f"{entry.host}: {what.splitlines()[0]}"
                raise BusyError(first, error.lines, hint=WAIT.format(host=entry.host)) from error
            raise DsrunError(what, where=entry.host, hint=NO_WAIT.format(host=entry.host)) from error
        host = HostDevices(entry.host, chosen, choice.as_cuda_says(machine, chosen))
        if host.visible and self.source.alike and len(self.source.entries) > 1:
            hint = "Train in one pod, or give the pods whole GPUs."
            raise DsrunError("the other pods' slices of GPUs have names that are not known here", hint=hint)
        return Share(host, machine, chosen, here), notes

    def _chosen(
        self, entry: Entry, slots: tuple[int, ...], machine: Machine, there: Seen, *, whole: bool
    ) -> tuple[tuple[int, ...], list[str]]:
        """The devices of a host whose GPUs are known. Raises BusyError where others use them."""
        if self.wanted.gpus is not None:
            chosen = choice.free(machine, self.wanted.gpus, there)
            return chosen, self._said(entry, choice.notes(machine, chosen, there))
        notes = []
        if whole and there.limit:
            kept = tuple(index for index in there.indices if index in slots)
            if left := [index for index in slots if index not in kept]:
                notes.append(f"{there.limit} leaves out {entry.host}:{','.join(map(str, left))}")
            slots = kept
        elif self.wanted.include is not None:
            slots = ordered(slots, there)
        by_name = self.wanted.include is not None or self.wanted.devices is not None
        if not slots:
            raise DsrunError(f"{self.wanted.option} leaves nothing of {there.limit} on host {entry.host}")
        chosen = choice.named(
            machine, slots, self.wanted.option or f"{self.source.name}, {entry.host}", there
        )
        busy = gpu_use.in_use(machine)
        if not by_name and (taken := [index for index in chosen if index in busy]):
            what = f"{len(taken)} of {len(chosen)} GPUs {'is' if len(taken) == 1 else 'are'} in use"
            raise BusyError(what, [gpu_use.in_words(index, busy[index]) for index in taken])
        return chosen, notes + self._said(entry, choice.notes(machine, chosen, there, by_name=True))

    @staticmethod
    def _said(entry: Entry, lines: Sequence[str]) -> list[str]:
        return [f"{entry.host}: {line}" for line in lines]

    def _slurms_share(self, host: str, slots: tuple[int, ...], *, here: bool) -> Share:
        """What Slurm gave is numbered from 0; on each host Slurm sets CUDA_VISIBLE_DEVICES to what that means there."""
        if not here or self.machine.accelerator == "cpu" or self.environ.get(VISIBLE) is None:
            return Share(HostDevices(host, slots), None, slots)
        there = choice.seen(self.machine, self.environ).indices
        if max(slots) >= len(there):
            raise DsrunError(
                f"{self.source.name} has {max(slots) + 1} GPUs or more on {host}, "
                f"and {VISIBLE}={self.environ[VISIBLE]} leaves {len(there)}",
                hint=f"Leave {VISIBLE} as Slurm sets it.",
            )
        said = [part.strip() for part in self.environ[VISIBLE].split(",")]
        visible = tuple(said[slot] for slot in slots)
        return Share(
            HostDevices(host, slots, visible), self.machine, tuple(there[slot] for slot in slots), here=True
        )

    def _unheard(self, hosts: Sequence[str], accelerator: str) -> Iterator[str]:
        """Nobody else's devices are this shell's to restrict."""
        value = self.environ.get(VISIBLE)
        if value is None or accelerator == "cpu" or self.source.slurm or any(map(ssh.is_here, hosts)):
            return
        yield f"{VISIBLE}={value} is this machine's, and doesn't count on {few(hosts)}: name devices with --devices"


def _count(machine: Machine | None) -> int:
    """How many slots a host can have."""
    if machine is None:
        return 0
    if machine.accelerator == "cpu":
        return machine.cpu_cores
    return sum(gpu.parent is None for gpu in machine.gpus)


def _with_stand_ins(
    shares: Sequence[Share], machine: Machine, accelerator: str
) -> tuple[list[Share], tuple[str, ...]]:
    """The shares, with this machine in place of hosts of which nothing is known, and a note that says so."""
    unknown = [share.host.host for share in shares if share.machine is None]
    if not unknown:
        return list(shares), ()
    what = f"{few(unknown)} {'was' if len(unknown) == 1 else 'were'} not asked"
    if machine.accelerator != accelerator:
        return list(shares), (f"{what}: what they have is not known",)
    indices = machine.indices
    found = [
        share
        if share.machine
        else replace(
            share,
            machine=machine,
            gpus=tuple(indices[place % len(indices)] for place, _ in enumerate(share.gpus)),
            asked=False,
        )
        for share in shares
    ]
    return found, (f"{what}: the plan takes every one of them to be like this machine",)


def ordered(slots: tuple[int, ...], there: Seen) -> tuple[int, ...]:
    """In the order of CUDA_VISIBLE_DEVICES, which DeepSpeed's filters have none of their own against."""
    return (*(i for i in there.indices if i in slots), *(i for i in slots if i not in there.indices))

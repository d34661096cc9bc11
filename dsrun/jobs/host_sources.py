"""Where the hosts of a job are named: in a hostfile, by --hosts or --devices, by Slurm or by Kubernetes."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.cluster import devices as choice
from dsrun.cluster import hostfile, hostlist, ssh
from dsrun.cluster.devices import VISIBLE, Machine
from dsrun.cluster.hostfile import Entry
from dsrun.errors import DsrunError
from dsrun.jobs import pods, slurm
from dsrun.jobs.placed import AUTO, KUBERNETES, Reach, Wanted, few
from dsrun.jobs.slurm import SlurmAllocation

VARIABLE = "DSRUN_HOSTFILE"
"""Names a hostfile where no option does."""
SCONTROL_S = 20
"""A controller that is busy takes a while to answer."""


@dataclass(frozen=True)
class Source:
    """The hosts to choose from. name: who says so; loose: nobody said how many slots they have, so all that are there.

    slurm: the allocation, where they are Slurm's. alike: they are pods of one job, each of them like this one, and all
    take part.
    """

    name: str
    entries: tuple[Entry, ...]
    file: Path | None = None
    loose: bool = False
    slurm: SlurmAllocation | None = None
    alike: bool = False
    notes: tuple[str, ...] = ()

    def where(self, entry: Entry) -> str:
        return f"{self.file}:{entry.line}" if self.file else self.name


def named_source(wanted: Wanted, reach: Reach, machine: Machine, environ: Mapping[str, str]) -> Source | None:
    """The hosts, where there are others than this machine, or it is named; None: this machine alone."""
    if wanted.hostfile is not None and wanted.hosts is not None:
        raise DsrunError(
            f"--hostfile {wanted.hostfile} and --hosts {wanted.hosts} both name the hosts",
            hint="Give one of them.",
        )
    if reach.launcher == KUBERNETES:
        return _of_pods(wanted, machine, environ)
    if wanted.hostfile is not None:
        path = Path(wanted.hostfile)
        return Source("the hostfile", hostfile.checked(path), path)
    if wanted.hosts is not None:
        return _short(wanted.hosts, reach, wanted.gpus)
    given = slurm.allocation(environ)
    if given is not None and given.gpus is None and not choice.cpu_reason(machine, environ):
        given = _detailed(given, environ)
    from_variable = environ.get(VARIABLE)
    if given is not None:
        if reach.launcher == AUTO and len(given.hosts) == 1 and ssh.is_here(given.hosts[0]):
            _check_share(given, machine, environ)
            return None
        left = (
            (f"{VARIABLE}={from_variable} is left alone inside Slurm's job {given.job_id}",)
            if from_variable
            else ()
        )
        return _of_slurm(given, wanted, machine, environ, left)
    if from_variable:
        path = Path(from_variable)
        note = f"the hosts are those of {VARIABLE}={from_variable}"
        return Source("the hostfile", hostfile.checked(path), path, notes=(note,))
    names = named_hosts(wanted.devices, ",")
    if all(map(ssh.is_here, names)):
        return None
    return _of_devices(wanted.devices or "", names, reach)


def _check_share(given: SlurmAllocation, machine: Machine, environ: Mapping[str, str]) -> None:
    """Raise DsrunError where more GPUs of this machine, the job's only host, are to be seen than Slurm gave."""
    if given.gpus is None or machine.accelerator == "cpu":
        return
    found = len(choice.seen(machine, environ).indices)
    if found <= given.gpus[0]:
        return
    value = environ.get(VISIBLE)
    said = f"{VISIBLE} doesn't say which" if value is None else f"{VISIBLE}={value} shows {found}"
    which = environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS")
    hint = (
        f"Slurm itself says: export {VISIBLE}={which}"
        if which
        else "Start a shell inside the job: srun --pty bash"
    )
    raise DsrunError(
        f"Slurm's job {given.job_id} has {given.gpus[0]} GPUs of this machine, and {said}", hint=hint
    )


def _detailed(given: SlurmAllocation, environ: Mapping[str, str]) -> SlurmAllocation:
    """The allocation with what scontrol says of its GPUs: salloc's shell on a login node isn't told of --gres."""
    words = slurm.details_command(given.job_id)
    if not shutil.which(words[0], path=environ.get("PATH", "")):
        return given
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=SCONTROL_S,
        )
        return slurm.detailed(given, said.stdout)
    return given


def _short(text: str, reach: Reach, gpus: int | None) -> Source:
    """--hosts. Slots that nobody gave are those that follow the default."""
    pairs = list(zip(hostlist.expand(text, 1), hostlist.expand(text, 2), strict=True))
    loose = any(one.slots != other.slots for one, other in pairs)
    if not loose or not reach.check:
        return Source("--hosts", hostlist.expand(text, gpus if loose else None))
    if any(one.slots == other.slots for one, other in pairs):
        raise DsrunError("some hosts have a number of slots, and others none", where=f"--hosts {text}")
    return Source("--hosts", tuple(one for one, _ in pairs), loose=True)


def _of_devices(text: str, names: Sequence[str], reach: Reach) -> Source:
    """Hosts that only --devices names."""
    loose = reach.check
    if not loose and any(part.rpartition(":")[2].strip() == "all" for part in text.split(",")):
        raise DsrunError(
            f"--devices {text}: how many are all? Nobody asks the hosts (--no-check)",
            hint="Write the numbers, or name the hosts with their slots: --hosts w1:8",
        )
    # As many slots as any number there needs: what isn't on a host is found out when it is asked.
    numbers = [
        int(number) for part in text.split(",") for number in re.findall(r"\d{1,4}", part.rpartition(":")[2])
    ]
    slots = min(max(numbers, default=0) + 1, hostfile.MOST_SLOTS)
    return Source("--devices", tuple(Entry(name, slots, 0) for name in names), loose=loose)


def _of_slurm(
    given: SlurmAllocation,
    wanted: Wanted,
    machine: Machine,
    environ: Mapping[str, str],
    notes: tuple[str, ...],
) -> Source:
    """The allocation's hosts, with what Slurm gave on each as slots."""
    name = f"Slurm's job {given.job_id}"
    cpu = choice.cpu_reason(machine, environ) or (given.gpus is None and machine.accelerator == "cpu")
    if cpu:
        slots = tuple(
            max(count, wanted.gpus or 1) for count in given.cpus or (machine.cpu_cores,) * len(given.hosts)
        )
    elif given.gpus is not None:
        slots = given.gpus
        if without := [host for host, count in zip(given.hosts, slots, strict=True) if not count]:
            raise DsrunError(f"{name} has no GPU on {few(without)}", hint="Ask for them: --gpus-per-node N")
    elif wanted.gpus is not None:
        slots = (wanted.gpus,) * len(given.hosts)
    else:
        raise DsrunError(f"{name}: Slurm doesn't say how many GPUs each host has", hint="Say so: --gpus N")
    entries = [Entry(host, count, 0) for host, count in zip(given.hosts, slots, strict=True)]
    return Source(name, tuple(entries), loose=bool(cpu), slurm=given, notes=notes)


def _of_pods(wanted: Wanted, machine: Machine, environ: Mapping[str, str]) -> Source:
    """The pods of this pod's job, with all the GPUs that they have, or the CPU ranks that are asked for."""
    pod = pods.of(environ)
    if wanted.hostfile is not None or wanted.hosts is not None:
        option = "--hosts" if wanted.hostfile is None else "--hostfile"
        raise DsrunError(
            f"{option}: the hosts of --launcher {KUBERNETES} are the job's pods", hint="Leave it out."
        )
    cuda = machine.accelerator == "cuda"
    entries = [Entry(name, 1 if cuda else wanted.gpus or 1, 0) for name in pod.names]
    return Source("the job's pods", tuple(entries), loose=cuda, alike=True)


def named_hosts(text: str | None, sign: str) -> list[str]:
    """The hosts in a filter (sign: @), where a name may stand alone, or in --devices (a comma), where it may not."""
    found = []
    for part in text.split(sign) if text is not None else ():
        name, colon, _ = part.strip().rpartition(":")
        found += [name] if colon else [part.strip()] if sign == "@" else []
    return [name for name in dict.fromkeys(found) if name]

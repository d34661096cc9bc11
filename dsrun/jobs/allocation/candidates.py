"""The hosts that a job may use: from a hostfile, --hosts or --devices, from Slurm or from Kubernetes."""

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
from dsrun.cluster.hostfile import HostSlots
from dsrun.errors import DsrunError
from dsrun.jobs.allocation.allocation import few
from dsrun.jobs.allocation.request import ConnectionOptions, DeviceRequest
from dsrun.jobs.launchers import AUTO, KUBERNETES
from dsrun.jobs.launchers.kubernetes import pods
from dsrun.jobs.launchers.slurm import allocation as slurm
from dsrun.jobs.launchers.slurm.allocation import SlurmJob
from dsrun.options.declare import entries
from dsrun.options.table import DeviceOptions

HOSTFILE = entries(DeviceOptions)["hostfile"]
SCONTROL_S = 20
"""Time that a busy controller may take to answer."""


@dataclass(frozen=True)
class HostCandidates:
    """The hosts to choose from."""

    name: str
    """The source of the hosts, for messages."""
    entries: tuple[HostSlots, ...]
    file: Path | None = None
    """The hostfile, if they come from one."""
    every_slot: bool = False
    """Whether nobody said how many slots they have: as many as there are devices."""
    slurm: SlurmJob | None = None
    """The Slurm job whose hosts they are."""
    pods: bool = False
    """Whether they are pods of one job: each like this one, and all take part."""
    notes: tuple[str, ...] = ()

    def where(self, entry: HostSlots) -> str:
        """The host's place in the file, or where the hosts come from."""
        return f"{self.file}:{entry.line}" if self.file else self.name


def find_candidates(
    request: DeviceRequest, connection: ConnectionOptions, machine: Machine, environ: Mapping[str, str]
) -> HostCandidates | None:
    """The hosts that the request, Slurm or the environment names; None: this machine alone."""
    if request.hostfile is not None and request.hosts is not None:
        raise DsrunError(
            f"--hostfile {request.hostfile} and --hosts {request.hosts} both name the hosts",
            hint="Give one of them.",
        )
    if connection.launcher == KUBERNETES:
        return _from_pods(request, machine, environ)
    if request.hostfile is not None:
        return _from_file(request.hostfile)
    if request.hosts is not None:
        return _from_hosts(request.hosts, connection, request.gpus)
    if (job := slurm.current_job(environ)) is not None:
        return _from_slurm(job, request, connection, machine, environ)
    if path := HOSTFILE.in_environment(environ):
        return _from_file(Path(path), f"the hosts are those of {HOSTFILE.option.variable}={path}")
    names = named_hosts(request.devices, ",")
    if all(map(ssh.is_here, names)):
        return None
    return _from_devices(request.devices or "", names, connection)


def _from_file(path: Path, *notes: str) -> HostCandidates:
    return HostCandidates("the hostfile", hostfile.checked(path), path, notes=notes)


def _from_hosts(text: str, connection: ConnectionOptions, gpus: int | None) -> HostCandidates:
    open_slots = [slots is None for _, slots in hostlist.with_open_slots(text)]
    if not any(open_slots) or not connection.check:
        return HostCandidates("--hosts", hostlist.expand(text, gpus if any(open_slots) else None))
    if not all(open_slots):
        raise DsrunError("some hosts have a number of slots, and others none", where=f"--hosts {text}")
    return HostCandidates("--hosts", hostlist.expand(text, 1), every_slot=True)


def _from_devices(text: str, names: Sequence[str], connection: ConnectionOptions) -> HostCandidates:
    parts = [part.rpartition(":")[2].strip() for part in text.split(",")]
    if not connection.check and "all" in parts:
        raise DsrunError(
            f"--devices {text}: how many are all? Nobody asks the hosts (--no-check)",
            hint="Write the numbers, or name the hosts with their slots: --hosts w1:8",
        )
    # As many slots as any number there needs: what a host lacks is found out when it is asked.
    numbers = [int(number) for part in parts for number in re.findall(r"\d{1,4}", part)]
    slots = min(max(numbers, default=0) + 1, hostfile.MOST_SLOTS)
    entries = tuple(HostSlots(name, slots, 0) for name in names)
    return HostCandidates("--devices", entries, every_slot=connection.check)


def _from_pods(request: DeviceRequest, machine: Machine, environ: Mapping[str, str]) -> HostCandidates:
    """The pods of this pod's job, with all the GPUs that they have, or the CPU ranks that are asked for."""
    names = pods.this_pod(environ).names
    if request.hostfile is not None or request.hosts is not None:
        option = "--hosts" if request.hostfile is None else "--hostfile"
        raise DsrunError(
            f"{option}: the hosts of --launcher {KUBERNETES} are the job's pods", hint="Leave it out."
        )
    cuda = machine.accelerator == "cuda"
    entries = tuple(HostSlots(name, 1 if cuda else request.gpus or 1, 0) for name in names)
    return HostCandidates("the job's pods", entries, every_slot=cuda, pods=True)


def _from_slurm(
    job: SlurmJob,
    request: DeviceRequest,
    connection: ConnectionOptions,
    machine: Machine,
    environ: Mapping[str, str],
) -> HostCandidates | None:
    """The job's hosts, with what Slurm gave on each as slots; None where that is this machine alone."""
    cpu = choice.cpu_reason(machine, environ)
    # salloc's shell on a login node isn't told of --gres, nor is a job whose hosts have different shares.
    if job.gpus is None and not cpu:
        job = _with_details(job, environ)
    if connection.launcher == AUTO and len(job.hosts) == 1 and ssh.is_here(job.hosts[0]):
        _check_visible(job, machine, environ)
        return None
    name = f"Slurm's job {job.job_id}"
    on_cpus = bool(cpu) or (job.gpus is None and machine.accelerator == "cpu")
    if on_cpus:
        cores = job.cpus or (machine.cpu_cores,) * len(job.hosts)
        slots = tuple(max(count, request.gpus or 1) for count in cores)
    elif job.gpus is not None:
        slots = job.gpus
        if without := [host for host, count in zip(job.hosts, slots, strict=True) if not count]:
            raise DsrunError(f"{name} has no GPU on {few(without)}", hint="Ask for them: --gpus-per-node N")
    elif request.gpus is not None:
        slots = (request.gpus,) * len(job.hosts)
    else:
        raise DsrunError(f"{name}: Slurm doesn't say how many GPUs each host has", hint="Say so: --gpus N")
    entries = tuple(HostSlots(host, count, 0) for host, count in zip(job.hosts, slots, strict=True))
    path = HOSTFILE.in_environment(environ)
    notes = (f"{HOSTFILE.option.variable}={path} is ignored inside {name}",) if path else ()
    return HostCandidates(name, entries, every_slot=on_cpus, slurm=job, notes=notes)


def _with_details(job: SlurmJob, environ: Mapping[str, str]) -> SlurmJob:
    """The job with the GPUs that scontrol reports, if it does."""
    words = slurm.details_command(job.job_id)
    if shutil.which(words[0], path=environ.get("PATH", "")):
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # then --gpus is asked for
            done = subprocess.run(
                words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
                timeout=SCONTROL_S,
            )  # fmt: skip
            return slurm.detailed(job, done.stdout)
    return job


def _check_visible(job: SlurmJob, machine: Machine, environ: Mapping[str, str]) -> None:
    """Raise DsrunError where more GPUs of this machine, the job's only host, are visible than Slurm gave."""
    if job.gpus is None or machine.accelerator == "cpu":
        return
    visible = len(choice.visible_devices(machine, environ).indices)
    if visible <= job.gpus[0]:
        return
    value = environ.get(VISIBLE)
    shows = f"{VISIBLE} doesn't say which" if value is None else f"{VISIBLE}={value} shows {visible}"
    which = environ.get("SLURM_JOB_GPUS") or environ.get("SLURM_STEP_GPUS")
    hint = (
        f"Slurm itself says: export {VISIBLE}={which}"
        if which
        else "Start a shell inside the job: srun --pty bash"
    )
    raise DsrunError(
        f"Slurm's job {job.job_id} has {job.gpus[0]} GPUs of this machine, and {shows}", hint=hint
    )


def named_hosts(text: str | None, sign: str) -> list[str]:
    """The hosts in a filter (sign: @), where a name may stand alone, or in --devices (a comma), where it may not."""
    names = []
    for part in text.split(sign) if text is not None else ():
        name, colon, _ = part.strip().rpartition(":")
        names += [name] if colon else [part.strip()] if sign == "@" else []
    return [name for name in dict.fromkeys(names) if name]

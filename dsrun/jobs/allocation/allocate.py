"""A request becomes an allocation: which devices of which hosts a job gets, from all that says so.

Whoever names hosts names all of them; CUDA_VISIBLE_DEVICES restricts and orders the devices of this machine only; a
slot is a device that is there. A contradiction is an error that names both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsrun.cluster import devices as choice
from dsrun.cluster import selection, ssh
from dsrun.cluster.devices import Machine, VisibleDevices
from dsrun.cluster.hostfile import HostSlots
from dsrun.errors import DsrunError
from dsrun.job.job import LOCAL, HostDevices
from dsrun.jobs.allocation.allocation import Allocation, Ask, HostAllocation, ask_hosts
from dsrun.jobs.allocation.candidates import find_candidates, named_hosts
from dsrun.jobs.allocation.on_hosts import HostsAllocator, ordered
from dsrun.jobs.allocation.request import ConnectionOptions, DeviceRequest
from dsrun.jobs.launchers import AUTO, ON_THIS_MACHINE

DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""The hostfile that DeepSpeed reads by default (deepspeed/launcher/runner.py, DLTS_HOSTFILE); dsrun does not."""
NAME_HOSTS = "Name hosts: --hostfile FILE, or --hosts node[01-16]:8"


def allocate(
    request: DeviceRequest,
    connection: ConnectionOptions,
    machine: Machine,
    environ: Mapping[str, str],
    ask: Ask = ask_hosts,
) -> Allocation:
    """The hosts and devices of a job that is started on this machine.

    1. Options that contradict each other are refused.
    2. Candidates are the hosts of --hostfile or --hosts, else of Slurm's job, of DSRUN_HOSTFILE, or in --devices; under
       Kubernetes the job's pods. Without any it is this machine alone, and its devices are chosen.
    3. Other candidates are asked what they have, except under Slurm, in pods and with --no-check.
    4. --include, --exclude, --devices, --gpus and --nodes choose hosts and slots (cluster/selection.py).
    5. Slots become devices, host by host: those that others use are left out or, where they can't be, refused.
    6. A host that was not asked is planned for as if it were like this machine.

    Raises DsrunError for what contradicts, isn't there, doesn't answer, or is in use on other hosts; BusyError where it
    is in use on this machine alone, so that it can be waited for.
    """
    selection.check_together(
        {
            "--include": request.include,
            "--exclude": request.exclude,
            "--devices": request.devices,
            "--gpus": request.gpus,
            "--nodes": request.nodes,
        }
    )
    candidates = find_candidates(request, connection, machine, environ)
    if candidates is None:
        return _on_this_machine(request, connection, machine, environ)
    return HostsAllocator(request, connection, machine, environ, ask, candidates).allocation()


def _on_this_machine(
    request: DeviceRequest, connection: ConnectionOptions, machine: Machine, environ: Mapping[str, str]
) -> Allocation:
    if connection.launcher != AUTO:
        raise DsrunError(f"--launcher {connection.launcher}: no hosts are named", hint=NAME_HOSTS)
    if (request.nodes or 1) > 1:
        raise DsrunError(f"--nodes {request.nodes}: no hosts are named", hint=NAME_HOSTS)
    visible = choice.visible_devices(machine, environ)
    with_host = any(":" in part or part.strip() == "all" for part in (request.devices or "").split(","))
    if request.include is not None or request.exclude is not None or with_host:
        chosen = _filtered(request, machine, visible)
    else:
        chosen = choice.choose(machine, request.gpus, request.devices, environ)
    by_name = request.devices is not None or request.include is not None
    notes = [*choice.notes(machine, chosen, visible, by_name=by_name)]
    if DEEPSPEED_HOSTFILE.exists():
        notes.append(
            f"{DEEPSPEED_HOSTFILE} is ignored: no hostfile is named (--hostfile {DEEPSPEED_HOSTFILE})"
        )
    host = HostDevices(LOCAL, chosen, choice.cuda_uuids(machine, chosen))
    entry = HostAllocation(host, machine, chosen, here=True)
    return Allocation((entry,), machine.accelerator, ON_THIS_MACHINE, tuple(notes))


def _filtered(request: DeviceRequest, machine: Machine, visible: VisibleDevices) -> tuple[int, ...]:
    """The devices of this machine that --include, --exclude or --devices leaves, where they name it."""
    option = request.option
    texts = ((request.include, "@"), (request.exclude, "@"), (request.devices, ","))
    names = sorted({name for text, sign in texts for name in named_hosts(text, sign)})
    if others := [name for name in names if not ssh.is_here(name)]:
        fault = f"{option}: {', '.join(others)} is not this machine, and no hosts are named"
        raise DsrunError(fault, hint=NAME_HOSTS)
    if len(names) > 1:
        raise DsrunError(f"{option}: {' and '.join(names)} are both this machine", hint="Use one name.")
    numbers = [gpu.index for gpu in machine.gpus] if machine.accelerator == "cuda" else machine.indices
    entry = HostSlots(names[0] if names else LOCAL, max(numbers) + 1, 0)
    selected = selection.select(
        [entry], request.include, request.exclude, devices=request.devices, source="this machine"
    )
    ((host, slots),) = selected.hosts
    if request.exclude is not None:
        left = VisibleDevices(tuple(index for index in visible.indices if index in slots), visible.limit)
        if not left.indices:
            raise DsrunError(
                f"{option} leaves nothing of {visible.limit or 'this machine'}", hint="Exclude fewer."
            )
        return choice.free(machine, None, left)
    if host in selected.whole:
        return choice.named(machine, visible.indices, option, visible)
    return choice.named(machine, slots if request.devices else ordered(slots, visible), option, visible)

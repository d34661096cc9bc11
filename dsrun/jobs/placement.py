"""Where a job runs: all that says so, from --devices to Slurm, becomes one table of hosts, devices and ranks.

Whoever names hosts names them in full; CUDA_VISIBLE_DEVICES restricts and orders what this machine has, and nobody
else's; a slot is a device that is there. What contradicts is an error that names both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dsrun.cluster import devices as choice
from dsrun.cluster import resources, ssh
from dsrun.cluster.devices import Machine, Seen
from dsrun.cluster.hostfile import Entry
from dsrun.errors import DsrunError
from dsrun.jobs.host_sources import named_hosts, named_source
from dsrun.jobs.job import LOCAL, HostDevices
from dsrun.jobs.on_hosts import Choice, ordered
from dsrun.jobs.placed import AUTO, ON_THIS_MACHINE, Ask, Placed, Reach, Share, Wanted, ask_hosts

DEEPSPEEDS = Path("/job/hostfile")
"""What DeepSpeed reads where no hostfile is named (deepspeed/launcher/runner.py, DLTS_HOSTFILE); dsrun does not."""
NAMES = "Name hosts: --hostfile FILE, or --hosts node[01-16]:8"


def place(
    wanted: Wanted, reach: Reach, machine: Machine, environ: Mapping[str, str], ask: Ask = ask_hosts
) -> Placed:
    """The hosts and devices of a job. machine: this one.

    Raises DsrunError for what contradicts, isn't there, doesn't answer, or is in use on other hosts; BusyError where it
    is in use on this machine alone, so that it can be waited for.
    """
    together = {"--include": wanted.include, "--exclude": wanted.exclude, "--devices": wanted.devices}
    counts = {"--gpus": wanted.gpus, "--nodes": wanted.nodes}
    resources.check_together({**together, **counts})
    source = named_source(wanted, reach, machine, environ)
    if source is None:
        return _alone(wanted, reach, machine, environ)
    return Choice(wanted, reach, machine, environ, ask, source).placed()


# This machine alone


def _alone(wanted: Wanted, reach: Reach, machine: Machine, environ: Mapping[str, str]) -> Placed:
    if reach.launcher != AUTO:
        raise DsrunError(f"--launcher {reach.launcher}: no hosts are named", hint=NAMES)
    if (wanted.nodes or 1) > 1:
        raise DsrunError(f"--nodes {wanted.nodes}: no hosts are named", hint=NAMES)
    there = choice.seen(machine, environ)
    in_full = any(":" in part or part.strip() == "all" for part in (wanted.devices or "").split(","))
    if wanted.include is not None or wanted.exclude is not None or in_full:
        chosen = _filtered(wanted, machine, there)
    else:
        chosen = choice.choose(machine, wanted.gpus, wanted.devices, environ)
    by_name = wanted.devices is not None or wanted.include is not None
    notes = [*choice.notes(machine, chosen, there, by_name=by_name)]
    if DEEPSPEEDS.exists():
        notes.append(f"{DEEPSPEEDS} is left alone: no hostfile is named (--hostfile {DEEPSPEEDS})")
    host = HostDevices(LOCAL, chosen, choice.as_cuda_says(machine, chosen))
    share = Share(host, machine, chosen, here=True)
    return Placed((share,), machine.accelerator, ON_THIS_MACHINE, tuple(notes))


def _filtered(wanted: Wanted, machine: Machine, there: Seen) -> tuple[int, ...]:
    """The devices of this machine that --include, --exclude or --devices leaves, where they name it."""
    option = wanted.option
    names = {
        *named_hosts(wanted.include, "@"),
        *named_hosts(wanted.exclude, "@"),
        *named_hosts(wanted.devices, ","),
    }
    if others := sorted(name for name in names if not ssh.is_here(name)):
        raise DsrunError(
            f"{option}: {', '.join(others)} is not this machine, and no hosts are named", hint=NAMES
        )
    if len(names) > 1:
        raise DsrunError(
            f"{option}: {' and '.join(sorted(names))} are both this machine", hint="Use one name."
        )
    numbers = [gpu.index for gpu in machine.gpus] if machine.accelerator == "cuda" else machine.indices
    entry = Entry(next(iter(names), LOCAL), max(numbers) + 1, 0)
    found = resources.select(
        [entry], wanted.include, wanted.exclude, devices=wanted.devices, source="this machine"
    )
    ((host, slots),) = found.hosts
    if wanted.exclude is not None:
        left = Seen(tuple(index for index in there.indices if index in slots), there.limit)
        if not left.indices:
            raise DsrunError(
                f"{option} leaves nothing of {there.limit or 'this machine'}", hint="Exclude fewer."
            )
        return choice.free(machine, None, left)
    if host in found.whole:
        return choice.named(machine, there.indices, option, there)
    return choice.named(machine, slots if wanted.devices else ordered(slots, there), option, there)

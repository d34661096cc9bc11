"""A real all-reduce across hosts, started the way that a job is: what no look at a host can tell."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dsrun
from dsrun.cluster import devices as choice
from dsrun.cluster import gpu_use, ssh
from dsrun.cluster.devices import CPU_RANKS, Machine
from dsrun.cluster.doctor.check import Host
from dsrun.errors import DsrunError, JobFailedError, Problem
from dsrun.jobs.allocation.allocation import few
from dsrun.jobs.launchers import SLURM
from dsrun.jobs.spec import run_folder
from dsrun.jobs.spec.job import HostDevices, ScriptJob
from dsrun.jobs.supervision.coordinator import Coordinator
from dsrun.jobs.supervision.run import opened
from dsrun.jobs.supervision.run_options import RunOptions

MODULE = "dsrun.training.smoke"
LIMIT = 3.0
"""Minutes. The ranks give one another up after a minute by themselves; this is for what they can't end."""


@dataclass(frozen=True)
class Smoke:
    """What came of it."""

    ranks: int
    hosts: int
    seconds: float
    """From the first process to the last."""
    found: Mapping[str, Any] | None
    """What dsrun.training.smoke prints; None where it failed."""
    problems: tuple[Problem, ...] = ()
    run_dir: str = ""
    """The run folder, where it failed."""


def smoke(
    hosts: Sequence[Host],
    launcher: str,
    parent: Path,
    environ: Mapping[str, str],
    options: RunOptions,
    *,
    say: Callable[[str], None],
) -> Smoke:
    """Try it on hosts that have been asked what they have.

    parent: the folder, shared by all hosts, in which a run folder is made for it; that stays where it fails.
    Raises what ends dsrun: KeyboardInterrupt, TerminatedError.
    """
    began = time.monotonic()
    ranks, found, run_dir = 0, None, ""
    problems: tuple[Problem, ...] = ()
    new = not parent.exists()
    try:
        machine = choice.detect(environ)
        devices, accelerator = devices_of(hosts, machine, launcher, environ)
        ranks = sum(len(host.devices) for host in devices)
        job = job_of(devices, accelerator, launcher, parent)
        run_dir = job.run_dir
        found = _run(job, machine, environ, replace(options, hang_timeout=LIMIT), say)
        shutil.rmtree(run_dir, ignore_errors=True)
        if new:
            with suppress(OSError):  # somebody else's run may be in it by now
                parent.rmdir()
    except DsrunError as error:
        problems = tuple(error.problems)
    return Smoke(ranks, len(hosts), time.monotonic() - began, found, problems, run_dir if problems else "")


def job_of(hosts: tuple[HostDevices, ...], accelerator: str, launcher: str, parent: Path) -> ScriptJob:
    """The job, in a new run folder. Raises DsrunError where that can't be made."""
    run_dir = parent.absolute() / f"smoke-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if problems := run_folder.check_new(run_dir):
        raise DsrunError(problems)
    return ScriptJob(
        run_dir=str(run_dir),
        script=MODULE,
        args=(),
        cwd=str(run_dir),
        accelerator=accelerator,
        hosts=hosts,
        dsrun_version=dsrun.__version__,
        module=True,
        local_rank=False,
        launcher=launcher,
    )


def _run(
    job: ScriptJob,
    machine: Machine,
    environ: Mapping[str, str],
    options: RunOptions,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """What the first rank printed. Raises DsrunError where any of them failed."""
    run_dir = Path(job.run_dir)
    with opened(job, machine, environ):
        run_folder.write_state(run_dir, "running")
        Coordinator(job, environ, options, lambda: False, say).run()
        found = _printed(run_dir / run_folder.rank_log(0))
        run_folder.write_state(run_dir, "finished", result=found)
    return found


def _printed(log: Path) -> dict[str, Any]:
    """What dsrun.training.smoke has printed."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("smoke"):
                return found
    raise JobFailedError([Problem("the ranks ended, and the first printed no result", str(log))], 1)


def devices_of(
    hosts: Sequence[Host], machine: Machine, launcher: str, environ: Mapping[str, str]
) -> tuple[tuple[HostDevices, ...], str]:
    """The devices to try, and "cuda" or "cpu": as many GPUs as a host has slots, only the free ones if there are any; a
    CPU rank on each host, or two on the only one.

    machine: this one. Raises DsrunError where hosts differ, or it isn't known what they have.
    """
    cpu = choice.cpu_reason(machine, environ)
    machines: dict[str, Machine] = {}
    silent = [
        Problem(f"does not answer: {host.fault}", host.name, host.fix) for host in hosts if host.facts is None
    ]
    if silent:
        raise DsrunError(silent)
    for host in hosts:
        try:
            machines[host.name] = choice.from_facts(host.facts or {}, cpu)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"what it has is not known: {type(error).__name__}: {error}"
            raise DsrunError(
                what, where=host.name, hint=f"See: dsrun doctor --hosts {host.name} --json"
            ) from error
    kinds = {found.accelerator for found in machines.values()}
    if len(kinds) > 1:
        odd = [name for name, found in machines.items() if found.accelerator == "cpu"]
        what = f"trains on CPUs ({machines[odd[0]].reason}), and others on GPUs"
        raise DsrunError(what, where=few(odd), hint="DS_ACCELERATOR=cpu for all, or leave it out.")
    if kinds == {"cpu"}:
        count = CPU_RANKS if len(hosts) == 1 else 1
        return tuple(HostDevices(host.name, tuple(range(count))) for host in hosts), "cpu"
    if launcher == SLURM:  # whose numbers are places among what it gave
        return tuple(HostDevices(host.name, tuple(range(host.slots or 1))) for host in hosts), "cuda"
    return tuple(_gpus(host, machines[host.name], environ) for host in hosts), "cuda"


def _gpus(host: Host, machine: Machine, environ: Mapping[str, str]) -> HostDevices:
    there = choice.visible_devices(machine, environ if ssh.is_here(host.name) else {}).indices
    busy = gpu_use.in_use(machine)
    chosen = tuple([index for index in there if index not in busy] or there)[: host.slots]
    if not chosen:
        raise DsrunError(f"{choice.VISIBLE} leaves no GPU", where=host.name)
    return HostDevices(host.name, chosen)

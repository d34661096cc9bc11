"""A real all-reduce across hosts, started the way that a job is: what no look at a host can tell."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dsrun
from dsrun.cluster import devices as choice
from dsrun.cluster import gpu_use, ssh
from dsrun.cluster.devices import CPU_RANKS, Machine
from dsrun.cluster.doctor.check import RED, YELLOW, CheckResult, Host, commonest
from dsrun.errors import DsrunError, JobFailedError, Problem, raise_all
from dsrun.job import run_folder
from dsrun.job.job import HostDevices, ScriptJob, world_size_of
from dsrun.jobs.allocation.allocation import few
from dsrun.jobs.launchers import SLURM
from dsrun.jobs.supervision.coordinator import Coordinator
from dsrun.jobs.supervision.run import opened
from dsrun.jobs.supervision.run_options import RunOptions

MODULE = "dsrun.training.smoke"
SLOW = {True: 0.85, False: 0.5}
"""Share of its kind's median below which a device holds up the others: for GPUs, and for ranks on CPUs, which share
cores."""
SLOW_PAIR = 0.7
"""Share of the median of all pairs below which a pair is slow."""
LIMIT = 3.0
"""Minutes. The ranks give one another up after a minute by themselves; this is for what they can't end."""


@dataclass(frozen=True)
class Smoke:
    """The outcome of a smoke test."""

    ranks: int
    hosts: int
    seconds: float
    """Seconds from the first process to the last."""
    found: Mapping[str, Any] | None
    """The result that dsrun.training.smoke prints; None where it failed."""
    problems: tuple[Problem, ...] = ()
    run_dir: str = ""
    """The run folder, where it failed."""
    remarks: tuple[CheckResult, ...] = ()
    """On devices and pairs of hosts that are worse than the others."""


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
    ranks, result, run_dir = 0, None, ""
    devices: tuple[HostDevices, ...] = ()
    problems: tuple[Problem, ...] = ()
    new = not parent.exists()
    try:
        machine = choice.detect(environ)
        devices, accelerator = devices_of(hosts, machine, launcher, environ)
        ranks = world_size_of(devices)
        job = job_of(devices, accelerator, launcher, parent)
        run_dir = job.run_dir
        result = _run(job, machine, environ, replace(options, hang_timeout=LIMIT), say)
        shutil.rmtree(run_dir, ignore_errors=True)
        if new:
            with suppress(OSError):  # somebody else's run may be in it by now
                parent.rmdir()
    except DsrunError as error:
        problems = tuple(error.problems)
    took, left = time.monotonic() - began, run_dir if problems else ""
    remarked = tuple(remarks(result, devices)) if result else ()
    return Smoke(ranks, len(hosts), took, result, problems, left, remarked)


def remarks(result: Mapping[str, Any], hosts: Sequence[HostDevices]) -> Iterator[CheckResult]:
    """Parts of the result that somebody should look at. hosts: in the order of the ranks."""
    names = [(host.host, device) for host in hosts for device in host.devices]
    cards, gpus = result.get("cards", ()), result.get("backend") == "nccl"
    for (host, device), card in zip(names, cards, strict=False):
        alike = [peer_rank for peer_rank in cards if peer_rank["device"] == card["device"]]
        usual = statistics.median(peer_rank["tflops"] for peer_rank in alike)
        which = f"{'GPU ' if gpus else 'CPU rank '}{device} ({card['device']})"
        fix = f"Leave it out (--devices, or --exclude {host}:{device}), and look at it: nvidia-smi -q; dcgmi diag -r 2"
        if card["wrong"]:
            wrong = f"{card['wrong']} of {card['numbers']} numbers, {card['nans']} of them NaN"
            fault = f"{which} multiplies wrongly: {wrong}"
            yield CheckResult("matrix", host, RED, fault, fix)
        elif gpus and card["bits"] != commonest([peer_rank["bits"] for peer_rank in alike]):
            yield CheckResult(
                "matrix", host, YELLOW, f"{which} gives other bits than the others of its kind", fix
            )
        elif card["tflops"] < SLOW[gpus] * usual:
            fault = (
                f"{which} multiplies at {card['tflops']:.3g} TFLOP/s, the others of its kind at {usual:.3g}"
            )
            yield CheckResult(
                "matrix",
                host,
                YELLOW,
                fault,
                "See heat, power and other programs: nvidia-smi -q -d PERFORMANCE; top",
            )
    if len(pairs := result.get("pairs", ())) > 1:
        rank, peer_rank, rate = min(pairs, key=lambda pair: float(pair[2]))
        usual = statistics.median(pair[2] for pair in pairs)
        if rate < SLOW_PAIR * usual:
            host, peer = hosts[int(rank)].host, hosts[int(peer_rank)].host
            fault = f"{host} and {peer} exchange {rate:.2f} GB/s, other pairs {usual:.2f}"
            yield CheckResult(
                "pair",
                host,
                YELLOW,
                fault,
                f"See their links and switches: ethtool, ibstat; or leave out {peer}.",
            )


def job_of(hosts: tuple[HostDevices, ...], accelerator: str, launcher: str, parent: Path) -> ScriptJob:
    """The job, in a new run folder. Raises DsrunError where that can't be made."""
    run_dir = parent.absolute() / f"{run_folder.stamped('smoke')}-{os.getpid()}"
    raise_all(run_folder.check_new(run_dir))
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
    """The result that the first rank printed. Raises DsrunError where any of them failed."""
    run_dir = Path(job.run_dir)
    with opened(job, machine, environ):
        run_folder.write_state(run_dir, "running")
        Coordinator(job, environ, options, lambda: False, say).run()
        result = _printed(run_dir / run_folder.rank_log(0))
        run_folder.write_state(run_dir, "finished", result=result)
    return result


def _printed(log: Path) -> dict[str, Any]:
    """The result of dsrun.training.smoke in a log."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        with suppress(ValueError):
            result = json.loads(line)
            if isinstance(result, dict) and result.get("smoke"):
                return result
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
    raise_all(silent)
    for host in hosts:
        try:
            machines[host.name] = choice.from_facts(host.facts or {}, cpu)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            fault = f"what it has is not known: {type(error).__name__}: {error}"
            raise DsrunError(
                fault, where=host.name, hint=f"See: dsrun doctor --hosts {host.name} --json"
            ) from error
    kinds = {machine_there.accelerator for machine_there in machines.values()}
    if len(kinds) > 1:
        odd = [name for name, machine_there in machines.items() if machine_there.accelerator == "cpu"]
        fault = f"trains on CPUs ({machines[odd[0]].reason}), and others on GPUs"
        raise DsrunError(fault, where=few(odd), hint="DS_ACCELERATOR=cpu for all, or leave it out.")
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

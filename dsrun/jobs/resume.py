"""Continue a run: the job in its folder, checked against what the user says now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsrun.cluster.devices import Machine
from dsrun.config import tree
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import run_folder
from dsrun.jobs.claims import Look, Take
from dsrun.jobs.finetune import Request, check_packages
from dsrun.jobs.fitting import AUTO
from dsrun.jobs.job import HostDevices, Job


def resumed(
    request: Request, machine: Machine, environ: Mapping[str, str], *, take: Take | None = None
) -> Job:
    """The job of the run in --output-dir, to be continued, on today's devices.

    take: takes the devices; unless given, they are chosen and not held.
    Raises DsrunError if there is no run, if it is finished or still running, or if an option that was given says
    something else than the run did: what is continued is what was started.
    """
    run_dir = request.given.get("output_dir")
    if run_dir is None:
        raise DsrunError("--resume continues the run in a folder", hint="Name it: --output-dir RUN")
    run_dir = run_dir.absolute()
    if not (run_dir / run_folder.JOB).is_file():
        raise DsrunError("holds no run to continue", where=str(run_dir), hint="Start it without --resume.")
    job = Job.read(run_dir / run_folder.JOB)
    if run_folder.in_use(run_dir):
        raise DsrunError("is still running", where=str(run_dir))
    if run_folder.describe_state(run_dir) == "finished":
        raise DsrunError("is finished; there is nothing to continue", where=str(run_dir))
    problems = [*_changed(request, job, machine), *check_packages()]
    if problems:
        raise DsrunError(problems)
    job = replace(job, run_dir=str(run_dir))
    count = None if request.given.get("devices") else request.given.get("gpus", job.world_size)
    taken = (take or Look(machine, environ))(count, request.given.get("devices"))
    devices = tuple(sorted(taken.devices))
    if len(devices) != job.world_size:
        raise DsrunError(
            f"the run has {job.world_size} ranks, and {len(devices)} devices are named",
            where=str(run_dir),
            hint=f"A checkpoint is continued by as many ranks as wrote it: --gpus {job.world_size}",
        )
    return replace(job, hosts=(HostDevices("localhost", devices),))


def _changed(request: Request, job: Job, machine: Machine) -> list[Problem]:
    """Options that contradict the stored job."""
    stored: dict[str, Any] = {
        **asdict(job.data), **asdict(job.training), "preset": job.preset, "precision": job.precision,
        "micro_batch": job.micro_batch, "grad_accum": job.grad_accum,
        "grad_clip": job.ds_config.get("gradient_clipping"), "nvme_path": _nvme_path(job.ds_config),
    }  # fmt: skip
    problems = []
    for name, value in request.given.items():
        wanted = str(value.absolute()) if isinstance(value, Path) else value
        if name == "preset" and value == AUTO:
            continue  # it was chosen when the run was started
        if name in stored and stored[name] != wanted:
            option = "--" + name.replace("_", "-")
            problems.append(
                Problem(f"is {wanted}, and the run was started with {stored[name]}", option, "Leave it out.")
            )
    if not _same_model(request.model, job):
        problems.append(Problem(f"MODEL is {request.model}, and the run trains {job.model.name}"))
    if machine.accelerator != job.accelerator:
        problems.append(
            Problem(
                f"the run trains on {job.accelerator}, this machine on {machine.accelerator} ({machine.reason})",
                hint="Continue it where it was started, with the same torch and DS_ACCELERATOR.",
            )
        )
    return [*problems, *_changed_keys(request.overrides, job.ds_config)]


def _same_model(model: str, job: Job) -> bool:
    named = model == job.model.name or Path(model).name == job.model.name
    return named or str(Path(model).expanduser().absolute()) == job.model.location


def _nvme_path(ds_config: Mapping[str, Any]) -> str | None:
    zero = ds_config.get("zero_optimization", {})
    found = [(zero.get(key) or {}).get("nvme_path") for key in ("offload_optimizer", "offload_param")]
    return next(filter(None, found), None)


def _changed_keys(overrides: Iterable[str], ds_config: Mapping[str, Any]) -> list[Problem]:
    """--set texts that say something else than the run's config; the same again is no change."""
    from dsrun.config.overrides import parse

    hint = "A run keeps the config that it was started with; leave it out."
    return [
        Problem(f"{path} is {value!r}, and the run has {tree.get(ds_config, path)!r}", "--set", hint)
        for path, value in parse(tuple(overrides), "deepspeed").items()
        if tree.get(ds_config, path) != value
    ]

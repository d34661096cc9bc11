"""Continue a run: its job, checked against what the user says now, on as many devices as there are now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsrun import talks
from dsrun.cluster.devices import Machine
from dsrun.config import tree
from dsrun.config.build import Options, build_config
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import fitting, kernels, optimizers, run_folder, space, tuning
from dsrun.jobs.claims import Look, Take
from dsrun.jobs.finetune import Request, check_packages
from dsrun.jobs.fitting import AUTO
from dsrun.jobs.job import Job
from dsrun.jobs.layout import MARK, whole_checkpoints
from dsrun.jobs.placed import ON_THIS_MACHINE, Wanted

DIVISION = "zero_optimization"
"""The section of a ds_config that says how a model is divided, which is what another preset changes."""
OPTIONS = {"keep_checkpoints": "--keep"}
"""Options that are not called as the fields of a job are."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resumed(
    request: Request,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    force: bool = False,
    take: Take | None = None,
) -> Job:
    """The job of the run in --output-dir, to be continued, on today's devices.

    Their number may be another one, and the preset. The rows of a step stay the same, and so do their order and the
    learning rate: losses go on as if nothing had happened.

    force: start what is predicted to run out of memory. take: takes the devices; unless given, they are chosen and not
    held. Raises DsrunError if there is no run, if it is finished or still running, if an option that was given says
    something else than the run did, or where the checkpoint can't be divided that way.
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
    wanted = Wanted.of(request.given).or_as(job.hosts, job.launcher)
    problems = [*_changed(request, job), *check_packages(), *tuning.check_packages(job.tuning), *_absent(job)]
    here = job.launcher == ON_THIS_MACHINE and wanted in (
        Wanted(gpus=wanted.gpus),
        Wanted(devices=wanted.devices),
    )
    if here and machine.accelerator != job.accelerator:
        problems.append(_another_kind(job, machine))
    if problems:
        raise DsrunError(problems)
    if here and wanted.gpus:
        batch_on(job, wanted.gpus)  # before devices are waited for
    placed = (take or Look(machine, environ))(wanted)
    if placed.accelerator != job.accelerator:
        raise DsrunError([_another_kind(job, placed.machine)])
    again = divided(
        replace(job, run_dir=str(run_dir), hosts=placed.hosts, launcher=placed.launcher),
        preset=_preset(request, job),
        batch=batch_on(job, placed.world_size),
        overrides=request.overrides,
        nvme_path=request.given.get("nvme_path"),
    )
    if wrong := tuning.check_place(again.tuning, placed.accelerator, again.ds_config):
        raise DsrunError(wrong)
    if again.world_size != job.world_size or again.ds_config != job.ds_config:
        if checkpoints := whole_checkpoints(run_dir):
            _check_divisible(checkpoints[-1], job, again)
        again, _ = fitting.predicted(again, placed, force=force)
    if problems := space.check(again):
        raise DsrunError(problems)
    return again


def _absent(job: Job) -> list[Problem]:
    """What the run was started with and isn't installed any more."""
    wanted = {
        optimizers.PACKAGE: job.training.optimizer == optimizers.ADAMW_8BIT,
        kernels.LIGER: job.training.liger,
        kernels.FLASH_PACKAGE: job.training.attention == kernels.FLASH,
    }
    return [
        Problem(
            f"the run uses {name}, which is not installed any more", hint=f"Install it: pip install {name}"
        )
        for name, used in wanted.items()
        if used and optimizers.installed(name) is None
    ]


def batch_on(job: Job, ranks: int) -> tuple[int, int]:
    """Micro batch and accumulation that make the job's step on so many ranks, with the job's micro batch if that works.

    Raises DsrunError, with the numbers of ranks that work, where the rows of a step are not to be divided by them.
    """
    rows = job.world_size * job.micro_batch * job.grad_accum
    if rows % ranks:
        counts = [str(count) for count in range(1, rows + 1) if rows % count == 0]
        raise DsrunError(
            f"the run takes {rows} rows a step, which {ranks} ranks can't share equally",
            where=job.run_dir,
            hint=f"Numbers of ranks that can: {', '.join(counts)}.",
        )
    own = rows // ranks
    micro_batch = next(size for size in range(min(job.micro_batch, own), 0, -1) if own % size == 0)
    return micro_batch, own // micro_batch


def divided(
    job: Job,
    *,
    preset: str,
    batch: tuple[int, int],
    overrides: tuple[str, ...] = (),
    nvme_path: str | None = None,
) -> Job:
    """The job with another batch and, where it is another preset, that one's division of the model.

    All that is not about the division (optimizer, precision, clipping, what --set once said) stays as it was.
    """
    micro_batch, grad_accum = batch
    if preset != job.preset:
        kept = {key: value for key, value in job.ds_config.items() if key not in (DIVISION, *BATCH)}
        texts = [f"{path}={json.dumps(value)}" for path, value in tree.leaves(kept)]
        counts = {len(host.devices) for host in job.hosts}
        nodes = len(job.hosts) if len(counts) == 1 else 1
        options = Options(
            gpus=job.world_size // nodes, nodes=nodes, precision=job.precision, micro_batch=micro_batch,
            grad_accum=grad_accum, nvme_path=nvme_path, overrides=(*texts, *overrides),
        )  # fmt: skip
        config = build_config(preset, options)
        if job.training.optimizer == optimizers.ADAMW_8BIT:
            if refused := optimizers.refusals(config.ds_config, job.accelerator, preset):
                raise DsrunError(refused)
            config, _ = optimizers.taken_out(config)
        return replace(job, preset=preset, ds_config=config.ds_config)
    numbers = dict(zip(BATCH, (job.world_size * micro_batch * grad_accum, *batch), strict=True))
    return replace(job, ds_config={**job.ds_config, **numbers})


def _preset(request: Request, job: Job) -> str:
    """The preset to go on with; `auto` was chosen when the run was started."""
    wanted = request.given.get("preset", AUTO)
    return job.preset if wanted == AUTO else str(wanted)


def _check_divisible(checkpoint: Path, job: Job, again: Job) -> None:
    """Raise DsrunError where swap files hold a part of the checkpoint, or would have to: they are not read or made."""
    if job.training.optimizer == optimizers.ADAMW_8BIT:
        raise DsrunError(
            "holds 8-bit states, whose blocks can't be divided anew",
            where=str(checkpoint),
            hint=f"Continue it with --preset {job.preset} --gpus {job.world_size}, as it was started.",
        )
    try:
        wrote = json.loads((checkpoint / MARK).read_text(encoding="utf-8"))["layout"]
    except (OSError, ValueError, KeyError, TypeError):
        wrote = job.ds_config
    if _on_nvme(wrote) or _on_nvme(again.ds_config):
        raise DsrunError(
            "keeps parts in swap files on an NVMe disk, which only the same preset on as many ranks reads and makes",
            where=str(checkpoint),
            hint=f"Continue it with --preset {job.preset} --gpus {job.world_size}.",
        )


def _on_nvme(config: Mapping[str, Any]) -> bool:
    sections = [
        tree.get(config, f"{DIVISION}.{name}") or {} for name in ("offload_optimizer", "offload_param")
    ]
    return any(section.get("device") == "nvme" for section in sections)


def _another_kind(job: Job, machine: Machine) -> Problem:
    return Problem(
        f"the run trains on {job.accelerator}, this machine on {machine.accelerator} ({machine.reason})",
        hint="Continue it where it was started, with the same torch and DS_ACCELERATOR.",
    )


def _changed(request: Request, job: Job) -> list[Problem]:
    """Options that contradict the stored job. What only divides the model (the preset, its folder) may change."""
    stored: dict[str, Any] = {
        **asdict(job.data), **asdict(job.training), **asdict(job.tuning), "precision": job.precision,
        "train_file": _files(job.data.train_files, job.data.weights),
        "micro_batch": job.micro_batch, "grad_accum": job.grad_accum,
        "grad_clip": job.ds_config.get("gradient_clipping"),
    }  # fmt: skip
    divides_anew = _preset(request, job) != job.preset
    if not divides_anew:
        stored["nvme_path"] = _nvme_path(job.ds_config)
    if request.given.get("data_format") == talks.AUTO:
        del stored["data_format"]  # what was found then goes
    problems = []
    for name, value in _said(request.given).items():
        wanted = str(value.absolute()) if isinstance(value, Path) else value
        if name in stored and stored[name] != wanted:
            option = OPTIONS.get(name) or "--" + name.replace("_", "-")
            problems.append(
                Problem(f"is {wanted}, and the run was started with {stored[name]}", option, "Leave it out.")
            )
    if not _same_model(request.model, job):
        problems.append(Problem(f"MODEL is {request.model}, and the run trains {job.model.name}"))
    may_change = DIVISION if divides_anew else None
    return [*problems, *_changed_keys(request.overrides, job.ds_config, may_change)]


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, with all training files and their weights in one text, as one option gives them."""
    rest = {name: value for name, value in given.items() if name not in ("more_files", "weights")}
    if "train_file" in given:
        files = (str(given["train_file"].absolute()), *given.get("more_files", ()))
        rest["train_file"] = _files(files, given.get("weights", ()))
    return rest


def _files(files: Sequence[str], weights: Sequence[float]) -> str:
    """The files as --train-file takes them: FILE, or FILE:WEIGHT."""
    each = zip(files, weights or [1.0] * len(files), strict=True)
    return " and ".join(file if weight == 1 else f"{file}:{weight:g}" for file, weight in each)


def _same_model(model: str, job: Job) -> bool:
    named = model == job.model.name or Path(model).name == job.model.name
    return named or str(Path(model).expanduser().absolute()) == job.model.location


def _nvme_path(ds_config: Mapping[str, Any]) -> str | None:
    zero = ds_config.get(DIVISION, {})
    found = [(zero.get(key) or {}).get("nvme_path") for key in ("offload_optimizer", "offload_param")]
    return next(filter(None, found), None)


def _changed_keys(
    overrides: Iterable[str], ds_config: Mapping[str, Any], may_change: str | None
) -> list[Problem]:
    """--set texts that say something else than the run's config, except in one section; the same again is no change."""
    from dsrun.config.overrides import parse

    hint = "A run keeps the config that it was started with; leave it out."
    return [
        Problem(f"{path} is {value!r}, and the run has {tree.get(ds_config, path)!r}", "--set", hint)
        for path, value in parse(tuple(overrides), "deepspeed").items()
        if tree.get(ds_config, path) != value and not (may_change and tree.under(path, may_change))
    ]

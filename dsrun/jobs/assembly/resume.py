"""Continue a run: its job, checked against what the user says now, on as many devices as there are now."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dsrun import packages
from dsrun.cluster.devices import Machine
from dsrun.config import tree
from dsrun.config.presets.build import Options, build_config
from dsrun.config.presets.preset import load
from dsrun.data import conversations
from dsrun.ds_config import ZERO, nvme_path, uses_nvme
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import explained
from dsrun.job import run_folder
from dsrun.job.checkpoints import CheckpointChoice, choice_of, named_checkpoint, newest_whole, read_mark
from dsrun.job.job import Job, node_shape
from dsrun.job.layout import NOT_FINITE, whole_checkpoints
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.assembly import PlannedJob, fsdp, same_inputs
from dsrun.jobs.assembly.checks import (
    another_layout,
    compiling,
    disk_check,
    kernels,
    memory_check,
    optimizers,
    precision,
    version_check,
)
from dsrun.jobs.assembly.checks.kernels import devices_of
from dsrun.jobs.assembly.checks.memory_check import AUTO
from dsrun.jobs.assembly.checks.packages import check_torch_build, check_trackers
from dsrun.jobs.assembly.finetune import FinetuneRequest
from dsrun.jobs.assembly.finetune.data import data_files
from dsrun.jobs.assembly.finetune.folder import check_packages, scores
from dsrun.jobs.assembly.rerun import another_kind
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.runs import past_runs
from dsrun.models import hub, model_files, peft_methods
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of, select
from dsrun.options.optimizers import ADAMW, OPTIMIZERS, made_by_ranks
from dsrun.options.table import MICRO_BATCH_MEAN, RestoreOptions, TrackerOptions

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

SLURM_RESTARTS = "SLURM_RESTART_COUNT"
"""Variable with the number of times that Slurm has started a job again (sbatch)."""
CONTINUED = "divided again when the run was continued"
"""The origin of a batch's numbers on other devices."""


def resumed(
    request: FinetuneRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    allocator: Allocator | None = None,
) -> PlannedJob[Job]:
    """The job of the run in --output-dir, to be continued, on today's devices.

    Their number may be another one, and the preset. The rows of a step stay the same, and so do their order and the
    learning rate: losses go on as if nothing had happened. Where devices have less memory, micro batches are
    smaller.

    allocator: chooses the devices; unless given, they are not locked. Raises DsrunError if there is no run, if it is
    finished or still running, if an option contradicts the run, or where the checkpoint can't be divided that way.
    """
    options = request.resolved.options
    job, run_dir = _stopped_run(options.output_dir)
    wanted = select(DeviceRequest, options).or_like(job.hosts, job.launcher)
    allocator = allocator or Preview(machine, environ)
    names_trackers = request.resolved.said("log")  # else the run keeps its own
    trackers = select(TrackerOptions, request.resolved.options) if names_trackers else job.trackers
    untracked = check_trackers(trackers, environ, allocator.connection)
    changed_files, about_files = same_inputs.for_resume(stopped := past_runs.read(run_dir))
    # Everything that needs no devices is refused first: with --wait the next line may take hours.
    _check_request(request, job, wanted, machine, [*untracked, *changed_files])
    placed = allocator.allocate(wanted)
    if placed.accelerator != job.accelerator:
        raise DsrunError([another_kind(job, placed.machine)])

    parallel = another_layout.wanted(request.resolved, job)
    batch = batch_on(job, placed.world_size, parallel.group)

    def split(batch: tuple[int, int]) -> Job:
        here = replace(
            job, run_dir=str(run_dir), hosts=placed.hosts, launcher=placed.launcher, trackers=trackers
        )
        return divided(
            another_layout.regrouped(here, parallel),
            preset=_preset(request, job),
            batch=batch,
            overrides=options.overrides,
            nvme_path=options.nvme_path,
        )

    again, remarks = split(batch), tuple[str, ...]()
    experts = peft_methods.check_experts(
        again.peft, stage=again.zero_stage, fsdp=bool(again.fsdp), compiles=again.training.compile
    )
    raise_all([*peft_methods.check_device(again.peft, placed.accelerator, again.ds_config), *experts])
    # A run that goes on as it was needs no second judgement: what its checkpoint was written by reads it, too.
    division = (job.world_size, job.ds_config, job.fsdp, job.parallel)
    changed = (again.world_size, again.ds_config, again.fsdp, again.parallel) != division
    newest, passed = checkpoint_of(run_dir, checkpoint_choice(options, run_dir, environ))
    if changed:
        another_layout.check(job, again, newest)
    if changed and job.fsdp is None and newest:
        _check_divisible(newest, job, again)
    # After the checks of the checkpoint: these refuse for the division alone, which smaller micro batches don't mend.
    if changed or memory_check.on_other_devices(job, placed):
        again, remarks = _that_fits(again, split, placed, force=options.force or options.dry_run)
    raise_all(
        [
            *precision.problems(again.precision, placed.own_machine),
            *disk_check.check(again),
            *check_torch_build(placed),
            *compiling.resumed(again, environ),
            *precision.fp8_device_problems(
                again.training.fp8, devices_of(placed.own_machine, placed.devices, known=placed.known)
            ),
        ]
    )
    known = version_check.check(again, resumes=True, force=options.force)
    slow = precision.notes(again.precision, placed.own_machine)
    about_versions = environment.differences(stopped.environment)
    notes = (*allocator.notes, *passed, *about_files, *about_versions, *remarks, *slow, *known)
    return PlannedJob(again, (*notes, *_diverged(run_dir)))


def checkpoint_choice(options: RestoreOptions, run_dir: Path, environ: Mapping[str, str]) -> CheckpointChoice:
    """The user's choice of the checkpoint to go on from. A job that Slurm starts again has been sent back to the step
    that was named: it goes on from what it has written since."""
    step = options.checkpoint
    if environ.get(SLURM_RESTARTS, "0") not in ("", "0"):
        step = choice_of(run_dir).step
    return CheckpointChoice(step, options.digests)


def checkpoint_of(run_dir: Path, choice: CheckpointChoice) -> tuple[Path | None, list[str]]:
    """The checkpoint that is gone on from, as far as its files' sizes tell; None: from the beginning. And a line for
    each newer one that is damaged. Raises DsrunError where there is none."""
    if choice.step is not None:
        return named_checkpoint(run_dir, choice.step), []
    newest, damaged = newest_whole(run_dir)
    return newest, [f"{line}; going on from {newest.name}" for line in damaged if newest]


def _that_fits(
    again: Job, split: Callable[[tuple[int, int]], Job], placed: Allocation, *, force: bool
) -> tuple[Job, tuple[str, ...]]:
    """The job with what it is predicted to take, in smaller micro batches where it would run out of memory.

    The examples of a step stay; where its loss depends on the micro batches, these do, too. Raises DsrunError where
    nothing fits and it is not forced.
    """
    whole = again.micro_batch * again.grad_accum
    sizes = (
        range(again.micro_batch - 1, 0, -1) if again.training.loss != MICRO_BATCH_MEAN and not force else ()
    )
    try:
        return memory_check.predicted(again, placed, force=force)
    except DsrunError:
        for size in (size for size in sizes if whole % size == 0):
            with suppress(DsrunError):
                fits, remarks = memory_check.predicted(split((size, whole // size)), placed, force=False)
                before = f"{again.micro_batch} x {again.grad_accum}"
                return fits, (
                    *remarks,
                    f"micro batch {size} x accumulation {whole // size}, the same examples a step: {before} runs "
                    "out of memory on these devices",
                )
        raise


def _diverged(run_dir: Path) -> list[str]:
    """A remark on a run that a loss or gradient ended which was not finite."""
    why = run_folder.record_of(run_dir).get("why") or ""
    if NOT_FINITE not in why:
        return []
    whole = whole_checkpoints(run_dir)
    start = f"from {whole[-1].name}, the newest good checkpoint," if whole else "from its beginning"
    another = "with another --lr it is another run"
    if whole:
        another += f", from the model of `{shlex.join(['dsrun', 'export', str(run_dir), '-o', 'DIR'])}`"
    return [f"{why}: {start} it takes the same steps again, with the same learning rate; {another}"]


def _stopped_run(folder: Path | None) -> tuple[Job, Path]:
    """The job of a run that can go on, and its folder. Raises DsrunError where there is none."""
    if folder is None:
        raise DsrunError("--resume continues the run in a folder", hint="Name it: --output-dir RUN")
    run_dir = folder.absolute()
    raise_all(run_folder.check_unfinished(run_dir))
    return Job.read(run_dir / run_folder.JOB), run_dir


def _check_request(
    request: FinetuneRequest, job: Job, wanted: DeviceRequest, machine: Machine, more: list[Problem]
) -> None:
    """Check what is known before devices are waited for. Raises DsrunError with all problems."""
    problems = [
        *more,
        *_changed(request, job),
        *check_packages(scored=scores(job)),
        *peft_methods.check_packages(job.peft),
        *_absent(job),
    ]
    alone = (DeviceRequest(gpus=wanted.gpus), DeviceRequest(devices=wanted.devices))
    here = job.launcher == ON_THIS_MACHINE and wanted in alone
    if here and machine.accelerator != job.accelerator:
        problems.append(another_kind(job, machine))
    raise_all(problems)
    if here and wanted.gpus:
        batch_on(job, wanted.gpus, another_layout.wanted(request.resolved, job).group)


def _absent(job: Job) -> list[Problem]:
    """Packages that the run was started with and that are not installed any more."""
    wanted = {
        **{
            optimizer.package: name == job.training.optimizer
            for name, optimizer in OPTIMIZERS.items()
            if optimizer.package
        },
        kernels.LIGER: job.training.liger,
        kernels.FLASH_PACKAGE: job.training.attention == kernels.FLASH,
    }
    return [
        Problem(
            f"the run uses {name}, which is not installed any more", hint=f"Install it: pip install {name}"
        )
        for name, used in wanted.items()
        if used and packages.installed_version(name) is None
    ]


def batch_on(job: Job, ranks: int, group: int | None = None) -> tuple[int, int]:
    """Micro batch and accumulation that make the job's step on these ranks, with the job's micro batch if that works.

    group: ranks that share their examples, the job's unless given. Raises DsrunError, with the numbers of ranks that
    work, where the rows of a step are not to be divided by them: in micro batches like the run's, where its loss is a
    mean of their means.
    """
    group = group or job.parallel.group
    shares, left = divmod(ranks, group)
    if left or not shares:
        fault = f"{ranks} ranks are not to be divided into groups of {group}, which share their examples"
        hint = f"Take a multiple of {group}, or another --tp or --sp."
        raise DsrunError(fault, where=job.run_dir, hint=hint)
    if tokens := job.training.tokens_per_batch:
        longest = job.data.max_source_length + job.data.max_target_length
        return job.micro_batch, derived.accumulation(tokens, longest, shares, job.micro_batch)
    rows = job.step_examples
    whole = job.training.loss == MICRO_BATCH_MEAN
    shared = rows // job.micro_batch if whole else rows
    if shared % shares:
        counts = [str(count * group) for count in range(1, shared + 1) if shared % count == 0]
        parts = f", in micro batches of {job.micro_batch} (--loss {MICRO_BATCH_MEAN})" if whole else ""
        raise DsrunError(
            f"the run takes {rows} rows a step{parts}, which {ranks} ranks can't share equally",
            where=job.run_dir,
            hint=f"Numbers of ranks that can: {', '.join(counts)}.",
        )
    own = rows // shares
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
    chosen = load(preset).fsdp if preset != job.preset or job.fsdp else None
    if bool(chosen) != bool(job.fsdp):
        raise fsdp.another_engine(job.preset, preset, job.run_dir)
    if chosen and job.fsdp:
        clip, freezes = job.fsdp.grad_clip, job.peft.freezes
        spec = fsdp.spec_of(chosen, preset, job.hosts, batch=batch, grad_clip=clip, freezes=freezes)
        return replace(job, preset=preset, fsdp=spec)
    before = job.origins.get("config", {})
    # Another preset is built anew, with all that the run's config says beside ZeRO and the batch as if by --set: so the
    # preset's own precision or optimizer can't take the place of the run's. The same preset keeps its config as it is,
    # also where a newer dsrun ships another under that name.
    if preset != job.preset:
        kept = {key: value for key, value in job.ds_config.items() if key not in (ZERO, *BATCH)}
        given = dict(tree.leaves(kept))
        texts = [f"{path}={json.dumps(value)}" for path, value in given.items()]
        ranks, nodes = node_shape(job.hosts)
        options = Options(
            gpus=ranks, nodes=nodes, group=job.parallel.group, precision=job.precision, micro_batch=micro_batch,
            grad_accum=grad_accum, nvme_path=nvme_path, overrides=(*texts, *overrides),
        )  # fmt: skip
        config = build_config(preset, options)
        optimizer = job.training.optimizer
        raise_all(optimizers.refusals(config.ds_config, job.accelerator, preset, optimizer))
        if made_by_ranks(optimizer):
            config, _ = optimizers.taken_out(config, optimizer)
        # What the run began with came in by --set here, and keeps who gave it.
        origins = {**config.origins, **{path: origin for path, origin in before.items() if path in given}}
        return replace(
            job, preset=preset, ds_config=config.ds_config, origins={**job.origins, "config": origins}
        )
    numbers = dict(zip(BATCH, (job.dp_size * micro_batch * grad_accum, *batch), strict=True))
    if job.parallel.group > 1:  # config.build leaves the total out
        del numbers[BATCH[0]]
    changed = [path for path, value in numbers.items() if job.ds_config.get(path) != value]
    origins = {**before, **dict.fromkeys(changed, CONTINUED)}
    all_origins = {**job.origins, "config": origins} if origins else job.origins
    return replace(job, ds_config={**job.ds_config, **numbers}, origins=all_origins)


def _preset(request: FinetuneRequest, job: Job) -> str:
    """The preset to go on with; `auto` was chosen when the run was started."""
    preset = request.resolved.options.preset
    return preset if request.resolved.said("preset") and preset != AUTO else job.preset


def _check_divisible(checkpoint: Path, job: Job, again: Job) -> None:
    """Raise DsrunError where swap files hold a part of the checkpoint, or would have to: they are not read or made."""
    if job.training.optimizer != ADAMW:
        raise DsrunError(
            f"holds states of {job.training.optimizer}, which can't be resharded",
            where=str(checkpoint),
            hint=f"Continue it with --preset {job.preset} --gpus {job.world_size}, as it was started.",
        )
    with explained("can't be read", checkpoint):
        wrote = read_mark(checkpoint).layout or job.ds_config
    if uses_nvme(wrote) or uses_nvme(again.ds_config):
        raise DsrunError(
            "keeps parts in swap files on an NVMe disk, which only the same preset on as many ranks reads and makes",
            where=str(checkpoint),
            hint=f"Continue it with --preset {job.preset} --gpus {job.world_size}.",
        )


def _changed(request: FinetuneRequest, job: Job) -> list[Problem]:
    """Options that contradict the stored job. What only divides the model (the preset, its folder) may change."""
    stored: dict[str, Any] = {
        **asdict(job.data), **asdict(job.training), **asdict(job.peft), **asdict(job.parallel),
        "precision": job.precision,
        "train_file": _files(job.data.train_files, job.data.weights),
        "micro_batch": job.micro_batch, "grad_accum": job.grad_accum,
        "global_batch": job.step_examples,
        "grad_clip": job.grad_clip,
    }  # fmt: skip
    another_preset = _preset(request, job) != job.preset
    if not another_preset:
        stored["nvme_path"] = nvme_path(job.ds_config)
    if request.resolved.options.data_format == conversations.AUTO:
        del stored["data_format"]  # what was found then goes
    stored = {name: value for name, value in stored.items() if name not in another_layout.MAY_CHANGE}
    problems = []
    for name, value in _given(request).items():
        wanted = str(value.absolute()) if isinstance(value, Path) else value
        if name in stored and stored[name] != wanted:
            flag = flag_of(FinetuneOptions, name)
            problems.append(
                Problem(f"is {wanted}, and the run was started with {stored[name]}", flag, "Leave it out.")
            )
    if not _same_model(request.model, job):
        problems.append(Problem(f"MODEL is {request.model}, and the run trains {job.model.name}"))
    may_change = ZERO if another_preset else None
    return [*problems, *_changed_keys(request.resolved.options.overrides, job.ds_config, may_change)]


def _given(request: FinetuneRequest) -> dict[str, Any]:
    """The user's options, with all training files and their weights in one text, as the option gives them."""
    given = request.resolved.user
    if "train_file" in given:
        files = data_files(request.resolved.options, None)
        given["train_file"] = _files(tuple(map(str, files.train)), files.weights)
    return given


def _files(files: Sequence[str], weights: Sequence[float]) -> str:
    """The files as --train-file takes them: FILE, or FILE:WEIGHT."""
    each = zip(files, weights or [1.0] * len(files), strict=True)
    return " and ".join(file if weight == 1 else f"{file}:{weight:g}" for file, weight in each)


def _same_model(model: str, job: Job) -> bool:
    if repository := hub.parse(model):
        known = model_files.by_repository(repository.id)
        return job.model.name in (str(repository), known and known.name)
    named = model == job.model.name or Path(model).name == job.model.name
    return named or str(Path(model).expanduser().absolute()) == job.model.location


def _changed_keys(
    overrides: Iterable[str], ds_config: Mapping[str, Any], may_change: str | None
) -> list[Problem]:
    """--set texts that say something else than the run's config, except in one section; the same again is no change."""
    from dsrun.config.presets.overrides import parse

    hint = "A run keeps the config that it was started with; leave it out."
    return [
        Problem(f"{path} is {value!r}, and the run has {tree.get(ds_config, path)!r}", "--set", hint)
        for path, value in parse(tuple(overrides), "deepspeed").items()
        if tree.get(ds_config, path) != value and not (may_change and tree.under(path, may_change))
    ]

"""From the user's request to a job: everything is looked at here, before anything is started or written.

A fine-tune goes through the stages of `stages`; a step makes the next one, or is refused. The other steps look at what
they can without it, so that the user hears of everything at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun import __version__
from dsrun.cluster.devices import Machine
from dsrun.config.presets.build import BuiltConfig
from dsrun.config.presets.sources import for_deepspeed
from dsrun.data.cache import prepared_paths
from dsrun.errors import DsrunError, Findings, raise_all
from dsrun.job.job import HostDevices, Job, TrainingSpec
from dsrun.jobs.allocation.allocation import alike, unnamed_hosts
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.assembly import PlannedJob
from dsrun.jobs.assembly.checks import disk_check, version_check
from dsrun.jobs.assembly.checks.packages import check_operators
from dsrun.jobs.assembly.finetune import devices, evaluation
from dsrun.jobs.assembly.finetune.config import config_anywhere, fit_memory, settle_config
from dsrun.jobs.assembly.finetune.data import Files, check_data, data_spec, with_corpus
from dsrun.jobs.assembly.finetune.folder import check_folder
from dsrun.jobs.assembly.finetune.lengths import settle_lengths
from dsrun.jobs.assembly.finetune.model import begin, check_model
from dsrun.jobs.assembly.finetune.stages import (
    Requested,
    WithConfig,
    WithDevices,
    WithModel,
    layered,
    located,
)
from dsrun.jobs.assembly.finetune.tokenizer import choose_tokenizer
from dsrun.models import resolve
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import select
from dsrun.options.layers import NOTHING, Resolved
from dsrun.options.table import TrackerOptions


@dataclass(frozen=True)
class FinetuneRequest:
    """The user's request for a fine-tune."""

    model: str
    """A name from `dsrun models`, a Hugging Face folder or a GGUF file."""
    resolved: Resolved[FinetuneOptions]
    """The options as the command line, the environment and a run file give them."""

    def on(
        self, machine: Machine, environ: Mapping[str, str], hosts: tuple[HostDevices, ...] = ()
    ) -> Requested:
        """Its first stage, on this machine. hosts: those that ranks are counted by."""
        return Requested(
            name=self.model, resolved=self.resolved, machine=machine, environ=environ, hosts=hosts
        )


def plan(
    request: FinetuneRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    download: bool = True,
    allocator: Allocator | None = None,
) -> PlannedJob[Job]:
    """Check everything and return the job. Raises DsrunError with all the problems that can be found together.

    download: fetch a model from the hub once all the rest is right; else the job names the repository only. allocator:
    chooses the devices; unless given, they are not locked.
    """
    allocator, findings = allocator or Preview(machine, environ), Findings()
    requested, holds = begin(request.on(machine, environ), findings)
    check_model(requested, findings)
    if isinstance(requested, WithModel):
        requested = choose_tokenizer(requested, findings)
    requested, files = findings.attempt(check_data, requested, findings) or (requested, None)
    if files:
        readable = not findings.problems
        findings.problems.extend(evaluation.problems(requested, files.evaluation, readable=readable))
        if isinstance(requested, WithModel):
            requested = settle_lengths(requested, files, findings)
    allocation = findings.attempt(allocator.allocate, select(DeviceRequest, requested.options))
    if allocation:
        findings.notes.extend(allocation.notes)
        machine = allocation.own_machine
        requested = located(requested, allocation)
    requested = devices.choose_precision(requested, machine, findings)
    made = None
    if isinstance(requested, WithModel) and allocation:
        placed = WithDevices(**vars(requested), allocation=allocation)
        requested = placed = findings.attempt(devices.choose_kernels, placed, findings) or placed
        held_out = bool(files and files.evaluation)
        made = findings.attempt(settle_config, placed, findings, held_out=held_out) if holds else None
    elif holds:
        findings.attempt(config_anywhere, requested, findings)
    layer = check_folder(
        made.before if made else requested, made.strategy.preset if made else requested.options.preset, files,
        allocation, connection=allocator.connection, findings=findings,
    )  # fmt: skip
    if findings.problems or made is None or files is None:
        raise DsrunError(findings.problems)
    made = replace(made, before=layered(made.before, layer))
    if download and made.before.model.source == "hub":
        made = _downloaded(made, files, findings)
    return _finished(made, files, findings)


def config_of(
    request: FinetuneRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    gpus: int,
    nodes: int,
    known: bool,
) -> tuple[BuiltConfig, tuple[str, ...]]:
    """The DeepSpeed config that the fine-tune would run on `gpus` of this machine's devices on each host, and lines for
    the user.

    known: the machine has them, so that their memory counts. Raises DsrunError where plan would, as far as that is not
    about the data, the devices or the folder, and for a preset of FSDP's.
    """
    made, notes = configured(request, machine, environ, gpus=gpus, nodes=nodes, known=known)
    for_deepspeed(made.strategy.preset)
    return made.config, notes


def configured(
    request: FinetuneRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    gpus: int,
    nodes: int,
    known: bool = False,
) -> tuple[WithConfig[Any], tuple[str, ...]]:
    """The fine-tune as far as its config, or what stands for one with FSDP, and lines for the user. Arguments and
    errors as of `config_of`."""
    findings, hosts = Findings(), unnamed_hosts(gpus, nodes)
    requested, _ = begin(request.on(machine, environ, hosts), findings)
    allocation = alike(machine, gpus, nodes) if known else None
    requested = devices.choose_precision(
        requested, allocation.own_machine if allocation else machine, findings
    )
    raise_all(findings.problems)
    made: WithConfig[Any] | None
    if isinstance(requested, WithModel) and allocation:
        placed = WithDevices(**vars(requested), allocation=allocation)
        placed = findings.attempt(devices.choose_kernels, placed, findings) or placed
        made = findings.attempt(settle_config, placed, findings, held_out=False)
    else:
        made = findings.attempt(config_anywhere, requested, findings)
    if findings.problems or made is None:
        raise DsrunError(findings.problems)
    return made, tuple(findings.notes)


def _downloaded(made: WithConfig[WithDevices], files: Files, findings: Findings) -> WithConfig[WithDevices]:
    """With the model on this machine, and once more what depends on its files: the export, the lengths, the memory."""
    placed = replace(made.before, model=resolve.downloaded(made.before.model))
    resolve.check_export_format(placed.model, placed.options.export_format)
    placed = devices.choose_tiles(settle_lengths(placed, files, findings), findings)
    made = replace(made, before=placed)
    if placed.allocation.known and not findings.problems:
        made = fit_memory(made, findings, held_out=files.evaluation is not None)
    raise_all(findings.problems)
    return made


def _finished(made: WithConfig[WithDevices], files: Files, findings: Findings) -> PlannedJob[Job]:
    """The job. Raises DsrunError with what is wrong with the disk, or with what must be compiled."""
    job, formats = _job(made, files)
    if (less := disk_check.fewer(job, made.before.resolved)) is not NOTHING:
        made = replace(made, before=layered(made.before, less))
        job, formats = _job(made, files)
        findings.notes.append(less.note)
    raise_all(disk_check.check(job))
    placed = made.before
    known = version_check.check(job, force=placed.forced)
    check_operators(job.ds_config, job.accelerator, placed.environ)
    notes = (*findings.notes, *formats, *known, *map(str, made.config.findings))
    return PlannedJob(job, notes, placed.resolved)


def _job(made: WithConfig[WithDevices], files: Files) -> tuple[Job, list[str]]:
    """The job as it stands, and notes on the forms of its data."""
    placed, config = made.before, made.config
    model, options = with_corpus(placed.model), placed.options
    data, formats = data_spec(placed, files)
    origins = {entry.name: str(origin) for entry, _, origin in placed.resolved.rows()}
    kernels = {"optimizer_params": made.optimizer_params, "liger": placed.kernels.liger}
    job = Job(
        run_dir=str(Path(str(options.output_dir)).absolute()), model=model, data=data,
        training=select(TrainingSpec, options, **kernels), preset=made.strategy.preset,
        precision=str(options.precision), accelerator=placed.machine.accelerator, hosts=placed.hosts,
        ds_config=config.ds_config, prepared=prepared_paths(model, data, placed.peft.adapter),
        dsrun_version=__version__, prediction=made.prediction, launcher=placed.launcher, peft=placed.peft,
        parallel=placed.parallel, trackers=select(TrackerOptions, options), fsdp=made.fsdp,
        origins={"config": config.origins, "options": origins},
    )  # fmt: skip
    return job, formats

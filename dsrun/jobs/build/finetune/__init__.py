"""From what the user asked for to a job: everything is looked at here, before anything is started or written.

A `Draft` is the job as far as it is known. Each of the STEPS adds to it; a step that finds something wrong adds
problems instead, and the next steps look at what they can without it, so that the user hears of everything at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dsrun import __version__
from dsrun.cluster.devices import Machine
from dsrun.config.presets.build import BuiltConfig
from dsrun.config.presets.sources import for_deepspeed
from dsrun.data.cache import prepared_paths
from dsrun.errors import DsrunError, raise_all
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.build import PlannedJob, go_through
from dsrun.jobs.build.checks import disk_check, version_check
from dsrun.jobs.build.checks.packages import check_operators
from dsrun.jobs.build.finetune.config import fit_memory, settle_config
from dsrun.jobs.build.finetune.data import check_data, data_spec, with_corpus
from dsrun.jobs.build.finetune.devices import (
    alike,
    allocate,
    choose_kernels,
    choose_precision,
    choose_tiles,
    unnamed_hosts,
)
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.build.finetune.evaluation import check_evaluation
from dsrun.jobs.build.finetune.folder import check_folder
from dsrun.jobs.build.finetune.lengths import settle_lengths
from dsrun.jobs.build.finetune.model import check_model, find_model, settle_options, take_adapter
from dsrun.jobs.build.finetune.tokenizer import choose_tokenizer
from dsrun.jobs.spec.job import Job, ModelSpec, TrainingSpec
from dsrun.models import resolve
from dsrun.options.commands import FinetuneOptions
from dsrun.options.groups import TrackerOptions
from dsrun.options.table import Resolved, select


@dataclass(frozen=True)
class FinetuneRequest:
    """What the user asked for."""

    model: str
    """A name from `dsrun models`, a Hugging Face folder or a GGUF file."""
    asked: Resolved[FinetuneOptions]
    """The options as the command line, the environment and a run file give them."""


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
    allocator = allocator or Preview(machine, environ)
    draft = Draft(
        name=request.model, asked=request.asked, machine=machine, environ=environ, allocator=allocator
    )
    go_through(draft, STEPS)
    return _finished(draft, download=download)


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
    draft = configured(request, machine, environ, gpus=gpus, nodes=nodes, known=known)
    for_deepspeed(str(draft.preset))
    return cast(BuiltConfig, draft.config), tuple(draft.notes)


def configured(
    request: FinetuneRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    gpus: int,
    nodes: int,
    known: bool = False,
) -> Draft:
    """The fine-tune as far as its config, or what stands for one with FSDP. Arguments and errors as of `config_of`."""
    draft = Draft(
        name=request.model, asked=request.asked, machine=machine, environ=environ,
        allocator=Preview(machine, environ), hosts=unnamed_hosts(gpus, nodes),
        placed=alike(machine, gpus, nodes) if known else None,
    )  # fmt: skip
    go_through(draft, (find_model, settle_options, choose_precision))
    if not draft.problems:
        go_through(draft, (choose_kernels, settle_config))
    raise_all(draft.problems)
    return draft


STEPS = (
    take_adapter, find_model, settle_options, check_model, choose_tokenizer, check_data, check_evaluation,
    settle_lengths, allocate, choose_precision, choose_kernels, settle_config, check_folder,
)  # fmt: skip
"""In this order: each knows what those before it found out."""


def _finished(draft: Draft, *, download: bool) -> PlannedJob[Job]:
    """The job. Raises DsrunError with what is wrong with the draft, or with the disk, or with what must be compiled."""
    model, config, files, placed = draft.model, draft.config, draft.files, draft.placed
    if draft.problems or model is None or config is None or files is None or placed is None:
        raise DsrunError(draft.problems)
    if model.source == "hub" and download:
        model = _downloaded(draft, model)
        config = draft.config or config
    model = with_corpus(model)
    data, formats = data_spec(draft, files)
    options = draft.options
    job = Job(
        run_dir=str(Path(str(options.output_dir)).absolute()),
        model=model,
        data=data,
        training=select(
            TrainingSpec, options, optimizer_params=draft.optimizer_params, liger=draft.kernels.liger
        ),
        preset=str(draft.preset),
        precision=str(options.precision),
        accelerator=draft.machine.accelerator,
        hosts=placed.hosts,
        ds_config=config.ds_config,
        prepared=prepared_paths(model, data, draft.peft.adapter),
        dsrun_version=__version__,
        prediction=draft.prediction,
        launcher=placed.launcher,
        peft=draft.peft,
        parallel=draft.parallel,
        trackers=select(TrackerOptions, options),
        origins={
            "config": config.origins,
            "options": {entry.name: str(origin) for entry, _, origin in draft.asked.rows()},
        },
        fsdp=draft.fsdp,
    )
    raise_all(disk_check.check(job))
    known = version_check.check(job, force=draft.forced)
    check_operators(job.ds_config, job.accelerator, draft.environ)
    notes = (*draft.notes, *formats, *known, *map(str, config.findings))
    return PlannedJob(job, notes, draft.asked)


def _downloaded(draft: Draft, model: ModelSpec) -> ModelSpec:
    """The model on this machine, and once more what depends on its files: the export, the lengths, the memory."""
    draft.model = model = resolve.downloaded(model)
    resolve.check_export_format(model, draft.options.export_format)
    settle_lengths(draft)
    choose_tiles(draft)
    if draft.placed and draft.placed.known and not draft.problems:
        fit_memory(draft)
    raise_all(draft.problems)
    return model

"""A model from a checkpoint of a run: which one, and where it goes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.job import export_request
from dsrun.job.checkpoints import named_checkpoint, step_of
from dsrun.job.export_request import ExportRequest, export_folders, with_format
from dsrun.job.job import Job
from dsrun.job.layout import NOT_FINITE, ORIGINAL, PREFIX, TEXT_MODEL
from dsrun.jobs.runs.helper_process import result_of
from dsrun.jobs.runs.past_runs import Run

PROCESS = "dsrun.training.export_process"


def job_of(run: Run, export_format: str | None) -> Job:
    """The run's job, with the format that the user names. A run that wrote no model gets it in transformers' format."""
    return with_format(run.job, export_format)


def request(
    run: Run, job: Job, step: int | None, output: Path | None, *, digests: bool = True
) -> ExportRequest:
    """The request for a model. step: of the checkpoint, None: the newest; output: a new folder, None: the run's own;
    digests: whether its files are compared with theirs before.

    Raises DsrunError where there is no such checkpoint or it is damaged, or where something is there already.
    """
    checkpoint = _checkpoint(run, step)
    folders = export_folders(job, run.path)
    if output is not None:
        _check_new(output)
        folders = {main_kind(folders): output}
    else:
        _check_own(run, next(iter(folders.values())))
    absolute = {kind: str(folder.absolute()) for kind, folder in folders.items()}
    return ExportRequest(str(run.path), str(checkpoint), absolute, digests)


def pushed(
    run: Run, job: Job, step: int | None, output: Path | None, *, digests: bool = True
) -> ExportRequest:
    """The request for a push: the model of the run's end, to be looked at, or as `request` what is written first.

    Raises DsrunError where the run has not come to its end, and nobody names the checkpoint that is meant.
    """
    if step is not None or output is not None:
        return request(run, job, step, output, digests=digests)
    if run.state != "finished":
        steps = ", ".join(path.name.removeprefix(PREFIX) for path in run.checkpoints)
        hint = f"Name the checkpoint that is meant (there are: {steps}): --checkpoint N -o DIR"
        fault = f"is {run.state}: it has no finished model to push"
        raise DsrunError(fault, where=str(run.path), hint=hint if steps else "Continue it: dsrun resume")
    if (at_end := of_end(job, run.path)) is None:
        return request(run, job, None, None, digests=digests)
    return at_end


def of_end(job: Job, run: Path) -> ExportRequest | None:
    """The request that looks at the model of a run's end; None where there is none."""
    folders = export_folders(job, run)
    kind = main_kind(folders)
    return (
        ExportRequest(str(run), None, {kind: str(folders[kind].absolute())})
        if folders[kind].is_dir()
        else None
    )


def main_kind(folders: Mapping[str, Path]) -> str:
    """The kind of folder that is meant where only one is named."""
    return next((kind for kind in (ORIGINAL, TEXT_MODEL) if kind in folders), next(iter(folders)))


def carry_out(requested: ExportRequest, environ: Mapping[str, str]) -> dict[str, Any]:
    """Write it, in a process that uses no GPU; returns what dsrun.training.export_process says. Raises DsrunError."""
    env = {**environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", PROCESS, export_request.to_json(requested)]
    return result_of(argv, env, "the export", requested.run_dir)


def _checkpoint(run: Run, step: int | None) -> Path:
    if not run.checkpoints:
        again = shlex.join(["dsrun", "rerun" if run.state == "finished" else "resume", str(run.path)])
        hint = f"Train it: {again}"
        if run.model is not None:
            hint = f"The model of its end is there: {run.model}. One of an earlier step: {again}"
        if NOT_FINITE in run.why:
            hint = f"Its {run.why}: train another with a lower --lr, or a longer warm-up."
        raise DsrunError("has no whole checkpoint", where=str(run.path), hint=hint)
    return named_checkpoint(run.path, step_of(run.checkpoints[-1]) if step is None else step)


def _check_own(run: Run, folder: Path) -> None:
    """Refuse to write over a folder: the model of a run's end is better than one on the way."""
    elsewhere = "Write it elsewhere: -o DIR"
    if run.alive:
        raise DsrunError(
            "is still running, and writes its model at its end", where=str(run.path), hint=elsewhere
        )
    if folder.exists():
        raise DsrunError("holds a model already", where=str(folder), hint=elsewhere)


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fault = "is not empty" if folder.is_dir() else "is not a folder"
        raise DsrunError(fault, where=str(folder), hint="Name a new one: nothing is written over.")

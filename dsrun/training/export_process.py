"""The process that `dsrun export` starts: a model from a checkpoint, on the CPU, without an engine."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.data import inputs
from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.job.export_request import ExportRequest, export_request
from dsrun.job.job import Job
from dsrun.job.run_folder import JOB

if TYPE_CHECKING:
    from dsrun.training.models.export import Weights


def main() -> int:
    """Carry out the ExportRequest in the first argument. The last line on stdout is the result, or {"problems"}."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            result, code = write(export_request(sys.argv[1])), 0
        except DsrunError as error:
            result, code = {"problems": [vars(problem) for problem in error.problems]}, 1
    sys.stdout.write(json_text(result) + "\n")
    return code


def write(request: ExportRequest) -> dict[str, Any]:
    """Write the folders; returns them, and the count of weights in them. Raises DsrunError."""
    from dsrun.training.models.export import shards, verify, write_folders
    from dsrun.training.models.load import end_ids, outline
    from dsrun.training.prepare import prepare_model, tokenizer_of

    if request.checkpoint is None:
        for folder in request.folders.values():
            verify(Path(folder))
        return {"folders": request.folders}
    job = Job.read_shown(Path(request.run_dir) / JOB)
    checkpoint = Path(request.checkpoint)
    inputs.check_model(job, from_checkpoint=True)
    check_checkpoint(job, checkpoint, digests=request.digests)
    prepare_model(job, lambda text: print(text, file=sys.stderr))  # noqa: T201
    tokenizer, encoder = tokenizer_of(job)
    model = outline(job)
    weights = weights_of(model, checkpoint, job)
    folders = {kind: Path(folder) for kind, folder in request.folders.items()}
    ends = end_ids(encoder, model)
    write_folders(model, weights, tokenizer=tokenizer, end_ids=ends, job=job, folders=folders)
    return {"folders": request.folders, "weights": sum(map(len, shards(model, trained=job.peft.freezes)))}


def check_checkpoint(job: Job, folder: Path, *, digests: bool) -> None:
    """Raise DsrunError where a checkpoint is damaged or asks for code; the error names the other checkpoints."""
    from dsrun.files import explained
    from dsrun.job.checkpoints import read_mark, unreadable
    from dsrun.training.checkpoint import check, files_of
    from dsrun.training.pickles import CodeRefusedError

    try:
        with explained("can't be read"):
            mark = read_mark(folder)
            check(job, folder, mark, files_of(folder, mark), digests=digests)
    except CodeRefusedError:
        raise
    except DsrunError as error:
        raise DsrunError([unreadable(folder, error.problems[0].what)]) from error


def weights_of(model: Any, checkpoint: Path, job: Job) -> Weights:
    """A function as Engine.full_weights, of a checkpoint without an engine. Raises DsrunError where a weight is
    lacking."""
    import torch

    from dsrun.training.engines import backend_of
    from dsrun.training.models.kernels import DTYPES

    trained, dtype = backend_of(job).trained_weights(checkpoint), getattr(torch, DTYPES[job.precision])
    buffers = dict(model.named_buffers())
    names: dict[str, str] = {}
    tied: dict[int, list[str]] = {}  # one tensor under several names, of which the checkpoint may have any
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:  # towers stay as they are, and are in no checkpoint
            tied.setdefault(id(parameter), []).append(name)
    for several in tied.values():
        stored = next((name for name in several if name in trained), None)
        if stored is None:
            hint = "Was job.json changed, or the model that it names?"
            raise DsrunError(f"lacks the weight {several[0]}", where=str(checkpoint), hint=hint)
        names |= dict.fromkeys(several, stored)
    return lambda wanted: {
        name: trained[names[name]].to(dtype) if name in names else buffers[name] for name in wanted
    }


if __name__ == "__main__":
    sys.exit(main())

"""A rank of a fine-tune: `python -m dsrun.training.worker --job RUN/job.json`, run by rank.py."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import DsrunError, TrainingError
from dsrun.job.job import Job
from dsrun.options.table import NO_FP8
from dsrun.training.reports.report import Report

if TYPE_CHECKING:
    from dsrun.training.reports.memory_record import Held


def main() -> None:
    """Run a job, and report how it ended. dsrun.jobs.supervision.rank has prepared the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True, type=Path)
    parser.add_argument(
        "--resume", action="store_true", help="from the newest whole checkpoint, if there is one"
    )
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    job = Job.read(arguments.job)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    report = Report(Path(job.run_dir), rank)
    try:
        run(job, report, resume=arguments.resume)
    except BaseException as error:
        _give_up(report, error)
    all_sent = report.close_trackers()
    if not report.ended:
        report.finished()
    if job.trackers.log and all_sent:
        return  # a tracker may clean up as Python ends
    # What a tracker left behind could keep Python from ending; and it takes a second to take torch and a model apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _give_up(report: Report, error: BaseException) -> None:
    """Write down why this rank fails, and end the process."""
    logger = logging.getLogger(__name__)
    if isinstance(error, TrainingError):
        logger.error("%s", error)
    else:
        logger.error("rank %d failed", report.rank, exc_info=error)
    report.failed(error)
    report.close_trackers(failed=True)
    # A clean shutdown would wait for the other ranks, which wait for this one.
    sys.stderr.flush()
    os._exit(1)


def run(job: Job, report: Report, *, resume: bool) -> None:
    """Do all of this rank's work, from the imports to the last score."""
    report.phase("loading libraries")
    _import_libraries(job)
    import torch

    from dsrun.training.ranks.barrier import barrier

    _meet(job, report)
    train(job, report, resume=resume)
    barrier()
    torch.distributed.destroy_process_group()


def _meet(job: Job, report: Report) -> None:
    """Connect this rank with the others. Raises TrainingError where some don't come or nothing gets through."""
    import torch

    from dsrun.training.engines import backend_of
    from dsrun.training.ranks.meeting import Meeting

    meeting = Meeting(job, lambda text: report.event("note", text=text))
    report.phase("meeting the other ranks")
    meeting.arrive()
    on_gpu = job.accelerator == "cuda"
    with meeting.watched(lambda error: _give_up(report, error)):
        backend_of(job).connect()
        meeting.exchange(
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        )


LIBRARIES = ("dsrun.training.loop", "transformers.modeling_utils")
"""Modules that every fine-tune imports beside its engine."""


def _import_libraries(job: Job) -> None:
    """Import without Python's garbage collector, which would take a sixth of the time: it looks through all objects
    again and again. Modules stay, so later collections leave them out, too."""
    from dsrun.training.engines import backend_of

    gc.disable()
    try:
        backend_of(job)
        for name in LIBRARIES:
            importlib.import_module(name)
        gc.freeze()
    finally:
        gc.enable()


def train(job: Job, report: Report, *, resume: bool) -> None:
    """Train a job among ranks that have met. They may train one job after the other, of the same groups of ranks."""
    from dsrun.training.reports import memory_record

    with memory_record.kept(report) as held:
        _train(job, report, held, resume=resume)


def _train(job: Job, report: Report, held: Held, *, resume: bool) -> None:
    """The same. held: gets the model and the engine once they are made."""
    import torch

    from dsrun.data import inputs
    from dsrun.training import checkpoint
    from dsrun.training.engines import backend_of
    from dsrun.training.loop import Trainer
    from dsrun.training.models import float8, kernels
    from dsrun.training.models.compiled import compile_layers
    from dsrun.training.models.load import end_ids, load_model, towers_note
    from dsrun.training.models.tiling import take_tiles
    from dsrun.training.prepare import prepare, tokenizer_of
    from dsrun.training.ranks.barrier import barrier

    backend = backend_of(job)
    torch.manual_seed(job.training.seed)
    resume_from = None
    # Before the model is loaded, which takes minutes: all checkpoints may be damaged.
    if resume:
        report.phase("looking at the checkpoints")
        resume_from = checkpoint.choose(job, lambda text: report.event("note", text=text))
    report.phase("loading the model")
    # One rank of each host looks for what the host's cache lacks; the others find it there.
    if os.environ["LOCAL_RANK"] == "0":
        try:
            inputs.check_model(job, from_checkpoint=resume_from is not None)
            prepare(job, say=lambda text: report.event("note", text=text))
        except DsrunError as error:  # about the user's files: no fault of this rank's
            raise TrainingError(error.problems) from error
    barrier()
    tokenizer, encoder = tokenizer_of(job)
    attention = kernels.attention_of(job)
    if attention != "sdpa":
        report.event("note", text=f"attention: {attention}")
    model, keep_alive = load_model(job, attention)
    held.model = model
    if text := towers_note(job, model):
        report.event("note", text=text)
    if job.peft.freezes:
        report.event("note", text=trained_share(model, job.peft.method))
    if job.training.liger:
        for text in kernels.take_liger(model):
            report.event("note", text=text)
    if job.training.tile_tokens:
        report.event("note", text=take_tiles(model, job))
    if job.training.fp8 != NO_FP8:
        report.event("note", text=float8.take_float8(model, job))
    if job.training.compile:
        compile_layers(model)
    barrier()
    report.phase(f"starting {backend.NAME}")
    held.engine = engine = backend.initialize(job, model)
    ends = end_ids(encoder, model)
    Trainer(job, engine, tokenizer, ends, report).run(resume_from)
    del keep_alive


def trained_share(model: Any, method: str) -> str:
    """A note on how many of a model's weights are trained; for LoRA on a mixture of experts also which parts."""
    from dsrun.models.adapters import PREFIX
    from dsrun.training.engines.optimizers import elements
    from dsrun.training.models.adapters import trained_parts

    trained = sum(elements(weight) for weight in model.parameters() if weight.requires_grad)
    # A weight in 4 bits lies in bytes, with two elements in each.
    sizes = (elements(weight) * (1 if weight.dtype.is_floating_point else 2) for weight in model.parameters())
    whole = sum(sizes)
    parts = "" if method == PREFIX else trained_parts(model)
    return f"training {trained:,} of {whole:,} weights ({trained / whole:.2%}){parts}"


if __name__ == "__main__":
    main()

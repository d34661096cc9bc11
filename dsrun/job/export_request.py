"""Export requests: made by dsrun.jobs.runs.exporting, read by dsrun.training.export_process."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from dsrun.job.job import Job
from dsrun.job.layout import ADAPTER, MODEL, ORIGINAL, TEXT_MODEL
from dsrun.options.table import NO_EXPORT, TEXT_FORMAT, WRITTEN_FORMATS


@dataclass(frozen=True)
class ExportRequest:
    """A model to be written from a checkpoint. Paths are absolute."""

    run_dir: str
    checkpoint: str | None
    """None: nothing is written, and what the folders hold is looked at."""
    folders: dict[str, str]
    """Folder by kind, as in `export_folders`, the one to look into first at the beginning."""
    digests: bool = True
    """Whether the checkpoint's files are compared with their digests first."""


def export_folders(job: Job, run_dir: Path) -> dict[str, Path]:
    """Folders that a job's end writes, by kind, the one to look into first at the beginning.

    "model": the trained model, or the one that LoRA was trained on with it merged. "adapter": what was trained beside
    the model. "model-chatglm": the model in the format that it came in. "model-text": the text part of a checkpoint
    that has more, by itself. None at all where no model is asked for.
    """
    if job.training.export_format == NO_EXPORT:
        return {}
    kinds = [ADAPTER] if job.peft.freezes else []
    if job.peft.method != "ptuning" and job.training.export_format != ADAPTER:
        kinds = [MODEL, *kinds]
        if job.training.export_format == "chatglm":
            kinds.append(ORIGINAL)
        if job.training.export_format == TEXT_FORMAT:
            kinds.append(TEXT_MODEL)
    return {kind: run_dir / kind for kind in kinds}


def with_format(job: Job, export_format: str | None) -> Job:
    """The job with another format, None: its own. One that writes no model gets it in transformers' format."""
    if export_format is None and job.training.export_format == NO_EXPORT:
        export_format = WRITTEN_FORMATS[0]
    if export_format is None:
        return job
    return dataclasses.replace(job, training=dataclasses.replace(job.training, export_format=export_format))


def to_json(request: ExportRequest) -> str:
    """One line of ASCII, for a command line: names of files need not be UTF-8."""
    return json.dumps(dataclasses.asdict(request))


def export_request(text: str) -> ExportRequest:
    """The request that `to_json` wrote."""
    return ExportRequest(**json.loads(text))

"""One of several ranks that train one job after the other:

torchrun --nproc_per_node N parallelism_ranks.py [--double] JOB.json [JOB.json ...]

The jobs need the same engine, and the same groups of ranks, which a process can make once. A job that fails ends all.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def compute_in_double() -> None:
    """Have fp32 jobs computed in fp64: models are cast once they are read, and whoever asks torch for float32 from then
    on gets float64."""
    import torch

    from dsrun.training.models import load

    single, read = torch.float32, load.load_model

    def load_model(*of_job: Any) -> tuple[Any, Any]:
        torch.float32 = torch.float = single
        model, keep_alive = read(*of_job)
        torch.float32 = torch.float = torch.float64
        return model.double(), keep_alive

    load.load_model = load_model
    torch.Tensor.float = torch.Tensor.double


def connect(first: str) -> None:
    """Join the group of the job's ranks. first: its file."""
    from transformers.models.auto import tokenization_auto

    from dsrun.job.job import Job
    from dsrun.training.engines import backend_of

    backend_of(Job.read(Path(first))).connect()
    # A qwen2 with random weights has SentencePiece's tokenizer, and says so: transformers would take Qwen2's own.
    tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.discard("qwen2")


def train(path: str) -> None:
    """A job's part of this rank, from its file to the exported model."""
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    from dsrun.job.job import Job
    from dsrun.training import worker
    from dsrun.training.reports.report import Report

    # Of the job before this one:
    parallel_state_sp._release_sequence_parallel_groups()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # hpZ's
    job = Job.read(Path(path))
    report = Report(Path(job.run_dir), dist.get_rank())
    worker.train(job, report, resume=False)
    report.finished()


def main(paths: list[str], *, double: bool) -> None:
    import torch.distributed as dist

    connect(paths[0])
    if double:
        compute_in_double()
    for path in paths:
        train(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main([path for path in sys.argv[1:] if path != "--double"], double="--double" in sys.argv)

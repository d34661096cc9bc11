"""One of several ranks that train one job after the other: torchrun --nproc_per_node N parallelism_ranks.py JOB.json

The jobs need the same engine, and the same groups of ranks, which a process can make once. A job that fails ends all.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(paths: list[str]) -> None:
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    from dsrun.jobs.spec.job import Job
    from dsrun.training import worker
    from dsrun.training.engines import backend_of
    from dsrun.training.reports.report import Report

    backend_of(Job.read(Path(paths[0]))).connect()
    for path in paths:
        parallel_state_sp._release_sequence_parallel_groups()  # of the job before this one
        job = Job.read(Path(path))
        report = Report(Path(job.run_dir), dist.get_rank())
        worker.train(job, report, resume=False)
        report.finished()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

"""A dsrun command on its way to a cluster's queue."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dsrun.jobs.launchers.common.cluster_files import ClusterFile


@dataclass(frozen=True)
class Submission:
    """One dsrun command for a cluster."""

    run_dir: Path
    command: tuple[str, ...]
    """The words behind `dsrun`, its name first, without the run's folder."""
    cluster: ClusterFile
    nodes: int
    gpus: int
    """GPUs of each node; 0 for none."""
    job_name: str | None
    """The user's name for it; None: made from the run folder's."""
    cwd: Path
    """The folder in which the command was given; its paths count from there."""
    again: bool = True
    """Whether a job that comes back goes on with the run in its folder."""
    python: str = sys.executable
    """The Python that runs dsrun, unless the cluster's file names one."""

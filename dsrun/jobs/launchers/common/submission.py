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
    """Of each node, 0 for none."""
    job_name: str | None
    """As the user says it; None: made from the run folder's."""
    cwd: Path
    """The folder that it was given in; its paths count from there."""
    again: bool = True
    """Whether the command goes on with the run that it finds in its folder, when the job comes back."""
    python: str = sys.executable
    """What runs dsrun, unless the cluster's file says so."""

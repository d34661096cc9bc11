"""`mpirun` of Open MPI, for clusters whose hosts are reached by MPI only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from dsrun.jobs.launchers import Launcher


def to_all(hosts: Sequence[str], command: Sequence[str], _environ: Mapping[str, str]) -> list[str]:
    """`mpirun`, one process for each host. Without --bind-to none it would pin every rank of a host to one core."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [
        "mpirun", *as_root, "--host", ",".join(f"{host}:1" for host in hosts), "-n", str(len(hosts)),
        "--map-by", "ppr:1:node", "--bind-to", "none", *command, "--node-from", "OMPI_COMM_WORLD_RANK",
    ]  # fmt: skip


LAUNCHER = Launcher("openmpi", program="mpirun", package="openmpi-bin", to_all=to_all)

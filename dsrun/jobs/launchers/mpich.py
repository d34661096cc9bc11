"""`mpiexec.hydra` of MPICH, for clusters whose hosts are reached by MPI only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.jobs.launchers import Launcher


def to_all(hosts: Sequence[str], command: Sequence[str], _environ: Mapping[str, str]) -> list[str]:
    """`mpiexec.hydra`, one process for each host."""
    return [
        "mpiexec.hydra", "-hosts", ",".join(hosts), "-n", str(len(hosts)), "-ppn", "1", "-bind-to", "none",
        *command, "--node-from", "PMI_RANK",
    ]  # fmt: skip


LAUNCHER = Launcher("mpich", program="mpiexec.hydra", package="mpich", to_all=to_all)

"""`mpirun` of Intel MPI, for clusters whose hosts are reached by MPI only. It is Hydra with options of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.jobs.launchers import Launcher


def to_all(hosts: Sequence[str], command: Sequence[str], _environ: Mapping[str, str]) -> list[str]:
    """`mpirun`, one process for each host. I_MPI_PIN=off: else every rank of a host is pinned to the agent's cores."""
    return [
        "mpirun", "-hosts", ",".join(hosts), "-n", str(len(hosts)), "-ppn", "1", "-genv", "I_MPI_PIN", "off",
        *command, "--node-from", "PMI_RANK",
    ]  # fmt: skip


LAUNCHER = Launcher("impi", program="mpirun", package="Intel MPI", to_all=to_all)

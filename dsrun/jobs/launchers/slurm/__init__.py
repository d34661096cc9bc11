"""`srun`, inside an allocation, which `salloc` or `dsrun submit` gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsrun.jobs.launchers import Launcher
from dsrun.jobs.launchers.slurm.allocation import current_job


def to_all(hosts: Sequence[str], command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """`srun`, one task for each node.

    Since 22.05 a step has one core for each task unless it says otherwise, whatever the job asked for; --cpu-bind=none
    because the ranks share the agent's. A node's name is how Slurm tells an agent which one it is.
    """
    cores = environ.get("SLURM_CPUS_PER_TASK") or environ.get("SLURM_CPUS_ON_NODE")
    per_task = ["--cpus-per-task", cores] if cores and cores.isdecimal() else []
    job = current_job(environ)
    beside = ["--overlap"] if job and job.in_step else []  # else it would wait for the step that it is in
    return [
        "srun", "--nodes", str(len(hosts)), "--ntasks", str(len(hosts)), "--ntasks-per-node", "1",
        "--nodelist", ",".join(hosts), "--cpu-bind=none", "--kill-on-bad-exit=0", *per_task, *beside, *command,
        "--node-from", "SLURMD_NODENAME",
    ]  # fmt: skip


LAUNCHER = Launcher("slurm", program="srun", package="slurm-client", to_all=to_all)

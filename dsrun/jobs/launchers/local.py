"""This machine: DeepSpeed's launcher with explicit devices, so that nothing in the surroundings is guessed from.

Its own rules would read /job/hostfile where that exists, overrule CUDA_VISIBLE_DEVICES when a number of GPUs is
given, and count NUMA nodes on a CPU (deepspeed/launcher/runner.py, 0.19). A hostfile of the run's own with an
--include list says the same thing on every machine; with one host it starts the ranks here, without ssh.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dsrun.jobs.job import Job
from dsrun.jobs.run_folder import HOSTFILE, JOB

WORKER = "dsrun.training.worker"


def hostfile(job: Job) -> str:
    """The text of the run's hostfile: enough slots that every chosen device is one of them."""
    return "".join(f"{host.host} slots={max(host.devices) + 1}\n" for host in job.hosts)


def command(job: Job, run_dir: Path, port: int, extra: list[str]) -> list[str]:
    """The `deepspeed` command. extra: more arguments for the worker."""
    include = "@".join(f"{host.host}:{','.join(map(str, sorted(host.devices)))}" for host in job.hosts)
    return [
        sys.executable, "-m", "deepspeed.launcher.runner",
        "--hostfile", str(run_dir / HOSTFILE), "--include", include, "--no_ssh_check",
        "--master_addr", "127.0.0.1", "--master_port", str(port),
        "--no_local_rank", "--module", WORKER, "--job", str(run_dir / JOB), *extra,
    ]  # fmt: skip

"""The command that starts a job's ranks on one of its hosts: DeepSpeed's launcher, which is left nothing to guess.

Its own rules would read /job/hostfile where that exists, overrule CUDA_VISIBLE_DEVICES when a number of GPUs is
given, count NUMA nodes on a CPU, and run a hostfile's only host here instead of there (deepspeed/launcher/runner.py,
0.19). A hostfile of the run's own, --no_ssh and the host's number say the same thing on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dsrun.jobs.job import AnyJob
from dsrun.jobs.layout import RANK_MODULE
from dsrun.jobs.run_folder import HOSTFILE, JOB

LOOPBACK = "127.0.0.1"


def hostfile(job: AnyJob) -> str:
    """The text of the run's hostfile: a slot for each rank. Which devices those are dsrun.jobs.rank sees to."""
    return "".join(f"{host.host} slots={len(host.devices)}\n" for host in job.hosts)


def command(job: AnyJob, node: int, master: tuple[str, int], extra: Sequence[str]) -> list[str]:
    """The `deepspeed` command for host number `node`. master: address and port on host 0; extra: for each rank."""
    run_dir = Path(job.run_dir)
    return [
        sys.executable, "-m", "deepspeed.launcher.runner",
        "--hostfile", str(run_dir / HOSTFILE), "--no_ssh", "--node_rank", str(node),
        "--master_addr", master[0], "--master_port", str(master[1]),
        "--no_local_rank", "--module", RANK_MODULE, str(run_dir / JOB), *extra,
    ]  # fmt: skip

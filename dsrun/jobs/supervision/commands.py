"""The commands of a job, which leave nothing to guess: DeepSpeed's launcher on each host, and the same as a script.

The launcher's own rules would read /job/hostfile where that exists, overrule CUDA_VISIBLE_DEVICES when a number of GPUs
is given, count NUMA nodes on a CPU, and run a hostfile's only host here instead of there (deepspeed/launcher/runner.py,
0.19). A hostfile of the run's own, --no_ssh and the host's number say the same thing on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsrun.cluster.ports import free_port
from dsrun.jobs.launchers.common import environment, shell_scripts
from dsrun.jobs.spec.job import AnyJob, Job
from dsrun.jobs.spec.layout import RANK_MODULE
from dsrun.jobs.spec.run_folder import HOSTFILE, JOB

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class JobCommands:
    """What is started, as it is shown and kept; the address and port to meet at are found again at the start."""

    env: dict[str, str]
    """What is added to the user's environment."""
    prepare: list[str]
    """Empty for a script."""
    train: list[list[str]]
    """One a host."""


def commands_of(job: AnyJob, environ: Mapping[str, str], *, resume: bool = False) -> JobCommands:
    """The commands of a job. resume: the ranks continue from the newest whole checkpoint, where there is one."""
    master = (LOOPBACK if len(job.hosts) == 1 else job.hosts[0].host, free_port())
    prepare = [sys.executable, "-m", "dsrun.training.prepare", str(Path(job.run_dir) / JOB)]
    return JobCommands(
        env=environment.of_ranks(job, environ),
        prepare=prepare if isinstance(job, Job) else [],
        train=[ranks_command(job, number, master, resume=resume) for number in range(len(job.hosts))],
    )


def ranks_command(job: AnyJob, host: int, master: tuple[str, int], *, resume: bool) -> list[str]:
    """The `deepspeed` command that starts the ranks of host number `host`. master: address and port on host 0."""
    run_dir = Path(job.run_dir)
    return [
        sys.executable, "-m", "deepspeed.launcher.runner",
        "--hostfile", str(run_dir / HOSTFILE), "--no_ssh", "--node_rank", str(host),
        "--master_addr", master[0], "--master_port", str(master[1]),
        "--no_local_rank", "--module", RANK_MODULE, str(run_dir / JOB), *(["--resume"] if resume else []),
    ]  # fmt: skip


def hostfile(job: AnyJob) -> str:
    """The text of the run's hostfile: a slot for each rank. Which devices those are jobs.supervision.rank sees to."""
    return "".join(f"{host.host} slots={len(host.devices)}\n" for host in job.hosts)


def command_text(job: AnyJob, commands: JobCommands) -> str:
    """command.sh: the same run by hand."""
    return shell_scripts.render(
        "command.sh.j2",
        title=job.title,
        env=commands.env,
        prepare=commands.prepare,
        cwd=getattr(job, "cwd", ""),
        hosts=[host.host for host in job.hosts],
        train=commands.train,
    )

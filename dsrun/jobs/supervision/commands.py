"""The commands of a job, which leave nothing to guess: DeepSpeed's launcher on each host, and the same as a script.

`deepspeed` itself (deepspeed/launcher/runner.py, 0.19) would read /job/hostfile where that exists, overrule
CUDA_VISIBLE_DEVICES when a number of GPUs is given, count NUMA nodes on a CPU, and run a hostfile's only host here
instead of there. What it starts on a host in the end is launch.py, which is told all of it: so that is what is started,
seconds sooner, as each of the two imports torch.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsrun.cluster.ports import free_port
from dsrun.files import json_text
from dsrun.host.hiding import secrets
from dsrun.job.job import AnyJob, Job, ScriptJob
from dsrun.job.layout import RANK_MODULE
from dsrun.job.run_folder import JOB
from dsrun.jobs.launchers.common import environment, shell_scripts

LOOPBACK = "127.0.0.1"
PLAIN_LAUNCHER = "dsrun.jobs.supervision.plain_launcher"


@dataclass(frozen=True)
class JobCommands:
    """The commands of a job, as they are shown and kept; address and port for the ranks are chosen anew at the
    start."""

    env: dict[str, str]
    """Variables on top of the user's environment."""
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
    """The command that starts the ranks of host number `host`. master: address and port on host 0."""
    run_dir = Path(job.run_dir)
    if isinstance(job, ScriptJob) and job.plain:
        place = ["--node", str(host), "--master", master[0], str(master[1])]
        return [sys.executable, "-m", PLAIN_LAUNCHER, str(run_dir / JOB), *place]
    return [
        sys.executable, "-m", "deepspeed.launcher.launch", "--world_info", world_info(job), "--node_rank", str(host),
        "--master_addr", master[0], "--master_port", str(master[1]),
        "--no_local_rank", "--module", RANK_MODULE, str(run_dir / JOB), *(["--resume"] if resume else []),
    ]  # fmt: skip


def world_info(job: AnyJob) -> str:
    """The job's hosts as launch.py reads them: {host: a number for each rank}, as JSON in base64.

    Which devices those are jobs.supervision.rank sees to.
    """
    slots = {host.host: list(range(len(host.devices))) for host in job.hosts}
    return base64.urlsafe_b64encode(json_text(slots).encode()).decode("ascii")


def command_text(job: AnyJob, commands: JobCommands) -> str:
    """command.sh: the same run by hand. Variables that are secret are not in it: ranks take them from the job."""
    hidden = secrets(commands.env)
    return shell_scripts.render(
        "command.sh.j2",
        title=job.title,
        env={name: value for name, value in commands.env.items() if name not in hidden},
        prepare=commands.prepare,
        cwd=getattr(job, "cwd", ""),
        hosts=[host.host for host in job.hosts],
        train=commands.train,
    )

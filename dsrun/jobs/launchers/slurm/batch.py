"""Slurm: the script that sbatch gets. Values become text; nothing runs.

Names of options and their forms: sbatch(1) and srun(1) of Slurm 22.05 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.job.run_folder import LOGS, SUBMITTED
from dsrun.jobs.launchers.common.cluster_files import ClusterFile
from dsrun.jobs.launchers.common.shell_scripts import render
from dsrun.jobs.launchers.common.submission import Submission
from dsrun.jobs.launchers.slurm.allocation import REQUEUE
from dsrun.options.declare import entries
from dsrun.options.table import HostOptions

TEMPLATE = "slurm.sbatch.j2"
LOG = "slurm-%j.out"
SIGNAL_S = 300
"""Seconds before the time limit, unless the cluster's file says: time for a checkpoint; Slurm may be 60 s early."""
NAME = re.compile(r"[^\W_][\w.+-]{0,63}")
TIME_FORMS = "As Slurm has it: MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


def time_limit_min(text: str) -> int:
    """Minutes of a time limit in any of Slurm's forms, seconds rounded up as Slurm does. Raises DsrunError."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text.strip(), re.ASCII)
    if not match or any(len(part or "") > 6 for part in match.groups()):
        raise DsrunError(f"can't be {text!r}", where="--time", hint=f"{TIME_FORMS}.")
    days, first, second, third = match.groups()
    if days is not None or third is not None:
        hours, minutes, seconds = first, second, third
    else:
        hours, minutes, seconds = "0", first, second
    total_s = int(days or 0) * 86400 + int(hours) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
    if total_s == 0:
        hint = "Leave it out for the partition's own limit."
        raise DsrunError(f"can't be {text!r}: that is no time", where="--time", hint=hint)
    return -(-total_s // 60)


def time_text(minutes: int) -> str:
    """A time limit as every Slurm reads it in one way: 1-02:30:00."""
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes:02d}:00"


def script(submission: Submission) -> str:
    """The text for sbatch. Raises DsrunError for what can't stand in it."""
    cluster = submission.cluster
    raise_all(_problems(submission))
    name, *words = submission.command
    python = [*cluster.container, cluster.python or ("python3" if cluster.container else submission.python)]
    cpus = {"SRUN_CPUS_PER_TASK": str(cluster.cpus_per_node)} if cluster.cpus_per_node else {}
    return render(
        TEMPLATE,
        title=name_of(submission),
        file=str(submission.run_dir / SUBMITTED),
        options=_options(submission),
        modules=cluster.modules,
        setup=_shell(cluster.setup),
        file_of_setup=str(cluster.path or ""),
        # srun takes no --cpus-per-task over from sbatch any more (Slurm 22.05's release notes).
        environment={**cluster.exports, **cpus},
        requeue=REQUEUE if cluster.requeue else "",
        cwd=str(submission.cwd),
        cluster=entries(HostOptions)["cluster"].option.variable,
        # The options of dsrun come before a script's name, behind which everything is the script's.
        start=[*python, "-m", "dsrun", name, "--output-dir", str(submission.run_dir)],
        words=[*(["--continue"] if submission.again else []), *words],
    )


def name_of(submission: Submission) -> str:
    """The job's name: the user's, or one made from the run folder's."""
    made = re.sub(r"[^\w.+-]+", "-", submission.run_dir.name).strip("-._+")[:64]
    return submission.job_name or made or "dsrun"


def _shell(lines: Sequence[str]) -> list[str]:
    """A cluster's own lines, which are shell already (cluster_files.py): nothing of a user's is in them."""
    from markupsafe import Markup

    return [Markup(line) for line in lines]  # noqa: S704


def _problems(submission: Submission) -> Iterator[Problem]:
    cluster, path = submission.cluster, str(submission.run_dir)
    where = str(cluster.path or cluster.name)
    if not NAME.fullmatch(name_of(submission)):
        hint = "Letters, digits, and . _ + - between them; 64 at most."
        yield Problem(f"can't be {submission.job_name!r}", "--job-name", hint)
    # A backslash turns Slurm's replacement of %j off (sbatch(1), filename pattern); a line ends at a newline.
    if not path.isprintable() or "\\" in path:
        hint = "Choose another --output-dir."
        yield Problem("Slurm can't write its log here: \\ or a control character", repr(path), hint)
    if cluster.container and submission.nodes > 1:
        fault = f"has a container, and the job {submission.nodes} nodes: Slurm's srun is not inside"
        yield Problem(fault, where, "Use one node, or a Python environment that all nodes see.")
    limit_s = (cluster.time_limit_min or 0) * 60
    if limit_s and (cluster.signal_s or 0) >= limit_s:
        fault = f"is {cluster.signal_s}, and the time limit is {limit_s} s: the job would end at once"
        yield Problem(fault, f"{where}: signal_s", "Give it more --time.")


def _options(submission: Submission) -> list[str]:
    """The #SBATCH lines. sbatch takes quotes as a shell does (opt.c, _get_argument), and expands nothing but %."""
    cluster, memory = submission.cluster, submission.cluster.memory_gib
    values = {
        "job-name": name_of(submission),
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "reservation": cluster.reservation,
        "nodes": submission.nodes,
        "ntasks-per-node": 1,
        "gres": cluster.gres.replace("{gpus}", str(submission.gpus)) if submission.gpus else None,
        "cpus-per-task": cluster.cpus_per_node,
        "mem": f"{memory}G" if memory else memory,
        "time": time_text(cluster.time_limit_min) if cluster.time_limit_min else None,
        "signal": f"B:USR1@{signal_s(cluster)}",
        "output": f"{submission.run_dir / LOGS}/".replace("%", "%%") + LOG,
        "open-mode": "append",
        "export": "ALL",
    }
    flags = ["exclusive"] if cluster.exclusive else []
    flags.append("requeue" if cluster.requeue else "no-requeue")
    given = [f"--{name}={value}" for name, value in values.items() if value not in (None, "")]
    return [*given, *(f"--{flag}" for flag in flags)]


def signal_s(cluster: ClusterFile) -> int:
    """Seconds before the time limit at which dsrun is told. A quarter of a short job's limit, unless the file says."""
    if cluster.signal_s is not None:
        return cluster.signal_s
    return min(SIGNAL_S, cluster.time_limit_min * 15) if cluster.time_limit_min else SIGNAL_S

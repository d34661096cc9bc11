"""Slurm: what a job finds out about its allocation. Texts become values; nothing runs.

Names of variables and their forms: sbatch(1) and srun(1) of Slurm 22.05 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsrun.cluster import hostlist
from dsrun.errors import DsrunError

REQUEUE = "DSRUN_REQUEUE"
"""Set to the job's id in jobs that are to come back after their time limit."""
FIRST_OWN_STEP = 0xFFFFFFF0
"""First number of Slurm's own steps: batch script, interactive shell, extern (slurm.h)."""


@dataclass(frozen=True)
class SlurmJob:
    """A job's allocation, as Slurm describes it."""

    job_id: str
    hosts: tuple[str, ...]
    gpus: tuple[int, ...] | None
    """GPUs of each host; None: Slurm doesn't say."""
    cpus: tuple[int, ...] | None
    """Logical cores of each host that the whole job has; None: Slurm doesn't say."""
    in_step: bool = False
    """Whether srun started this process, so that a step of its own has to share (srun --overlap)."""
    requeue: bool = False
    """Whether the job comes back after its time limit, if asked to."""


def current_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The allocation that this process is in; None outside of Slurm.

    Raises DsrunError, naming the variables, where they are wrong or contradict each other.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    in_step = _number(environ, "SLURM_STEP_ID", FIRST_OWN_STEP) < FIRST_OWN_STEP
    hosts = _hosts(environ, in_step=in_step)
    if _number(environ, "SLURM_HET_SIZE", 1) > 1:
        fault = f"is {environ['SLURM_HET_SIZE']}: a job of several components"
        hint = "Submit one component, with the same kind of node."
        raise DsrunError(fault, where="SLURM_HET_SIZE", hint=hint)
    copies = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if in_step and copies > 1:
        fault = f"is {copies}: srun started {copies} dsrun, and each would start the whole job"
        hint = "Call dsrun without srun: it starts the ranks on all nodes. Or: srun --ntasks=1 --pty bash"
        raise DsrunError(fault, where="SLURM_STEP_NUM_TASKS", hint=hint)
    return SlurmJob(
        job_id=job_id,
        hosts=hosts,
        gpus=_gpus(environ, len(hosts), in_step=in_step),
        cpus=_per_host(environ, "SLURM_JOB_CPUS_PER_NODE", len(hosts)),
        in_step=in_step,
        requeue=environ.get(REQUEUE) == job_id,
    )


def _hosts(environ: Mapping[str, str], *, in_step: bool) -> tuple[str, ...]:
    variable = next((name for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)
    if variable is None:
        fault = f"is not set, but SLURM_JOB_ID is {environ['SLURM_JOB_ID']}"
        raise DsrunError(fault, where="SLURM_JOB_NODELIST", hint="Outside of the job: unset SLURM_JOB_ID.")
    try:
        hosts = tuple(entry.host for entry in hostlist.expand(environ[variable], default_slots=1))
    except DsrunError as error:
        raise DsrunError(replace(problem, where=variable) for problem in error.problems) from error
    for name in ("SLURM_JOB_NUM_NODES",) if in_step else ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if (count := _number(environ, name, len(hosts))) != len(hosts):
            raise DsrunError(f"is {count}, but {variable}={environ[variable]} names {len(hosts)}", where=name)
    return hosts


def _gpus(environ: Mapping[str, str], nodes: int, *, in_step: bool) -> tuple[int, ...] | None:
    """GPUs of each host.

    A request for a node or a task holds for all hosts; the number of this host may hold for it alone.
    """
    here = _here(environ)
    if in_step and nodes == 1 and here is not None:
        return (here,)  # a step may have fewer than the job asked for
    if in_step and "SLURM_GPUS_PER_TASK" in environ:
        return None  # the tasks of a step are not the job's
    if per_node := environ.get("SLURM_GPUS_PER_NODE"):
        counts: tuple[int, ...] | None = (_count(per_node, "SLURM_GPUS_PER_NODE"),) * nodes
    elif (per_task := environ.get("SLURM_GPUS_PER_TASK")) and "SLURM_TASKS_PER_NODE" in environ:
        each = _count(per_task, "SLURM_GPUS_PER_TASK")
        tasks = _per_host(environ, "SLURM_TASKS_PER_NODE", nodes) or ()
        counts = tuple(each * count for count in tasks)
    elif here is None:
        return None
    elif total := environ.get("SLURM_GPUS"):
        # --gpus=N spreads them as it likes: only an equal share says what the other hosts have.
        count = _count(total, "SLURM_GPUS")
        counts = (here,) * nodes if count == here * nodes else None
    else:
        counts = (here,) * nodes  # --gres counts for every node
    if nodes == 1 and counts is not None and here is not None and counts != (here,):
        variable = "SLURM_GPUS_PER_NODE" if per_node else "SLURM_GPUS_PER_TASK"
        raise DsrunError(f"is {here}, but {variable} says {counts[0]}", where="SLURM_GPUS_ON_NODE")
    return counts


def details_command(job_id: str) -> list[str]:
    """The command whose output `detailed` reads."""
    return ["scontrol", "show", "job", "--details", job_id]


def detailed(job: SlurmJob, text: str) -> SlurmJob:
    """The allocation with the GPUs that scontrol names for each host; as it is where the text names none.

    This is for salloc's shell on a login node, which learns nothing of --gres, and for shares that are not equal.
    """
    counts: dict[str, int] = {}
    for match in re.finditer(r"^\s*Nodes=(\S+) CPU_IDs=.* GRES=(\S*)$", text, re.MULTILINE):
        # gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2),nvme:1
        number = sum(map(int, re.findall(r"(?:^|,)gpu:(?:[^,(:]+:)?([0-9]+)(?=[(,]|$)", match[2])))
        for entry in hostlist.expand(match[1], default_slots=1):
            counts[entry.host] = counts.get(entry.host, 0) + number
    if not any(counts.values()) or not all(host in counts for host in job.hosts):
        return job
    return replace(job, gpus=tuple(counts[host] for host in job.hosts))


def _here(environ: Mapping[str, str]) -> int | None:
    """GPUs of this host. Raises DsrunError where their number and their list contradict each other."""
    lists = {name: environ[name] for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS") if environ.get(name)}
    counts = {name: len(text.split(",")) for name, text in lists.items()}
    if environ.get("SLURM_GPUS_ON_NODE"):
        here = _count(environ["SLURM_GPUS_ON_NODE"], "SLURM_GPUS_ON_NODE")
        if counts and here not in counts.values():  # a step may have fewer than the job
            others = ", ".join(f"{name}={text}" for name, text in lists.items())
            raise DsrunError(f"is {here}, but {others}", where="SLURM_GPUS_ON_NODE")
        return here
    return min(counts.values(), default=None)


def _count(text: str, variable: str) -> int:
    """GPUs of "4", "a100:4" or "a100:2,v100:1"."""
    pieces = [re.fullmatch(r"(?:[\w.-]+:)*([0-9]+)", piece.strip()) for piece in text.split(",")]
    numbers = [int(match[1]) for match in pieces if match]
    if len(numbers) != len(pieces):
        raise DsrunError(f"is {text!r}, which isn't a number of GPUs", where=variable, hint="As 4 or a100:4")
    return sum(numbers)


def _per_host(environ: Mapping[str, str], variable: str, nodes: int) -> tuple[int, ...] | None:
    """A number for each host: "2(x3),1" is 2, 2, 2, 1. None where the variable is not set."""
    text = environ.get(variable)
    if not text:
        return None
    counts: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", piece.strip())
        if not match or int(match[2] or 1) > hostlist.MOST_HOSTS:
            raise DsrunError(f"is {text!r}", where=variable, hint="As 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        raise DsrunError(f"is {text!r}: for {len(counts)} nodes, and the job has {nodes}", where=variable)
    return tuple(counts)


def _number(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable, "")
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,18}", text):
        raise DsrunError(f"is {text!r}, which isn't a number", where=variable)
    return int(text)

"""Slurm: the script that sbatch gets, and what a job finds out about its allocation. Text and values; nothing runs.

Names of variables, options and their forms: sbatch(1) and srun(1) of Slurm 22.05 to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dsrun.cluster import hostlist
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.run_folder import LOGS, SUBMITTED
from dsrun.jobs.scripts import render
from dsrun.jobs.sites import CLUSTER, Site

TEMPLATE = "slurm.sbatch.j2"
LOG = "slurm-%j.out"
REQUEUE = "DSRUN_REQUEUE"
"""Set to the job's id in jobs that are to come back after their time limit."""
SIGNAL_S = 300
"""Seconds before the time limit, where no site says: time for a checkpoint, and Slurm may be up to 60 s early."""
FIRST_OWN_STEP = 0xFFFFFFF0
"""From here on Slurm numbers its own steps: batch script, interactive shell, extern (slurm.h)."""
NAME = re.compile(r"[^\W_][\w.+-]{0,63}")
TIME_FORMS = "As Slurm has it: MINUTES, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


@dataclass(frozen=True)
class SlurmAllocation:
    """What Slurm gave to a job. gpus, cpus: of each host, in the order of `hosts`; None where Slurm doesn't say.

    cpus: logical ones, of the whole job. restarts: how often the job was requeued. in_step: whether this process was
    started by srun, so that a step of its own has to share (srun --overlap). requeue: whether the job comes back after
    its time limit, if it is asked to.
    """

    job_id: str
    hosts: tuple[str, ...]
    gpus: tuple[int, ...] | None
    cpus: tuple[int, ...] | None
    restarts: int = 0
    in_step: bool = False
    requeue: bool = False

    @property
    def nodes(self) -> int:
        return len(self.hosts)


def allocation(environ: Mapping[str, str]) -> SlurmAllocation | None:
    """The allocation that this process is in; None outside of Slurm.

    Raises DsrunError, naming the variables, where they are wrong or contradict each other.
    """
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    in_step = _number(environ, "SLURM_STEP_ID", FIRST_OWN_STEP) < FIRST_OWN_STEP
    hosts = _hosts(environ, in_step=in_step)
    if _number(environ, "SLURM_HET_SIZE", 1) > 1:
        raise DsrunError(
            f"is {environ['SLURM_HET_SIZE']}: a job of several components",
            where="SLURM_HET_SIZE",
            hint="Submit one component, with the same kind of node.",
        )
    copies = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if in_step and copies > 1:
        raise DsrunError(
            f"is {copies}: srun started {copies} dsrun, and each would start the whole job",
            where="SLURM_STEP_NUM_TASKS",
            hint="Call dsrun without srun: it starts the ranks on all nodes. Or: srun --ntasks=1 --pty bash",
        )
    return SlurmAllocation(
        job_id=job_id,
        hosts=hosts,
        gpus=_gpus(environ, len(hosts), in_step=in_step),
        cpus=_per_host(environ, "SLURM_JOB_CPUS_PER_NODE", len(hosts)),
        restarts=_number(environ, "SLURM_RESTART_COUNT", 0),
        in_step=in_step,
        requeue=environ.get(REQUEUE) == job_id,
    )


def _hosts(environ: Mapping[str, str], *, in_step: bool) -> tuple[str, ...]:
    variable = next((name for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST") if environ.get(name)), None)
    if variable is None:
        raise DsrunError(
            f"is not set, but SLURM_JOB_ID is {environ['SLURM_JOB_ID']}",
            where="SLURM_JOB_NODELIST",
            hint="Outside of the job: unset SLURM_JOB_ID.",
        )
    try:
        hosts = tuple(entry.host for entry in hostlist.expand(environ[variable], default_slots=1))
    except DsrunError as error:
        raise DsrunError(
            Problem(problem.what, variable, problem.hint) for problem in error.problems
        ) from error
    for name in ("SLURM_JOB_NUM_NODES",) if in_step else ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if (count := _number(environ, name, len(hosts))) != len(hosts):
            raise DsrunError(f"is {count}, but {variable}={environ[variable]} names {len(hosts)}", where=name)
    return hosts


def _gpus(environ: Mapping[str, str], nodes: int, *, in_step: bool) -> tuple[int, ...] | None:
    """GPUs of each host. What was asked for a node or a task holds for all; what this host has, maybe only here."""
    here = _here(environ)
    if in_step and nodes == 1 and here is not None:
        return (here,)  # a step may have fewer than the job asked for
    if in_step and "SLURM_GPUS_PER_TASK" in environ:
        return None  # the tasks of a step are not the job's
    if asked := environ.get("SLURM_GPUS_PER_NODE"):
        found: tuple[int, ...] | None = (_count(asked, "SLURM_GPUS_PER_NODE"),) * nodes
    elif (per_task := environ.get("SLURM_GPUS_PER_TASK")) and "SLURM_TASKS_PER_NODE" in environ:
        each = _count(per_task, "SLURM_GPUS_PER_TASK")
        tasks = _per_host(environ, "SLURM_TASKS_PER_NODE", nodes) or ()
        found = tuple(each * count for count in tasks)
    elif here is None:
        return None
    elif total := environ.get("SLURM_GPUS"):
        # --gpus=N spreads them as it likes: only an equal share says what the other hosts have.
        count = _count(total, "SLURM_GPUS")
        found = (here,) * nodes if count == here * nodes else None
    else:
        found = (here,) * nodes  # --gres counts for every node
    if nodes == 1 and found is not None and here is not None and found != (here,):
        asked_by = "SLURM_GPUS_PER_NODE" if asked else "SLURM_GPUS_PER_TASK"
        raise DsrunError(f"is {here}, but {asked_by} says {found[0]}", where="SLURM_GPUS_ON_NODE")
    return found


def details_command(job_id: str) -> list[str]:
    """What prints the text that `detailed` reads."""
    return ["scontrol", "show", "job", "--details", job_id]


def detailed(found: SlurmAllocation, text: str) -> SlurmAllocation:
    """The allocation with the GPUs that scontrol names for each host; as it is where the text names none.

    For salloc's shell on a login node, which learns nothing of --gres, and for shares that are not equal.
    """
    counts: dict[str, int] = {}
    for match in re.finditer(r"^\s*Nodes=(\S+) CPU_IDs=.* GRES=(\S*)$", text, re.MULTILINE):
        # gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2),nvme:1
        number = sum(map(int, re.findall(r"(?:^|,)gpu:(?:[^,(:]+:)?([0-9]+)(?=[(,]|$)", match[2])))
        for entry in hostlist.expand(match[1], default_slots=1):
            counts[entry.host] = counts.get(entry.host, 0) + number
    if not any(counts.values()) or not all(host in counts for host in found.hosts):
        return found
    return replace(found, gpus=tuple(counts[host] for host in found.hosts))


def _here(environ: Mapping[str, str]) -> int | None:
    """GPUs of this host. Raises DsrunError where their number and their list contradict each other."""
    lists = {name: environ[name] for name in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS") if environ.get(name)}
    counts = {name: len(text.split(",")) for name, text in lists.items()}
    if environ.get("SLURM_GPUS_ON_NODE"):
        here = _count(environ["SLURM_GPUS_ON_NODE"], "SLURM_GPUS_ON_NODE")
        if counts and here not in counts.values():  # a step may have fewer than the job
            said = ", ".join(f"{name}={text}" for name, text in lists.items())
            raise DsrunError(f"is {here}, but {said}", where="SLURM_GPUS_ON_NODE")
        return here
    return min(counts.values(), default=None)


def _count(text: str, variable: str) -> int:
    """GPUs of "4", "a100:4" or "a100:2,v100:1"."""
    pieces = [re.fullmatch(r"(?:[\w.-]+:)*([0-9]+)", piece.strip()) for piece in text.split(",")]
    numbers = [int(match[1]) for match in pieces if match]
    if len(numbers) != len(pieces):
        raise DsrunError(f"is {text!r}: no number of GPUs", where=variable, hint="As 4 or a100:4")
    return sum(numbers)


def _per_host(environ: Mapping[str, str], variable: str, nodes: int) -> tuple[int, ...] | None:
    """ "2(x3),1" is 2, 2, 2, 1; None where the variable is not set."""
    text = environ.get(variable)
    if not text:
        return None
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", piece.strip())
        if not match or int(match[2] or 1) > hostlist.MOST_HOSTS:
            raise DsrunError(f"is {text!r}", where=variable, hint="As 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    if len(found) != nodes:
        raise DsrunError(f"is {text!r}: for {len(found)} nodes, and the job has {nodes}", where=variable)
    return tuple(found)


def _number(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable, "")
    if not text:
        return default
    if not re.fullmatch("[0-9]{1,18}", text):
        raise DsrunError(f"is {text!r}: no number", where=variable)
    return int(text)


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
        raise DsrunError(f"can't be {text!r}: no time at all", where="--time", hint=hint)
    return -(-total_s // 60)


def time_text(minutes: int) -> str:
    """A time limit as every Slurm reads it in one way: 1-02:30:00."""
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes:02d}:00"


@dataclass(frozen=True)
class Submission:
    """One dsrun command for the queue.

    command: the words behind `dsrun`, its name first, without the run's folder. gpus: of each node, 0 for none.
    cwd: the folder that it was given in; its paths count from there. python: what runs dsrun, unless the site knows
    better. again: whether the command goes on with the run that it finds in its folder, when the job comes back.
    """

    run_dir: Path
    command: tuple[str, ...]
    site: Site
    nodes: int
    gpus: int
    job_name: str
    cwd: Path
    python: str
    again: bool = True


def script(submission: Submission) -> str:
    """The text for sbatch. Raises DsrunError for what can't stand in it."""
    site = submission.site
    if problems := list(_faults(submission)):
        raise DsrunError(problems)
    name, *words = submission.command
    python = [*site.container, site.python or ("python3" if site.container else submission.python)]
    cpus = {"SRUN_CPUS_PER_TASK": str(site.cpus_per_node)} if site.cpus_per_node else {}
    return render(
        TEMPLATE,
        title=submission.job_name,
        file=str(submission.run_dir / SUBMITTED),
        options=_options(submission),
        modules=site.modules,
        setup=_shell(site.setup),
        site=str(site.path or ""),
        # srun takes no --cpus-per-task over from sbatch any more (Slurm 22.05's release notes).
        environment={**site.exports, **cpus},
        requeue=REQUEUE if site.requeue else "",
        cwd=str(submission.cwd),
        cluster=CLUSTER,
        # The options of dsrun come before a script's name, behind which everything is the script's.
        start=[*python, "-m", "dsrun", name, "--output-dir", str(submission.run_dir)],
        words=[*(["--continue"] if submission.again else []), *words],
    )


def _shell(lines: tuple[str, ...]) -> list[str]:
    """A site's own lines, which are shell already (dsrun/jobs/sites.py): nothing of a user's is in them."""
    from markupsafe import Markup

    return [Markup(line) for line in lines]  # noqa: S704


def _faults(submission: Submission) -> list[Problem]:
    site, problems = submission.site, []
    path = str(submission.run_dir)
    if not NAME.fullmatch(submission.job_name):
        hint = "Letters, digits, and . _ + - between them; 64 at most."
        problems.append(Problem(f"can't be {submission.job_name!r}", "--job-name", hint))
    # A backslash turns Slurm's replacement of %j off (sbatch(1), filename pattern); a line ends at a newline.
    if not path.isprintable() or "\\" in path:
        hint = "Choose another --output-dir."
        problems.append(
            Problem("Slurm can't write its log here: \\ or a control character", repr(path), hint)
        )
    if site.container and submission.nodes > 1:
        what = f"has a container, and the job {submission.nodes} nodes: Slurm's srun is not inside"
        hint = "Use one node, or a Python environment that all nodes see."
        problems.append(Problem(what, str(site.path or site.name), hint))
    if site.signal_s and site.time_limit_min and site.signal_s >= site.time_limit_min * 60:
        what = f"is {site.signal_s}, and the time limit is {site.time_limit_min * 60} s: the job would end at once"
        problems.append(Problem(what, f"{site.path or site.name}: signal_s", "Give it more --time."))
    return problems


def _options(submission: Submission) -> list[str]:
    """The #SBATCH lines. sbatch takes quotes as a shell does (opt.c, _get_argument), and expands nothing but %."""
    site = submission.site
    values = {
        "job-name": submission.job_name,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "nodes": submission.nodes,
        "ntasks-per-node": 1,
        "gres": site.gres.replace("{gpus}", str(submission.gpus)) if submission.gpus else None,
        "cpus-per-task": site.cpus_per_node,
        "mem": None if site.memory_gib is None else f"{site.memory_gib}G" if site.memory_gib else 0,
        "time": time_text(site.time_limit_min) if site.time_limit_min else None,
        "signal": f"B:USR1@{signal_s(site)}",
        "output": f"{submission.run_dir / LOGS}/".replace("%", "%%") + LOG,
        "open-mode": "append",
        "export": "ALL",
    }
    flags = ["exclusive"] if site.exclusive else []
    flags.append("requeue" if site.requeue else "no-requeue")
    return [
        *(f"--{name}={value}" for name, value in values.items() if value not in (None, "")),
        *(f"--{flag}" for flag in flags),
    ]


def signal_s(site: Site) -> int:
    """Seconds before the time limit at which dsrun is told. Of a short job a quarter, unless the site says."""
    if site.signal_s is not None:
        return site.signal_s
    return min(SIGNAL_S, site.time_limit_min * 15) if site.time_limit_min else SIGNAL_S

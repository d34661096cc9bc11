"""Clusters: TOML files in launch/clusters/ that say what one cluster has differently from another.

Such a file is written by whoever runs the cluster or knows it, and is trusted as code is: its `setup` lines are shell.
Everything else is checked against a pattern, because what becomes an #SBATCH line is read by sbatch, not by a shell.
Secrets have no place in it: what it says is written into run folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun import catalog
from dsrun.cluster import hostlist
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.host import hiding
from dsrun.jobs.launchers import AUTO, CHOICES, KUBERNETES
from dsrun.jobs.launchers.common import forwarded_environment, keys
from dsrun.jobs.launchers.common.keys import key
from dsrun.jobs.launchers.kubernetes import pod_spec
from dsrun.jobs.launchers.kubernetes.pod_spec import PodSpec

KIND = "launch/clusters"
LAUNCHERS = [name for name in CHOICES if name != AUTO]
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
NAME = r"[A-Za-z0-9_][\w.+@-]*"
NAMES = rf"{NAME}(?:,{NAME})*"


@dataclass(frozen=True)
class ClusterFile:
    """What a cluster has differently. The fields made by `key` are the file's keys."""

    name: str = "no cluster"
    path: Path | None = None
    """Its file; None: nobody described the cluster."""
    description: str = key("a text", default="")
    """A line for people."""
    launcher: str = key(f"one of {', '.join(LAUNCHERS)}", default="slurm", pattern="|".join(LAUNCHERS))
    """How jobs start there."""
    hosts: str | None = key('hosts and their devices, as "gpu[01-04]:2"')
    """The machines and their GPUs, where there is no queue."""
    hostfile: str | None = key("a file's path")
    """The same in a file; its path counts from the cluster's file."""
    interface: str | None = key('an interface, or several as "ib0,ib1"', pattern=r"[\w.@:-]+(?:,[\w.@:-]+)*")
    """The network interface of NCCL and Gloo: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    partition: str | None = key('a partition, or several as "a,b"', pattern=NAMES)
    """Slurm's partition; `--partition` comes before it."""
    account: str | None = key("a name", pattern=NAME)
    """The account that is charged; `--account` comes before it."""
    qos: str | None = key("a name", pattern=NAME)
    """Quality of service; `--qos` comes before it."""
    constraint: str | None = key('features, as "a100&infiniband"', pattern=r"[\w.&|*,:()\[\]-]+")
    """Features that the nodes must have."""
    reservation: str | None = key('a reservation, or several as "a,b"', pattern=NAMES)
    """A reservation to use."""
    time_limit_min: int | None = key("minutes, a whole number")
    """The time limit where nobody says `--time`."""
    signal_s: int | None = key("seconds, a whole number up to 65535", most=65535)  # sbatch(1), --signal
    """How long before the time limit dsrun is told; without it 300, or a quarter of a short job's time."""
    requeue: bool = key("true or false", default=True)
    """Whether the job goes back into the queue then."""
    gpus_per_node: int | None = key("a whole number", most=1000)
    """GPUs of each node; `--gpus-per-node` comes before it."""
    gres: str = key(
        'as "gpu:a100:{gpus}", or "" to ask for none',
        default="gpu:{gpus}",
        pattern=r"(?:[\w.:,/=-]*\{gpus\}[\w.:,/=-]*)?",
    )
    """How sbatch is asked for GPUs; `{gpus}` becomes their number."""
    cpus_per_node: int | None = key("a whole number")
    """Cores of each node."""
    memory_gib: int | None = key("GiB, a whole number; 0 for all of it", least=0)
    """Memory of each node."""
    exclusive: bool = key("true or false", default=False)
    """The whole node, even where fewer GPUs are asked for."""
    modules: tuple[str, ...] = key('a list of names, as ["cuda/12.4"]', default=(), pattern=r"[\w][\w./+-]*")
    """What `module load` loads, in this order."""
    setup: tuple[str, ...] = key("a list of lines of shell", default=())
    """Lines of shell before dsrun, as they stand here."""
    container: tuple[str, ...] = key(
        'a list of words, as ["apptainer", "exec", "--nv", "dsrun.sif"]', default=()
    )
    """Words in front of Python, for jobs on one node."""
    python: str | None = key("a program")
    """The Python that has dsrun; without it the one that `dsrun submit` runs with, in a container `python3`."""
    environment: Mapping[str, str] = key(
        'a table, as [environment] with NCCL_DEBUG = "WARN" below it', default={}
    )
    """Variables that every rank gets; no secrets."""
    kubernetes: PodSpec | None = key(  # noqa: RUF009  (a field)
        "a table, as [kubernetes] with the keys of a pod below it"
    )
    """What a pod is: see below."""

    @property
    def exports(self) -> dict[str, str]:
        """The variables that a job gets there: the interface's, then [environment], which is the more exact one."""
        interface = dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}
        return {**interface, **self.environment}


def load(name: str) -> ClusterFile:
    """The cluster of that name, or in a TOML file.

    Raises DsrunError for an unknown name, and with everything that is wrong in the file.
    """
    path = Path(name).expanduser() if "/" in name or name.endswith(".toml") else _find(name)
    table = catalog.read_toml(path)
    raise_all(_problems(table, str(path)))
    if "hostfile" in table:
        table["hostfile"] = str(path.absolute().parent / Path(table["hostfile"]).expanduser())
    if KUBERNETES in table:
        table[KUBERNETES] = keys.value_of(PodSpec, table[KUBERNETES])
    cluster: ClusterFile = keys.value_of(ClusterFile, table, name=path.stem, path=path.absolute())
    return cluster


def changed(cluster: ClusterFile, given: Mapping[str, Any]) -> ClusterFile:
    """The cluster with what the command line says in its place; None leaves a key as it is. Raises DsrunError, naming
    the option."""
    given = {name: value for name, value in given.items() if value is not None}
    known = keys.keys_of(ClusterFile)
    problems = [
        problem
        for name, value in given.items()
        for problem in known[name].problems(value, f"--{name.replace('_', '-')}")
    ]
    raise_all(problems)
    return replace(cluster, **given)


def _find(name: str) -> Path:
    known = catalog.files(KIND)
    if name not in known:
        hint = f"There are {', '.join(known)}; the path of a file works as well."
        raise DsrunError(f"unknown cluster {name!r}", hint=catalog.suggestion(name, known, hint))
    return known[name]


def _problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    yield from keys.problems(ClusterFile, table, where, ": ")
    environment, pod, hosts = (table.get(name) for name in ("environment", KUBERNETES, "hosts"))
    for name, value in environment.items() if isinstance(environment, dict) else ():
        yield from _variable_problems(name, value, f"{where}: environment.{name}")
    if isinstance(pod, dict):
        yield from pod_spec.problems(pod, f"{where}: {KUBERNETES}")
    if isinstance(hosts, str):
        try:
            hostlist.expand(hosts)
        except DsrunError as error:
            yield from (replace(problem, where=f"{where}: hosts") for problem in error.problems)
    if (table.get("launcher") == KUBERNETES) != (KUBERNETES in table):
        has, lacks = f'launcher = "{KUBERNETES}"', f"[{KUBERNETES}]"
        has, lacks = (lacks, has) if KUBERNETES in table else (has, lacks)
        yield Problem(f"has {has} and no {lacks}", where, "They are used together.")
    if "hosts" in table and "hostfile" in table:
        yield Problem("hosts and hostfile both say which machines there are", where, "Keep one of them.")
    chooser = {"slurm": "Slurm", KUBERNETES: "Kubernetes"}.get(str(table.get("launcher", "slurm")))
    if chooser and ("hosts" in table or "hostfile" in table):
        hint = 'Remove them, or set launcher = "ssh".'
        yield Problem(f"names hosts, and {chooser} chooses them", where, hint)


def _variable_problems(name: str, value: Any, where: str) -> Iterator[Problem]:
    if problem := forwarded_environment.problem_of(name, value if isinstance(value, str) else "", where):
        yield problem
    elif hiding.is_secret(name) or hiding.secrets({name: str(value)}):
        hint = "Remove it here and set it in your own environment, which is forwarded."
        yield Problem("looks like a secret, and this file's values are written into run folders", where, hint)

"""Sites: TOML files in launch/clusters/ that say what one cluster has differently from another.

A site's file is written by whoever runs the cluster or knows it, and is trusted as code is: its `setup` lines are
shell. Everything else is checked against a pattern, because what becomes an #SBATCH line is read by sbatch, not by a
shell. Secrets have no place in it: what it says is written into run folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsrun import catalog
from dsrun.cluster import hostlist
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import travel
from dsrun.jobs.launchers import CHOICES

KIND = "launch/clusters"
CLUSTER = "DSRUN_CLUSTER"
"""Names a cluster's file where no option does."""
LAUNCHERS = CHOICES[1:]  # no auto: a cluster has its way
INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Site:
    """A cluster's ways. None, or empty, where it has no wish.

    path: its file, None for a site that nobody described. launcher: how jobs start there. hosts: a hostlist
    ("gpu[01-04]:2"), hostfile: a file of hosts; for sites without a queue. The rest is for Slurm's queue:
    gres: how GPUs are asked for, {gpus} standing for those of a node; "" asks for none. memory_gib: of a node, 0 for
    all of it. signal_s: how long before the time limit dsrun is told, None for slurm.SIGNAL_S or less.
    modules, setup: what runs before dsrun; setup is shell. container: the words in front of Python. kubernetes: what a
    pod is, as PODS has it.
    """

    name: str = "no site"
    path: Path | None = None
    description: str = ""
    launcher: str = "slurm"
    hosts: str | None = None
    hostfile: str | None = None
    interface: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time_limit_min: int | None = None
    signal_s: int | None = None
    requeue: bool = True
    gpus_per_node: int | None = None
    gres: str = "gpu:{gpus}"
    cpus_per_node: int | None = None
    memory_gib: int | None = None
    exclusive: bool = False
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    container: tuple[str, ...] = ()
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    kubernetes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exports(self) -> dict[str, str]:
        """The variables that a job gets there: the interface's, then [environment], which is the more exact one."""
        interface = dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}
        return {**interface, **self.environment}


@dataclass(frozen=True)
class _Key:
    """What a key holds. kind: its type, tuple for a list of texts; pattern: of a text, or of every text in a list."""

    kind: type
    words: str
    pattern: str = r"[^\0\n\r]+"
    least: float = 1
    most: int = 10**6

    def accepts(self, value: Any) -> bool:
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if self.kind in (int, float):
            return isinstance(value, (int, self.kind)) and self.least <= value <= self.most
        if self.kind is str:
            return isinstance(value, str) and re.fullmatch(self.pattern, value, re.ASCII) is not None
        if self.kind is tuple:
            return isinstance(value, list) and all(replace(self, kind=str).accepts(entry) for entry in value)
        if self.kind is list:
            return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
        return isinstance(value, dict)


_NAME = r"[A-Za-z0-9_][\w.+@-]*"
_NAMES = rf"{_NAME}(?:,{_NAME})*"
KEYS: dict[str, _Key] = {
    "description": _Key(str, "a text"),
    "launcher": _Key(str, f"one of {', '.join(LAUNCHERS)}", "|".join(LAUNCHERS)),
    "hosts": _Key(str, 'hosts and their devices, as "gpu[01-04]:2"'),
    "hostfile": _Key(str, "a file's path"),
    "interface": _Key(str, 'an interface, or several as "ib0,ib1"', r"[\w.@:-]+(?:,[\w.@:-]+)*"),
    "partition": _Key(str, 'a partition, or several as "a,b"', _NAMES),
    "account": _Key(str, "a name", _NAME),
    "qos": _Key(str, "a name", _NAME),
    "constraint": _Key(str, 'features, as "a100&infiniband"', r"[\w.&|*,:()\[\]-]+"),
    "reservation": _Key(str, 'a reservation, or several as "a,b"', _NAMES),
    "time_limit_min": _Key(int, "minutes, a whole number"),
    "signal_s": _Key(int, "seconds, a whole number up to 65535", most=65535),  # sbatch(1), --signal
    "requeue": _Key(bool, "true or false"),
    "gpus_per_node": _Key(int, "a whole number", most=1000),
    "gres": _Key(str, 'as "gpu:a100:{gpus}", or "" to ask for none', r"(?:[\w.:,/=-]*\{gpus\}[\w.:,/=-]*)?"),
    "cpus_per_node": _Key(int, "a whole number"),
    "memory_gib": _Key(int, "GiB, a whole number; 0 for all of it", least=0),
    "exclusive": _Key(bool, "true or false"),
    "modules": _Key(tuple, 'a list of names, as ["cuda/12.4"]', r"[\w][\w./+-]*"),
    "setup": _Key(tuple, "a list of lines of shell"),
    "container": _Key(tuple, 'a list of words, as ["apptainer", "exec", "--nv", "dsrun.sif"]'),
    "python": _Key(str, "a program"),
    "environment": _Key(dict, 'a table, as [environment] with NCCL_DEBUG = "WARN" below it'),
    "kubernetes": _Key(dict, "a table, as [kubernetes] with the keys of a pod below it"),
}
PODS: dict[str, _Key] = {
    "image": _Key(str, 'as "registry.lab.org/team/dsrun:1.0"'),
    "claim": _Key(str, "a PersistentVolumeClaim's name"),
    "mount_path": _Key(str, 'an absolute path, as "/runs"'),
    "namespace": _Key(str, "a name"),
    "cpu": _Key(float, "cores, a number", least=0.001),
    "memory_gib": _Key(int, "GiB, a whole number"),
    "shm_gib": _Key(int, "GiB, a whole number"),
    "secret": _Key(str, "a Secret's name"),
    "secret_variables": _Key(tuple, 'a list of names, as ["HF_TOKEN"]'),
    "node_selector": _Key(dict, 'a table, as { "lab.org/pool" = "a100" }'),
    "tolerations": _Key(list, 'a list of tables, as [{ key = "nvidia.com/gpu", operator = "Exists" }]'),
    "labels": _Key(dict, 'a table, as { "kueue.x-k8s.io/queue-name" = "gpus" }'),
    "image_pull_policy": _Key(str, "Always, IfNotPresent or Never"),
    "image_pull_secret": _Key(str, "a Secret's name"),
    "gpu_resource": _Key(str, 'as "nvidia.com/gpu"'),
    "grace_s": _Key(int, "seconds, a whole number", least=0),
    "ttl_s": _Key(int, "seconds, a whole number", least=0, most=2**31 - 1),
    "python": _Key(str, "a program of the image"),
}
"""The keys of [kubernetes]: fields of dsrun.jobs.launchers.kubernetes.PodSpec, and the image's Python. What the values
have to be more exactly, Kubernetes' own rules say there."""
NEEDED = ("image", "claim", "mount_path")


def names() -> list[str]:
    """Every site that can be found by name."""
    return list(catalog.files(KIND))


def load(name: str) -> Site:
    """The site of that name, or of a TOML file.

    Raises DsrunError for an unknown name, and with everything that is wrong in the file.
    """
    path = Path(name).expanduser() if "/" in name or name.endswith(".toml") else _find(name)
    table = catalog.read_toml(path)
    if problems := list(_problems(table, str(path))):
        raise DsrunError(problems)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    if "hostfile" in values:
        values["hostfile"] = str(path.absolute().parent / Path(values["hostfile"]).expanduser())
    return Site(name=path.stem, path=path.absolute(), **values)


def changed(site: Site, given: Mapping[str, Any]) -> Site:
    """The site with what the command line says in its place. Raises DsrunError, naming the option.

    given: key -> value; None leaves a key as it is.
    """
    given = {key: value for key, value in given.items() if value is not None}
    problems = [
        problem
        for key, value in given.items()
        for problem in _value(key, value, f"--{key.replace('_', '-')}")
    ]
    if problems:
        raise DsrunError(problems)
    return replace(site, **given)


def _find(name: str) -> Path:
    known = catalog.files(KIND)
    if name not in known:
        hint = f"There are {', '.join(known)}; the path of a file works as well."
        raise DsrunError(f"unknown cluster {name!r}", hint=catalog.suggestion(name, known, hint))
    return known[name]


def _problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for key, value in table.items():
        if key in KEYS:
            yield from _value(key, value, f"{where}: {key}")
        else:
            hint = catalog.suggestion(key, KEYS, f"A cluster's file holds {', '.join(KEYS)}.")
            yield Problem(f"unknown key {key!r}", where, hint)
    kubernetes = table.get("launcher") == "kubernetes"
    if kubernetes != ("kubernetes" in table):
        has, lacks = ('launcher = "kubernetes"', "[kubernetes]")[:: 1 if kubernetes else -1]
        yield Problem(f"has {has} and no {lacks}", where, "The two belong together.")
    if "hosts" in table and "hostfile" in table:
        yield Problem("hosts and hostfile both say which machines there are", where, "Keep one of them.")
    chooser = {"slurm": "Slurm", "kubernetes": "Kubernetes"}.get(str(table.get("launcher", "slurm")))
    if chooser and ("hosts" in table or "hostfile" in table):
        yield Problem(
            f"names hosts, and {chooser} chooses them", where, 'Remove them, or set launcher = "ssh".'
        )


def _pods(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for key, value in table.items():
        if key not in PODS:
            hint = catalog.suggestion(key, PODS, f"A pod has {', '.join(PODS)}.")
            yield Problem(f"unknown key {key!r}", where, hint)
        elif not PODS[key].accepts(value):
            yield Problem(f"can't be {value!r}", f"{where}.{key}", f"Expected: {PODS[key].words}.")
        elif PODS[key].kind is dict and not all(isinstance(text, str) for text in value.values()):
            yield Problem("has a value that is no text", f"{where}.{key}", f"Expected: {PODS[key].words}.")
    if missing := [key for key in NEEDED if key not in table]:
        yield Problem(f"lacks {', '.join(missing)}", where)


def _value(key: str, value: Any, where: str) -> Iterator[Problem]:
    known = KEYS[key]
    if not known.accepts(value):
        yield Problem(f"can't be {value!r}", where, f"Expected: {known.words}.")
    elif key == "environment":
        for name, text in value.items():
            yield from _variable(name, text, f"{where}.{name}")
    elif key == "kubernetes":
        yield from _pods(value, where)
    elif key == "hosts":
        try:
            hostlist.expand(value)
        except DsrunError as error:
            yield from (Problem(problem.what, where, problem.hint) for problem in error.problems)


def _variable(name: str, text: Any, where: str) -> Iterator[Problem]:
    if not travel.NAME.fullmatch(name):
        yield Problem("is no variable's name", where, "Letters, digits and underscores, with no digit first.")
    elif name in travel.OURS:
        yield Problem("is set for each rank by dsrun", where, "Take it out.")
    elif travel.is_secret(name):
        hint = "Remove it here and set it in your own environment: that one goes along."
        yield Problem("looks like a secret, and this file's values are written into run folders", where, hint)
    elif not isinstance(text, str):
        yield Problem(f"can't be {text!r}", where, f'Expected: a text, as "{text}".')
    elif "\0" in text:
        yield Problem("holds a null character", where, "Remove it.")

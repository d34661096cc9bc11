"""What a pod of a job is: the [kubernetes] table of a cluster's file, checked as Kubernetes would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from dsrun.catalog import suggestion
from dsrun.cluster.hostnames import shown
from dsrun.errors import Problem
from dsrun.jobs.launchers.common import forwarded_environment, keys
from dsrun.jobs.launchers.common.keys import key

# RFC 1123's names, as Kubernetes checks them.
LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
SUBDOMAIN = r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
LABEL_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
# Below "/", nothing of the container's system, no "." or ".." and no colon.
FOLDER = r"/(?!(?:dev|proc|sys)(?:/|\Z))(?!\.\.?(?:/|\Z))(?!.*/\.\.?(?:/|\Z))[^:\0\n\r]+"
INT32 = 2**31 - 1
"""The largest of Kubernetes' counts."""
TOLERATION = {
    "key": None,
    "operator": ("Exists", "Equal"),
    "value": None,
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "tolerationSeconds": None,
}
"""The fields of a toleration, and what each takes where that is a choice."""


@dataclass(frozen=True)
class PodSpec:
    """The same for every node of a job."""

    image: str = key(
        'as "registry.lab.org/team/dsrun:1.0"', default=MISSING, pattern=r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*"
    )
    """The container's image; it holds dsrun."""
    claim: str = key("a PersistentVolumeClaim's name", default=MISSING, pattern=SUBDOMAIN)
    """The PersistentVolumeClaim that all pods share (ReadWriteMany)."""
    mount_path: str = key('an absolute path, as "/runs"', default=MISSING, pattern=FOLDER)
    """Where the pods see it; run folders, data and models lie below."""
    namespace: str = key("a name", default="default", pattern=LABEL)
    """Where the job belongs."""
    cpu: float = key("cores, a number", default=8, least=0.001)
    """Cores that are reserved."""
    memory_gib: int = key("GiB, a whole number", default=64)
    """Memory, reserved and the limit."""
    shm_gib: int = key("GiB, a whole number, less than memory_gib", default=16)
    """Size of /dev/shm, a part of the memory."""
    secret: str | None = key("a Secret's name", pattern=SUBDOMAIN)
    """The Secret that holds tokens."""
    secret_variables: tuple[str, ...] = key(
        'a list of names, as ["HF_TOKEN"]', default=(), pattern=forwarded_environment.NAME.pattern
    )
    """The keys of a secret that become variables of the same name."""
    node_selector: Mapping[str, str] = key('a table, as { "lab.org/pool" = "a100" }', default={})
    """Labels that a node must have."""
    tolerations: tuple[Mapping[str, Any], ...] = key(
        'a list of tables, as [{ key = "nvidia.com/gpu", operator = "Exists" }]', default=()
    )
    """Taints of nodes that don't matter."""
    labels: Mapping[str, str] = key('a table, as { "kueue.x-k8s.io/queue-name" = "gpus" }', default={})
    """The job's labels, for queues such as Kueue."""
    image_pull_policy: str = key(
        "Always, IfNotPresent or Never", default="IfNotPresent", pattern="Always|IfNotPresent|Never"
    )
    """When the image is fetched."""
    image_pull_secret: str | None = key("a Secret's name", pattern=SUBDOMAIN)
    """For a registry with a login."""
    gpu_resource: str = key(
        'as "nvidia.com/gpu"', default="nvidia.com/gpu", pattern=r"[a-z0-9.-]+/[A-Za-z0-9][A-Za-z0-9_.-]*"
    )
    """What a GPU is called on the cluster."""
    grace_s: int = key("seconds, a whole number", default=120, least=0)
    """Seconds between SIGTERM and SIGKILL, enough for a checkpoint."""
    ttl_s: int | None = key("seconds, a whole number", least=0, most=INT32)
    """Seconds after its end until the job is deleted, with the pods' logs."""
    job: str = key("PyTorchJob or TrainJob", default="PyTorchJob", pattern="PyTorchJob|TrainJob")
    """What runs the pods: a PyTorchJob of the training operator (version 1), or a TrainJob of Kubeflow Trainer (2)."""
    python: str = key("a program of the image", default="python3")
    """The image's Python that has dsrun."""


def problems(table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """What is wrong with a [kubernetes] table."""
    if unfit := list(keys.problems(PodSpec, table, where)):
        yield from unfit
        return
    spec: PodSpec = keys.value_of(PodSpec, table)
    if spec.shm_gib >= spec.memory_gib:
        fault = f"{spec.shm_gib} GiB of /dev/shm leave nothing of {spec.memory_gib} GiB of memory, which it is part of"
        yield Problem(fault, f"{where}.shm_gib", "Give the pod more memory, or a smaller /dev/shm.")
    if spec.secret_variables and not spec.secret:
        fault = f"no Secret is named that holds {', '.join(spec.secret_variables)}"
        yield Problem(fault, f"{where}.secret", "The name that kubectl shows for it.")
    for name in ("node_selector", "labels"):
        for label, value in getattr(spec, name).items():
            yield from _label_problems(label, value, f"{where}.{name}")
    for number, toleration in enumerate(spec.tolerations):
        yield from _toleration_problems(toleration, f"{where}.tolerations[{number}]")


def _label_problems(label: str, value: str, where: str) -> Iterator[Problem]:
    import re

    prefix, slash, plain = label.rpartition("/")
    if not (plain and re.fullmatch(LABEL_VALUE, plain)) or (slash and not re.fullmatch(SUBDOMAIN, prefix)):
        yield Problem(f"{shown(label)} isn't a label's name", where, "As: lab.org/pool")
    if not re.fullmatch(LABEL_VALUE, value):
        hint = "At most 63 letters, digits, hyphens, underscores and dots."
        yield Problem(f"{shown(value)} can't be the value of a label", f"{where}.{label}", hint)


def _toleration_problems(toleration: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for name, value in toleration.items():
        if name not in TOLERATION:
            hint = suggestion(name, TOLERATION, f"There are: {', '.join(TOLERATION)}.")
            yield Problem(f"a toleration has no {shown(name)}", where, hint)
        elif (choices := TOLERATION[name]) and value not in choices:
            hint = suggestion(str(value), choices, f"One of {', '.join(choices)}.")
            yield Problem(f"can't be {value!r}", f"{where}.{name}", hint)
        elif not isinstance(value, int if name == "tolerationSeconds" else str) or isinstance(value, bool):
            yield Problem(f"{value!r} has the wrong type", f"{where}.{name}")
    if toleration.get("operator", "Equal") == "Equal" and not toleration.get("key"):
        yield Problem("has no key", where, 'operator = "Exists" alone tolerates everything.')
    if toleration.get("operator") == "Exists" and toleration.get("value"):
        yield Problem("the operator Exists takes no value", where, "Remove one of the two.")
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield Problem("tolerationSeconds needs the effect NoExecute", where)

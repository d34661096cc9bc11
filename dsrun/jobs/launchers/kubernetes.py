"""Kubernetes: the manifest of a PyTorchJob (kubeflow.org/v1), which the Kubeflow training operator runs as pods, and
the way to its pods, which have started already: the first is this one, and the agents in the others call it.

Nothing here talks to a cluster: the text is for `kubectl apply -f`. Every pod runs the same command. What differs
between them comes from the operator, which adds to each container's variables MASTER_ADDR (the master's service,
NAME-master-0), MASTER_PORT (23456), RANK (0 is the master, 1 the first worker) and WORLD_SIZE; without nprocPerNode,
which the manifest therefore leaves out, these two count pods, not GPUs (pkg/controller.v1/pytorch/envvar.go).

The job is done as soon as the master ends with 0, and cleanPodPolicy Running then ends the workers that still run: the
master's command must end last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsrun.catalog import suggestion
from dsrun.cluster.hostnames import shown
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import travel
from dsrun.jobs.job import HostDevices
from dsrun.jobs.launchers import Launcher

CONTAINER = "pytorch"
"""The operator refuses a pod without a container of this name (pkg/webhooks/pytorch)."""
SHM = "/dev/shm"  # noqa: S108  (where NCCL and DataLoader workers look)
LONGEST = 63

# RFC 1035's label for what becomes a service's name, as the operator's webhook has it; RFC 1123's for the rest.
JOB_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9][A-Za-z0-9_.-]*")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*")
OF_THE_OPERATOR = re.compile(r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_\w+")

PULL = ("Always", "IfNotPresent", "Never")
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
    """What a pod is, the same for every node of the job.

    image: it holds dsrun. claim, mount_path: the PersistentVolumeClaim (ReadWriteMany, where there are several nodes)
    that holds the run folder, and where the pods see it. cpu: cores that are reserved; memory_gib: reserved, and the
    limit; shm_gib: size of /dev/shm, which counts against the memory. env: plain variables. secret: the name of a
    Kubernetes Secret; secret_variables: those of its keys that become variables of the same name. node_selector,
    tolerations, labels: as Kubernetes has them. image_pull_secret: for a registry with a login. gpu_resource: what a
    GPU is called on the cluster. grace_s: seconds between SIGTERM and SIGKILL, enough for a checkpoint.
    time_limit_min: the job is ended then. ttl_s: it is deleted that long after its end, with the pods' logs. cwd: the
    folder that the command is run in, the image's own unless given.
    """

    image: str
    claim: str
    mount_path: str
    namespace: str = "default"
    cpu: float = 8
    memory_gib: int = 64
    shm_gib: int = 16
    env: Mapping[str, str] = field(default_factory=dict)
    secret: str | None = None
    secret_variables: Sequence[str] = ()
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    image_pull_policy: str = "IfNotPresent"
    image_pull_secret: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    grace_s: int = 120
    time_limit_min: int | None = None
    ttl_s: int | None = None
    cwd: str | None = None


def gpus_per_pod(hosts: Sequence[HostDevices]) -> int:
    """GPUs of each pod. Raises DsrunError where hosts differ: a PyTorchJob has one kind of worker."""
    counts = {len(host.devices) for host in hosts}
    if len(counts) != 1:
        listed = ", ".join(f"{host.host} {len(host.devices)}" for host in hosts[:8])
        raise DsrunError(
            f"the hosts have different numbers of GPUs ({listed})",
            hint="Every pod of a PyTorchJob gets the same: give the nodes and the GPUs of each.",
        )
    return counts.pop()


def job_name(text: str, nodes: int = 1) -> str:
    """A name that Kubernetes takes, made from any text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[: LONGEST - len(_longest_suffix(nodes))].strip("-")


def _longest_suffix(nodes: int) -> str:
    return f"-worker-{nodes - 2}" if nodes > 1 else "-master-0"


def manifest(name: str, nodes: int, gpus: int, command: Sequence[str], spec: PodSpec) -> dict[str, Any]:
    """The PyTorchJob that runs `command` once on each of `nodes` pods with `gpus` GPUs.

    Raises DsrunError with everything that Kubernetes or the operator would refuse, and for a secret among the
    variables: a manifest is kept, shown and checked in.
    """
    problems = [*_faults_of_the_job(name, nodes, gpus, command), *_faults(spec)]
    if problems:
        raise DsrunError(problems)
    replicas = {"Master": 1, "Worker": nodes - 1} if nodes > 1 else {"Master": 1}
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if spec.time_limit_min is not None:
        policy["activeDeadlineSeconds"] = spec.time_limit_min * 60
    if spec.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = spec.ttl_s
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": name,
            "namespace": spec.namespace,
            "labels": {"app.kubernetes.io/managed-by": "dsrun", **spec.labels},
        },
        "spec": {
            "runPolicy": policy,
            "pytorchReplicaSpecs": {
                role: {
                    "replicas": count,
                    # dsrun starts again by itself; a single pod that comes back alone would wait for the others.
                    "restartPolicy": "Never",
                    "template": _template(gpus, command, spec),
                }
                for role, count in replicas.items()
            },
        },
    }


def _template(gpus: int, command: Sequence[str], spec: PodSpec) -> dict[str, Any]:
    pod: dict[str, Any] = {
        # A reaper for what a killed launcher leaves: otherwise the command is process 1, which has to do that itself.
        "shareProcessNamespace": True,
        # Variables for each service of the namespace: one named "master" would set MASTER_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.grace_s,
        "containers": [_container(gpus, command, spec)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": spec.claim}},
            # A container has 64 MB otherwise: NCCL and DataLoader workers die there of SIGBUS.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{spec.shm_gib}Gi"}},
        ],
    }
    if spec.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": spec.image_pull_secret}]
    if spec.node_selector:
        pod["nodeSelector"] = dict(spec.node_selector)
    if spec.tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in spec.tolerations]
    # Istio's proxy, which profiles of Kubeflow put into every pod, never ends and stands in the way of NCCL.
    return {"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}, "spec": pod}


def _container(gpus: int, command: Sequence[str], spec: PodSpec) -> dict[str, Any]:
    limits = {"memory": f"{spec.memory_gib}Gi"} | ({spec.gpu_resource: str(gpus)} if gpus else {})
    milli = round(spec.cpu * 1000)
    return {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": [_literal(word) for word in command],
        **({"workingDir": spec.cwd} if spec.cwd else {}),
        "env": list(_variables(spec)),
        "resources": {
            # No limit on cores: it would stop ranks in the middle of a step.
            "requests": {
                "cpu": f"{milli}m" if milli % 1000 else str(milli // 1000),
                "memory": f"{spec.memory_gib}Gi",
            },
            "limits": limits,
        },
        "volumeMounts": [{"name": "runs", "mountPath": spec.mount_path}, {"name": "shm", "mountPath": SHM}],
    }


def _variables(spec: PodSpec) -> Iterator[dict[str, Any]]:
    for name in sorted({*spec.env, *spec.secret_variables}):
        if name in spec.secret_variables:
            yield {"name": name, "valueFrom": {"secretKeyRef": {"name": spec.secret, "key": name}}}
        else:
            yield {"name": name, "value": _literal(spec.env[name])}


def _literal(text: str) -> str:
    """The text as Kubernetes' own expansion of $(NAME) leaves it: $$ stands for one dollar sign."""
    return text.replace("$", "$$")


def _faults_of_the_job(name: str, nodes: int, gpus: int, command: Sequence[str]) -> Iterator[Problem]:
    most = LONGEST - len(_longest_suffix(nodes))
    if not JOB_NAME.fullmatch(name) or len(name) > most:
        near = job_name(name, nodes)
        yield Problem(
            f"{shown(name)} is no name of a job: lower-case letters, digits and hyphens, a letter first, no hyphen "
            f"last, at most {most} characters (a label of RFC 1123 and 1035; pods are NAME{_longest_suffix(nodes)})",
            "name",
            f"As: {near}",
        )
    if nodes < 1:
        yield Problem(f"{nodes} nodes", "nodes", "At least one.")
    if gpus < 0:
        yield Problem(f"{gpus} GPUs for each pod", "gpus", "0 for the CPU.")
    if not command:
        yield Problem("there is no command to run", "command")
    for word in command:
        yield from _text_fault("command", word)


def _faults(spec: PodSpec) -> Iterator[Problem]:
    names = "Lower-case letters, digits and hyphens, at most 63 characters (a label of RFC 1123)."
    if not LABEL.fullmatch(spec.namespace):
        yield Problem(f"{shown(spec.namespace)} is no namespace", "namespace", names)
    objects = {"claim": spec.claim, "secret": spec.secret, "image_pull_secret": spec.image_pull_secret}
    for key, value in objects.items():
        if value is not None and not SUBDOMAIN.fullmatch(value):
            what = f"{shown(value)} is no name of an object"
            yield Problem(
                what, key, "Lower-case letters, digits, hyphens and dots (a subdomain of RFC 1123)."
            )
    if not IMAGE.fullmatch(spec.image):
        yield Problem(f"{shown(spec.image)} is no image", "image", "As: registry.lab.org/team/dsrun:1.0")
    if spec.image_pull_policy not in PULL:
        yield _choice("image_pull_policy", spec.image_pull_policy, PULL)
    yield from _faults_of_the_mount(spec.mount_path)
    yield from _text_fault("the folder that the command is run in", spec.cwd or "")
    if not RESOURCE.fullmatch(spec.gpu_resource):
        yield Problem(f"{shown(spec.gpu_resource)} is no resource", "gpu_resource", "As: nvidia.com/gpu")
    yield from _faults_of_sizes(spec)
    yield from _faults_of_variables(spec)
    for key, value in [*spec.node_selector.items(), *spec.labels.items()]:
        prefix, slash, plain = key.rpartition("/")
        if not (plain and LABEL_VALUE.fullmatch(plain)) or (slash and not SUBDOMAIN.fullmatch(prefix)):
            yield Problem(f"{shown(key)} is no name of a label", "node_selector, labels", "As: lab.org/pool")
        if not LABEL_VALUE.fullmatch(value):
            hint = "At most 63 letters, digits, hyphens, underscores and dots."
            yield Problem(
                f"{shown(value)} is no value of the label {shown(key)}", "node_selector, labels", hint
            )
    for number, toleration in enumerate(spec.tolerations):
        yield from _faults_of_a_toleration(toleration, f"tolerations[{number}]")


def _faults_of_the_mount(path: str) -> Iterator[Problem]:
    yield from _text_fault("mount_path", path)
    parts = path.split("/")
    if not path.startswith("/") or ":" in path or path == "/" or {".", ".."} & set(parts):
        yield Problem(f"{shown(path)} is no place for a volume", "mount_path", "An absolute path, as: /runs")
    elif path.startswith(("/dev", "/proc", "/sys")) and parts[1] in {"dev", "proc", "sys"}:
        yield Problem(f"{shown(path)} belongs to the system of the container", "mount_path", "As: /runs")


def _faults_of_sizes(spec: PodSpec) -> Iterator[Problem]:
    sizes: dict[str, tuple[float | None, float]] = {
        "cpu": (spec.cpu, 0.001),
        "memory_gib": (spec.memory_gib, 1),
        "shm_gib": (spec.shm_gib, 1),
        "grace_s": (spec.grace_s, 0),
        "time_limit_min": (spec.time_limit_min, 1),
        "ttl_s": (spec.ttl_s, 0),
    }
    for key, (value, least) in sizes.items():
        # Not `value < least`: NaN is neither.
        if value is not None and not least <= value <= 2**31 - 1:
            yield Problem(f"{value}", key, f"At least {least}.")
    if spec.shm_gib >= spec.memory_gib:
        yield Problem(
            f"{spec.shm_gib} GiB of /dev/shm leave nothing of {spec.memory_gib} GiB of memory, which it is part of",
            "shm_gib",
            "Give the pod more memory, or a smaller /dev/shm.",
        )


def _faults_of_variables(spec: PodSpec) -> Iterator[Problem]:
    open_secrets = travel.secrets(spec.env) - set(spec.secret_variables)
    for name in sorted({*spec.env, *spec.secret_variables}):
        where = f"env {name}" if name in spec.env else f"secret_variables {shown(name)}"
        if not travel.NAME.fullmatch(name):
            yield Problem(f"{shown(name)} is no name of a variable", where)
        elif OF_THE_OPERATOR.fullmatch(name):
            yield Problem("is set in each pod by the training operator", where, "Take it out.")
        elif name in open_secrets:
            secret = spec.secret or "NAME"
            yield Problem(
                "is a secret, which a manifest does not hold",
                where,
                f"Put it into a Secret (`kubectl create secret generic {secret} --from-env-file=FILE`) and name it in "
                "secret_variables.",
            )
        elif name in spec.env and name not in spec.secret_variables:
            yield from _text_fault(where, spec.env[name])
    if spec.secret_variables and not spec.secret:
        listed = ", ".join(spec.secret_variables)
        yield Problem(
            f"no Secret is named to take {listed} from", "secret", "The name that kubectl shows for it."
        )


def _faults_of_a_toleration(toleration: Mapping[str, Any], where: str) -> Iterator[Problem]:
    for key, value in toleration.items():
        if key not in TOLERATION:
            hint = suggestion(key, TOLERATION, f"There are: {', '.join(TOLERATION)}.")
            yield Problem(f"{shown(key)} is no field of a toleration", where, hint)
        elif (choices := TOLERATION[key]) and value not in choices:
            yield _choice(f"{where}.{key}", value, choices)
        elif not isinstance(value, int if key == "tolerationSeconds" else str) or isinstance(value, bool):
            yield Problem(f"{value!r} has the wrong type", f"{where}.{key}")
        elif isinstance(value, str):
            yield from _text_fault(f"{where}.{key}", value)
    if toleration.get("operator", "Equal") == "Equal" and not toleration.get("key"):
        yield Problem("has no key", where, 'operator = "Exists" alone tolerates everything.')
    if toleration.get("operator") == "Exists" and toleration.get("value"):
        yield Problem(
            "has a value, which the operator Exists does not take", where, "Take out one of the two."
        )
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield Problem("has tolerationSeconds, which belong to the effect NoExecute", where)


def _choice(where: str, value: object, choices: Iterable[str]) -> Problem:
    return Problem(f"{value!r}", where, suggestion(str(value), choices, f"One of {', '.join(choices)}."))


def _text_fault(where: str, text: str) -> Iterator[Problem]:
    if "\0" in text or (not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text)):
        yield Problem("holds a NUL byte, or bytes that are no UTF-8", where)


def render(manifest: Mapping[str, Any]) -> str:
    """The manifest as YAML, in the order it is built in.

    Texts that are not plain words are quoted: Kubernetes' reader takes 1e3 or y for a number and a boolean, where
    PyYAML's writer sees a text that needs no quotes.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9./_-]+", value)
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')

    Dumper.add_representer(str, text)
    return yaml.dump(dict(manifest), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=2**20)


def by_hand(hosts: Sequence[str], _command: Sequence[str]) -> list[str]:
    """Nothing is left to do by hand: the pods know their part (dsrun/jobs/pods.py)."""
    return [f"waiting for {len(hosts) - 1} more pod{'s' * (len(hosts) > 2)}"] if len(hosts) > 1 else []


LAUNCHER = Launcher("kubernetes", by_hand=by_hand, own_first=True)

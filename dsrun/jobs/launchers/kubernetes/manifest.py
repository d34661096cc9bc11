"""The manifest of a PyTorchJob (kubeflow.org/v1), which the Kubeflow training operator runs as pods, or of version 2's
TrainJob (train_job.py).

Nothing here contacts a cluster: the text is for `kubectl apply -f`. Every pod runs the same command. What differs
between them comes from the operator, which adds to each container's variables MASTER_ADDR (the master's service,
NAME-master-0), MASTER_PORT (23456), RANK (0 is the master, 1 the first worker) and WORLD_SIZE; without nprocPerNode,
which the manifest therefore leaves out, these two count pods, not GPUs (pkg/controller.v1/pytorch/envvar.go).

The job is done as soon as the master ends with 0, and cleanPodPolicy Running then ends the workers that still run: the
master's command must end last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsrun.cluster.hostnames import shown
from dsrun.errors import Problem, raise_all
from dsrun.host import hiding
from dsrun.jobs.launchers import KUBERNETES
from dsrun.jobs.launchers.common.cluster_files import ClusterFile
from dsrun.jobs.launchers.common.submission import Submission
from dsrun.jobs.launchers.kubernetes import train_job
from dsrun.jobs.launchers.kubernetes.pod_spec import PodSpec
from dsrun.jobs.launchers.kubernetes.preflight import on_volume, spec_of

TRAIN_JOB = "TrainJob"
CONTAINER = "pytorch"
"""The operator refuses a pod without a container of this name (pkg/webhooks/pytorch)."""
SHM = "/dev/shm"  # noqa: S108  (where NCCL and DataLoader workers look)
LONGEST = 63
# RFC 1035's label for what becomes a service's name, as the operator's webhook has it.
JOB_NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
OF_THE_OPERATOR = re.compile(r"RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_\w+")


def manifest(submission: Submission) -> dict[str, Any]:
    """The PyTorchJob or TrainJob that runs the command once on each of its pods.

    Raises DsrunError with everything that Kubernetes or the operator would refuse, and for a secret among the
    variables: a manifest is kept, shown and checked in.
    """
    cluster, nodes, spec = submission.cluster, submission.nodes, spec_of(submission.cluster)
    second = spec.job == TRAIN_JOB
    suffix = train_job.longest_suffix(nodes) if second else _longest_suffix(nodes)
    job_name = submission.job_name or name_of(submission.run_dir.name, suffix)
    verb, *words = submission.command
    command = [
        spec.python, "-m", "dsrun", verb, "--output-dir", str(submission.run_dir), "--launcher", KUBERNETES,
        *(["--continue"] if submission.again else []), *words,
    ]  # fmt: skip
    cwd = str(submission.cwd) if on_volume(submission.cwd, cluster) else spec.mount_path
    problems = [*_name_problems(job_name, suffix), *_variable_problems(cluster, spec)]
    problems += [problem for word in [*command, cwd] for problem in _text_problems(word, "the command")]
    raise_all(problems)
    container = _container(spec, cluster.exports, command, cwd, submission.gpus)
    if second:
        template = _template(spec, {**container, "name": train_job.NODE})
        return train_job.train_job(job_name, spec, template, nodes, cluster.time_limit_min)
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if cluster.time_limit_min is not None:
        policy["activeDeadlineSeconds"] = cluster.time_limit_min * 60
    if spec.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = spec.ttl_s
    replicas = {"Master": 1, "Worker": nodes - 1} if nodes > 1 else {"Master": 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": job_name,
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
                    "template": _template(spec, container),
                }
                for role, count in replicas.items()
            },
        },
    }


def name_of(text: str, suffix: str) -> str:
    """A job's name that Kubernetes takes, made from any text. suffix: the longest behind it, in the name of a pod."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[: LONGEST - len(suffix)].strip("-")


def _longest_suffix(nodes: int) -> str:
    return f"-worker-{nodes - 2}" if nodes > 1 else "-master-0"


def _template(spec: PodSpec, container: Mapping[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = {
        # A reaper for what a killed launcher leaves: otherwise the command is process 1, which has to do that itself.
        "shareProcessNamespace": True,
        # Variables for each service of the namespace: one named "master" would set MASTER_PORT.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.grace_s,
        "containers": [container],
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


def _container(
    spec: PodSpec, env: Mapping[str, str], command: Sequence[str], cwd: str, gpus: int
) -> dict[str, Any]:
    memory, milli = f"{spec.memory_gib}Gi", round(spec.cpu * 1000)
    return {
        "name": CONTAINER,
        "image": spec.image,
        "imagePullPolicy": spec.image_pull_policy,
        "command": [_literal(word) for word in command],
        "workingDir": cwd,
        "env": list(_variables(spec, env)),
        "resources": {
            # No limit on cores: it would stop ranks in the middle of a step.
            "requests": {"cpu": f"{milli}m" if milli % 1000 else str(milli // 1000), "memory": memory},
            "limits": {"memory": memory} | ({spec.gpu_resource: str(gpus)} if gpus else {}),
        },
        "volumeMounts": [{"name": "runs", "mountPath": spec.mount_path}, {"name": "shm", "mountPath": SHM}],
    }


def _variables(spec: PodSpec, env: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for name in sorted({*env, *spec.secret_variables}):
        if name in spec.secret_variables:
            yield {"name": name, "valueFrom": {"secretKeyRef": {"name": spec.secret, "key": name}}}
        else:
            yield {"name": name, "value": _literal(env[name])}


def _literal(text: str) -> str:
    """The text as Kubernetes' own expansion of $(NAME) leaves it: $$ stands for one dollar sign."""
    return text.replace("$", "$$")


def _name_problems(name: str, suffix: str) -> Iterator[Problem]:
    most = LONGEST - len(suffix)
    if not JOB_NAME.fullmatch(name) or len(name) > most:
        fault = (
            f"{shown(name)} can't be a job's name: lower-case letters, digits and hyphens, a letter first, no hyphen "
            f"last, at most {most} characters (a label of RFC 1123 and 1035; pods are NAME{suffix})"
        )
        yield Problem(fault, "--job-name", f"As: {name_of(name, suffix)}")


def _variable_problems(cluster: ClusterFile, spec: PodSpec) -> Iterator[Problem]:
    in_the_open = hiding.secrets(cluster.exports) - set(spec.secret_variables)
    for name in sorted({*cluster.exports, *spec.secret_variables}):
        where = f"{cluster.path}: {'environment' if name in cluster.exports else 'secret_variables'}.{name}"
        if OF_THE_OPERATOR.fullmatch(name):
            yield Problem("is set in each pod by the training operator", where, "Remove it.")
        elif name in in_the_open:
            command = f"kubectl create secret generic {spec.secret or 'NAME'} --from-env-file=FILE"
            hint = f"Put it into a Secret (`{command}`) and name it in secret_variables."
            yield Problem("is a secret, which a manifest does not hold", where, hint)
        elif name in cluster.exports:
            yield from _text_problems(cluster.exports[name], where)


def _text_problems(text: str, where: str) -> Iterator[Problem]:
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        yield Problem("holds a NUL byte, or bytes that are not UTF-8", where)


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

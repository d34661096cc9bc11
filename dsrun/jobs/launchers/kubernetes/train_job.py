"""A TrainJob (trainer.kubeflow.org/v1alpha1), which Kubeflow Trainer, version 2, runs as pods, and its runtime.

The runtime is the job's own, in the same manifest: a TrainJob alone can say neither that a pod which fails stays as it
is, nor how it ends its processes. With the torch policy Trainer adds PET_NODE_RANK and PET_NNODES to the container
called node of the job called node (pkg/runtime/framework/plugins/torch); dsrun starts the ranks, so that nothing is
said of them. Pods are NAME-node-0-INDEX, of a JobSet, with five more characters behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsrun.jobs.launchers.kubernetes.pod_spec import PodSpec

VERSION = "trainer.kubeflow.org/v1alpha1"
NODE = "node"
"""Name of the container, and of the replicated job."""
STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""The label by which Trainer knows the job that trains."""
RANDOM = "-xxxxx"


def longest_suffix(nodes: int) -> str:
    """The longest text behind a job's name in the names of its pods."""
    return f"-{NODE}-0-{nodes - 1}{RANDOM}"


def train_job(
    name: str, spec: PodSpec, template: Mapping[str, Any], nodes: int, time_limit_min: int | None
) -> dict[str, Any]:
    """The runtime and the job, as one list. template: the pods'."""
    labels = {"app.kubernetes.io/managed-by": "dsrun", **spec.labels}
    metadata = {"name": name, "namespace": spec.namespace, "labels": labels}
    pod = {**template, "spec": {"restartPolicy": "Never", **template["spec"]}}
    # dsrun starts again by itself; a single pod that comes back alone would wait for the others.
    job: dict[str, Any] = {"backoffLimit": 0, "template": pod}
    if time_limit_min is not None:
        job["activeDeadlineSeconds"] = time_limit_min * 60
    jobs: dict[str, Any] = {
        "replicatedJobs": [{"name": NODE, "template": {"metadata": {"labels": STEP}, "spec": job}}]
    }
    if spec.ttl_s is not None:
        jobs["ttlSecondsAfterFinished"] = spec.ttl_s
    runtime = {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": jobs}}
    request = {"runtimeRef": {"kind": "TrainingRuntime", "name": name}, "trainer": {"numNodes": nodes}}
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {"apiVersion": VERSION, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
            {"apiVersion": VERSION, "kind": "TrainJob", "metadata": metadata, "spec": request},
        ],
    }

"""Things that pods would not find, looked for before a job is sent: files off their volume, variables not set there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dsrun.cluster.hostnames import shown
from dsrun.config.presets import preset
from dsrun.data.hub_data import HUB
from dsrun.data.rows import weighted_file
from dsrun.errors import Problem
from dsrun.host import hiding
from dsrun.jobs.launchers.common.cluster_files import ClusterFile
from dsrun.jobs.launchers.kubernetes.pod_spec import PodSpec
from dsrun.models import hub
from dsrun.options.commands import FinetuneOptions, LaunchOptions
from dsrun.options.declare import flag_of


def spec_of(cluster: ClusterFile) -> PodSpec:
    """The pods' description in a cluster's file, which has to have one. Raises ValueError."""
    if cluster.kubernetes is None:
        raise ValueError(f"{cluster.name} is not a cluster of Kubernetes")
    return cluster.kubernetes


def mount_of(cluster: ClusterFile) -> Path:
    """The path at which the pods see the volume that they share."""
    return Path(spec_of(cluster).mount_path)


def is_here(cluster: ClusterFile) -> bool:
    """Whether this machine sees the volume in the same place, so that its files can be looked at."""
    return mount_of(cluster).is_dir()


def on_volume(path: Path, cluster: ClusterFile) -> bool:
    """Whether the pods see a path."""
    whole = Path(os.path.abspath(path))  # noqa: PTH100  (no link is followed: the pods may not have it)
    return whole.is_relative_to(mount_of(cluster))


def is_path(model: str) -> bool:
    """Whether MODEL is a folder or a file, not a name."""
    return hub.parse(model) is None and (os.sep in model or model.startswith(".") or model.endswith(".gguf"))


def problems(
    target: str,
    options: FinetuneOptions | LaunchOptions,
    run_dir: Path,
    cluster: ClusterFile,
    run_file: Path | None = None,
) -> list[Problem]:
    """All problems of a command. target: MODEL or SCRIPT. run_file: the file of its options."""
    paths = {"--output-dir": run_dir} | ({"run file": run_file} if run_file else {})
    return [*_files(target, options, paths, cluster), *_variables(options.env, cluster)]


def _files(
    target: str, options: FinetuneOptions | LaunchOptions, more: Mapping[str, Path], cluster: ClusterFile
) -> Iterator[Problem]:
    paths = [*more.items()]
    if isinstance(options, FinetuneOptions):
        named = {"eval_file": options.eval_file, "model_path": options.model_path, "adapter": options.adapter}
        paths += [
            (flag_of(FinetuneOptions, name), Path(path)) for name, path in named.items() if path is not None
        ]
        paths += [
            ("--train-file", path)
            for path, _ in map(weighted_file, options.train_file)
            if not str(path).startswith(HUB)
        ]
        paths += [("MODEL", Path(target))] if is_path(target) else []
    else:
        paths += [] if options.module else [("SCRIPT", Path(target))]
        paths += [("--accelerate", options.accelerate)] if options.accelerate else []
    if preset.is_path(options.preset or ""):
        paths.append(("--preset", Path(str(options.preset))))
    for option, path in paths:
        if not on_volume(path, cluster):
            hint = f"The pods share {mount_of(cluster)}, and nothing else ({cluster.path}: mount_path)."
            yield Problem(f"{shown(str(path))} is not on the pods' volume", option, hint)


def _variables(texts: Sequence[str], cluster: ClusterFile) -> Iterator[Problem]:
    known = {*cluster.exports, *spec_of(cluster).secret_variables}
    for name, equals, value in (text.partition("=") for text in texts):
        if equals and hiding.secrets({name: value}):
            hint = f"Put it into a Secret, and name it in secret_variables of {cluster.path}."
            yield Problem(f"the value of {name} would stand in the manifest", "--env", hint)
        elif not equals and name not in known:
            hint = f"Write --env {name}=VALUE, or put it into [environment] of {cluster.path}."
            yield Problem(f"{name} is not set in the pods", "--env", hint)

"""Sending a job to Kubernetes: what can be looked at before, and the manifest that is handed to kubectl."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.cluster.hostnames import shown
from dsrun.config import preset
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import travel
from dsrun.jobs.launchers import kubernetes
from dsrun.jobs.sites import Site

FILES = ("train_file", "eval_file", "model_path", "adapter")
"""Options that name what the pods have to see."""
PYTHON = "python3"


@dataclass(frozen=True)
class PodJob:
    """One dsrun command for pods.

    command: the words behind `dsrun`, its name first, without the run's folder. gpus: of each pod. name: of the job, as
    the user said it; empty: made from the folder's. cwd: the folder that it was given in; its paths count from there.
    again: whether the command goes on with the run that it finds in its folder.
    """

    run_dir: Path
    command: Sequence[str]
    site: Site
    nodes: int
    gpus: int
    name: str
    cwd: Path
    again: bool = True


def mount_of(site: Site) -> Path:
    """Where the pods see the volume that they share."""
    return Path(str(site.kubernetes["mount_path"]))


def is_here(site: Site) -> bool:
    """Whether this machine sees the volume in the same place, so that its files can be looked at."""
    return mount_of(site).is_dir()


def manifest(job: PodJob) -> dict[str, Any]:
    """The PyTorchJob. Raises DsrunError with all that Kubernetes would refuse, and where the cluster's file says it."""
    site, fields = job.site, dict(job.site.kubernetes)
    python = fields.pop("python", PYTHON)
    name, *words = job.command
    spec = kubernetes.PodSpec(
        **fields,
        env=site.exports,
        time_limit_min=site.time_limit_min,
        cwd=str(job.cwd if _below(job.cwd, site) else mount_of(site)),
    )
    command = [
        python, "-m", "dsrun", name, "--output-dir", str(job.run_dir), "--launcher", "kubernetes",
        *(["--continue"] if job.again else []), *words,
    ]  # fmt: skip
    try:
        return kubernetes.manifest(
            job.name or kubernetes.job_name(job.run_dir.name, job.nodes), job.nodes, job.gpus, command, spec
        )
    except DsrunError as error:
        options = {
            "name": "--job-name",
            "nodes": "--nodes",
            "gpus": "--gpus-per-node",
            "command": "the command",
        }
        raise DsrunError(
            Problem(one.what, options.get(one.where) or f"{site.path}: {one.where}", one.hint)
            for one in error.problems
        ) from error


def problems(params: Mapping[str, Any], given: Mapping[str, Any], run_dir: Path, site: Site) -> list[Problem]:
    """What pods would not find or have: files that are not on their volume, variables that nobody sets there.

    params: all of the command's options and arguments by name; given: those that were given.
    """
    return [*_files(params, given, run_dir, site), *_variables(given.get("env") or (), site)]


def _files(
    params: Mapping[str, Any], given: Mapping[str, Any], run_dir: Path, site: Site
) -> Iterator[Problem]:
    paths = {"--output-dir": run_dir}
    paths |= {f"--{name.replace('_', '-')}": given[name] for name in FILES if given.get(name) is not None}
    if is_path(model := str(params.get("model") or "")):
        paths["MODEL"] = Path(model)
    if preset.is_path(name := str(given.get("preset") or "")):
        paths["--preset"] = Path(name)
    if params.get("script") and not params.get("module"):
        paths["SCRIPT"] = Path(params["script"])
    more = [("--train-file", Path(path)) for path in given.get("more_files", ())]
    for option, path in (*paths.items(), *more):
        if not _below(path, site):
            hint = f"The pods share {mount_of(site)}, and nothing else ({site.path}: mount_path)."
            yield Problem(f"{shown(str(path))} is not on the pods' volume", option, hint)


def is_path(model: str) -> bool:
    """Whether MODEL is a folder or a file, and no name."""
    return os.sep in model or model.startswith(".") or model.endswith(".gguf")


def _below(path: Path, site: Site) -> bool:
    whole = Path(os.path.abspath(path))  # noqa: PTH100  (no link is followed: the pods may not have it)
    return whole.is_relative_to(mount_of(site))


def _variables(texts: Sequence[str], site: Site) -> Iterator[Problem]:
    there = {*site.exports, *site.kubernetes.get("secret_variables", ())}
    for name, equals, _ in (text.partition("=") for text in texts):
        if equals and travel.is_secret(name):
            hint = f"Put it into a Secret, and name it in secret_variables of {site.path}."
            yield Problem(f"the value of {name} would stand in the manifest", "--env", hint)
        elif not equals and name not in there:
            hint = f"Write --env {name}=VALUE, or put it into [environment] of {site.path}."
            yield Problem(f"{name} is not set in the pods", "--env", hint)

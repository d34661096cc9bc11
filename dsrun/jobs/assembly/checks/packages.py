"""Needs of a job's ranks that are not met: packages, trackers' accounts, tools to compile with."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun.errors import Problem
from dsrun.host.gpus import DRIVER

if TYPE_CHECKING:
    from dsrun.cluster.python_environment import PythonEnvironment
    from dsrun.jobs.allocation.allocation import Allocation
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.options.table import TrackerOptions

SCORE_PACKAGES = ("jieba", "nltk", "rouge_chinese")
"""Packages that compute ROUGE and BLEU (training/metrics.py)."""


def absent_packages(names: Sequence[str], doing: str) -> list[Problem]:
    """Problems of packages that are needed and not installed. doing: what needs it ("training")."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    from dsrun.packages import install, install_all

    command = install_all(gpus=DRIVER.exists()) if "torch" in absent else install(*absent)
    return [Problem(f"{doing} needs {', '.join(absent)}", hint=f"Install: {command}")]


OFFLINE = {
    "wandb": ("WANDB_MODE", ("offline", "dryrun", "disabled"), "wandb login"),
    "swanlab": ("SWANLAB_MODE", ("offline", "local", "disabled"), "swanlab login"),
}
"""Trackers that want an account: the variable by which they don't, its values, and how a key is got."""


def check_trackers(
    options: TrackerOptions, environ: Mapping[str, str], connection: ConnectionOptions
) -> list[Problem]:
    """Trackers that are asked for and not installed, or that have no key and are not told to do without.

    connection: what the cluster's file and --env add to the environment.
    """
    from dsrun.packages import install

    named = dict(text.split("=", 1) for text in connection.env if "=" in text)
    environ = {**environ, **connection.cluster_env, **named}
    problems = []
    for name in options.log:
        where = f"--log {name}"
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name is no package
            problems.append(Problem("is not installed", where, f"Install it: {install(name)}"))
        elif name in OFFLINE and not _has_account(name, environ):
            mode, (offline, *_), login = OFFLINE[name]
            hint = f"Log in first ({login}), set {name.upper()}_API_KEY, or {mode}={offline} to send nothing."
            problems.append(Problem("has no API key", where, hint))
    return problems


def _has_account(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a tracker has a key in the environment or in the file of its login, or is to do without.

    Of the file only that it is there is looked at.
    """
    mode, values, _ = OFFLINE[name]
    if environ.get(mode, "").lower() in values or environ.get(f"{name.upper()}_API_KEY"):
        return True
    home = Path(environ.get("HOME") or Path.home())
    files = {
        "wandb": [Path(environ.get("NETRC") or home / ".netrc"), home / "_netrc"],
        "swanlab": [Path(environ.get("SWANLAB_SAVE_DIR") or home / ".swanlab") / ".netrc"],
    }
    return any(path.is_file() for path in files[name])


def absent_there(names: Sequence[str], python: PythonEnvironment) -> list[Problem]:
    """Problems of packages that another Python lacks."""
    if not (absent := python.lacks(tuple(names))):
        return []
    hint = f"Install: {python.executable} -m pip install {' '.join(absent)}"
    return [
        Problem(f"lacks {', '.join(absent)}, which the script imports", f"--python {python.executable}", hint)
    ]


def check_torch_build(placed: Allocation | None, python: PythonEnvironment | None = None) -> list[Problem]:
    """A GPU of this machine's that the installed torch has no code for: its first kernel would be the end."""
    import sys

    from dsrun import versions
    from dsrun.cluster import torch_builds
    from dsrun.host.gpus import driver_version
    from dsrun.host.toolkit import torch_build

    there = python.packages if python else versions.installed()
    cuda, torch = torch_build(python.path if python else sys.path)["cuda"], there.get("torch", "")
    here = [entry for entry in placed.entries if entry.here and entry.machine] if placed and cuda else []
    gpus = [gpu for entry in here if entry.machine for gpu in entry.machine.gpus if gpu.index in entry.gpus]
    capabilities = ["{}.{}".format(*gpu.compute_capability) for gpu in gpus]
    for gpu, capability in zip(gpus, capabilities, strict=True):
        if torch_builds.left_out(capability, cuda, torch):
            build = f"torch {torch} for CUDA {cuda}"
            fault = f"{gpu.name} has compute capability {capability}, which {build} has no code for"
            command = torch_builds.newest(driver_version(), capabilities)
            return [Problem(fault, hint=command or "Leave it out: --devices.")]
    return []


def check_operators(ds_config: Mapping[str, Any], accelerator: str, environ: Mapping[str, str]) -> None:
    """Raise DsrunError where DeepSpeed has to compile an operator and what it takes is not there."""
    from dsrun.cluster import extensions
    from dsrun.data.cache import cache_root

    names = extensions.needed(ds_config)
    if missing := extensions.missing(names, extensions.folder(environ, cache_root())):
        extensions.check_tools(missing, accelerator)

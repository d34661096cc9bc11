"""The surroundings of a run: versions, devices, the git checkout. No secrets: only variables that are listed.
How that differs from what is here now. And what dsrun adds to it for the ranks."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsrun import catalog, packages, versions
from dsrun.cluster import extensions, python_environment
from dsrun.cluster.devices import Machine
from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.data.cache import cache_root
from dsrun.host.gpus import has_virtual_memory
from dsrun.host.hiding import shown
from dsrun.job.job import AnyJob, Job, ScriptJob
from dsrun.jobs.launchers.common import forwarded_environment
from dsrun.words import counted

COMPUTING = tuple(
    dict.fromkeys(("dsrun", *versions.PACKAGES))
    | dict.fromkeys(("tokenizers", "sentencepiece", "safetensors", "gguf", "datasets", "pyarrow"))
)
"""Packages whose version may change losses, or how checkpoints, models and rows are read. The record lists them even
where they were missing."""
GPU_LIBRARIES = re.compile("nvidia-(nccl|cudnn|cublas)-")
"""These compute as well, in packages of their own beside torch's."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "CUDA_DEVICE_ORDER",
    "DSRUN_PATH", "DSRUN_CACHE", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "PYTHONPATH",
)  # fmt: skip
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's settings of its allocator; the second name is of torch 2.9 and later, which know both."""
EXPANDABLE = "expandable_segments:True"
"""Batches of a fine-tune differ in length: blocks of fixed sizes leave holes, of which a GPU runs out of memory that
nobody uses (torch's notes on CUDA, "Memory management"). A value of the user's own stands."""
NCCL_LOG_LEVEL = "WARN"
"""NCCL says nothing of what broke by itself (its "Environment Variables", NCCL_DEBUG); its warnings name the network
interface, the peer and the error, and `diagnose` reads them. Where all is well they are none. A value of the user's
own stands."""


def of_ranks(job: AnyJob, environ: Mapping[str, str], node: int = 0) -> dict[str, str]:
    """The variables that the ranks on this host get on top of `environ`. node: the host's number."""
    script = job if isinstance(job, ScriptJob) else None
    python = script.python if script and script.python else sys.executable
    added: dict[str, str] = {}
    if not (script and script.plain and not script.python):
        added["DS_ACCELERATOR"] = job.accelerator
    if not (script and (script.plain or script.python)):  # another Python's operators are of another torch
        added[extensions.VARIABLE] = str(extensions.folder(environ, cache_root()))
    # The environment's own ninja: another version of it compiles the same operators once more.
    path = environ.get("PATH") or os.defpath
    if (with_own := forwarded_environment.with_folder(path, str(Path(python).parent))) != path:
        added["PATH"] = with_own
    if isinstance(job, Job):
        added["TOKENIZERS_PARALLELISM"] = "false"
    if job.accelerator == "cuda":
        added["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that indices mean what nvidia-smi shows
        allocator_given = any(environ.get(name) for name in ALLOCATOR)
        # Without virtual memory management the first allocation would fail: "operation not supported".
        if isinstance(job, Job) and not allocator_given and has_virtual_memory() is not False:
            added[ALLOCATOR[0]] = EXPANDABLE
        if isinstance(job, Job) and not environ.get("NCCL_DEBUG"):
            added["NCCL_DEBUG"] = NCCL_LOG_LEVEL
    # Without it each rank's optimizer on the host takes all cores, and they take turns.
    if "OMP_NUM_THREADS" not in environ and (job.accelerator == "cpu" or job.offloads):
        ranks = len(job.hosts[node].devices)
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    return {**added, **of_checkout(environ), **(script.env if script else {})}


def of_checkout(environ: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with dsrun's folder where it runs from a bare checkout, which child processes would not find."""
    if packages.installed_version("dsrun") is None:
        paths = [str(catalog.PACKAGE.parent), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return {}


def describe(machine: Machine, environ: Mapping[str, str], python: str | None = None) -> dict[str, Any]:
    """The content of environment.json. python: the ranks', where it isn't this one."""
    theirs = python_environment.ask(Path(python), "--python") if python else None
    of_ranks = (
        {"python": theirs.version, "executable": python, "packages": every_package(theirs.path)}
        if theirs
        else None
    )
    return {
        **({"ranks": of_ranks} if of_ranks else {}),
        "python": sys.version,
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": platform.node(),
        "packages": every_package(),
        "accelerator": machine.accelerator,
        "cpu_cores": machine.cpu_cores,
        "gpus": [asdict(gpu) for gpu in machine.gpus],
        "variables": shown({name: environ[name] for name in VARIABLES if name in environ}),
        "git": git_state(Path.cwd()),
    }


def every_package(path: Iterable[str] | None = None) -> dict[str, str | None]:
    """Name -> version of all that is installed, and None for what would compute and isn't. path: as sys.path."""
    return {**dict.fromkeys(COMPUTING), **packages.installed(path)}


def differences(record: Mapping[str, Any], python: PythonEnvironment | None = None) -> list[str]:
    """A line about versions that are not those the run was started with; no line where they are the same.

    Packages that compute are named, others counted. What the record doesn't mention isn't compared: an older dsrun
    recorded seven packages. record: what `describe` gave; python: the ranks', where it isn't this one.
    """
    before = record.get("ranks") if python else record
    if not isinstance(before, dict) or not isinstance(known := before.get("packages"), dict):
        return ["versions aren't compared: the run has no whole record of what it was started with"]
    now: dict[str, str | None] = {
        "Python": python.version if python else platform.python_version(),
        **every_package(python.path if python else None),
    }
    then = {"Python": str(before.get("python") or "").partition(" ")[0], **known}
    changed = {name: (number, now.get(name)) for name, number in then.items() if number != now.get(name)}
    named = [
        f"{name} {old or 'none'} -> {new or 'none'}"
        for name, (old, new) in changed.items()
        if name in ("Python", *COMPUTING) or GPU_LIBRARIES.match(name)
    ]
    others = len(changed) - len(named)
    if named:
        more = f", and of {counted(others, 'other package')}" if others else ""
        return [f"other versions than the run was started with: {', '.join(named)}{more}"]
    text = (
        f"{counted(others, 'package')} of another version than the run was started with, none that computes"
    )
    return [text] if others else []


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the checkout that `folder` is in, and the files changed since; None outside of one."""

    def git(*words: str) -> str:
        environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=True,
            env=environ,
            timeout=10,
        ).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {
            "commit": commit,
            "branch": git("rev-parse", "--abbrev-ref", "HEAD"),
            "changed": git("status", "--short").splitlines(),
        }
    except (OSError, subprocess.SubprocessError):
        return None

"""A request becomes a job: fine-tunes, scripts, resumed and repeated runs, and the checks before the start."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dsrun.errors import Problem, collected

if TYPE_CHECKING:  # `dsrun plan` uses modules beside this one, and none of these
    from dsrun.cluster.devices import Machine
    from dsrun.jobs.allocation.allocation import Allocation
    from dsrun.jobs.allocation.request import ConnectionOptions
    from dsrun.jobs.allocation.reservation import Allocator
    from dsrun.jobs.spec.job import Job, ScriptJob
    from dsrun.options.groups import TrackerOptions
    from dsrun.options.table import Resolved

J = TypeVar("J", "Job", "ScriptJob")
D = TypeVar("D", bound="JobDraft")
TORCH_ADAM = "optimizer.params.torch_adam=true"
"""--set's text for torch's own AdamW, in place of DeepSpeed's fused one."""
SCORE_PACKAGES = ("jieba", "nltk", "rouge_chinese")
"""What ROUGE and BLEU are computed with (training/metrics.py)."""
TORCH_TAKES = {"lr", "betas", "eps", "weight_decay"}
"""Parameters that both take, and mean the same by."""


@dataclass(frozen=True)
class PlannedJob(Generic[J]):
    """A job that passed every check."""

    job: J
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    asked: Resolved[Any] | None = None
    """Every option as it holds, and where it came from; None for a run that goes on, whose job has them."""


@dataclass
class JobDraft:
    """A job on its way. What is None is not known, because a step before found something wrong."""

    asked: Resolved[Any]
    machine: Machine
    environ: Mapping[str, str]
    allocator: Allocator
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    placed: Allocation | None = None


def go_through(draft: D, steps: Sequence[Callable[[D], None]]) -> None:
    """Take the steps one after the other; what one of them refuses is kept, and the next goes on."""
    for step in steps:
        with collected(draft.problems):
            step(draft)


def absent_packages(names: Sequence[str], doing: str) -> list[Problem]:
    """What is needed and not installed. doing: what needs it ("training")."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    from dsrun.packages import install

    return [Problem(f"{doing} needs {', '.join(absent)}", hint=f"Install: {install(*absent)}")]


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
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
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


def check_operators(ds_config: Mapping[str, Any], accelerator: str, environ: Mapping[str, str]) -> None:
    """Raise DsrunError where DeepSpeed has to compile an operator and what it takes is not there."""
    from dsrun.cluster import extensions
    from dsrun.data.cache import cache_root

    names = extensions.needed(ds_config)
    if missing := extensions.missing(names, extensions.folder(environ, cache_root())):
        extensions.check_tools(missing, accelerator)


def why_torch_adam(ds_config: Mapping[str, Any], accelerator: str) -> str:
    """Why torch's own AdamW takes the place of DeepSpeed's fused one; empty where it doesn't.

    On a CPU both compute the same, and DeepSpeed's takes a minute to compile. Nothing changes where the config says
    which it is to be, or what only DeepSpeed's takes.
    """
    from dsrun.cluster import extensions

    if extensions.needed(ds_config) != ["fused_adam"]:
        return ""
    if accelerator == "cpu":
        plain = ds_config["optimizer"].get("params", {}).keys() <= TORCH_TAKES
        return "nothing to compile on a CPU" if plain else ""
    return "no nvcc" if accelerator == "cuda" and not extensions.has_nvcc() else ""


def precision_problems(precision: str | None, accelerator: str) -> list[Problem]:
    """What is wrong with training in a precision there: many CPUs have no fp16."""
    from dsrun.cluster import cpu_types

    if precision != "fp16" or accelerator != "cpu" or cpu_types.has_fp16():
        return []
    hint = "Take --precision bf16 (half the memory) or fp32 (exact, the default on a CPU)."
    return [Problem("is fp16, which this CPU can't train in (DeepSpeed refuses it)", "--precision", hint)]

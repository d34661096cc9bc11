"""Launchers: ways to run one command, dsrun's agent, on every host of a job. One small module each.

A module holds one value, LAUNCHER. Where the way leads to each host by itself, head and agent talk over its pipes;
where one program starts them all, the agents call the head over TCP, and learn their number from the program. To add a
way, add a module, and its name to CHOICES.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.errors import DsrunError

AUTO = "auto"
CHOICES = (AUTO, "ssh", "pdsh", "openmpi", "mpich", "impi", "slurm", "manual", "kubernetes")
"""What --launcher takes, in the order of --help: every module here but local, which is what one machine alone gets."""


@dataclass(frozen=True)
class Launcher:
    """A way to the hosts. Exactly one of the three is given.

    program: what has to be installed, None for nothing; package: where it comes from, for the message.
    to_each: (host, command) -> the command here that runs it there, with its stdin and stdout.
    to_all: (hosts, command, environment) -> the command here that runs it once on every host; `command` lacks the last
    word, which says where the agent learns its number, and the way adds it.
    by_hand: (hosts, command) -> lines that tell the user what to start where; nothing is started, unless own_first:
    then host 0 is this machine, and its agent is started here.
    """

    name: str
    program: str | None = None
    package: str = ""
    to_each: Callable[[str, Sequence[str]], list[str]] | None = None
    to_all: Callable[[Sequence[str], Sequence[str], Mapping[str, str]], list[str]] | None = None
    by_hand: Callable[[Sequence[str], Sequence[str]], list[str]] | None = None
    own_first: bool = False


def names() -> list[str]:
    """Every launcher's name."""
    return sorted(entry.name for entry in pkgutil.iter_modules(__path__) if _has(entry.name))


def _has(name: str) -> bool:
    return hasattr(importlib.import_module(f"{__name__}.{name}"), "LAUNCHER")


def get(name: str) -> Launcher:
    """The launcher of that name. Raises DsrunError where there is none."""
    if name not in names():
        raise DsrunError(f"there is no launcher {name!r}", hint=f"There are {', '.join(names())}.")
    found: Launcher = importlib.import_module(f"{__name__}.{name}").LAUNCHER
    return found

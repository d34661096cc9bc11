"""Launchers: ways to run one command, dsrun's agent, on every host of a job. One module each.

A module (or package) here holds one value, LAUNCHER, and is found by its name; what they share lies in common/. Where
the way leads to each host by itself, coordinator and agent communicate over its pipes; where one program starts all,
the agents call the coordinator over TCP, and learn their number from the program.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsrun.errors import DsrunError

AUTO, ON_THIS_MACHINE, SLURM, SSH, KUBERNETES = "auto", "local", "slurm", "ssh", "kubernetes"
"""Launchers that others need to know by name; AUTO: whichever fits."""
SHARED = "common"


@dataclass(frozen=True)
class Launcher:
    """A way to the hosts: exactly one of to_each, to_all and by_hand."""

    name: str
    program: str | None = None
    """The program that has to be installed; None: none."""
    package: str = ""
    """The package that has the program, for the message."""
    to_each: Callable[[str, Sequence[str]], list[str]] | None = None
    """(host, command) -> the command here that runs it there, with its stdin and stdout."""
    to_all: Callable[[Sequence[str], Sequence[str], Mapping[str, str]], list[str]] | None = None
    """(hosts, command, environment) -> the command here that runs it once on every host. `command` lacks its last
    word, which says where the agent learns its number; the way adds it."""
    by_hand: Callable[[Sequence[str], Sequence[str]], list[str]] | None = None
    """(hosts, command) -> lines that tell the user what to start where; dsrun starts nothing."""
    own_first: bool = False
    """by_hand: host 0 is this machine, and dsrun starts its agent here."""


def names() -> list[str]:
    """Every launcher's name; none is imported."""
    return sorted(entry.name for entry in pkgutil.iter_modules(__path__) if entry.name != SHARED)


CHOICES = (AUTO, *(name for name in names() if name != ON_THIS_MACHINE))
"""What --launcher takes: all but the one for this machine alone."""


def get(name: str) -> Launcher:
    """A launcher by its name. Raises DsrunError for an unknown name."""
    if name not in names():
        raise DsrunError(f"there is no launcher {name!r}", hint=f"There are {', '.join(names())}.")
    launcher: Launcher = importlib.import_module(f"{__name__}.{name}").LAUNCHER
    return launcher

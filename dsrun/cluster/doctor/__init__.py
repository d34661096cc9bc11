"""Checks whether hosts are fit for a job: pure functions of the facts that probe.py gathers.

A module is a group of checks, and is found by looking in this folder; check.py defines a check.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from dsrun.cluster.doctor.check import WORST, Check, CheckResult, Host


class Group(NamedTuple):
    """A column of the table. title: its head."""

    order: int
    name: str
    title: str
    checks: tuple[Check, ...]


@cache
def groups() -> tuple[Group, ...]:
    """Every group of checks, in the order of the columns."""
    columns = []
    for entry in pkgutil.iter_modules(__path__):
        if entry.name == "check":
            continue
        module = importlib.import_module(f"{__name__}.{entry.name}")
        checks = tuple(value for value in vars(module).values() if isinstance(value, Check))
        columns.append(Group(module.ORDER, entry.name, module.TITLE, checks))
    return tuple(sorted(columns))


def examine(hosts: Sequence[Host]) -> list[CheckResult]:
    """The results of every check in turn, for the hosts in their order."""
    return [result for group in groups() for check in group.checks for result in check.results(hosts)]


def worst(colours: Iterable[str]) -> str:
    """The worst of several colours; grey for none."""
    return min(colours, key=WORST.index, default=WORST[-1])

"""What dsrun needs of other packages, and how to get it."""

from __future__ import annotations

import re
from collections.abc import Iterable

REQUIREMENT = re.compile(r"([\w.-]+)(.*)")


def install(*names: str) -> str:
    """The command that installs these, in the versions that dsrun works with. names: as they are imported."""
    from shlex import join

    return join(["pip", "install", *_requirements(names)])


def _requirements(names: Iterable[str]) -> list[str]:
    from importlib import metadata  # slow

    try:
        said = metadata.requires("dsrun") or []
    except metadata.PackageNotFoundError:  # run from its sources
        said = []
    known = {
        _plain(found[1]): found[0].strip()
        for line in said
        if (found := REQUIREMENT.match(line.partition(";")[0]))
    }
    return [known.get(_plain(name), name) for name in names]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")

"""A Python that isn't dsrun's own, and its packages: they are read, never imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dsrun import versions
from dsrun.catalog import PACKAGE
from dsrun.cluster.probe import Probe
from dsrun.errors import DsrunError
from dsrun.host.toolkit import torch_build

OLDEST = (3, 8)
"""An older Python lists its packages in another way, and no torch still in use runs on it."""
OWN_VARIABLES = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables of the environment that dsrun runs in, which mean nothing to another Python, or mislead it."""


@dataclass(frozen=True)
class PythonEnvironment:
    """executable: as it was named, absolute; version: "3.8.18"; path: where it imports from, without the folder that a
    script lies in."""

    executable: str
    version: str
    path: tuple[str, ...]

    @cached_property
    def packages(self) -> dict[str, str]:
        """Name -> version of the packages that are judged (versions.PACKAGES)."""
        return versions.installed(self.path)

    @property
    def cuda(self) -> str | None:
        """The CUDA that its torch was built for."""
        cuda: str | None = torch_build(self.path)["cuda"]
        return cuda

    def lacks(self, names: tuple[str, ...]) -> list[str]:
        """The packages among these that it can't import."""
        return [name for name in names if not any(_is_there(Path(folder), name) for folder in self.path)]


def _is_there(folder: Path, name: str) -> bool:
    return (folder / name / "__init__.py").is_file() or (folder / f"{name}.py").is_file()


def without_own(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that another Python gets: without OWN_VARIABLES, and without a checkout of dsrun to import."""
    variables = {name: value for name, value in environ.items() if name not in OWN_VARIABLES}
    if paths := variables.pop("PYTHONPATH", ""):
        paths_left = [
            path for path in paths.split(os.pathsep) if Path(path or ".").absolute() != PACKAGE.parent
        ]
        variables |= {"PYTHONPATH": os.pathsep.join(paths_left)} if paths_left else {}
    return variables


def ask(path: Path, option: str) -> PythonEnvironment:
    """The environment of the Python at a path. Raises DsrunError where there is none that can be used."""
    where = f"{option} {path}"
    if path.is_dir():
        inside = path / "bin" / "python"
        hint = f"Name the Python in it: {inside}" if inside.exists() else ""
        raise DsrunError("is a folder", where=where, hint=hint)
    if not path.is_file():
        raise DsrunError(
            "no such file", where=where, hint="Name the Python of an environment: ENV/bin/python"
        )
    if not os.access(path, os.X_OK):
        raise DsrunError(
            "can't be run", where=where, hint="Name the Python of an environment: ENV/bin/python"
        )
    probe = Probe({"python": str(path)})
    probe.environ = without_own(probe.environ)
    try:
        answer = probe.python
        version = str(answer["version"]).split()[0]
        numbers = tuple(map(int, version.rstrip("+").split(".")[:2]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DsrunError(f"is no Python that answers: {str(error)[-300:]}", where=where) from error
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise DsrunError(f"is Python {version}: {oldest} is the oldest", where=where)
    return PythonEnvironment(str(path), version, tuple(answer["path"]))

"""Environments of some versions, made with uv or pip.

Beside the installed packages, each version lies in a folder of its own (without its dependencies), which stands in
front of the others: one small download a version, kept for the next probe. A fresh environment has its own Python and
all that the versions require.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import DsrunError

INSTALL_SECONDS = 1800
READY = ".installed"
"""The file that says that a folder is whole."""


@dataclass(frozen=True)
class Environment:
    """python: its executable; variables: of a process in it."""

    python: str
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Beside:
    """Environments of this Python with some packages in other versions."""

    folder: Path
    """Where versions are kept."""

    def made(self, versions: Mapping[str, str]) -> Environment:
        """Raises DsrunError where a version can't be installed."""
        places = [self._place(name, version) for name, version in versions.items()]
        paths = [*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])]
        return Environment(sys.executable, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})

    def _place(self, name: str, version: str) -> Path:
        place = self.folder / f"{name}-{version}"
        if not (place / READY).is_file():
            shutil.rmtree(place, ignore_errors=True)  # one that was broken off
            run([*installer(sys.executable), "--no-deps", "--target", str(place), f"{name}=={version}"])
            (place / READY).touch()
        return place


@dataclass(frozen=True)
class Fresh:
    """Environments of their own, with what the versions require."""

    folder: Path
    more: tuple[str, ...] = ()
    """What else the probe needs, as pip writes it."""

    def made(self, versions: Mapping[str, str]) -> Environment:
        """Raises DsrunError where the versions can't be installed together."""
        name = "_".join(f"{name}-{version}" for name, version in sorted(versions.items()))
        place = self.folder / f"fresh_{name}"
        python = str(place / "bin" / "python")
        if not (place / READY).is_file():
            shutil.rmtree(place, ignore_errors=True)
            run(
                [sys.executable, "-m", "venv", *(["--without-pip"] if shutil.which("uv") else []), str(place)]
            )
            pins = [f"{name}=={version}" for name, version in versions.items()]
            run([*installer(python), *pins, *self.more])
            (place / READY).touch()
        variables = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")
        }
        variables |= {
            "VIRTUAL_ENV": str(place),
            "PATH": f"{place / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        return Environment(python, variables)


def installer(python: str) -> list[str]:
    """The command that installs into a Python: uv's where there is one, which is several times as fast."""
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--quiet", "--python", python]
    return [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def run(command: list[str]) -> None:
    """Raises DsrunError with the last line where a command fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            text=True,
            capture_output=True,
            check=False,
            timeout=INSTALL_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise DsrunError(f"not installed within {INSTALL_SECONDS} s", where=command[-1]) from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it says nothing"]
        raise DsrunError(f"can't be installed: {lines[-1].strip()}", where=command[-1])

"""Other packages: their installed versions, the versions that dsrun needs, and the command that installs them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from dsrun.errors import DsrunError

REQUIREMENT = re.compile(r"([\w.-]+)(.*)")
INFO = re.compile(r"([^/]+?)-([0-9][^/-]*)(?:\.dist-info|(?:-py3\.\d+)?\.egg-info)")
"""The folder that an installed package leaves beside it (PEP 376). An egg-info is setup.py's own: so pip before 23.1
installs what has no wheel, DeepSpeed for one, where the package `wheel` is missing, as in Debian 12."""


def installed_version(name: str) -> str | None:
    """The installed version of a package; None where it is not installed. name: as pip knows it."""
    for folder in sys.path:
        for package, number in installed_in(Path(folder or ".")):
            if package == plain(name):
                return number
    import importlib.util

    if importlib.util.find_spec(plain(name).replace("-", "_")) is None:
        return None
    from importlib import metadata  # slow: 40 ms, for what setuptools installed without pip

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """Name -> version of every package that this Python can import. path: sys.path unless given.

    From the names of *.dist-info and *.egg-info folders: importlib.metadata takes 40 ms to import.
    """
    versions: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, number in installed_in(Path(folder or ".")):
            versions.setdefault(name, number)
    return versions


def installed_in(folder: Path) -> Iterator[tuple[str, str]]:
    """The packages in a folder and their versions, from the names of what pip wrote beside them."""
    with suppress(OSError):
        yield from _listed(folder, folder.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _listed(folder: Path, _changed: int) -> tuple[tuple[str, str], ...]:
    """The packages of a folder in its present state, which its time stands for: some commands ask many times."""
    names = os.listdir(folder)  # noqa: PTH208 - iterdir makes a Path of each of thousands
    ends = (".dist-info", ".egg-info")
    matches = (INFO.fullmatch(name) for name in names if name.endswith(ends))
    return tuple((plain(match[1]), match[2]) for match in matches if match)


def install(*names: str) -> str:
    """The command that installs these, in the versions that dsrun works with. names: as they are imported."""
    from shlex import join

    return join(["pip", "install", *_requirements(names)])


TORCH = "torch==2.13.0"
"""The torch of README's lines."""
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
"""Where torch's builds without CUDA are: elsewhere Linux gets CUDA's libraries with it, 5 GB."""


def install_all(*, gpus: bool) -> str:
    """README's command that installs what training needs: dsrun's extras, from the clone where it runs from one."""
    from shlex import quote

    clone = Path(__file__).resolve().parents[1]
    extras = "[train,gpu]" if gpus else "[train]"
    place = "." if clone == Path.cwd() else str(clone)
    target = f"-e {quote(place + extras)}" if (clone / "setup.cfg").is_file() else quote(f"dsrun{extras}")
    if gpus:
        return f"pip install {TORCH} {target}"
    return f"pip install --no-deps {TORCH} --index-url {CPU_WHEELS} && pip install {target}"


@contextmanager
def needed(package: str, where: str) -> Iterator[None]:
    """A context for imports of an optional package: its absence is a DsrunError with the command that installs it.

    where: the feature that needs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:  # the package is there, and lacks one of its own
            raise
        hint = f"Install it: {install(package)}"
        raise DsrunError(f"needs {package}, which is not installed", where=where, hint=hint) from None


def _requirements(names: Iterable[str]) -> list[str]:
    from importlib import metadata  # slow

    try:
        requirements = metadata.requires("dsrun") or []
    except metadata.PackageNotFoundError:  # run from its sources
        requirements = []
    known = {
        plain(match[1]): match[0].strip()
        for line in requirements
        if (match := REQUIREMENT.match(line.partition(";")[0]))
    }
    return [known.get(plain(name), name) for name in names]


def plain(name: str) -> str:
    """A package's name as messages and requirements spell it."""
    return name.lower().replace("_", "-")

"""The releases of a package in order: those that dsrun has data of, and newer ones as pip finds them."""

from __future__ import annotations

import re
import subprocess
import sys

from dsrun.errors import DsrunError
from dsrun.releases import packed


def releases_of(name: str) -> list[str]:
    """The releases of a package, oldest first. Raises DsrunError where pip finds none."""
    if name in packed.packages() and "last patch" not in (data := packed.package(name)).note:
        return list(data.releases)
    return _asked(name)


def _asked(name: str) -> list[str]:
    """As pip's index has them."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "index",
        "versions",
        name,
        "--disable-pip-version-check",
    ]
    done = subprocess.run(command, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip says nothing"]
        raise DsrunError(f"its releases can't be asked for: {lines[-1]}", where=name)
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    found = listed[1].split(", ") if listed else []
    return [version for version in reversed(found) if re.fullmatch(r"[\d.]+(\.post\d+)?", version)]

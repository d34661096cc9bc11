"""DeepSpeed's compiled operators on this machine: their folder, what they were built for, locks of builds.

torch guards a build by a file named `lock` in the operator's folder. A build that was killed leaves it behind, and
every later process waits for it (torch/utils/file_baton.py).

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsrun.host.disks import file_system
from dsrun.host.gpus import gpu_models
from dsrun.host.system import link_target, text_of


def operators_in(folder: Path, path: Iterable[str]) -> dict[str, Any]:
    """The operators in a folder, and the locks of builds; stale: those behind which nothing builds.

    path: where the Python that they are for imports from.
    """
    locks = sorted(folder.glob("*/lock"))
    return {
        "folder": str(folder),
        "built": sorted(path.stem for path in folder.glob("*/*.so") if path.stem == path.parent.name),
        "locks": [str(lock) for lock in locks],
        "stale": [str(lock) for lock in stale_locks(folder)],
        "oldest_lock_hours": max((round(_age_s(lock) / 3600, 1) for lock in locks), default=None),
        "builds": _builds(folder, path),
        "file_system": file_system(folder),
    }


def _builds(folder: Path, path: Iterable[str]) -> list[dict[str, Any]]:
    """The torch and the GPUs that each operator was compiled for; own_torch: the one on that path."""
    torch = next(
        (place / "torch" for place in map(Path, path) if (place / "torch/version.py").is_file()), Path()
    )
    builds = {file.parent.name: built_for(text_of(file)) for file in sorted(folder.glob("*/build.ninja"))}
    return [
        {"name": name, "own_torch": Path(build["torch"]).resolve() == torch.resolve(), "gpus": build["gpus"]}
        for name, build in builds.items()
        if build
    ]


def operators_folder(cache: Path, prefix: str, version: str, torch: str, deepspeed: str) -> Path:
    """The folder of a Python's compiled operators. prefix, version: sys.prefix and sys.version.

    Shared by nobody: virtual environments with other versions would overwrite one another's builds, and a build for
    one processor or kind of GPU (they are compiled for the machine's own) dies on another that shares the home folder.
    """
    identity = "\n".join((prefix, version, _cpu_flags(), torch, deepspeed, *gpu_models()))
    return cache / "torch_extensions" / hashlib.sha256(identity.encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    lines = text_of("/proc/cpuinfo").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def built_for(ninja: str) -> dict[str, Any]:
    """The torch and the GPUs' capabilities ("8.0") that an operator was compiled for, from its build.ninja."""
    torch = re.search(r"-isystem (\S*/torch)/include(?:\s|$)", ninja)
    if not torch:
        return {}
    gpus = sorted({f"{int(code) // 10}.{int(code) % 10}" for code in re.findall(r"code=sm_(\d+)", ninja)})
    return {"torch": torch.group(1), "gpus": gpus}


def stale_locks(folder: Path) -> list[Path]:
    """The `lock` files of the operators in a folder behind which no process of this machine is building."""
    locks = sorted(folder.glob("*/lock"))
    busy = _paths_in_use() if locks else set()
    return [lock for lock in locks if not _is_in_use(lock.parent, busy)]


def _paths_in_use() -> set[str]:
    """Working folders and path arguments of every process: builds (ninja, c++, nvcc) run in the operator's folder."""
    paths = set()
    for process in Path("/proc").glob("[0-9]*"):
        paths.add(link_target(process / "cwd"))
        words = text_of(process / "cmdline").split("\0")
        # An option may stand before the path: -I/folder, --output=/folder.
        paths.update(word[word.find("/") :] for word in words if "/" in word)
    return paths


def _is_in_use(folder: Path, busy: Iterable[str]) -> bool:
    # The kernel shows the folder behind a link, as where ~/.cache leads to a scratch disk.
    names = {str(folder), str(folder.resolve())}
    return any(path == name or path.startswith(name + "/") for path in busy for name in names)


def _age_s(path: Path) -> float:
    """Seconds since a file was written; 0 where it is gone by now."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0

"""DeepSpeed's compiled operators: where they are kept, which a job needs, and locks that a killed build left.

torch builds them at first use into TORCH_EXTENSIONS_DIR/<name>/, guarded by a file named `lock` there. A build that
was killed leaves the file, and every later process waits for it in silence (torch/utils/file_baton.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError

VARIABLE = "TORCH_EXTENSIONS_DIR"
BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
}
"""Folder name -> class name of DeepSpeed's builder."""
INCLUDES = ("/usr/include", "/usr/local/include", f"{sys.prefix}/include")
CUDA = "/usr/local/cuda"
"""Where headers and the CUDA toolkit are looked for when no variable says so."""


def folder(environ: Mapping[str, str], cache: Path) -> Path:
    """Where the operators are: the user's own TORCH_EXTENSIONS_DIR, else a folder for just this environment.

    Shared by nobody: virtual environments with other versions overwrite one another's builds otherwise, and a
    build for one processor (they are compiled for the machine's own) dies on another that shares the home folder.
    """
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).expanduser().absolute()
    identity = [sys.prefix, sys.version, _cpu_flags()]
    for package in ("torch", "deepspeed"):
        try:
            identity.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            identity.append("none")
    return cache / "torch_extensions" / hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def needed(ds_config: Mapping[str, Any], accelerator: str) -> list[str]:
    """The operators that DeepSpeed will want at start for this config."""
    zero = ds_config.get("zero_optimization", {})
    offload = {
        key: (zero.get(key) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")
    }
    optimizer = ds_config.get("optimizer", {})
    names = []
    if optimizer.get("type", "").lower() in {"adam", "adamw"}:
        if offload["offload_optimizer"] in {"cpu", "nvme"}:
            names.append("cpu_adam")
        elif not optimizer.get("params", {}).get("torch_adam", False):
            names.append("fused_adam")
    if "nvme" in offload.values():
        names.append("async_io")
    if accelerator == "cpu":
        names.append("deepspeed_shm_comm")
    return names


def missing(names: list[str], directory: Path) -> list[str]:
    """Those of the operators that are not built there yet."""
    return [name for name in names if not (directory / name / f"{name}.so").is_file()]


def check_tools(names: list[str], accelerator: str) -> None:
    """Raise DsrunError if something that building these operators takes is not installed."""
    if not shutil.which(os.environ.get("CXX", "c++")):
        raise DsrunError(
            f"DeepSpeed has to compile {', '.join(names)}, and there is no C++ compiler",
            hint="Install one: apt-get install g++ (or set CXX).",
        )
    if "async_io" in names and not any((Path(root) / "libaio.h").is_file() for root in INCLUDES):
        raise DsrunError(
            "offloading to NVMe needs libaio's header, which is not installed",
            hint="Install it: apt-get install libaio-dev (conda install libaio), or choose a preset without NVMe.",
        )
    if accelerator == "cuda" and not has_nvcc():
        raise DsrunError(
            f"DeepSpeed has to compile {', '.join(names)} for the GPU, and there is no nvcc",
            hint="Install the CUDA toolkit of torch's CUDA version and set CUDA_HOME.",
        )


def has_nvcc() -> bool:
    """Whether a CUDA compiler is found the way torch looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin/nvcc").is_file():
        return True
    return shutil.which("nvcc") is not None or (Path(CUDA) / "bin/nvcc").is_file()


def stale_locks(directory: Path) -> list[Path]:
    """The `lock` files in the folder behind which no process of this machine is building."""
    locks = sorted(directory.glob("*/lock"))
    if not locks:
        return []
    busy = _places_in_use()
    return [lock for lock in locks if not any(_inside(place, lock.parent) for place in busy)]


def _inside(place: str, folder: Path) -> bool:
    """Whether a path is the folder, under the name given or its real one, or lies in it."""
    return any(place == name or place.startswith(f"{name}/") for name in {str(folder), str(folder.resolve())})


def _places_in_use() -> set[str]:
    """Working folders and path arguments of every process: builds (ninja, c++, nvcc) run in the operator's folder."""
    import psutil

    found: set[str] = set()
    for process in psutil.process_iter(["cwd", "cmdline"]):
        words = [process.info["cwd"] or "", *(process.info["cmdline"] or [])]
        found |= {place for word in words if (place := word[word.find("/") :]).startswith("/")}
    return found

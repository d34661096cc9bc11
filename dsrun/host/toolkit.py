"""The compilers, libraries and CUDA toolkit of this machine, which compiling DeepSpeed's operators takes.

Sent to hosts as part of the probe: Python 3.8, its own library.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dsrun.host.system import folders_of, output_of, text_of

CUDA = "/usr/local/cuda"
"""CUDA's usual folder, for when no variable names one."""
HEADERS = ("cuda_runtime.h", "cusparse.h", "cublas_v2.h", "cusolverDn.h", "curand.h")
"""Headers that torch's own (ATen/cuda/CUDAContextLight.h) and DeepSpeed's operators include."""
LIBRARIES = ("cudart", "curand")
"""Libraries that operators are linked with: -lcudart by torch, -lcurand by CPU Adam before DeepSpeed 0.19.8."""
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib")


def build_tools(environ: Mapping[str, str], prefix: str, beside: str) -> dict[str, Any]:
    """The programs and libraries that compiling takes; None for what isn't there.

    prefix: the Python's sys.prefix; beside: the folder of its executable.
    """
    compiler, nvcc = compiler_of(environ), find_nvcc(environ)
    libraries = [Path(root, kind) for root in _roots(prefix) for kind in ("lib", "lib64")]
    libraries += [
        folder for root in _roots(prefix) for folder in sorted(Path(root, "lib").glob("*-linux-gnu*"))
    ]
    libraries += folders_of(environ, "LD_LIBRARY_PATH")
    return {
        "compiler": shutil.which(compiler),
        "compiler_name": compiler,
        # pip and conda put it beside Python, where no PATH need lead.
        "ninja": shutil.which("ninja") or shutil.which("ninja", path=f"{beside}:{prefix}/bin"),
        "nvcc": nvcc,
        "nvcc_version": nvcc_version(nvcc) if nvcc else None,
        "numactl": shutil.which("numactl"),
        "libaio_header": libaio_header(prefix),
        "libaio": _first(libraries, "libaio.so*"),
    }


def compiler_of(environ: Mapping[str, str]) -> str:
    """The C++ compiler that torch starts."""
    return environ.get("CXX") or "c++"


def libaio_header(prefix: str) -> str | None:
    """The header with which DeepSpeed's operator for NVMe is compiled."""
    return _first([Path(root, "include") for root in _roots(prefix)], "libaio.h")


def _roots(prefix: str) -> tuple[str, ...]:
    return "/usr", "/usr/local", prefix


def _first(folders: Iterable[Path], pattern: str) -> str | None:
    return next((str(path) for folder in folders for path in sorted(folder.glob(pattern))), None)


def used_toolkit(environ: Mapping[str, str]) -> dict[str, Any]:
    """`cuda_toolkit` of the nvcc that torch finds, and the version of the compiler that it is used with."""
    nvcc = find_nvcc(environ)
    if not nvcc:
        return {"home": None}
    compiler, version = compiler_of(environ), None
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        version = int(output_of(compiler, "-dumpversion").split(".")[0])
    return {**cuda_toolkit(nvcc, environ), "compiler": compiler, "compiler_major": version}


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """The nvcc that torch finds (utils/cpp_extension.py): by CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    for home in (environ.get("CUDA_HOME"), environ.get("CUDA_PATH")):
        if home and Path(home, "bin/nvcc").is_file():
            return f"{home}/bin/nvcc"
    usual = Path(CUDA, "bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


def nvcc_version(nvcc: str) -> str | None:
    """The release that an nvcc calls itself: "12.6"."""
    try:
        match = re.search(r"release (\d+\.\d+)", output_of(nvcc, "--version"))
    except (OSError, subprocess.SubprocessError):
        return None
    return match.group(1) if match else None


def cuda_toolkit(nvcc: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The headers and libraries that nvcc's toolkit lacks, and the newest gcc that it takes.

    gcc: the major version, from the toolkit's own host_config.h, which stops the compiler; None where it doesn't say.
    """
    home = Path(environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or Path(nvcc).parent.parent)
    # A toolkit of NVIDIA's installer has links to targets/; one of conda or pip may have that folder alone.
    includes = [home / "include", *home.glob("targets/*/include"), *folders_of(environ, "CPATH")]
    libraries = [home / "lib64", home / "lib", home / "lib64/stubs", *home.glob("targets/*/lib")]
    libraries += [*map(Path, SYSTEM_LIBRARIES), *folders_of(environ, "LIBRARY_PATH")]
    limits = (text_of(folder / "crt/host_config.h") for folder in includes)
    newest = re.search(r"__GNUC__ > (\d+)", next(filter(None, limits), ""))
    headers = [name for name in HEADERS if any((folder / name).is_file() for folder in includes)]
    linked = [
        name
        for name in LIBRARIES
        if any((folder / f"lib{name}.{end}").exists() for folder in libraries for end in ("so", "a"))
    ]
    return {
        "home": str(home),
        "no_headers": [name for name in HEADERS if name not in headers],
        "no_libraries": [name for name in LIBRARIES if name not in linked],
        "gcc": int(newest.group(1)) if newest else None,
    }


def torch_build(path: Iterable[str]) -> dict[str, Any]:
    """The CUDA of the torch on an import path, from its version.py: importing it takes seconds, and a GPU's memory.

    cpu_build: None where there is no torch.
    """
    for folder in path:
        if text := text_of(Path(folder, "torch", "version.py")):
            match = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return {"cuda": match.group(1) if match else None, "cpu_build": match is None}
    return {"cuda": None, "cpu_build": None}

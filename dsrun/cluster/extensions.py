"""DeepSpeed's compiled operators: where they are kept, which a job needs, and locks that a killed build left.

torch builds them at first use into TORCH_EXTENSIONS_DIR/<name>/, guarded by a file named `lock` there. A build that
was killed leaves the file, and every later process waits for it silently (torch/utils/file_baton.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun import packages
from dsrun.cluster.doctor.build import goes_with
from dsrun.ds_config import offload_sections, rounding, uses_nvme
from dsrun.errors import DsrunError
from dsrun.host.operators import operators_folder
from dsrun.host.toolkit import compiler_of, cuda_toolkit, find_nvcc, libaio_header, nvcc_version, torch_build
from dsrun.versions import version

VARIABLE = "TORCH_EXTENSIONS_DIR"
BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "fused_adam": "FusedAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "quantizer": "QuantizerBuilder",
}
"""Folder name -> class name of DeepSpeed's builder."""
PLAIN_CPU_ADAM = (0, 19, 8)
"""The first DeepSpeed whose CPU Adam is plain C++ beside a GPU, too (op_builder/cpu/cpu_adam.py). Before it, CPU Adam
was linked with CUDA's libraries (TorchCPUOpBuilder)."""


def folder(environ: Mapping[str, str], cache: Path) -> Path:
    """The folder of the operators: the user's own TORCH_EXTENSIONS_DIR, else one for just this environment."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).expanduser().absolute()
    versions = [packages.installed_version(name) or "none" for name in ("torch", "deepspeed")]
    return operators_folder(cache, sys.prefix, sys.version, *versions)


def needed(ds_config: Mapping[str, Any]) -> list[str]:
    """The operators that DeepSpeed will want at start for this config."""
    optimizer = ds_config.get("optimizer", {})
    names = []
    if optimizer.get("type", "").lower() in {"adam", "adamw", "muon"}:  # what Muon leaves, Adam steps
        if offload_sections(ds_config)[0].get("device") in {"cpu", "nvme"}:
            names.append("cpu_adam")
        elif not optimizer.get("params", {}).get("torch_adam", False):
            names.append("fused_adam")
    if uses_nvme(ds_config):
        names.append("async_io")
    if rounding(ds_config):
        names.append("quantizer")
    return names


def missing(names: list[str], directory: Path) -> list[str]:
    """The operators that are not built there yet."""
    return [name for name in names if not (directory / name / f"{name}.so").is_file()]


def check_tools(names: list[str], accelerator: str) -> None:
    """Raise DsrunError if something that building these operators takes is not installed."""
    if not shutil.which(compiler_of(os.environ)):
        raise DsrunError(
            f"DeepSpeed has to compile {', '.join(names)}, and there is no C++ compiler",
            hint="Install one: apt-get install g++ (or set CXX).",
        )
    if "async_io" in names and not libaio_header(sys.prefix):
        raise DsrunError(
            "offloading to NVMe needs libaio's header, which is not installed",
            hint="Install it: apt-get install libaio-dev (conda install libaio), or choose a preset without NVMe.",
        )
    if (for_nvcc := with_cuda(names, accelerator)) and (fault := nvcc_fault(os.environ)):
        newer = " DeepSpeed 0.19.8 and newer compile it without." if for_nvcc == ["cpu_adam"] else ""
        raise DsrunError(
            f"DeepSpeed has to compile {', '.join(for_nvcc)} for the GPU, and there is {fault}",
            hint=f"Install the whole CUDA toolkit of torch's CUDA version, and set CUDA_HOME.{newer}",
        )


def with_cuda(names: list[str], accelerator: str) -> list[str]:
    """The operators that take the CUDA toolkit to compile."""
    if accelerator != "cuda":
        return []
    older = () < version(packages.installed_version("deepspeed") or "") < PLAIN_CPU_ADAM
    return [name for name in names if name != "cpu_adam" or older]


def nvcc_fault(environ: Mapping[str, str]) -> str:
    """The reason why operators for GPUs can't be compiled with the nvcc that torch finds; empty where they can.

    As DeepSpeed judges the versions (op_builder/builder.py, assert_no_cuda_mismatch), and what torch's headers include.
    """
    nvcc, cuda = find_nvcc(environ), torch_build(sys.path)["cuda"]
    if nvcc is None:
        return "no nvcc"
    number = nvcc_version(nvcc)
    if cuda and number and environ.get("DS_SKIP_CUDA_CHECK") != "1" and not goes_with(number, cuda):
        return f"nvcc {number} for a torch of CUDA {cuda}"
    toolkit = cuda_toolkit(nvcc, environ)
    lacking = [
        *toolkit["no_headers"],
        *(f"lib{name}.so" for name in toolkit["no_libraries"] if name == "cudart"),
    ]
    return f"an nvcc whose toolkit ({toolkit['home']}) lacks {', '.join(lacking)}" if lacking else ""

"""Kinds of GPU: the TOML files under presets/gpus/, with what a config or a plan depends on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem
from dsrun.json_numbers import is_finite

KIND = "presets/gpus"
LINKS = ("nvlink", "pcie")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU; every field but the name is a key of its file."""

    name: str
    summary: str
    memory_gb: float
    """Memory as the box says it, 10^9 bytes or not."""
    memory_gib: float
    """Memory that torch sees in all."""
    compute_capability: str
    bf16: bool
    """Whether its matrix units compute in bfloat16."""
    matrix_tflops: float
    """Rate of dense 16-bit products, summed in fp32."""
    fp32_tflops: float
    """Rate of fp32 without matrix units."""
    memory_gb_s: float
    """Bandwidth of its own memory."""
    link: str
    """The link between GPUs of a node: one of LINKS."""
    link_gb_s: float
    """Bandwidth of each of them in an all-reduce (nccl-tests' bus bandwidth)."""
    pcie_gb_s: float
    """Bandwidth to the host or from it, as copies from pinned memory reach it."""
    nvml: tuple[str, ...]
    """Patterns (`*`, `?`) of the names that NVML, and so nvidia-smi, calls it by."""
    watts: float | None = None
    """Power of the board at most, by its data sheet; None where the file doesn't say."""

    def takes_fp16(self, environ: Mapping[str, str]) -> bool:
        """Whether DeepSpeed trains in fp16 on it (is_fp16_supported in accelerator/cuda_accelerator.py)."""
        major = int(self.compute_capability.partition(".")[0])
        return major >= 7 or (major == 6 and environ.get("DS_ALLOW_DEPRECATED_FP16") == "1")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_positive(value: Any) -> bool:
    return is_finite(value) and value > 0


def _is_capability(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+\.\d", value) is not None


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _number(example: str) -> tuple[Callable[[Any], bool], str]:
    return _is_positive, f"A number above 0, as {example}."


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "summary": (_is_text, "A line of text: what it is called, and its memory."),
    "memory_gb": _number("80"),
    "memory_gib": _number("79.25"),
    "compute_capability": (
        _is_capability,
        'Two numbers in quotes, as nvidia-smi --query-gpu=compute_cap says: "8.0"',
    ),
    "bf16": (lambda value: isinstance(value, bool), "true or false."),
    "matrix_tflops": _number("312"),
    "fp32_tflops": _number("19.5"),
    "memory_gb_s": _number("2039"),
    "link": (lambda value: value in LINKS, f"One of {', '.join(LINKS)}, in quotes."),
    "link_gb_s": _number("230"),
    "pcie_gb_s": _number("24"),
    "watts": (lambda value: value is None or _is_positive(value), "A number above 0, as 400, or nothing."),
    "nvml": (_is_names, 'A list of names as nvidia-smi -L says them: ["NVIDIA A100-SXM4-80GB"]'),
}
"""Key -> whether a value is right, and the hint otherwise (the numbers are an A100's)."""


def load(name: str) -> GpuModel:
    """The GPU of that name.

    Raises DsrunError for an unknown one, and for a file with all that is missing, wrong or unknown in it.
    """
    known = catalog.files(KIND)
    begin = [other for other in known if other.startswith(name.casefold())] if len(name) > 1 else []
    if begin and name not in known:
        raise DsrunError(f"unknown GPU {name!r}", hint=f"There are: {', '.join(begin)}")
    path = catalog.find(KIND, name, "GPU", ", ".join(known))
    values = catalog.read_toml(path)
    problems = [
        Problem(f"{key} is {_shown(values[key]) if key in values else 'missing'}", str(path), hint)
        for key, (is_right, hint) in CHECKS.items()
        if not is_right(values.get(key))
    ]
    problems += [
        Problem(f"{key} is not a key of a GPU", str(path), catalog.suggestion(key, CHECKS, "Remove it."))
        for key in values
        if key not in CHECKS
    ]
    if problems:
        raise DsrunError(problems)
    return GpuModel(name, **{**values, "nvml": tuple(values["nvml"])})


def recognise(name: str) -> GpuModel | None:
    """The kind of GPU that NVML calls `name` ("Tesla V100-SXM2-32GB"), or its file; None where no file describes it.

    A lab's own file comes before dsrun's. The name alone can mislead on memory: a RTX 3080 has 10 or 12 GB, and a
    partition of a GPU has its own. Where the machine is at hand, its own figure is the better one.
    """
    if name in catalog.files(KIND):
        return load(name)
    order = catalog.folders(KIND)
    files = sorted(catalog.files(KIND).items(), key=lambda item: (order.index(item[1].parent), item[0]))
    for known, path in files:
        patterns = catalog.read_toml(path).get("nvml")
        if isinstance(patterns, list) and any(_matches(name, pattern) for pattern in patterns):
            return load(known)
    return None


def _matches(name: str, pattern: object) -> bool:
    return isinstance(pattern, str) and fnmatchcase(name.strip().casefold(), pattern.casefold())


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)

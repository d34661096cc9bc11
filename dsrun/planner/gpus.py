"""Kinds of GPU: the TOML files under presets/gpus/, with what a config or a plan depends on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dsrun import catalog
from dsrun.errors import DsrunError, Problem

KIND = "presets/gpus"
LINKS = ("nvlink", "pcie")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU; every field but the name is a key of its file.

    memory_gb: as on the box, 10^9 bytes or not. memory_gib: what torch sees in all.
    bf16: whether its matrix units compute in bfloat16. matrix_tflops: dense 16-bit products, summed in fp32;
    fp32_tflops: without matrix units. memory_gb_s: of its own memory.
    link: how GPUs of a node reach one another, see LINKS; link_gb_s: what each of them gets of it in an all-reduce
    (nccl-tests' bus bandwidth). pcie_gb_s: to the host or from it, as copies from pinned memory reach it.
    nvml: patterns (`*`, `?`) of the names that NVML, and so nvidia-smi, calls it by.
    """

    name: str
    summary: str
    memory_gb: float
    memory_gib: float
    compute_capability: str
    bf16: bool
    matrix_tflops: float
    fp32_tflops: float
    memory_gb_s: float
    link: str
    link_gb_s: float
    pcie_gb_s: float
    nvml: tuple[str, ...]


NUMBERS = {
    "memory_gb": "80",
    "memory_gib": "79.25",
    "matrix_tflops": "312",
    "fp32_tflops": "19.5",
    "memory_gb_s": "2039",
    "link_gb_s": "230",
    "pcie_gb_s": "24",
}
"""Keys that are numbers above 0, with an A100's values as examples."""
KEYS = tuple(key for key in Gpu.__dataclass_fields__ if key != "name")


def load(name: str) -> Gpu:
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
        Problem(f"{key} is {'missing' if value is None else _shown(value)}", str(path), hint)
        for key in KEYS
        if (hint := _fault(key, value := values.get(key)))
    ]
    problems += [
        Problem(f"{key} is no key of a GPU", str(path), catalog.suggestion(key, KEYS, "Remove it."))
        for key in values
        if key not in KEYS
    ]
    if problems:
        raise DsrunError(problems)
    return Gpu(name, **{**values, "nvml": tuple(values["nvml"])})


def recognise(name: str) -> Gpu | None:
    """The kind of GPU that NVML calls `name` ("Tesla V100-SXM2-32GB"); None for one that no file describes.

    A lab's own file comes before dsrun's. The name alone can mislead on memory: a RTX 3080 has 10 or 12 GB, and a
    partition of a GPU has its own. Where the machine is at hand, its own figure is the better one.
    """
    order = catalog.folders(KIND)
    files = sorted(catalog.files(KIND).items(), key=lambda item: (order.index(item[1].parent), item[0]))
    for known, path in files:
        patterns = catalog.read_toml(path).get("nvml")
        if isinstance(patterns, list) and any(_matches(name, pattern) for pattern in patterns):
            return load(known)
    return None


def _matches(name: str, pattern: object) -> bool:
    return isinstance(pattern, str) and fnmatchcase(name.strip().casefold(), pattern.casefold())


def _fault(key: str, value: Any) -> str:
    """What would be right, where the value isn't; empty where it is."""
    if key in NUMBERS:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if number and 0 < value < math.inf else f"A number above 0: {key} = {NUMBERS[key]}"
    if key == "bf16":
        return "" if isinstance(value, bool) else "true or false."
    if key == "link":
        return "" if value in LINKS else f"One of {', '.join(LINKS)}, in quotes."
    if key == "nvml":
        good = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
        return "" if good else 'A list of names as nvidia-smi -L says them: ["NVIDIA A100-SXM4-80GB"]'
    if key == "compute_capability":
        good = isinstance(value, str) and re.fullmatch(r"\d+\.\d", value) is not None
        return "" if good else 'Two numbers in quotes, as nvidia-smi --query-gpu=compute_cap says: "8.0"'
    return (
        ""
        if isinstance(value, str) and value.strip()
        else "A line of text: what it is called, and its memory."
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)

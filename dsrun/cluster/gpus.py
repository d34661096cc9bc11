"""Kinds of GPU: the TOML files under presets/gpus/, with what a config or a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass

from dsrun import catalog
from dsrun.errors import DsrunError

KIND = "presets/gpus"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. memory_gb: as on the box; bf16: whether its matrix units compute in bfloat16."""

    name: str
    summary: str
    memory_gb: float
    compute_capability: str
    bf16: bool


def load(name: str) -> Gpu:
    """The GPU of that name. Raises DsrunError for an unknown one, or a file that lacks a field."""
    path = catalog.find(KIND, name, "GPU", ", ".join(catalog.files(KIND)))
    values = catalog.read_toml(path)
    wanted: dict[str, type | tuple[type, ...]] = {
        "summary": str,
        "memory_gb": (int, float),
        "compute_capability": str,
        "bf16": bool,
    }
    for key, kind in wanted.items():
        if not isinstance(values.get(key), kind):
            hint = "See presets/gpus/a100-80g.toml for one that is whole."
            raise DsrunError(f"{key} is missing or of a wrong type", where=str(path), hint=hint)
    return Gpu(name, values["summary"], values["memory_gb"], values["compute_capability"], values["bf16"])

"""A finished ds_config's division of a model: ZeRO's stage, offloading, NVMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ZERO = "zero_optimization"
ROUNDING = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
"""Keys of ZeRO++ with which ranks send one another, or keep, rounded numbers; DeepSpeed's quantiser makes them."""


def zero_stage(ds_config: Mapping[str, Any]) -> int:
    """ZeRO's stage; 0 where there is no such section."""
    return int(section(ds_config, ZERO).get("stage", 0))


def offload_sections(ds_config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The sections offload_optimizer and offload_param; empty where they are missing or no sections."""
    zero = section(ds_config, ZERO)
    return section(zero, "offload_optimizer"), section(zero, "offload_param")


def uses_nvme(ds_config: Mapping[str, Any]) -> bool:
    """Whether optimizer states or weights are kept in swap files."""
    return any(section.get("device") == "nvme" for section in offload_sections(ds_config))


def offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether optimizer states or weights are kept off the GPU, so that the host's cores step the optimizer."""
    return any(part.get("device") in {"cpu", "nvme"} for part in offload_sections(ds_config))


def rounding(ds_config: Mapping[str, Any]) -> list[str]:
    """The keys of ROUNDING that are on; ZeRO-3 alone reads them."""
    zero = section(ds_config, ZERO)
    return [key for key in ROUNDING if zero.get(key) is True] if zero.get("stage") == 3 else []


def nvme_path(ds_config: Mapping[str, Any]) -> str | None:
    """The folder of the swap files; None where there are none."""
    sections = offload_sections(ds_config)
    return next((section.get("nvme_path") for section in sections if section.get("device") == "nvme"), None)


def section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section by its name; empty where it is missing or no section."""
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}

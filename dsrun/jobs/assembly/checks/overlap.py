"""Gradients that are reduced while the backward goes on, in ZeRO-1 and 2: where DeepSpeed does it right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dsrun import packages
from dsrun.config.presets import preset
from dsrun.config.rules.zero.buckets import FIXED_OVERLAP
from dsrun.versions import version

PATH = "zero_optimization.overlap_comm"
OVERLAP = f"{PATH}=true"


def why_overlap(
    ds_config: Mapping[str, Any], name: str, accelerator: str, ranks: int, overrides: Iterable[str]
) -> str:
    """Why a shipped preset's overlap_comm is switched on; empty where it stays.

    The presets have it off: before FIXED_OVERLAP buckets were read while they were filled (rule DS202). Where somebody
    says it, or the optimizer is offloaded, whose copies have streams of their own, nothing changes.
    """
    zero = ds_config.get("zero_optimization", {})
    if accelerator != "cuda" or ranks < 2 or zero.get("stage") not in (1, 2) or zero.get("overlap_comm"):
        return ""
    if zero.get("offload_optimizer") or any(text.startswith(PATH) for text in overrides):
        return ""
    there = packages.installed_version("deepspeed")
    if not preset.load(name).shipped or there is None or version(there) < FIXED_OVERLAP:
        return ""
    return f"deepspeed {there} reduces gradients beside the backward without the faults of earlier ones"

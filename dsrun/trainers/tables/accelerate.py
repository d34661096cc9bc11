"""The YAML of `accelerate config`: how a script is started, without what is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsrun.trainers.tables import launchers


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """With the keys of its sections beside the others, as accelerate launch's options are named."""
    made = dict(values)
    for section in ("deepspeed_config", "fsdp_config"):
        inner = values.get(section)
        if isinstance(inner, Mapping):
            made |= {str(key): value for key, value in inner.items()}
            made[section] = None
    if values.get("distributed_type") == "FSDP":
        made["use_fsdp"] = True
    return made


TRAINER = replace(
    launchers.TRAINER,
    name="accelerate",
    title="accelerate",
    prepare=flat,
    telling=("compute_environment", "distributed_type", "mixed_precision"),
    starts=(),
)

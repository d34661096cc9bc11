"""Parts of the rules' examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Example = dict[str, Any]


def zero(stage: Any, **keys: Any) -> Example:
    return {"zero_optimization": {"stage": stage, **keys}}


def nvme(**keys: Any) -> Example:
    """An offload section."""
    return {"device": "nvme", "nvme_path": "/nvme", **keys}


def made(name: str, **params: Any) -> Example:
    """An optimizer section."""
    return {"optimizer": {"type": name, "params": params}}


def fp16(**fields: Any) -> Example:
    return {"fp16": {"enabled": True, **fields}}


def bf16(**fields: Any) -> Example:
    return {"bf16": {"enabled": True, **fields}}


def tensor(size: int, **keys: Any) -> Example:
    return {"tensor_parallel": {"autotp_size": size, **keys}}


def deep(**keys: Any) -> Example:
    """DeepCompile."""
    return {"compile": {"deepcompile": True, **keys}}


def hf(trainer: Mapping[str, Any] | None = None, **keys: Any) -> Example:
    """Under HF Trainer, with these TrainingArguments where they are known."""
    return {"_for": "hf", **({} if trainer is None else {"_trainer": trainer}), **keys}


ZERO_1 = zero(1)
ZERO_2 = zero(2)
SAVED_3 = zero(3, stage3_gather_16bit_weights_on_model_save=True)
CPU = zero(2, offload_optimizer={"device": "cpu"})
ADAMW = made("AdamW", lr=1e-3)

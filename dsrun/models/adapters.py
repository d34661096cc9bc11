"""Adapters on disk: PEFT's LoRA folders, and P-Tuning checkpoints of ChatGLM2's script or dsrun's.

Their configs are read and checked here, without torch; dsrun/training/models/adapters.py loads the tensors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import read_json_object

CONFIG = "adapter_config.json"
LORA, PREFIX = "lora", "ptuning"
PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, "", []),
    "exclude_modules": (None, "", []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
}
"""Fields of PEFT's LoraConfig that must have one of these values: with another one it is more than plain LoRA."""
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX_WEIGHTS = ("pytorch_model.bin", "model.safetensors", "pytorch_model.safetensors")


@dataclass(frozen=True)
class Adapter:
    """What was trained beside a model."""

    method: str
    """LORA or PREFIX."""
    weights: Path
    """The file with the tensors."""
    fields: Mapping[str, Any]
    """What its config says, under the names of PeftOptions; empty without a config of its own."""
    base: str | None = None
    """Where the model is that it was trained on, if known."""


def read_adapter(path: Path) -> Adapter:
    """The adapter in PEFT's folder, in a P-Tuning checkpoint's folder, or in a file of the latter.

    Raises DsrunError where it is none, or one that training can't continue from.
    """
    where = str(path)
    if os.path.isfile(path):  # noqa: PTH113 - a name that is too long raises in pathlib
        if path.suffix not in (".bin", ".pt", ".pth", ".safetensors"):
            hint = "A folder with adapter_config.json, or a P-Tuning checkpoint's pytorch_model.bin."
            raise DsrunError("is not an adapter", where=where, hint=hint)
        beside = path.parent / CONFIG
        return read_adapter(path.parent) if beside.is_file() else Adapter(PREFIX, path, {})
    if not os.path.isdir(path):  # noqa: PTH112
        raise DsrunError("no such folder or file", where=where, hint="Check the path.")
    if (path / CONFIG).is_file():
        return _with_config(path)
    found = next((path / name for name in PREFIX_WEIGHTS if (path / name).is_file()), None)
    if found is None:
        hint = "PEFT's have adapter_config.json, ChatGLM2's P-Tuning checkpoints pytorch_model.bin."
        raise DsrunError("holds no adapter", where=where, hint=hint)
    return Adapter(PREFIX, found, _prefix_fields(path / "config.json"))


def _with_config(path: Path) -> Adapter:
    config = read_json_object(path / CONFIG)
    base = config.get("base_model_name_or_path")
    if config.get("adapter_type") == PREFIX:
        return Adapter(PREFIX, _weights(path, PREFIX_WEIGHTS), _prefix_fields(path / CONFIG), base)
    kind = config.get("peft_type")
    if kind == "PREFIX_TUNING":
        hint = "Import the P-Tuning checkpoint that ChatGLM2's own script writes, or train a new one."
        what = "is PEFT's prefix tuning, which computes something else: positions start at the prefix's end"
        raise DsrunError(what, where=str(path), hint=hint)
    if kind != "LORA":
        raise DsrunError(
            f"is an adapter of kind {kind!r}; dsrun knows LoRA and P-Tuning v2", where=str(path / CONFIG)
        )
    raise_all(
        [
            Problem(f"{name} is {config[name]!r}: that is more than plain LoRA", str(path / CONFIG))
            for name, plain in PLAIN.items()
            if name in config and config[name] not in plain
        ]
    )
    targets = config.get("target_modules")
    fields = {
        "lora_rank": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "lora_dropout": float(config.get("lora_dropout") or 0.0),
        "lora_target": ",".join(sorted(targets)) if isinstance(targets, list) else targets,
    }
    if not all(isinstance(fields[name], (int, float)) for name in ("lora_rank", "lora_alpha")) or not targets:
        raise DsrunError("lacks r, lora_alpha or target_modules", where=str(path / CONFIG))
    if targets == "all-linear":
        fields["lora_target"] = "all"
    return Adapter(LORA, _weights(path, WEIGHTS), fields, base)


def _weights(path: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (path / name).is_file():
            return path / name
    raise DsrunError(f"holds no weights: none of {', '.join(names)}", where=str(path))


def _prefix_fields(config: Path) -> dict[str, Any]:
    if not config.is_file():
        return {}
    length = read_json_object(config).get("pre_seq_len")
    return {"pre_seq_len": length} if isinstance(length, int) and length > 0 else {}

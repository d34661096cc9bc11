"""Adapters on disk: PEFT's LoRA folders, and P-Tuning checkpoints of ChatGLM2's script or dsrun's.

Their configs are read and checked here, without torch; dsrun/training/models/adapters.py loads the tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import read_json_object
from dsrun.options.table import PeftOptions

CONFIG = "adapter_config.json"
LORA, PREFIX = "lora", "ptuning"
ALL, EXPERTS = "all", "experts"
"""Words of --lora-target: all linear layers but the output's and routers; the matrices of a mixture's experts."""
PLAIN_LORA: dict[str, tuple[object, ...]] = {
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
    "layer_replication": (None, []),
    "lora_bias": (False, None),
}
"""Fields of PEFT's LoraConfig that must have one of these values: with another one it is more than plain LoRA."""
INSIDE = re.compile(r"[\w\\.]+\\\.\(\.\*\\\.\)\?\((?P<names>[\w|]+)\)")
"""The form of what `inside` writes."""
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX_WEIGHTS = ("pytorch_model.bin", "model.safetensors", "pytorch_model.safetensors")


@dataclass(frozen=True)
class Adapter:
    """Weights that were trained beside a model."""

    method: str
    """LORA or PREFIX."""
    weights: Path
    """The file with the tensors."""
    fields: Mapping[str, Any]
    """Its config, under the names of PeftOptions; empty without a config of its own."""
    base: str | None = None
    """The place of the model that it was trained on, if known."""


def inside(path: str, names: Sequence[str]) -> str:
    """Layers of these names inside a module, as a pattern for PEFT's target_modules."""
    return rf"{re.escape(path)}\.(.*\.)?({'|'.join(names)})"


def read_adapter(path: Path) -> Adapter:
    """The adapter in PEFT's folder, in a P-Tuning checkpoint's folder, or in a file of the latter.

    Raises DsrunError where it is none, or one that training can't continue from.
    """
    where = str(path)
    if os.path.isfile(path):  # noqa: PTH113 - a name that is too long raises in pathlib
        if path.suffix not in (".bin", ".pt", ".pth", ".safetensors"):
            hint = "A folder with adapter_config.json, or a P-Tuning checkpoint's pytorch_model.bin."
            raise DsrunError("is not an adapter", where=where, hint=hint)
        # A weights file of PEFT's folder stands for the folder; one without a config is a P-Tuning checkpoint's.
        beside = path.parent / CONFIG
        return read_adapter(path.parent) if beside.is_file() else Adapter(PREFIX, path, {})
    if not os.path.isdir(path):  # noqa: PTH112
        raise DsrunError("no such folder or file", where=where, hint="Check the path.")
    if (path / CONFIG).is_file():
        return _with_config(path)
    weights = next((path / name for name in PREFIX_WEIGHTS if (path / name).is_file()), None)
    if weights is None:
        hint = "PEFT's have adapter_config.json, ChatGLM2's P-Tuning checkpoints pytorch_model.bin."
        raise DsrunError("holds no adapter", where=where, hint=hint)
    return Adapter(PREFIX, weights, _prefix_fields(path / "config.json"))


def _with_config(path: Path) -> Adapter:
    config = read_json_object(path / CONFIG)
    base = config.get("base_model_name_or_path")
    if config.get("adapter_type") == PREFIX:
        return Adapter(PREFIX, _weights(path, PREFIX_WEIGHTS), _prefix_fields(path / CONFIG), base)
    kind = config.get("peft_type")
    if kind == "PREFIX_TUNING":
        hint = "Import the P-Tuning checkpoint that ChatGLM2's own script writes, or train a new one."
        message = (
            "is PEFT's prefix tuning, which computes something else: positions start at the prefix's end"
        )
        raise DsrunError(message, where=str(path), hint=hint)
    if kind != "LORA":
        raise DsrunError(
            f"is an adapter of kind {kind!r}; dsrun knows LoRA and P-Tuning v2", where=str(path / CONFIG)
        )
    raise_all(
        [
            Problem(f"{name} is {config[name]!r}: that is more than plain LoRA", str(path / CONFIG))
            for name, plain in PLAIN_LORA.items()
            if name in config and config[name] not in plain
        ]
    )
    # PEFT keeps experts' tensors in a list of their own; --lora-target has both in one text, told apart by their dots.
    targets, tensors = config.get("target_modules"), config.get("target_parameters") or []
    if targets == "all-linear":
        targets = [ALL]
    if isinstance(targets, str) and (parts := INSIDE.fullmatch(targets)):
        targets = parts["names"].split("|")
    if tensors:
        targets = [*(targets or []), *tensors] if isinstance(targets or [], list) else None
    fields = {
        "lora_rank": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "lora_dropout": float(config.get("lora_dropout") or 0.0),
        "lora_target": ",".join(sorted(targets)) if isinstance(targets, list) else targets,
    }
    if not all(isinstance(fields[name], (int, float)) for name in ("lora_rank", "lora_alpha")) or not targets:
        raise DsrunError("lacks r, lora_alpha or target_modules", where=str(path / CONFIG))
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


def names_tensors(target: str) -> bool:
    """Whether --lora-target surely names tensors that no linear layer holds: a mixture's experts, by that word, or what
    has a dotted name. Other names may be theirs, too, which only the model says."""
    return any(name.strip() == EXPERTS or "." in name for name in target.split(","))


EXPERTS_NOTE = (
    "LoRA on experts: PEFT makes a copy of a layer's experts in each forward, and backward needs it; what is predicted "
    "leaves it out (--activation-checkpointing full: one layer's at a time)"
)


def check_tensors(peft: PeftOptions, *, stage: int, fsdp: bool, compiles: bool) -> list[Problem]:
    """The problems of LoRA on tensors that no linear layer holds, such as a mixture's experts.

    PEFT computes with them by putting something else in their place for as long as a forward takes (ParamWrapper in
    peft/tuners/lora/layer.py).
    """
    where = "--lora-target"
    hint = "Take a preset of ZeRO-0, 1 or 2, or name linear layers alone."
    problems = []
    if stage == 3 or fsdp:
        engine = "FSDP" if fsdp else "ZeRO-3"
        text = f"experts can't have LoRA under {engine}, which gathers a layer's own tensors: PEFT replaces these"
        problems.append(Problem(text, where, hint))
    if compiles:
        text = "experts can't have LoRA in compiled layers: PEFT replaces their tensors in each forward"
        problems.append(Problem(text, where, "Leave --compile out, or name linear layers alone."))
    if peft.lora_dropout:
        text = f"is {peft.lora_dropout:g}, and PEFT has no dropout for experts"
        problems.append(Problem(text, "--lora-dropout", "Leave it out, or name linear layers alone."))
    return problems

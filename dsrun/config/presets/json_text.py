"""The text of a deepspeed.json: keys in an order that depends on the content only, whole numbers as such."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsrun.config.schemas import schema

# Keys that a reader looks for first; the others follow the schema, which follows DeepSpeed.
FIRST = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "scheduler", "fp16", "bf16", "zero_optimization",
)  # fmt: skip


def render_json(ds_config: Mapping[str, Any]) -> str:
    """The file's text, with a newline at its end. Equal configs give equal texts."""
    return _text(ordered(ds_config), "") + "\n"


def ordered(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with its keys in the file's order."""
    return _sorted(ds_config, schema.load().root, FIRST)


def _sorted(
    section: Mapping[str, Any], node: Mapping[str, Any], first: tuple[str, ...] = ()
) -> dict[str, Any]:
    properties = node.get("properties", {})
    places = {key: place for place, key in enumerate(dict.fromkeys([*first, *properties]))}
    return {
        key: _sorted(value, properties.get(key, {})) if isinstance(value := section[key], Mapping) else value
        for key in sorted(section, key=lambda key: (places.get(key, len(places)), key))
    }


def _text(value: Any, indent: str) -> str:
    """JSON as json.dumps(indent=2) has it, but with a list of plain values on one line."""
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        lines = [f"{inner}{_plain(key)}: {_text(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        return "[\n" + ",\n".join(f"{inner}{_text(item, inner)}" for item in value) + f"\n{indent}]"
    return _plain(value)


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)

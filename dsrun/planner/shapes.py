"""Shapes of released networks by name: the files in presets/shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsrun import catalog
from dsrun.planner.families import FAMILIES, LLAMAS
from dsrun.planner.shape import Shape, from_config, from_numbers

KIND = "presets/shapes"
NAME_ENDINGS = re.compile(r"-(hf|base|chat|instruct|it|sft|dpo|v0\.1|v1\.[0-9]|[0-9]+k|2407|fp16|bf16)$")
"""Endings of models' names behind the size, which say nothing of the shape."""


def table() -> dict[str, dict[str, Any]]:
    """name -> the shape's fields, under every name that it has."""
    fields_by_name: dict[str, dict[str, Any]] = {}
    for path in catalog.files(KIND).values():
        for name, fields in _flat("", catalog.read_toml(path)):
            if "null" in fields:
                fields["config"] |= dict.fromkeys(fields["null"])
            for each in (name, *fields.get("also", ())):
                fields_by_name.setdefault(each, fields)
    return fields_by_name


def _flat(prefix: str, tables: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tables by their whole names: TOML takes a dot in a bare key for a table in a table."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for key, value in tables.items():
        name = f"{prefix}{key}"
        rows += [(name, value)] if value.keys() & {"layers", "config"} else _flat(f"{name}.", value)
    return rows


def find(name: str) -> dict[str, Any] | None:
    """The fields of a model, by a name with or without organisation, in any case, with or without its tuning."""
    short = name.lower().rsplit("/", 1)[-1].replace("_", "-").replace(" ", "-")
    known = {key.replace("_", "-"): fields for key, fields in table().items()}
    while short not in known:
        cut = NAME_ENDINGS.sub("", short)
        if cut == short:
            return None
        short = cut
    return known[short]


def shape(name: str, parameters: int | None) -> tuple[Shape, tuple[str, ...]]:
    """The shape of a model with that count of parameters, and what was assumed.

    Raises DsrunError where the parameters of an unknown model fit no shape, ValueError where they aren't known either.
    """
    fields = find(name)
    if fields is None:
        if not parameters:
            raise ValueError(f"{name} is not in {KIND}, and its parameters are not given")
        return from_numbers(parameters), (f"{name} is not in {KIND}: a usual shape for its parameters",)
    if "config" in fields:
        return from_config(fields["config"], name, parameters), ()
    head_dim = fields.get("head_dim", fields["hidden"] // fields["heads"])
    block = FAMILIES[fields["like"]].block if "like" in fields else LLAMAS
    if fields.get("dropout"):
        block = replace(block, dropouts=2, attention_dropout=True)
    built = Shape(
        parameters=parameters or 0,
        layers=fields["layers"],
        hidden=fields["hidden"],
        intermediate=fields["intermediate"],
        heads=fields["heads"],
        kv_heads=fields.get("kv_heads", fields["heads"]),
        head_dim=head_dim,
        vocab=fields["vocab"],
        gated=fields.get("gated", True),
        tied=fields.get("tied", False),
        block=block,
    )
    notes: tuple[str, ...] = (fields["note"],) if "note" in fields else ()
    if not parameters:
        built = replace(built, parameters=matrices(built))
        notes += ("parameters counted from the shape",)
    return built, notes


def matrices(shape: Shape) -> int:
    """Weights of a shape's matrices: all but norms and biases, less than a thousandth."""
    attention = 2 * shape.hidden * (shape.query_width + shape.kv_width)
    inner = (3 if shape.gated else 2) * shape.hidden * shape.intermediate
    return shape.layers * (attention + inner) + shape.embedding * (1 if shape.tied else 2)

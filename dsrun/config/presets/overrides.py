"""`--set a.b.c=VALUE`: the path is checked against the schema, the value typed by it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from dsrun.config.presets.options import SET
from dsrun.config.schemas import schema
from dsrun.config.schemas.guess import guess
from dsrun.config.schemas.violations import fits
from dsrun.errors import DsrunError, Problem, collected, raise_all

READERS = {schema.HF: "HF Trainer", schema.ACCELERATE: "accelerate"}


def parse(texts: Iterable[str], target: str) -> dict[str, Any]:
    """Dotted path -> value, in the order given. Raises DsrunError with every text that is wrong."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for text in texts:
        with collected(problems):
            path, value = parse_one(text, target)
            values[path] = value
    raise_all(problems)
    return values


def parse_one(text: str, target: str) -> tuple[str, Any]:
    """One `path=value`; an alias is answered with the name it stands for."""
    path, equals, raw = text.partition("=")
    path = path.strip().removeprefix("$.")
    where = f"{SET} {path}"
    if not equals or not all(path.split(".")):
        raise DsrunError(
            f"is not KEY=VALUE: {text!r}",
            where=SET,
            hint="For example zero_optimization.reduce_bucket_size=2e8",
        )
    known = schema.load()
    if advice := known.removed(path):
        raise DsrunError("was removed from DeepSpeed", where=where, hint=advice)
    node = known.node(path)
    if node is None:
        raise DsrunError(
            "unknown key: DeepSpeed has none of this name", where=where, hint=guess(known, path).advice
        )
    return known.canonical(path), typed(raw.strip(), node, target, where)


def typed(raw: str, node: schema.Node, target: str, where: str) -> Any:
    """The value that `raw` means at a node. Raises DsrunError for a wrong one, with what would be right."""
    takes = schema.types(node)
    if raw == schema.AUTO and (node.get("x-auto") or target in schema.FILLING):
        return _auto(node, target, where)
    value = schema.as_whole(_json(raw, where), node)
    if not fits({"type": [*takes]}, value):
        # 5 for a job name, or a text without quotes: the schema knows that it is a text.
        value = raw if "string" in takes else value
    # The check of the whole config reports what is wrong inside a section, with its own path.
    if fits(node, value) or isinstance(value, dict):
        return value
    raise _refused(raw, node, where)


def _auto(node: schema.Node, target: str, where: str) -> str:
    filling = target in schema.FILLING
    if node.get("x-auto") and filling:
        return schema.AUTO
    who = f"{READERS[target]} doesn't fill it in here" if filling else "DeepSpeed fills in nothing"
    advice = f"Write {schema.expected(node)}"
    hint = f"{advice}." if filling else f"{advice}, or --for hf where HF Trainer reads the config."
    raise DsrunError(f'can\'t be "auto": {who}', where=where, hint=hint)


def _json(raw: str, where: str) -> Any:
    """`raw` as JSON where it is JSON, as the text it is otherwise."""

    def refuse(name: str) -> NoReturn:
        raise DsrunError(f"can't be {name}", where=where, hint="JSON has no such number.")

    def finite(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else refuse(text)

    try:
        return json.loads(raw, parse_constant=refuse, parse_float=finite)
    except (ValueError, RecursionError):
        return raw


def _refused(raw: str, node: schema.Node, where: str) -> DsrunError:
    hint = f"It takes {schema.expected(node)}."
    lowered = raw.lower()
    if lowered in ("true", "false", "null") and raw != lowered and lowered[0] in "tfn":
        hint += f" In small letters: {lowered}."
    return DsrunError(f"can't be {schema.shorten(raw)}", where=where, hint=hint)

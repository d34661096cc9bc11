"""The schema of deepspeed.json: what each key is, and whether a config fits.

The schema files are generated and checked in (schemas/); the newest one is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsrun.catalog import closest
from dsrun.config import quick, tree

AUTO = "auto"
HF = "hf"
Node = dict[str, Any]


@dataclass(frozen=True)
class Violation:
    """Where a config departs from the schema. kind: unknown, removed, value, auto or alias."""

    kind: str
    path: str
    value: Any
    message: str
    suggestion: str


@lru_cache(maxsize=1)
def load() -> Node:
    """The newest schema."""

    def version(path: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in path.name.split("-")[1].split(".")[:2])

    path = max(Path(__file__).with_name("schemas").glob("deepspeed-*.schema.json"), key=version)
    schema: Node = json.loads(path.read_text(encoding="utf-8"))
    return schema


def node(path: str) -> Node | None:
    """The schema of one key; None where there is no such key, {} below a section that takes any key."""
    found = load()
    for key in path.split("."):
        properties = found.get("properties", {})
        if key in properties:
            found = properties[key]
        elif _open(found):
            return {}
        else:
            return None
    return found


def describe(path: str) -> tuple[Any, str]:
    """DeepSpeed's default (tree.MISSING where it has none) and what a key does."""
    found = node(path) or {}
    return found.get("default", tree.MISSING), found.get("description", "")


def is_auto(path: str) -> bool:
    """Whether HF Trainer fills in "auto" at this key."""
    return bool((node(path) or {}).get("x-auto"))


def types(found: Node) -> set[str]:
    """The JSON types a node takes ("auto" aside); every type for a node that says nothing."""
    if "anyOf" in found:
        return {name for branch in found["anyOf"] if "const" not in branch for name in types(branch)}
    named = found.get("type", ["object", "array", "string", "number", "integer", "boolean", "null"])
    return {named} if isinstance(named, str) else set(named)


def canonical(path: str) -> str:
    """A path in which each alias is replaced by the name it stands for."""
    keys: list[str] = []
    for key in path.split("."):
        alias = (node(".".join([*keys, key])) or {}).get("x-alias-of")
        keys.append(alias or key)
    return ".".join(keys)


def expected(found: Node) -> str:
    """What a node takes, in words: `an integer, at least 1`, `one of none, cpu, nvme`."""
    if "anyOf" in found:
        return " or ".join(expected(branch) for branch in found["anyOf"] if branch.get("const") != AUTO)
    if "const" in found:
        return json.dumps(found["const"])
    if "enum" in found:
        return "one of " + ", ".join(
            value if isinstance(value, str) else json.dumps(value) for value in found["enum"]
        )
    names = {"object": "a section", "array": "a list", "boolean": "true or false", "string": "a text"}
    names |= {"integer": "a whole number", "number": "a number", "null": "null"}
    found_types = types(found)
    text = (
        " or ".join(name for key, name in names.items() if key in found_types)
        or "nothing: it can't be set here"
    )
    if isinstance(found.get("items"), Mapping) and "array" in found_types:
        count = f"{found['minItems']} times " if found.get("minItems") else ""
        text += f" of {count}{expected(found['items'])}"
    words = {"minimum": "at least", "exclusiveMinimum": "more than"}
    words |= {"maximum": "at most", "exclusiveMaximum": "less than"}
    return ", ".join([text, *(f"{word} {found[key]}" for key, word in words.items() if key in found)])


def nearest(path: str) -> str:
    """Where an unknown key was probably meant to be: the same key elsewhere, or the closest one."""
    section, _, key = path.rpartition(".")
    homes = [known for known in _index().get(key, ()) if known != path]
    if homes:
        return f"There is {' and '.join(homes[:3])}."
    parent = node(section) if section else load()
    beside = list((parent or {}).get("properties", {}))
    if near := closest(key, beside):
        return f"Did you mean {f'{section}.{near}' if section else near}?"
    if near := closest(key, _index()):
        return f"Did you mean {_index()[near][0]}?"
    if parent is None:
        return nearest(section)
    if not section:
        return "Remove it; a comment's key starts with an underscore."
    shown = ", ".join(beside[:12]) + (f" and {len(beside) - 12} more" if len(beside) > 12 else "")
    return f"{section} takes: {shown}." if beside else f"{section} takes no keys of its own."


def check(config: Mapping[str, Any], target: str) -> list[Violation]:
    """Every departure of a config from the schema, unknown keys and stray "auto"s included."""
    found = list(_autos(config, target))
    stray = {violation.path for violation in found}
    if not quick.accepts(load(), config):
        # One is enough for a key: a text where a number from a list belongs is wrong twice.
        wrong = {
            violation.path: violation for violation in _mismatches(config) if violation.path not in stray
        }
        found += wrong.values()
    found += _doubles(config)
    return found


def whole_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config with 2e8 as 200000000 where the schema wants a whole number."""
    result = dict(config)

    def fix(value: Any, found: Node) -> Any:
        if isinstance(value, Mapping):
            properties = found.get("properties", {})
            return {key: fix(item, properties.get(key, {})) for key, item in value.items()}
        return as_whole(value, found)

    return {key: fix(value, node(key) or {}) for key, value in result.items()}


def as_whole(value: Any, found: Node) -> Any:
    """2e8 as 200000000 at a node that takes whole numbers and no others; any other value as it is."""
    takes = types(found)
    if isinstance(value, float) and value.is_integer() and "integer" in takes and "number" not in takes:
        return int(value)
    return value


def removed(path: str) -> str | None:
    """What to do instead of a key (or below one) that DeepSpeed has removed; None for any other key."""
    gone: dict[str, str] = load().get("x-removed", {})
    return next((advice for key, advice in gone.items() if tree.under(path, key)), None)


def _open(found: Node) -> bool:
    return found.get("additionalProperties", True) is not False and "object" in types(found)


@lru_cache(maxsize=1)
def _index() -> dict[str, list[str]]:
    """Every key name -> the paths where it stands, aliases left out."""
    index: dict[str, list[str]] = {}

    def walk(found: Node, prefix: str) -> None:
        for key, child in found.get("properties", {}).items():
            if "x-alias-of" not in child:
                path = f"{prefix}.{key}" if prefix else key
                index.setdefault(key, []).append(path)
                walk(child, path)

    walk(load(), "")
    return index


def _autos(config: Mapping[str, Any], target: str) -> Iterator[Violation]:
    """HF fills in a fixed list and stops at any other "auto"; DeepSpeed itself fills in none.

    Source: transformers/integrations/deepspeed.py, accelerate/utils/dataclasses.py (deepspeed_config_process)
    and DeepSpeedConfigModel, which drops such keys in silence (runtime/config_utils.py).
    """
    for path, value in tree.leaves(config):
        if value != AUTO or path.startswith("_"):
            continue
        known = node(path)
        if target == HF and not is_auto(path):
            yield Violation("auto", path, value, 'HF Trainer doesn\'t fill in "auto" here', _wanted(known))
        elif target != HF and is_auto(path):
            yield Violation(
                "auto", path, value, 'DeepSpeed doesn\'t fill in "auto"; only HF Trainer does', _wanted(known)
            )


def _wanted(known: Node | None) -> str:
    return f"Write {expected(known)}." if known else "Write the value itself."


def _mismatches(config: Mapping[str, Any]) -> Iterator[Violation]:
    from jsonschema import Draft202012Validator

    for error in Draft202012Validator(load()).iter_errors(config):
        path = ".".join(str(key) for key in error.absolute_path)
        if error.validator == "additionalProperties":
            yield from _unknown(path, error.instance, error.schema)
            continue
        found = node(path) if path else None
        if error.validator == "required":
            missing = [key for key in error.validator_value if key not in error.instance]
            yield Violation("value", path, error.instance, f"lacks {', '.join(missing)}", "")
        elif path:
            whole = found or node(path.rpartition(".")[0]) or {}
            yield Violation(
                "value", path, error.instance, f"can't be {shorten(error.instance)}", _wanted(whole)
            )


def _unknown(section: str, value: Mapping[str, Any], found: Node) -> Iterator[Violation]:
    comments = tuple(pattern[1:] for pattern in found.get("patternProperties", {}))
    for key, item in value.items():
        if key in found.get("properties", {}) or key.startswith(comments):
            continue
        path = f"{section}.{key}" if section else key
        if advice := removed(path):
            yield Violation("removed", path, item, "was removed from DeepSpeed", advice)
        else:
            yield Violation("unknown", path, item, "is no key of DeepSpeed", nearest(path))


def _doubles(config: Mapping[str, Any], prefix: str = "") -> Iterator[Violation]:
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else key
        name = (node(path) or {}).get("x-alias-of")
        if name in config:
            yield Violation(
                "alias", path, value, f"stands beside {name}, which is the same", f"Keep {name} only."
            )
        if isinstance(value, Mapping):
            yield from _doubles(value, path)


def shorten(value: Any) -> str:
    """A value as JSON, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."

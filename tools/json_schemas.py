"""JSON Schemas of what commands print with --json, from the types in tools/json_forms.py.

docs/generate.py writes docs/reference/json/NAME.schema.json and docs/reference/json.md; a test holds what the commands
print against them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Union

from dsrun.json_outputs import VERSIONS
from tools.json_forms import FORMS, OPEN_ENDED

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FLAT = {str: "string", int: "integer", bool: "boolean", type(None): "null"}


def schema_of(name: str, *, strict: bool = False) -> dict[str, Any]:
    """The JSON Schema of a form. strict: with no key besides, as a test wants it; a reader has to expect new ones."""
    shape = FORMS[name].shape
    found = _object(shape, strict=strict)
    version = {
        "const": VERSIONS[name],
        "description": "Of this form: a reader that knows it can read what follows.",
    }
    return {
        "$schema": DIALECT,
        "title": f"{' / '.join(FORMS[name].commands)}: --json",
        "description": inspect.cleandoc(shape.__doc__ or "").partition("\n\n")[0],
        **found,
        "properties": {"version": version, **found["properties"]},
        "required": ["version", *found["required"]],
    }


def _object(shape: type, *, strict: bool) -> dict[str, Any]:
    """A dataclass, a TypedDict or a NamedTuple as an object."""
    hints = typing.get_type_hints(shape, include_extras=True)
    words = field_words(shape) if dataclasses.is_dataclass(shape) else {}
    optional = {key for key, hint in hints.items() if typing.get_origin(hint) is NotRequired}
    properties = {}
    for key, hint in hints.items():
        found = _schema(hint, strict=strict)
        if text := words.get(key):
            found = {**found, "description": " ".join(text.split())}
        properties[key] = found
    return {
        "type": "object",
        "properties": properties,
        "required": [key for key in hints if key not in optional],
        **({"additionalProperties": False} if strict and shape not in OPEN_ENDED else {}),
    }


def _schema(hint: Any, *, strict: bool) -> dict[str, Any]:
    """The schema of a type. A number that is no integer may be null: JSON has no NaN."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is NotRequired:
        return _schema(args[0], strict=strict)
    if origin is Annotated:
        return {**_schema(args[0], strict=strict), "description": args[1]}
    if hint is Any:
        return {}
    if hint is float:
        return {"type": ["number", "null"]}
    if hint is Path:
        return {"type": "string"}
    if hint in FLAT:
        return {"type": FLAT[hint]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return _either([_schema(arg, strict=strict) for arg in args])
    if origin is tuple and args[-1] is not Ellipsis:
        items = [_schema(arg, strict=strict) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _schema(args[0], strict=strict)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], strict=strict)}
    return {
        "description": inspect.cleandoc(hint.__doc__ or "").partition("\n\n")[0],
        **_object(hint, strict=strict),
    }


def _either(options: list[dict[str, Any]]) -> dict[str, Any]:
    """One of several; plain types together in one list."""
    if all(set(one) == {"type"} for one in options):
        names = itertools.chain.from_iterable(
            [one["type"]] if isinstance(one["type"], str) else one["type"] for one in options
        )
        return {"type": list(dict.fromkeys(names))}
    return {"anyOf": options}


def field_words(owner: type) -> dict[str, str]:
    """The docstrings below a class's fields, by field."""
    body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: str(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def page() -> Iterator[str]:
    """docs/reference/json.md: every form, its version and its keys."""
    yield "# What --json prints"
    yield ""
    yield "One JSON object on stdout; what is said to people goes to stderr. Its first key is the `version` of its"
    yield "form: within a version keys are only added. JSON has no NaN and no infinity: such a number is null. Bytes"
    yield "are bytes, times seconds (points in time since 1970). How to work with it: [for agents](for-agents.md);"
    yield "exit codes: [one table](exit-codes.md)."
    yield ""
    yield "| command | version | schema |"
    yield "| --- | --- | --- |"
    for name, form in FORMS.items():
        commands = ", ".join(f"`{command}`" for command in form.commands)
        yield f"| {commands} | {VERSIONS[name]} | [{name}](json/{name}.schema.json) |"
    for name in FORMS:
        yield ""
        yield f"## {name}"
        yield ""
        yield str(schema_of(name)["description"])
        yield ""
        yield "| key | type | |"
        yield "| --- | --- | --- |"
        yield from _rows(schema_of(name))


def _rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, one in schema["properties"].items():
        if key != "version":
            yield f"| `{prefix}{key}` | {_type_words(one)} | {' '.join(one.get('description', '').split())} |"
            yield from _inside(one, f"{prefix}{key}")


def _inside(schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The keys of what a key holds, where they are known."""
    for option in schema.get("anyOf", [schema]):
        inner, sign = (option["items"], "[]") if "items" in option else (option, "")
        if "properties" in inner:
            yield from _rows(inner, f"{prefix}{sign}.")


def _type_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_words, schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type_words(schema['items'])}" if schema.get("items") else "list"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)

"""Configuration of a release of DeepSpeed, read from its source code.

Nothing of it is run: old releases import neither on a new Python nor beside a new pydantic. What is wanted
is in the code in few forms: classes with fields, constants, and functions that ask a block for one key.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from dsrun.config.schemas import schema
from dsrun.config.schemas.schema import Node
from dsrun.errors import DsrunError

PACKAGE = "deepspeed"
NO_DEFAULT: Any = object()
"""Stands for "this key has no default", as None is a default of its own."""

REJECTS = "_reject_removed_config_keys"
"""The function that looks for keys in order to refuse them."""

RANGES = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "Path": "string",
    "list": "array",
    "List": "array",
    "dict": "object",
    "Dict": "object",
}


@dataclass(frozen=True)
class TypedClass:
    """A pydantic model, or another class with typed fields."""

    file: str
    name: str
    """The class in that file."""


@dataclass
class Known:
    """Facts in DeepSpeed's code about one key."""

    keywords: Node = field(default_factory=dict)
    """JSON Schema keywords of its type, with the limits that a pydantic model enforces."""
    default: Any = NO_DEFAULT
    model: TypedClass | None = None
    """The model of a key that is a section."""
    alias: str = ""
    outside: bool = False
    """Whether its type is another package's class (torch.dtype), of which JSON has no value."""


@dataclass(frozen=True)
class Read:
    """A place that asks a block for a key."""

    block: str
    """Name of the block there."""
    key: str
    default: Any
    """Value that the code takes where the key is left out."""


class ReleaseSource:
    """One release, as "0.18.9". files: the text of each module, by its path below the package."""

    def __init__(self, release: str, files: dict[str, str]) -> None:
        self.release = release
        self.version = schema.numbers(release)
        self.files = files

    @classmethod
    def packed(cls, archive: Path) -> ReleaseSource:
        """A published source package: deepspeed-0.18.9.tar.gz."""
        files = {}
        with tarfile.open(archive) as opened:
            for member in opened:
                top, _, name = member.name.partition(f"/{PACKAGE}/")
                file = opened.extractfile(member) if name.endswith(".py") and "/" not in top else None
                if file:
                    files[name] = file.read().decode("utf-8")
        return cls(archive.name.removeprefix(f"{PACKAGE}-").removesuffix(".tar.gz"), files)

    @classmethod
    def installed(cls) -> ReleaseSource:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None:
            raise DsrunError("DeepSpeed is not installed", hint="Install it, or name source packages.")
        folder = Path(found.origin).parent
        files = {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in folder.rglob("*.py")
        }
        return cls(importlib.metadata.version(PACKAGE).partition("+")[0], files)

    def forget(self) -> None:
        """Let go of the syntax trees of all releases: 77 are gigabytes."""
        for method in (ReleaseSource.tree, ReleaseSource.defined, ReleaseSource.reads):
            method.cache_clear()

    @cached_property
    def converts_as_1(self) -> bool:
        """Whether the models are those of pydantic 1: by where the module of their base takes BaseModel from."""
        file = "runtime/config_utils.py"
        for statement in self.tree(file).body:
            if isinstance(statement, ast.ImportFrom) and any(
                one.name == "BaseModel" for one in statement.names
            ):
                module = self.module(file, statement)
                text = ast.unparse(self.tree(module)) if module else ast.unparse(statement)
                later = any(name in self.files.get(file, "") for name in ("ConfigDict", "model_fields"))
                return "pydantic.v1" in text or not later
        return False

    @cached_property
    def text(self) -> str:
        return "\n".join(self.files.values())

    def mentions(self, key: str) -> bool:
        """Whether the key stands anywhere in the package as a text of its own."""
        return f'"{key}"' in self.text or f"'{key}'" in self.text

    @cache  # noqa: B019 - a source lives as long as the program
    def tree(self, file: str) -> ast.Module:
        return ast.parse(self.files.get(file, ""))

    @cache  # noqa: B019
    def defined(self, file: str) -> dict[str, ast.AST]:
        """Every name that a module itself defines -> its class, its value, or the import it comes from.

        Of a name that is assigned in both branches of an `if`, the last counts: the one for ordinary machines.
        Imports of everything are under "*" and their number.
        """
        found: dict[str, ast.AST] = {}
        for statement in flat(self.tree(file).body):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    number = str(len(found)) if alias.name == "*" else ""
                    found[(alias.asname or alias.name) + number] = statement
            elif isinstance(statement, ast.ClassDef):
                found[statement.name] = statement
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value:
                found[target_of(statement)] = statement.value
        return found

    def find(self, file: str, name: str, seen: tuple[str, ...] = ()) -> tuple[str, ast.AST]:
        """Origin of a module's name: the file and the class or value. Raises LookupError."""
        if file in seen:
            raise LookupError(name)
        names = self.defined(file)
        stars = [statement for key, statement in reversed(names.items()) if key.startswith("*")]
        for statement in [names[name]] if name in names else stars:
            if not isinstance(statement, ast.ImportFrom):
                return file, statement
            with contextlib.suppress(LookupError):
                return self.find(self.module(file, statement), name, (*seen, file))
        raise LookupError(name)

    def module(self, file: str, statement: ast.ImportFrom) -> str:
        """The file of the package that a module imports from; empty if it is another package's."""
        parts = (statement.module or "").split(".")
        if statement.level:
            parts = [*PurePosixPath(file).parts[: -statement.level], *parts]
        elif parts[0] == PACKAGE:
            parts = parts[1:]
        else:
            return ""
        base = "/".join(part for part in parts if part)
        candidates = (f"{base}.py", f"{base}/__init__.py" if base else "__init__.py")
        return next((name for name in candidates if name in self.files), "")

    # Values

    def value(self, file: str, node: ast.AST | None) -> Any:
        """The JSON value of an expression; NO_DEFAULT where it has none."""
        try:
            return self.evaluate(file, node)
        except (LookupError, TypeError, ValueError):
            return NO_DEFAULT

    def evaluate(self, file: str, node: ast.AST | None) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id="list"):  # as a factory
                return []
            case ast.Name():
                return self.evaluate(*self.find(file, node.id))
            case ast.List() | ast.Tuple():
                return [self.evaluate(file, item) for item in node.elts]
            case ast.Dict():
                pairs = zip(node.keys, node.values, strict=True)
                return {self.evaluate(file, key): self.value(file, item) for key, item in pairs}
            case ast.UnaryOp(op=ast.USub()):
                return -self.evaluate(file, node.operand)
            case ast.BinOp(op=ast.Mult()):
                return self.evaluate(file, node.left) * self.evaluate(file, node.right)
            case ast.BinOp(op=ast.Pow()):
                return self.evaluate(file, node.left) ** self.evaluate(file, node.right)
            case ast.Call(func=ast.Name(id="pp_int")):  # a whole number with a way of its own to be printed
                return int(self.evaluate(file, node.args[0]))
            case ast.Lambda():
                return self.evaluate(file, node.body)
            case ast.Call(func=ast.Name(id="list"), args=[inner]):
                return [*self.evaluate(file, inner)]
            case ast.Attribute() if ast.unparse(node) == "sys.maxsize":
                return sys.maxsize
            case ast.Attribute():
                return self.member(*self.find(file, ast.unparse(node.value)), node.attr)
            case ast.ClassDef():
                return list(dict.fromkeys(self.value(file, item.value) for item in assignments(node)))
        raise LookupError

    def member(self, file: str, holder: ast.AST, name: str) -> Any:
        """One member of an enum."""
        if not isinstance(holder, ast.ClassDef):
            raise LookupError
        return next(
            self.evaluate(file, item.value) for item in assignments(holder) if target_of(item) == name
        )

    # Pydantic models

    def has(self, model: TypedClass) -> bool:
        with contextlib.suppress(LookupError):
            return isinstance(self.find(model.file, model.name)[1], ast.ClassDef)
        return False

    def bases(self, model: TypedClass) -> Iterator[tuple[str, ast.ClassDef]]:
        """The class and those it derives from, as far as they stand in the package; the farthest first."""
        file, node = self.find(model.file, model.name)
        if not isinstance(node, ast.ClassDef):
            raise LookupError(model.name)
        for base in node.bases:
            below = TypedClass(file, ast.unparse(base))
            if self.has(below):
                yield from self.bases(below)
        yield file, node

    def rejects_unknown(self, model: TypedClass) -> bool:
        """Whether the model has extra="forbid", in the way of pydantic 1 or 2."""
        for _, node in self.bases(model):
            for inner in ast.walk(node):
                if isinstance(inner, ast.keyword) and inner.arg == "extra":
                    return ast.unparse(inner.value) == "'forbid'"
                if isinstance(inner, ast.Assign) and target_of(inner) == "extra":
                    return ast.unparse(inner.value) == "'forbid'"
        return False

    def fields(self, model: TypedClass) -> dict[str, Known]:
        found: dict[str, Known] = {}
        for file, node in self.bases(model):
            for item in assignments(node):
                name = target_of(item)
                if name != "model_config" and not name.startswith("_"):
                    found[name] = self.field(file, item)
        return found

    def field(self, file: str, item: ast.Assign | ast.AnnAssign) -> Known:
        known = Known()
        if isinstance(item, ast.AnnAssign):
            known.keywords, known.model = self.annotation(file, item.annotation)
            known.outside = isinstance(item.annotation, ast.Attribute)
        default = item.value
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "Field":
            self.settings(file, default, known)
            given = {keyword.arg: keyword.value for keyword in default.keywords}
            default = (*default.args, given.get("default", given.get("default_factory")))[0]
        # An empty block stands for the block's own defaults.
        if default is not None and known.model is None:
            known.default = plain(self.value(file, default))
        if default is not None and self.value(file, default) is None:
            known.default = None
        if not isinstance(item, ast.AnnAssign):  # pydantic 1 takes the type from the default
            known.keywords = {"type": TYPES[type(known.default).__name__]}
        return known

    def settings(self, file: str, call: ast.Call, known: Known) -> None:
        """Settings in Field(...) beside the default."""
        for keyword in call.keywords:
            if keyword.arg in RANGES:
                known.keywords[RANGES[keyword.arg]] = plain(self.value(file, keyword.value))
            elif keyword.arg == "alias":
                known.alias = self.value(file, keyword.value)
            elif ast.unparse(keyword) == "deprecated=True" or "'deprecated': True" in ast.unparse(keyword):
                known.keywords["deprecated"] = True

    def annotation(self, file: str, node: ast.AST) -> tuple[Node, TypedClass | None]:
        """JSON Schema keywords of a type, and the pydantic model if it is one.

        A type that JSON doesn't have gives no keywords: the overlay has to.
        """
        if isinstance(node, ast.BinOp):  # int | None
            return self.generic(file, "Union", ast.Tuple([node.left, node.right]))
        if isinstance(node, ast.Subscript):
            return self.generic(file, ast.unparse(node.value), node.slice)
        if not isinstance(node, ast.Name):
            return {}, None
        if node.id in TYPES:
            return {"type": TYPES[node.id]}, None
        try:
            where, target = self.find(file, node.id)
        except LookupError:  # another package's class
            return {}, None
        if isinstance(target, ast.Subscript):
            return self.annotation(where, target)
        if not isinstance(target, ast.ClassDef):
            return {}, None
        if any(ast.unparse(base) == "Enum" for base in target.bases):
            members = self.evaluate(where, target)
            return {"type": TYPES[type(members[0]).__name__], "enum": members}, None
        return {"type": "object"}, TypedClass(where, target.name)

    def generic(self, file: str, name: str, inner: ast.expr) -> tuple[Node, TypedClass | None]:
        arguments = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Literal":
            return {"type": "string", "enum": [self.evaluate(file, argument) for argument in arguments]}, None
        others = [argument for argument in arguments if ast.unparse(argument) != "None"]
        if name == "Optional" or (name == "Union" and len(others) == 1):
            keywords, model = self.annotation(file, others[0])
            return (nullable(keywords) if keywords else {}), model
        if name in ("List", "list"):
            return {"type": "array", "items": self.annotation(file, arguments[0])[0]}, None
        return ({"type": TYPES[name]} if name in TYPES else {}), None

    def arguments(self, file: str, name: str) -> dict[str, Any]:
        """The arguments of a class's constructor and their defaults."""
        _, node = self.find(file, name)
        (constructor,) = (
            item
            for item in getattr(node, "body", ())
            if isinstance(item, ast.FunctionDef) and item.name == "__init__"
        )
        names, defaults = constructor.args.args, constructor.args.defaults
        given = [None] * (len(names) - len(defaults)) + defaults
        return {
            argument.arg: plain(self.value(file, default))
            for argument, default in zip(names, given, strict=True)
        }

    # Blocks that are read key by key

    @cache  # noqa: B019
    def reads(self, file: str) -> list[Read]:
        """Every question for a key in a file, in order."""
        found: list[Read] = []
        for function in ast.walk(self.tree(file)):
            if isinstance(function, ast.FunctionDef) and function.name != REJECTS:
                names = self.bound(file, function)
                for node in ast.walk(function):
                    found += self.questions(file, node, names)
        return found

    def local(self, file: str, function: str, name: str) -> Any:
        """The value that a function gives to one of its variables."""
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.FunctionDef) and node.name == function:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assign) and target_of(inner) == name:
                        return self.value(file, inner.value)
        return NO_DEFAULT

    def bound(self, file: str, function: ast.FunctionDef) -> dict[str, list[Any]]:
        """Names that stand for keys inside a function: defaults of its arguments, variables of its loops."""
        arguments = function.args.args
        pairs = zip(reversed(arguments), reversed(function.args.defaults), strict=False)
        found = {argument.arg: [self.value(file, default)] for argument, default in pairs}
        for node in ast.walk(function):
            if isinstance(node, (ast.For, ast.comprehension)):
                looped, target = node.iter, node.target
                if isinstance(looped, ast.Call) and isinstance(looped.func, ast.Attribute):
                    looped = looped.func.value
                values = self.value(file, looped)
                columns = [[*values]] if isinstance(values, (list, dict)) else []
                if isinstance(values, dict):
                    columns.append([*values.values()])
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                found.update(zip(map(ast.unparse, targets), columns, strict=False))
        return found

    def questions(self, file: str, node: ast.AST, names: dict[str, list[Any]]) -> Iterator[Read]:
        """`ask(block, key, default)`, `block.get(key, default)`, `block[key]` and `key in block`."""
        key: ast.AST
        default: ast.AST | None = None
        match node:
            case ast.Call(func=ast.Attribute(value=block, attr="get" | "pop"), args=[key, *rest]):
                default = rest[0] if rest else ast.Constant(None)
            case ast.Call(func=ast.Name(), args=[block, key, *rest]):
                default = rest[0] if rest else None
            case ast.Subscript(value=block, slice=key, ctx=ast.Load()):
                pass
            case ast.Compare(left=key, ops=[ast.In()], comparators=[block]):
                pass
            case _:
                return
        name = ast.unparse(block).removesuffix(".keys()")
        keys = names[key.id] if isinstance(key, ast.Name) and key.id in names else [self.value(file, key)]
        defaults = [self.value(file, default)] * len(keys)
        if isinstance(default, ast.Name) and default.id in names:
            defaults = names[default.id]
        for one, asked in zip(keys, defaults, strict=False):
            if isinstance(one, str):
                yield Read(name, one, plain(asked))


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, with those inside `if` and `try`."""
    for statement in body:
        yield statement
        for part in ("body", "orelse"):
            if isinstance(statement, (ast.If, ast.Try)):
                yield from flat(getattr(statement, part))


def assignments(node: ast.ClassDef) -> list[ast.Assign | ast.AnnAssign]:
    """The fields of a class, or the members of an enum."""
    return [item for item in node.body if isinstance(item, (ast.Assign, ast.AnnAssign))]


def target_of(item: ast.Assign | ast.AnnAssign) -> str:
    return ast.unparse(item.target if isinstance(item, ast.AnnAssign) else item.targets[0])


def nullable(keywords: Node) -> Node:
    """The same keywords with null allowed."""
    widened = dict(keywords)
    kinds = [widened["type"]] if isinstance(widened.get("type"), str) else widened.get("type", ["null"])
    if "null" not in kinds:
        widened["type"] = [*kinds, "null"]
    if None not in widened.get("enum", [None]):
        widened["enum"] = [*widened["enum"], None]
    return widened


def plain(value: Any) -> Any:
    """A default as JSON: whole numbers as integers; NO_DEFAULT for what JSON hasn't got."""
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    if isinstance(value, float):
        return value
    return [plain(item) for item in value] if isinstance(value, list) else NO_DEFAULT

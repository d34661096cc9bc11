"""The names, parameters and attributes that one Python file defines, by its syntax alone.

What a file says is the same in every release that has this very text, so it is read once. What depends on the file's
place (relative imports, `import *`, lazy modules) is kept as it stands and resolved by modules.py.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CLASS, DATACLASS, FUNCTION, VALUE, FIELD, ATTRIBUTE, PROPERTY, LINK = "c", "d", "f", "v", "a", "s", "p", "="
"""Kinds: a class, a dataclass, a function or method, a value, an annotated field of a class, an attribute that a method
sets on self, a property, and a name that stands for one of another module."""

SPECIAL = ("__init__", "__new__", "__call__", "__post_init__")
"""Methods with two underscores whose parameters users meet."""

STANDARD = """
    __future__ abc argparse ast asyncio atexit base64 builtins collections concurrent contextlib copy csv
    ctypes dataclasses datetime enum errno fnmatch functools gc glob gzip hashlib heapq importlib inspect io
    itertools json logging math multiprocessing numbers numpy operator os packaging pathlib pickle platform
    queue random re shlex shutil signal socket string struct subprocess sys tarfile tempfile textwrap
    threading time timeit tqdm traceback types typing typing_extensions unittest urllib uuid warnings
    weakref zipfile
    """
COMMON = frozenset(STANDARD.split())
"""Packages whose names nobody imports by way of another package."""

TELLING = re.compile(
    r"deprecat|\binstead\b|renamed|no longer|(?:been|was|be) removed|moved to", re.IGNORECASE
)
LONGEST_MESSAGE = 400

BRANCHES = ("body", "orelse", "finalbody", "handlers", "cases")
"""Fields of statements that hold others."""

Parameters = list[str]


@dataclass
class Member:
    """Something that a class has."""

    kind: str
    parameters: Parameters = field(default_factory=list)
    """The parameters of a method as they are written, `*args` and `**kwargs` with their stars."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Parameters that a decorator still takes -> their new names, or empty texts."""


@dataclass
class Definition(Member):
    """A name of a module."""

    target: str = ""
    """What a link stands for: dots before it are those of a relative import; `name` alone is of the same module."""
    bases: list[str] = field(default_factory=list)
    """The bases of a class, as they are written."""
    members: dict[str, Member] = field(default_factory=dict)


@dataclass
class FileNames:
    """What a file defines."""

    names: dict[str, list[Definition]] = field(default_factory=dict)
    """A name that is defined in several branches has several definitions."""
    stars: list[str] = field(default_factory=list)
    """Modules of which everything is imported."""
    exported: list[str] | None = None
    """`__all__`, as far as it is written out."""
    lazy: bool = False
    """Its names are those of its import structure alone (transformers' and trl's _LazyModule)."""
    structure: dict[str, list[str]] = field(default_factory=dict)
    """Submodule -> names, of a lazy module."""
    folders: list[str] = field(default_factory=list)
    """Folders of which a lazy module has all that their files export; "" is its own."""
    required: list[str] = field(default_factory=list)
    """Objects that a lazy module exports for their decorator @requires."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Modules that lead to others, both beside this one."""
    dynamic: bool = False
    """It answers some names at run time (`__getattr__`)."""
    messages: list[str] = field(default_factory=list)
    """Texts that tell of something deprecated, renamed or gone."""
    uses: list[str] = field(default_factory=list)
    """What it imports from other packages, anywhere in it."""

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read(text: str, stub: bool = False) -> FileNames:
    """What a file defines; nothing where this Python cannot parse it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return FileNames()
    found = FileNames()
    for statement in statements(tree.body):
        _define(found, statement, stub)
    if "_LazyModule" in text or "@requires" in text:
        _lazy(found, tree)
    found.messages = sorted(set(_messages(tree, text)))
    found.uses = sorted(set(_uses(tree)))
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported or a class made, those of all branches."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            condition = ast.unparse(statement.test)
            if condition.rpartition(".")[2] == "TYPE_CHECKING" or condition.startswith("__name__ =="):
                yield from statements(statement.orelse)
                continue
        for branch in ("body", "orelse", "finalbody"):
            if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from statements(getattr(statement, branch, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)
        for case in getattr(statement, "cases", []):
            yield from statements(case.body)


def inner(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement below these. Expressions are not walked through: they are most of a tree."""
    stack = list(body)
    while stack:
        statement = stack.pop()
        yield statement
        for branch in BRANCHES:
            below = getattr(statement, branch, None)
            if below:
                for each in below:
                    if branch in ("handlers", "cases"):
                        stack.extend(each.body)
                    else:
                        stack.append(each)


def places(statement: ast.stmt) -> Iterator[ast.expr]:
    """What a statement assigns to, with the parts of tuples."""
    if isinstance(statement, ast.Assign):
        stack = list(statement.targets)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For)):
        stack = [statement.target]
    elif isinstance(statement, ast.With):
        stack = [item.optional_vars for item in statement.items if item.optional_vars]
    else:
        return
    while stack:
        place = stack.pop()
        if isinstance(place, (ast.Tuple, ast.List)):
            stack.extend(reversed(place.elts))
        else:
            yield place.value if isinstance(place, ast.Starred) else place


def targets(statement: ast.stmt) -> Iterator[str]:
    """The plain names that a statement assigns."""
    for place in places(statement):
        if isinstance(place, ast.Name):
            yield place.id


def _define(found: FileNames, statement: ast.stmt, stub: bool) -> None:
    if isinstance(statement, ast.ClassDef):
        _add(found, statement.name, _class(statement))
    elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        found.dynamic |= statement.name == "__getattr__"
        member = _function(statement, method=False)
        _add(found, statement.name, Definition(FUNCTION, member.parameters, member.renamed))
    elif isinstance(statement, ast.ImportFrom):
        _import(found, statement)
    elif isinstance(statement, ast.Delete):
        for target in statement.targets:
            found.names.pop(ast.unparse(target), None)
    elif isinstance(statement, ast.AnnAssign) and statement.value is None and not stub:
        return  # an annotation alone makes no name
    else:
        value = getattr(statement, "value", None)
        for name in targets(statement):
            plain = (
                isinstance(statement, ast.Assign)
                and isinstance(value, ast.Name)
                and len(statement.targets) == 1
            )
            _add(found, name, Definition(LINK, target=value.id) if plain else Definition(VALUE))  # type: ignore[union-attr]
    _exported(found, statement)


def _add(found: FileNames, name: str, definition: Definition) -> None:
    if name.startswith("__") or name in ("_", definition.target):
        return
    known = found.names.setdefault(name, [])
    if definition not in known:
        known.append(definition)


def _import(found: FileNames, statement: ast.ImportFrom) -> None:
    module = "." * statement.level + (statement.module or "")
    if not statement.level and module.split(".")[0] in COMMON:
        return
    for alias in statement.names:
        if alias.name == "*":
            found.stars.append(module)
        else:
            dot = "" if module.endswith(".") else "."
            _add(found, alias.asname or alias.name, Definition(LINK, target=f"{module}{dot}{alias.name}"))


def _exported(found: FileNames, statement: ast.stmt) -> None:
    """`__all__ = [...]`, `__all__ += [...]`, `__all__.extend([...])`, `__all__.append("...")`."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id="__all__")], value=value)
            | ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value)
        ):
            found.exported = texts(value)
        case ast.AugAssign(target=ast.Name(id="__all__"), value=value):
            found.exported = [*(found.exported or ()), *texts(value)]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="__all__")), args=[value])):
            found.exported = [*(found.exported or ()), *texts(value)]


def texts(node: ast.AST) -> list[str]:
    """The texts in a list, or in a sum of lists."""
    return [
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def _class(node: ast.ClassDef) -> Definition:
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    definition = Definition(DATACLASS if "dataclass" in decorators else CLASS)
    definition.bases = [text for base in node.bases if (text := dotted(base))]
    for statement in statements(node.body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            _method(definition, statement)
        elif isinstance(statement, ast.ClassDef):
            _member(definition, statement.name, Member(CLASS))
        elif isinstance(statement, ast.AnnAssign):
            kind = VALUE if "ClassVar" in ast.unparse(statement.annotation) else FIELD
            for name in targets(statement):
                _member(definition, name, Member(kind))
        else:
            for name in targets(statement):
                _member(definition, name, Member(VALUE))
    return definition


def dotted(node: ast.expr) -> str:
    """A name with dots; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def _member(definition: Definition, name: str, member: Member) -> None:
    """Add a member; of one that is there, the parameters are added."""
    if name.startswith("__") and name not in SPECIAL:
        return
    known = definition.members.get(name)
    if known is None or (known.kind == ATTRIBUTE != member.kind):
        definition.members[name] = member
    elif member.kind == known.kind == FUNCTION:
        known.parameters += [name for name in member.parameters if name not in known.parameters]


def _method(definition: Definition, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(re.search(r"property$|\.setter$|\.getter$", decorator) for decorator in decorators):
        _member(definition, node.name, Member(PROPERTY))
    else:
        _member(definition, node.name, _function(node, method="staticmethod" not in decorators))
    if not node.args.args:
        return
    own = node.args.args[0].arg
    for statement in inner(node.body):
        for place in places(statement):
            if (
                isinstance(place, ast.Attribute)
                and isinstance(place.value, ast.Name)
                and place.value.id == own
                and not place.attr.startswith("_")
            ):
                _member(definition, place.attr, Member(ATTRIBUTE))


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> Member:
    given = node.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)][int(method) :]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    member = Member(FUNCTION, names)
    for decorator in node.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and ast.unparse(decorator.func).rpartition(".")[2] == "deprecate_kwarg"
        ):
            said = {keyword.arg: keyword.value for keyword in decorator.keywords}
            old = said.get("old_name", decorator.args[0] if decorator.args else None)
            if isinstance(old, ast.Constant):
                new = said.get("new_name", decorator.args[2] if len(decorator.args) > 2 else None)
                member.renamed[str(old.value)] = (
                    str(new.value) if isinstance(new, ast.Constant) and new.value else ""
                )
    return member


# Lazy modules


def _lazy(found: FileNames, tree: ast.Module) -> None:
    """The import structure of a lazy module, of all branches; what it holds only for type checkers is not its."""
    for statement in statements(tree.body):
        match statement:
            case ast.Assign(
                targets=[ast.Name(id="_import_structure" | "import_structure")], value=ast.Dict() as value
            ):
                for key, names in zip(value.keys, value.values, strict=True):
                    _structure(found, key, names)
            case ast.Assign(
                targets=[ast.Subscript(value=ast.Name(id="_import_structure"), slice=key)], value=names
            ):
                _structure(found, key, names)
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(
                        value=ast.Subscript(value=ast.Name(id="_import_structure"), slice=key)
                    ),
                    args=[names],
                )
            ):
                _structure(found, key, names)
            case ast.Assign(targets=[ast.Name(id="_LEGACY_MODULE_ALIASES")], value=ast.Dict() as value):
                pairs = zip(value.keys, value.values, strict=True)
                found.aliases |= {texts(key)[0]: texts(new)[0] for key, new in pairs if key and texts(new)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and any(
                ast.unparse(each).startswith("requires(") for each in node.decorator_list
            ):
                found.required.append(node.name)
            continue
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in ("_LazyModule", "LazyModule"):
            found.lazy = True
        elif called == "define_import_structure" and node.args:
            found.folders.append("/".join(texts(node.args[0])[-1:]).replace("__file__", ""))
        elif called == "_create_module_alias" and len(node.args) == 2:
            old, new = (texts(argument) for argument in node.args)
            if old and new:
                found.aliases[old[-1].strip(".")] = new[-1].strip(".")


def _structure(found: FileNames, key: ast.expr | None, names: ast.expr) -> None:
    if isinstance(key, ast.Constant) and not isinstance(names, (ast.ListComp, ast.SetComp)):
        found.structure.setdefault(str(key.value), []).extend(texts(names))


# What else a file says


def _uses(tree: ast.Module) -> Iterator[str]:
    for node in inner(tree.body):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] not in COMMON
        ):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _messages(tree: ast.Module, text: str) -> Iterator[str]:
    """Texts that are given to a call or stand in a dict; not docstrings."""
    lines = [number for number, line in enumerate(text.split("\n"), 1) if TELLING.search(line)]
    if not lines:
        return
    for statement in inner(tree.body):
        first, last = statement.lineno, statement.end_lineno or 0
        near = bisect.bisect_left(lines, first)
        if getattr(statement, "body", None) or near == len(lines) or lines[near] > last:
            continue
        for node in ast.walk(statement):
            parts = (
                [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else []
            )
            for part in parts:
                for each in [part, *(part.values if isinstance(part, ast.Dict) else ())]:
                    told = " ".join(message(each).split())
                    if len(told) <= LONGEST_MESSAGE and TELLING.search(told):
                        yield told


def message(node: ast.AST | None) -> str:
    """A text as far as the code says it, with {} for what is put in; empty where it is none."""
    match node:
        case ast.Constant(value=str()):
            return str(node.value)
        case ast.JoinedStr():
            return "".join(message(part) or "{}" for part in node.values)
        case ast.BinOp(op=ast.Add()):
            return message(node.left) + message(node.right)
        case ast.Call(func=ast.Attribute(attr="format", value=value)):
            return message(value)
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str())), args=[only]):
            return message(only)
    return ""

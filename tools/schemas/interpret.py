"""What a release's reader does with one value, found by walking its syntax: taken, refused, or not to be told.

DeepSpeedConfig is a constructor of plain Python: it asks for keys, compares them, and raises. `Reader.read` follows it
statement by statement over a config of a few keys. Nothing of the release is imported or run: names are looked up in
its sources, and only builtins listed here apply. Whatever comes from elsewhere (torch, a pydantic model's own
conversion, an open file) is UNKNOWN, and so is all that is made of it. A condition that is UNKNOWN is passed over with
both branches, so that an exception counts only where it is certain.

`answers` puts values of every kind at every key of a release, and keeps the kinds that stop it: what the schema calls
x-refuses.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

from dsrun.config import tree
from dsrun.config.schemas.schema import KINDS_OF_VALUES, Node
from tools.schemas.source import ReleaseSource

CONFIG = "runtime/config.py"
ROOT = "DeepSpeedConfig"
MOST_STEPS = 60_000
"""Statements and expressions of one reading, after which it can't be told."""
DEEPEST = 60
"""Calls within calls."""
WORLD = {"get_world_size": 1, "get_rank": 0}
"""What torch.distributed says of a job of one rank."""
MODELS = ("BaseModel", "DeepSpeedConfigModel")


class Unknown:
    """A value that can't be told. There is one."""

    def __repr__(self) -> str:
        return "UNKNOWN"


class Looked(Unknown):
    """An unknown value that notices when the reader looks at it, and doesn't only keep it."""

    seen = False

    def __deepcopy__(self, _memory: Any) -> Looked:
        return self


class Asked(dict[str, Any]):
    """A section that keeps which keys it is asked for."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.keys_asked: dict[str, None] = {}

    def __deepcopy__(self, _memory: Any) -> Asked:
        return self

    def __getitem__(self, key: str) -> Any:
        self.keys_asked[key] = None
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            self.keys_asked[key] = None
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked[key] = None
        return super().get(key, default)


UNKNOWN = Unknown()


@cache
def code(node: ast.AST) -> str:
    """The text of a piece of syntax."""
    return ast.unparse(node)


class UntoldError(Exception):
    """A reading that went too far to be told."""


class Stopped(Exception):  # noqa: N818 - an exception of the program that is read
    """An exception that the release raises. names: its class and those above it."""

    def __init__(self, names: Sequence[str], text: str = "") -> None:
        super().__init__(text)
        self.names = tuple(names)


class _Return(Exception):  # noqa: N818
    def __init__(self, value: Any) -> None:
        self.value = value


class _Loop(Exception):  # noqa: N818
    def __init__(self, again: bool) -> None:
        self.again = again


@dataclass
class Scope:
    """The names of one call. file: where the rest is looked up."""

    file: str
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Function:
    file: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    names: Mapping[str, Any] | None = None
    """Those around a function within a function."""


@dataclass(frozen=True)
class Class:
    file: str
    node: ast.ClassDef


@dataclass(eq=False)
class Instance:
    made_of: Class
    attributes: dict[str, Any] = field(default_factory=dict)


def look(*values: Any) -> None:
    for value in values:
        if isinstance(value, Looked):
            value.seen = True


def _plain(value: Any) -> bool:
    """Whether a builtin may be applied to a value."""
    if isinstance(value, (list, tuple, set)):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_plain(item) for item in value.values())
    return isinstance(
        value, (int, float, str, bool, type(None), type, range, type({}.keys()), type({}.values()))
    )


TYPES = {
    name: getattr(builtins, name) for name in ("int", "float", "str", "bool", "list", "dict", "set", "tuple")
}
BUILTINS: dict[str, Any] = {
    **TYPES,
    **{
        name: getattr(builtins, name)
        for name in (
            "len",
            "max",
            "min",
            "sum",
            "sorted",
            "range",
            "abs",
            "zip",
            "enumerate",
            "round",
            "type",
        )
    },
}
METHODS: dict[type, tuple[str, ...]] = {
    str: (
        "lower",
        "upper",
        "strip",
        "startswith",
        "endswith",
        "split",
        "replace",
        "format",
        "join",
        "isdigit",
    ),
    dict: ("get", "keys", "values", "items", "pop", "copy", "update", "setdefault"),
    list: ("append", "index", "count", "copy", "extend"),
    set: ("add", "issubset", "difference", "union"),
}
BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
}  # fmt: skip
UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip


class Reader:
    """Reads configs as one release does."""

    def __init__(self, source: ReleaseSource) -> None:
        self.source = source
        self.steps = self.depth = 0
        self.stop = ""
        """The exception that ended the last reading, as it stands in the code."""
        self.sections: dict[str, Class] = {}
        """Key at the top -> the pydantic model that is made of its value."""
        self._section: dict[int, str] = {}
        self._names: dict[str, dict[str, ast.AST]] = {}
        self._found: dict[tuple[str, str], Any] = {}
        """(File, name) -> the value of a name of a module."""
        self._methods: dict[type, Callable[[Any, Scope], Any]] = {}
        self._roots: dict[Class, set[str]] = {}

    def read(self, config: dict[str, Any]) -> bool | None:
        """Whether the release takes a config; None where that can't be told."""
        self.steps = self.depth = 0
        self.stop = ""
        config = copy.deepcopy(config)
        self._section = {id(value): key for key, value in config.items() if isinstance(value, dict)}
        try:
            self.call(self.name(Scope(CONFIG), ROOT), [config], {})
        except Stopped as error:
            self.stop = str(error)
            return False
        except (UntoldError, RecursionError):
            return None
        return True

    def asked(self, path: str) -> list[str]:
        """The keys that the release asks a section for, whether it is on or not."""
        found: dict[str, None] = {}
        for given in ({}, {"enabled": True}):
            section = Asked(given)
            self.read(_alone(path, section))
            found |= section.keys_asked
        return [*found]

    @property
    def files(self) -> tuple[str, ...]:
        """The modules that were looked into."""
        return (*self._names,)

    @cached_property
    def looked_at(self) -> set[str]:
        """The names of fields whose value a validator looks at as it is given."""
        marks = [
            mark
            for file in self.source.files
            if "config" in file
            for node in ast.walk(self.source.tree(file))
            if isinstance(node, ast.FunctionDef)
            for mark in node.decorator_list
        ]
        return {
            argument.value
            for mark in marks
            if isinstance(mark, ast.Call) and first_of(mark)
            for argument in mark.args
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        }

    # Names

    def named(self, file: str) -> dict[str, ast.AST]:
        """What a module defines at its margin, functions among it; imports of everything under "*" and a number."""
        if file not in self._names:
            functions = {
                node.name: node
                for node in ast.walk(self.source.tree(file))
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.col_offset == 0
            }
            self._names[file] = {**self.source.defined(file), **functions}
        return self._names[file]

    def name(self, scope: Scope, name: str, seen: tuple[str, ...] = ()) -> Any:
        """The value of a name."""
        if name in scope.names:
            return scope.names[name]
        if (scope.file, name) not in self._found:
            self._found[scope.file, name] = self._look_up(scope, name, seen)
        found = self._found[scope.file, name]
        return copy.copy(found) if isinstance(found, (dict, list)) else found

    def _look_up(self, scope: Scope, name: str, seen: tuple[str, ...]) -> Any:
        names = self.named(scope.file)
        if name in names and not isinstance(names[name], ast.ImportFrom):
            return self._defined(scope.file, names[name])
        imports = (
            [names[name]]
            if name in names
            else [node for key, node in reversed(names.items()) if key[0] == "*"]
        )
        for statement in imports:
            if isinstance(statement, ast.ImportFrom):
                found = self._imported(scope.file, statement, name, (*seen, scope.file))
                if found is not UNKNOWN:
                    return found
        return BUILTINS.get(name, UNKNOWN)

    def _imported(self, file: str, statement: ast.ImportFrom, name: str, seen: tuple[str, ...]) -> Any:
        module = self.source.module(file, statement)
        if not module or module in seen:
            return UNKNOWN
        original = next((alias.name for alias in statement.names if alias.asname == name), name)
        return self.name(Scope(module), original, seen)

    def _defined(self, file: str, node: ast.AST) -> Any:
        if isinstance(node, ast.ClassDef):
            return Class(file, node)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Function(file, node)
        return self.value(node, Scope(file))  # type: ignore[arg-type]

    def above(self, made_of: Class) -> Iterator[Class]:
        """A class and those it derives from, as far as they stand in the package."""
        yield made_of
        for base in made_of.node.bases:
            found = self.name(Scope(made_of.file), code(base))
            if isinstance(found, Class):
                yield from self.above(found)

    def roots(self, made_of: Class) -> set[str]:
        """The names of all classes above a class, those of other packages among them."""
        if made_of not in self._roots:
            bases = [base for one in self.above(made_of) for base in one.node.bases]
            self._roots[made_of] = {code(base).rpartition(".")[2] for base in bases}
        return self._roots[made_of]

    # Statements

    def run(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._step()
            getattr(self, f"_on_{type(statement).__name__.lower()}", self._pass_over)(statement, scope)

    def _step(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise UntoldError

    def _pass_over(self, _statement: ast.stmt, _scope: Scope) -> None:
        pass

    def _on_expr(self, statement: ast.Expr, scope: Scope) -> None:
        self.value(statement.value, scope)

    def _on_assign(self, statement: ast.Assign, scope: Scope) -> None:
        value = self.value(statement.value, scope)
        for target in statement.targets:
            self.put(target, value, scope)

    def _on_annassign(self, statement: ast.AnnAssign, scope: Scope) -> None:
        if statement.value:
            self.put(statement.target, self.value(statement.value, scope), scope)

    def _on_augassign(self, statement: ast.AugAssign, scope: Scope) -> None:
        before = self.value(statement.target, scope)
        after = self.apply(BINARY.get(type(statement.op)), before, self.value(statement.value, scope))
        self.put(statement.target, after, scope)

    def put(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            known = isinstance(value, (list, tuple)) and len(value) == len(target.elts)
            for index, inner in enumerate(target.elts):
                self.put(inner, value[index] if known else UNKNOWN, scope)
        elif isinstance(target, ast.Attribute):
            holder = self.value(target.value, scope)
            if isinstance(holder, Instance):
                holder.attributes[target.attr] = value
        elif isinstance(target, ast.Subscript):
            holder, key = self.value(target.value, scope), self.value(target.slice, scope)
            if isinstance(holder, (dict, list)) and key is not UNKNOWN:
                self.apply(operator.setitem, holder, key, value)

    def _on_if(self, statement: ast.If, scope: Scope) -> None:
        test = self.truth(statement.test, scope)
        if test is UNKNOWN:
            self.untold([*statement.body, *statement.orelse], scope)
        else:
            self.run(statement.body if test else statement.orelse, scope)

    def untold(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        """Statements that may run or not: what they put is unknown, and what they give back, too."""
        for statement in body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Return):
                    raise _Return(UNKNOWN)
                if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                    self.put(node, UNKNOWN, scope)

    def _on_for(self, statement: ast.For, scope: Scope) -> None:
        many = self.value(statement.iter, scope)
        if isinstance(many, Unknown):
            look(many)
            self.put(statement.target, UNKNOWN, scope)
            self.untold(statement.body, scope)
            return
        for item in self.items(many):
            self.put(statement.target, item, scope)
            try:
                self.run(statement.body, scope)
            except _Loop as loop:
                if not loop.again:
                    return
        self.run(statement.orelse, scope)

    def items(self, many: Any) -> list[Any]:
        """What a loop goes over."""
        if isinstance(many, (Instance, Class, Function, Unknown)):
            look(many)
            raise UntoldError
        found: list[Any] = self.apply(list, many)
        return found

    def _on_while(self, statement: ast.While, scope: Scope) -> None:
        while test := self.truth(statement.test, scope):
            if test is UNKNOWN:
                self.untold(statement.body, scope)
                return
            self._step()
            try:
                self.run(statement.body, scope)
            except _Loop as loop:
                if not loop.again:
                    return

    def _on_break(self, _statement: ast.stmt, _scope: Scope) -> None:
        raise _Loop(again=False)

    def _on_continue(self, _statement: ast.stmt, _scope: Scope) -> None:
        raise _Loop(again=True)

    def _on_return(self, statement: ast.Return, scope: Scope) -> None:
        raise _Return(self.value(statement.value, scope) if statement.value else None)

    def _on_raise(self, statement: ast.Raise, scope: Scope) -> None:
        error = statement.exc
        if error is None:
            raise scope.names.get("<error>", Stopped(["Exception"]))
        kind = error.func if isinstance(error, ast.Call) else error
        if isinstance(kind, ast.Name) and isinstance(scope.names.get(kind.id), Stopped):
            raise scope.names[kind.id]
        raise Stopped(self.error_names(kind, scope), code(error))

    def error_names(self, kind: ast.expr, scope: Scope) -> list[str]:
        """An exception's class and those above it."""
        name = code(kind).rpartition(".")[2]
        found = self.value(kind, scope)
        names = [name, *(self.roots(found) if isinstance(found, Class) else ())]
        above = [getattr(builtins, one) for one in names if isinstance(getattr(builtins, one, None), type)]
        return [*names, *(base.__name__ for one in above for base in one.__mro__)]

    def _on_assert(self, statement: ast.Assert, scope: Scope) -> None:
        if self.truth(statement.test, scope) is False:
            raise Stopped(["AssertionError", "Exception", "BaseException"], code(statement.test))

    def _on_try(self, statement: ast.Try, scope: Scope) -> None:
        try:
            self.run(statement.body, scope)
        except Stopped as error:
            handler = next((one for one in statement.handlers if self.caught(one, error)), None)
            if handler is None:
                raise
            scope.names["<error>"] = error
            if handler.name:
                scope.names[handler.name] = error
            self.run(handler.body, scope)
        else:
            self.run(statement.orelse, scope)
        finally:
            self.run(statement.finalbody, scope)

    def caught(self, handler: ast.ExceptHandler, error: Stopped) -> bool:
        if handler.type is None:
            return True
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(code(kind).rpartition(".")[2] in error.names for kind in kinds)

    def _on_with(self, statement: ast.With, scope: Scope) -> None:
        for item in statement.items:
            if item.optional_vars:
                self.put(item.optional_vars, UNKNOWN, scope)
        self.run(statement.body, scope)

    def _on_functiondef(self, statement: ast.FunctionDef, scope: Scope) -> None:
        scope.names[statement.name] = Function(scope.file, statement, scope.names)

    def _on_importfrom(self, statement: ast.ImportFrom, scope: Scope) -> None:
        for alias in statement.names:
            name = alias.asname or alias.name
            scope.names[name] = self._imported(scope.file, statement, name, ())

    def _on_delete(self, statement: ast.Delete, scope: Scope) -> None:
        for target in statement.targets:
            if isinstance(target, ast.Subscript):
                holder, key = self.value(target.value, scope), self.value(target.slice, scope)
                if isinstance(holder, dict) and key is not UNKNOWN:
                    self.apply(operator.delitem, holder, key)

    # Expressions

    def apply(self, function: Callable[..., Any] | None, *values: Any, **named: Any) -> Any:
        """A builtin's answer; UNKNOWN where a value is, and its exception as one of the release."""
        given = (*values, *named.values())
        if function is None or any(isinstance(value, (Unknown, Class, Function)) for value in given):
            look(*given)
            return UNKNOWN
        try:
            return function(*values, **named)
        except (_Return, _Loop, Stopped, UntoldError):
            raise
        except Exception as error:
            raise Stopped([one.__name__ for one in type(error).__mro__], str(error)) from None

    def truth(self, node: ast.expr, scope: Scope) -> Any:
        """Whether a condition holds: true, false or UNKNOWN."""
        return self.true(self.value(node, scope))

    def true(self, value: Any) -> Any:
        if isinstance(value, Unknown):
            look(value)
            return UNKNOWN
        return True if isinstance(value, (Instance, Class, Function)) else bool(value)

    def value(self, node: ast.expr, scope: Scope) -> Any:
        self._step()
        if type(node) not in self._methods:
            self._methods[type(node)] = getattr(self, f"_of_{type(node).__name__.lower()}", self._of_other)
        return self._methods[type(node)](node, scope)

    def _of_other(self, _node: ast.expr, _scope: Scope) -> Any:
        return UNKNOWN

    def _of_constant(self, node: ast.Constant, _scope: Scope) -> Any:
        return node.value

    def _of_name(self, node: ast.Name, scope: Scope) -> Any:
        return self.name(scope, node.id)

    def _of_joinedstr(self, _node: ast.JoinedStr, _scope: Scope) -> Any:
        return UNKNOWN

    def _of_list(self, node: ast.List, scope: Scope) -> Any:
        return [self.value(item, scope) for item in node.elts]

    def _of_tuple(self, node: ast.Tuple, scope: Scope) -> Any:
        return tuple(self.value(item, scope) for item in node.elts)

    def _of_set(self, node: ast.Set, scope: Scope) -> Any:
        return [self.value(item, scope) for item in node.elts]

    def _of_dict(self, node: ast.Dict, scope: Scope) -> Any:
        found: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if key is None:
                inner = self.value(item, scope)
                found.update(inner if isinstance(inner, dict) else {})
            elif (name := self.value(key, scope)) is not UNKNOWN:
                self.apply(operator.setitem, found, name, self.value(item, scope))
        return found

    def _of_ifexp(self, node: ast.IfExp, scope: Scope) -> Any:
        test = self.truth(node.test, scope)
        return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse, scope)

    def _of_boolop(self, node: ast.BoolOp, scope: Scope) -> Any:
        ends = isinstance(node.op, ast.Or)
        value: Any = UNKNOWN
        doubtful = False
        for part in node.values:
            value = self.value(part, scope)
            true = self.true(value)
            if true is UNKNOWN:
                doubtful = True
            elif true == ends:
                return UNKNOWN if doubtful and not isinstance(value, bool) else value
            elif doubtful:
                return UNKNOWN
        return UNKNOWN if doubtful else value

    def _of_unaryop(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self.value(node.operand, scope)
        if isinstance(node.op, ast.Not):
            true = self.true(value)
            return UNKNOWN if true is UNKNOWN else not true
        return self.apply(UNARY.get(type(node.op)), value)

    def _of_binop(self, node: ast.BinOp, scope: Scope) -> Any:
        one, other = self.value(node.left, scope), self.value(node.right, scope)
        if isinstance(node.op, ast.Pow) and isinstance(other, (int, float)) and abs(other) > 64:
            return UNKNOWN
        if isinstance(node.op, ast.Mult) and any(isinstance(value, (str, list)) for value in (one, other)):
            return UNKNOWN
        return self.apply(BINARY.get(type(node.op)), one, other)

    def _of_compare(self, node: ast.Compare, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        for sign, side in zip(node.ops, node.comparators, strict=True):
            right = self.value(side, scope)
            answer = self.compared(sign, left, right)
            if answer is UNKNOWN or not answer:
                return answer
            left = right
        return True

    def compared(self, sign: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(sign, (ast.Is, ast.IsNot)):
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                look(left, right)
                return UNKNOWN
            same = left is right or (isinstance(left, type) and left == right)
            return same == isinstance(sign, ast.Is)
        if isinstance(right, (list, tuple, dict)) and isinstance(sign, (ast.In, ast.NotIn)):
            within = self.apply(COMPARE[ast.In], left, [*right] if not isinstance(right, dict) else right)
            if within is False and any(item is UNKNOWN for item in right):
                return UNKNOWN
            return UNKNOWN if within is UNKNOWN else within == isinstance(sign, ast.In)
        if isinstance(left, Instance) or isinstance(right, Instance):
            return UNKNOWN
        return self.apply(COMPARE.get(type(sign)), left, right)

    def _of_subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        holder = self.value(node.value, scope)
        if isinstance(node.slice, ast.Slice) or isinstance(holder, (Instance, type)):
            return UNKNOWN
        return self.apply(operator.getitem, holder, self.value(node.slice, scope))

    def _of_lambda(self, node: ast.Lambda, scope: Scope) -> Any:
        return Function(scope.file, node, scope.names)

    def _of_listcomp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope) -> Any:
        found: list[Any] = []
        inner = Scope(scope.file, dict(scope.names))
        sure = self._comprehended(node.generators, inner, lambda: found.append(self.value(node.elt, inner)))
        return found if sure else UNKNOWN

    _of_generatorexp = _of_setcomp = _of_listcomp

    def _of_dictcomp(self, node: ast.DictComp, scope: Scope) -> Any:
        found: dict[Any, Any] = {}
        inner = Scope(scope.file, dict(scope.names))

        def add() -> None:
            self.apply(operator.setitem, found, self.value(node.key, inner), self.value(node.value, inner))

        return found if self._comprehended(node.generators, inner, add) else UNKNOWN

    def _comprehended(
        self, loops: Sequence[ast.comprehension], scope: Scope, add: Callable[[], object]
    ) -> bool:
        """Run a comprehension; whether it can be told."""
        if not loops:
            add()
            return True
        many = self.value(loops[0].iter, scope)
        if isinstance(many, Unknown):
            look(many)
            return False
        for item in self.items(many):
            self.put(loops[0].target, item, scope)
            tests = [self.truth(test, scope) for test in loops[0].ifs]
            if UNKNOWN in tests:
                return False
            if all(tests) and not self._comprehended(loops[1:], scope, add):
                return False
        return True

    # Attributes and calls

    def _of_attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        return self.attribute(self.value(node.value, scope), node.attr)

    def attribute(self, holder: Any, name: str) -> Any:
        if isinstance(holder, Instance):
            if name in holder.attributes:
                return holder.attributes[name]
            return self.of_class(holder.made_of, name, holder)
        if isinstance(holder, Class):
            if "Enum" in " ".join(self.roots(holder)):
                return self.of_enum(holder, name)
            return self.of_class(holder, name, None)
        for kind, methods in METHODS.items():
            if isinstance(holder, kind) and name in methods:
                return getattr(holder, name)
        if name in WORLD and holder is UNKNOWN:
            return lambda *_arguments, **_named: WORLD[name]
        if isinstance(holder, (Unknown, Function, type)):
            look(holder)
            return UNKNOWN
        if not hasattr(holder, name):
            raise Stopped(["AttributeError", "Exception", "BaseException"], name)
        return UNKNOWN

    def of_enum(self, holder: Class, name: str) -> Any:
        for item in holder.node.body:
            if isinstance(item, ast.Assign) and code(item.targets[0]) == name:
                return self.value(item.value, Scope(holder.file))
        return UNKNOWN

    def of_class(self, made_of: Class, name: str, instance: Instance | None) -> Any:
        """A class's method, bound where there is an instance, or its value."""
        for one in self.above(made_of):
            for item in one.node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    marks = {code(mark).partition("(")[0] for mark in item.decorator_list}
                    function = Function(one.file, item)
                    if instance is None or "staticmethod" in marks:
                        return function
                    if "property" in marks:
                        return self.call(function, [instance], {})
                    return partial(self._bound, function, made_of if "classmethod" in marks else instance)
                if isinstance(item, (ast.Assign, ast.AnnAssign)) and item.value:
                    target = item.target if isinstance(item, ast.AnnAssign) else item.targets[0]
                    if code(target) == name:
                        return self.value(item.value, Scope(one.file))
        return UNKNOWN

    def _bound(self, function: Function, instance: Any, *arguments: Any, **named: Any) -> Any:
        return self.call(function, [instance, *arguments], named)

    def _of_call(self, node: ast.Call, scope: Scope) -> Any:
        text = code(node.func)
        if text.partition(".")[0] in ("logger", "warnings", "print"):
            return None
        if text == "super":
            return UNKNOWN
        arguments: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                many = self.value(argument.value, scope)
                arguments += self.items(many) if not isinstance(many, Unknown) else [UNKNOWN]
            else:
                arguments.append(self.value(argument, scope))
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            given = self.value(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = given
            elif isinstance(given, (dict, Unknown)):
                look(given)
                named |= given if isinstance(given, dict) else {}
                named["<all>"] = given
            else:
                raise Stopped(["TypeError", "Exception", "BaseException"], "not a mapping")
        special = SPECIAL.get(text)
        if special and text not in scope.names:
            return special(self, arguments)
        function = self.value(node.func, scope)
        return self.call(function, arguments, named)

    def call(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        whole = named.pop("<all>", None)
        if isinstance(function, Class):
            return self.made(function, arguments, named, whole)
        if isinstance(function, Function):
            return UNKNOWN if isinstance(whole, Unknown) else self.called(function, arguments, named)
        if isinstance(function, partial) or (
            callable(function) and getattr(function, "__name__", "") == "<lambda>"
        ):
            return function(*arguments, **named)
        if isinstance(function, Unknown) or not callable(function):
            look(*arguments, *named.values())
            return UNKNOWN
        of_container = isinstance(getattr(function, "__self__", None), (dict, list))
        if any(not _plain(value) for value in arguments) and not of_container:
            look(*arguments)
            return UNKNOWN
        return self.apply(function, *arguments, **named)

    def called(self, function: Function, arguments: list[Any], named: dict[str, Any]) -> Any:
        """A function of the release, followed."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise UntoldError
        names: dict[str, Any] = dict(function.names or {})
        rules, outer = function.node.args, Scope(function.file)
        positional = [*rules.posonlyargs, *rules.args]
        for argument, default in zip(reversed(positional), reversed(rules.defaults), strict=False):
            names[argument.arg] = self.value(default, outer)
        for argument, preset in zip(rules.kwonlyargs, rules.kw_defaults, strict=True):
            names[argument.arg] = self.value(preset, outer) if preset else UNKNOWN
        names |= dict(zip((argument.arg for argument in positional), arguments, strict=False))
        if rules.vararg:
            names[rules.vararg.arg] = tuple(arguments[len(positional) :])
        known = {argument.arg for argument in (*positional, *rules.kwonlyargs)}
        names |= {name: value for name, value in named.items() if name in known}
        if rules.kwarg:
            names[rules.kwarg.arg] = {name: value for name, value in named.items() if name not in known}
        scope = Scope(function.file, names)
        try:
            if isinstance(function.node, ast.Lambda):
                return self.value(function.node.body, scope)
            self.run(function.node.body, scope)
        except _Return as answer:
            return answer.value
        finally:
            self.depth -= 1
        return None

    def made(self, made_of: Class, arguments: list[Any], named: dict[str, Any], whole: Any) -> Any:
        """An instance: of a plain class by its constructor, of a pydantic model by its fields and validators."""
        roots = self.roots(made_of)
        if any("Enum" in root for root in roots):
            return self.member(made_of, arguments)
        instance = Instance(made_of)
        if roots & set(MODELS):
            return self.modelled(instance, named, whole)
        constructor = self.of_class(made_of, "__init__", instance)
        if constructor is not UNKNOWN:
            constructor(*arguments, **named)
        return instance

    def member(self, made_of: Class, arguments: list[Any]) -> Any:
        """The member of an enum with a value: UNKNOWN, or a ValueError where no member has it."""
        value = arguments[0] if arguments else UNKNOWN
        if isinstance(value, Unknown) or self.of_class(made_of, "_missing_", None) is not UNKNOWN:
            look(value)
            return UNKNOWN
        known: list[Any] = []
        for item in made_of.node.body:
            if isinstance(item, ast.Assign):
                given = self.value(item.value, Scope(made_of.file))
                known += given if isinstance(given, tuple) else [given]
        if value in [one for one in known if not isinstance(one, Unknown)]:
            return UNKNOWN
        raise Stopped(["ValueError", "Exception", "BaseException"], f"{made_of.node.name}: no such member")

    def modelled(self, instance: Instance, named: dict[str, Any], whole: Any) -> Any:
        """A pydantic model: its own conversion is the schema's matter, so that only its validators are followed."""
        if isinstance(whole, dict) and (key := self._section.get(id(whole))):
            self.sections[key] = instance.made_of
        named = {name: value for name, value in named.items() if value != "auto"}
        bodies = [*reversed([*self.above(instance.made_of)])]
        for one in bodies:
            for item in one.node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    instance.attributes[item.target.id] = self._default(item, one.file)
        for one in bodies:
            for item in one.node.body:
                if isinstance(item, ast.FunctionDef):
                    self._before(item, one.file, instance, named)
        for name, value in named.items():
            if name in instance.attributes:
                instance.attributes[name] = UNKNOWN if isinstance(value, (dict, list)) else value
        return instance

    def _default(self, item: ast.AnnAssign, file: str) -> Any:
        given: ast.expr | None = item.value
        if isinstance(given, ast.Call) and code(given.func) == "Field":
            keywords = {keyword.arg: keyword.value for keyword in given.keywords}
            given = given.args[0] if given.args else keywords.get("default")
        found = self.value(given, Scope(file)) if given is not None else UNKNOWN
        return UNKNOWN if isinstance(found, dict) else found

    def _before(self, item: ast.FunctionDef, file: str, instance: Instance, named: dict[str, Any]) -> None:
        """Run a field's validator that looks at the value as it is given."""
        for mark in item.decorator_list:
            if isinstance(mark, ast.Call) and first_of(mark):
                for name in (self.value(argument, Scope(file)) for argument in mark.args):
                    if name in named:
                        self.called(Function(file, item), [instance.made_of, named[name]], {})


def first_of(mark: ast.Call) -> bool:
    """Whether a decorator makes a validator of a field's value before it is converted."""
    words = {keyword.arg: code(keyword.value) for keyword in mark.keywords}
    named = code(mark.func).rpartition(".")[2] in ("field_validator", "validator")
    return named and (words.get("mode") == "'before'" or words.get("pre") == "True")


def _isinstance(reader: Reader, arguments: list[Any]) -> Any:
    value, kinds = arguments
    if isinstance(value, Unknown):
        look(value)
        return UNKNOWN
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    known = [kind for kind in kinds if isinstance(kind, type)]
    if isinstance(value, tuple(known)):
        return True
    if isinstance(value, Instance):
        return any(kind in [*reader.above(value.made_of)] for kind in kinds if isinstance(kind, Class))
    return False if len(known) == len(kinds) else UNKNOWN


def _getattr(reader: Reader, arguments: list[Any]) -> Any:
    if not isinstance(arguments[1], str):
        return UNKNOWN
    return reader.attribute(arguments[0], arguments[1])


def _hasattr(_reader: Reader, arguments: list[Any]) -> Any:
    holder, name = arguments
    if isinstance(holder, (Unknown, Class)) or not isinstance(name, str):
        return UNKNOWN
    if isinstance(holder, Instance):
        return True if name in holder.attributes else UNKNOWN
    return hasattr(holder, name)


def _setattr(_reader: Reader, arguments: list[Any]) -> None:
    if isinstance(arguments[0], Instance) and isinstance(arguments[1], str):
        arguments[0].attributes[arguments[1]] = arguments[2]


def _map(reader: Reader, arguments: list[Any]) -> Any:
    function, many = arguments[0], arguments[-1]
    if isinstance(many, Unknown):
        look(many)
        return UNKNOWN
    return [reader.call(function, [item], {}) for item in reader.items(many)]


def _all(reader: Reader, arguments: list[Any], ends: bool = False) -> Any:
    if isinstance(arguments[0], Unknown):
        look(arguments[0])
        return UNKNOWN
    truths = [reader.true(item) for item in reader.items(arguments[0])]
    if ends in truths:
        return ends
    return UNKNOWN if UNKNOWN in truths else not ends


def _finite(reader: Reader, arguments: list[Any]) -> Any:
    return reader.apply(math.isfinite, *arguments)


def _copied(_reader: Reader, arguments: list[Any]) -> Any:
    return copy.copy(arguments[0]) if isinstance(arguments[0], (dict, list)) else arguments[0]


SPECIAL: dict[str, Callable[[Reader, list[Any]], Any]] = {
    "isinstance": _isinstance,
    "getattr": _getattr,
    "hasattr": _hasattr,
    "setattr": _setattr,
    "map": _map,
    "all": _all,
    "any": partial(_all, ends=True),
    "math.isfinite": _finite,
    "copy.copy": _copied,
    "copy.deepcopy": _copied,
}
"""Functions that look at more than a builtin may see here."""


# Every key


@dataclass
class Answers:
    """What a release's reader refuses. texts: the modules that it was read in, by which a next release is the same."""

    refuses: dict[str, list[str]] = field(default_factory=dict)
    """Key -> the kinds of values (schema.KINDS_OF_VALUES) of which it refuses each that is tried."""
    needs: dict[str, list[str]] = field(default_factory=dict)
    """Section -> the keys that it stops without once `enabled` is true."""
    empty: list[str] = field(default_factory=list)
    """Sections that may be an empty list or text, which pydantic 1 makes an empty section of."""
    models: dict[str, Class] = field(default_factory=dict)
    """Key at the top -> the pydantic model that is made of it."""
    texts: dict[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()

    def holds(self, source: ReleaseSource, nodes: Mapping[str, Node]) -> bool:
        """Whether another release gives the same answers, as its modules are the same."""
        return self.keys == (*nodes,) and all(
            source.files.get(file) == text for file, text in self.texts.items()
        )


_LAST: list[Answers] = []


def answers(source: ReleaseSource, nodes: Mapping[str, Node]) -> Answers:
    """What a release refuses. nodes: the keys of its schema.

    What a pydantic model converts is the model's matter: of its fields those count that a validator looks at first.
    Where a section's keys have to be there together, none of them alone is judged.
    """
    if _LAST and _LAST[0].holds(source, nodes):
        return _LAST[0]
    reader = Reader(source)
    found = Answers()
    checked = [path for path, node in nodes.items() if node.get("x-checked")]
    for path, node in nodes.items():
        if path.startswith(NOT_READ):
            continue
        if "properties" in node:  # in whose place anything else is refused, unless the overlay says otherwise
            if "x-wrong" in node and (kinds := _refused(reader, path, node)):
                found.refuses[path] = kinds
            if needs := _needs(reader, path, node):
                found.needs[path] = needs
            if source.converts_as_1 and reader.read(_alone(path, [])) is True:
                found.empty.append(path)
        elif (not _below(path, checked) or path.rpartition(".")[2] in reader.looked_at) and (
            kinds := _refused(reader, path, node)
        ):
            found.refuses[path] = kinds
    found.models = reader.sections
    found.texts = {file: source.files.get(file, "") for file in (*reader.files, CONFIG)}
    found.keys = (*nodes,)
    _LAST[:] = [found]
    return found


def _below(path: str, sections: Sequence[str]) -> bool:
    return any(path.startswith(f"{section}.") for section in sections)


def _refused(reader: Reader, path: str, node: Node) -> list[str]:
    """The kinds of values that stop a release at a key; none where right ones do, too, for want of another key."""
    probe = Looked()
    reader.read(_alone(path, probe))
    if not probe.seen or all(reader.read(_alone(path, value)) is not False for value in FIRST_TRIED):
        return []
    kinds = [
        kind
        for kind, values in KINDS_OF_VALUES.items()
        if all(reader.read(_alone(path, value)) is False for value in values)
    ]
    some_taken = len(kinds) < len(KINDS_OF_VALUES) or any(
        reader.read(_alone(path, value)) is not False for value in _right(node)
    )
    return kinds if some_taken else []


def _right(node: Node) -> list[Any]:
    """Values that a key's schema takes."""
    branches = [branch for branch in node.get("anyOf", [node]) if "const" not in branch]
    return [*(value for branch in branches for value in branch.get("enum", ())), _fitting(node)]


def _needs(reader: Reader, path: str, node: Node) -> list[str]:
    """The keys that a section has to have once it is on: without them a reading stops before it else would."""
    if "enabled" not in node["properties"] or any(
        reader.read(_alone(f"{path}.enabled", True, batch)) is not False for batch in (True, False)
    ):
        return []
    all_keys = {name: _fitting(child) for name, child in node["properties"].items()}
    reader.read(_alone(path, all_keys, batch=False))
    whole, length = reader.stop, reader.steps
    needed = []
    for name in all_keys:
        rest = {key: value for key, value in all_keys.items() if key != name}
        stops = reader.read(_alone(path, rest, batch=False)) is False
        if name != "enabled" and stops and reader.stop != whole and reader.steps < length:
            needed.append(name)
    return needed


def _fitting(node: Node) -> Any:
    """A value that a key's schema takes."""
    node = node["anyOf"][-1] if "anyOf" in node else node
    kind = node.get("type", "null")
    kind = kind[0] if isinstance(kind, list) else kind
    if node.get("default") is not None and kind != "boolean":
        return node["default"]
    if "enum" in node:
        return node["enum"][0]
    if kind == "array":
        return [_fitting(node.get("items", {"type": "integer"}))]
    return {"boolean": True, "integer": 8, "number": 8, "string": "x", "object": {}}.get(kind)


def _alone(path: str, value: Any, batch: bool = True) -> dict[str, Any]:
    """A config of one key, and the batch size that most configs need."""
    config: dict[str, Any] = {BATCH[1]: 1} if batch and path not in BATCH[:2] else {}
    tree.put(config, path, value)
    return config


FIRST_TRIED: tuple[Any, ...] = (None, True, -1, "x", {}, [1])
"""Values of which at least one stops a release at a key where any does."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
NOT_READ = (
    *("optimizer.params.", "scheduler.params.", "inference", "msamp"),
    *("compression_training.", "autotuning.", "sparse_attention."),
)
"""Sections of which DeepSpeedConfig reads no key, or none by itself."""

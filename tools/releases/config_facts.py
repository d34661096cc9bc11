"""What each release of DeepSpeed says about its configuration: keys, types, defaults, bounds, refusals and warnings.

The keys are those that tools/schemas reads from the same code, release by release and not minor by minor. A fact is a
line of text with the releases in which it holds; what changed between two releases is the difference of their facts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dsrun.config.schemas import schema
from dsrun.config.schemas.schema import Node
from dsrun.releases.packed import span
from tools.releases.fetch import Cache, Source
from tools.releases.names import message
from tools.schemas.generate import COPIED, OVERLAY, Builder, join, mark_refused, nodes
from tools.schemas.interpret import NOT_READ, Reader
from tools.schemas.refusals import CHECKS, ENGINE
from tools.schemas.source import NO_DEFAULT, Known, ReleaseSource, TypedClass, nullable

CONFIG_FILE = re.compile(r"(?:^|[/_])config(?:_utils)?\.py$")
OTHERS = ("inference/", "autotuning/", "compression/", "launcher/", "model_implementations/", "nvme/")
"""Folders whose config files are not those of deepspeed.json's keys, or whose keys nobody checks."""
NOT_KEYS = tuple(f"{path}." for path in sorted(COPIED))
"""Sections that constructors take: what each takes in which release stands with its names."""
OLDEST = (0, 9)
"""The first version that there are schemas of."""
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
WARN = re.compile(r"(?:^|\.)(?:warn|warning|warning_once|log_dist_once|logger\.warn)$")
STOPS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Fact(NamedTuple):
    """Something that holds in a release."""

    kind: str
    """key, type, default, bound, values, deprecated, alias, checked, refused, refusal or warning."""
    place: str
    """The key; of refusals, warnings, and the values of a key that no model has, the file and function."""
    text: str = ""
    when: str = ""
    """The condition right before a refusal or warning."""

    @property
    def line(self) -> str:
        return "\t".join(self)


class CodeReader(Builder):
    """Keeps what the code says of each key, and takes a release that the overlay does not describe wholly: what the
    overlay lacks is a key without a description."""

    def __init__(self, source: ReleaseSource, overlay: Node, newest: Node) -> None:
        super().__init__(source, overlay, newest)
        self.said: dict[str, Known] = {}
        """Key -> what the code says about it."""
        self.new: list[str] = []
        """Keys that the overlay lacks."""

    def node(self, entry: Node, known: Known, path: str) -> Node:
        self.said[path] = known
        return super().node(entry, known, path)

    def properties(self, entry: Node, model: TypedClass | None, path: str) -> Node:
        found = super().properties(entry, model, path)
        for name, known in self.known_keys(entry, model, path).items():
            if (key := known.alias or name) not in found:
                self.said[join(path, key)] = known
                self.new.append(join(path, key))
                found[key] = self.bare(known, join(path, key))
                if key != name:
                    found[name] = {**found[key], "x-alias-of": key}
        return found

    def bare(self, known: Known, path: str) -> Node:
        """A key that the overlay lacks; of a section all that its model says."""
        node: Node = {"not": {}} if known.outside else dict(known.keywords)
        if known.default is not NO_DEFAULT:
            node["default"] = known.default
            node = nullable(node) if known.default is None and "type" in node else node
        return {**node, **self.section(known.model, path)} if known.model else node

    def section(self, model: TypedClass, path: str) -> Node:
        """The node of a section that a model is made of."""
        checked = {"x-checked": True} if self.source.rejects_unknown(model) else {}
        inner = self.properties({"properties": {}}, model, path)
        return {**checked, "type": "object", "additionalProperties": False, "properties": inner}

    def tree(self) -> Node:
        """Every key of the release."""
        return {"properties": self.properties(self.overlay, None, "")}

    def ask(self, reader: Reader, root: Node) -> None:
        """Put in the keys that sections without a model are asked for, and those that are asked for below them."""
        todo = [
            (path, node)
            for path, node in nodes(root)
            if path in self.new or ("properties" in node and "x-checked" not in node)
        ]
        while todo:
            path, node = todo.pop()
            inner = node.get("properties", {})
            fresh = (
                [] if path.startswith(NOT_READ) else [key for key in reader.asked(path) if key not in inner]
            )
            if fresh:
                node["properties"] = {**inner, **{key: {} for key in fresh}}
                self.new += [join(path, key) for key in fresh]
                todo += [(join(path, key), node["properties"][key]) for key in fresh]

    def judged(self) -> Node:
        """The same with what the release's reader refuses, and with the models of sections that the overlay lacks."""
        root = self.tree()
        known = root["properties"]
        models = mark_refused(root, self.source, self.overlay).models
        for key, model in models.items():
            if "properties" not in known.get(key, {}):
                known[key] = self.section(TypedClass(model.file, model.node.name), key)
        self.ask(Reader(self.source), root)
        if self.new:
            mark_refused(root, self.source, self.overlay)
        return root


def facts(source: ReleaseSource, overlay: Node, newest: Node) -> list[Fact]:
    """The facts of a release. newest: the newest release's keys, {} for itself."""
    reader = CodeReader(source, overlay, newest)
    found = [
        fact
        for path, node in nodes(reader.tree())
        if not path.startswith(NOT_KEYS)
        for fact in _of_key(path, node, reader.said.get(path))
    ]
    found += [Fact("refused", path) for path in reader.refused]
    found += _stops_and_warnings(source)
    return list(dict.fromkeys(found))


def _of_key(path: str, node: Node, known: Known | None) -> Iterator[Fact]:
    """The facts of a key; of a second name, only that it is one."""
    yield Fact("key", path)
    if "x-alias-of" in node:
        yield Fact("alias", path, node["x-alias-of"])
    if node.get("x-checked"):
        yield Fact("checked", path)
    if known is None:
        return
    said = known.keywords
    if "type" in said:
        yield Fact("type", path, json.dumps(said["type"]))
    if known.default is not NO_DEFAULT:
        yield Fact("default", path, json.dumps(known.default))
    for bound in BOUNDS:
        if bound in said and said[bound] is not NO_DEFAULT:
            yield Fact("bound", path, f"{bound} {json.dumps(said[bound])}")
    if "enum" in said:
        yield Fact("values", path, json.dumps(said["enum"]))
    if said.get("deprecated"):
        yield Fact("deprecated", path)


# Refusals and warnings


def _stops_and_warnings(source: ReleaseSource) -> Iterator[Fact]:
    for file in sorted(source.files):
        if file == ENGINE or (CONFIG_FILE.search(file) and not file.startswith(OTHERS)):
            for function in ast.walk(source.tree(file)):
                if isinstance(function, STOPS[:2]) and (file != ENGINE or function.name in CHECKS):
                    yield from of_function(function, f"{file}:{function.name}")


def of_function(function: ast.FunctionDef | ast.AsyncFunctionDef, place: str) -> Iterator[Fact]:
    """What a function refuses, warns of, and which values it tells apart."""
    yield from _in(function.body, place, "")
    if values := _values_taken(function):
        yield Fact("values", place, json.dumps(values))


def _values_taken(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The texts that a function compares a value with before it refuses all others: fp16, bf16 and fp32."""
    for statement in ast.walk(function):
        if not isinstance(statement, ast.If):
            continue
        values: list[str] = []
        rest: list[ast.stmt] = [statement]
        while len(rest) == 1 and isinstance(branch := rest[0], ast.If):
            values += _compared(branch.test)
            rest = branch.orelse
        if len(values) > 1 and any(isinstance(last, ast.Raise) for last in (*rest, function.body[-1])):
            return sorted(values)
    return []


def _compared(test: ast.expr) -> list[str]:
    """The text that a condition compares something with; none where it asks something else."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        value = test.comparators[0]
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return [value.value]
    return []


def _in(body: list[ast.stmt], place: str, when: str) -> Iterator[Fact]:
    """The refusals of some statements, each with the condition that stands right before it."""
    for statement in body:
        if isinstance(statement, STOPS):
            continue
        if isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call):
            told = statement.exc.args[0] if statement.exc.args else statement.exc.func
            yield Fact("refusal", place, _text(told), when)
        elif isinstance(statement, ast.Assert):
            yield Fact("refusal", place, _text(statement.msg), ast.unparse(statement.test))
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if WARN.search(ast.unparse(call.func)) and call.args:
                yield Fact("warning", place, _text(call.args[0]), when)
        if isinstance(statement, ast.If):
            condition = " ".join(ast.unparse(statement.test).split())
            yield from _in(statement.body, place, condition)
            yield from _in(statement.orelse, place, f"not ({condition})")
            continue
        for branch in ("body", "orelse", "finalbody"):
            yield from _in(getattr(statement, branch, []), place, when)
        for handler in getattr(statement, "handlers", []):
            yield from _in(handler.body, place, when)


def _text(node: ast.AST | None) -> str:
    return " ".join((message(node) or (ast.unparse(node) if node else "")).split())


# All releases


def release_source(cache: Cache, release: str) -> ReleaseSource:
    """A release as the tools of the schemas read it."""
    files = cache.files(release)
    return ReleaseSource(
        release,
        {
            path.removeprefix("deepspeed/"): cache.text(digest)
            for path, digest in files.items()
            if path.startswith("deepspeed/") and path.endswith(".py")
        },
    )


def config_text(cache: Cache, sources: list[Source]) -> str:
    """Every fact with its span, a line each."""
    overlay = json.loads(OVERLAY.read_text(encoding="utf-8"))
    read = [(number, source.release) for number, source in enumerate(sources)]
    read = [(number, release) for number, release in read if schema.minor_of(release) >= OLDEST]
    newest = CodeReader(release_source(cache, read[-1][1]), overlay, {}).tree()
    found: dict[Fact, int] = {}
    for number, release in read:
        of_newest: Mapping[str, Any] = {} if number == read[-1][0] else newest
        source = release_source(cache, release)
        for fact in facts(source, overlay, dict(of_newest)):
            found[fact] = found.get(fact, 0) | 1 << number
        source.forget()
    every = (1 << len(sources)) - 1
    return "".join(f"{fact.line}\t{span(had, every)}\n" for fact, had in sorted(found.items()))

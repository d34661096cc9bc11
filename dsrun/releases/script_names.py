"""Names and parameters in a script that some releases of its packages don't have, by line; nothing is run.

Only what a release is known to have had and not to have now is reported: a name that no release had may be made at run
time. What the script itself looks out for is left out: names in a `try` that catches their absence, under an `if` that
asks for a version or with hasattr, and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dsrun.releases import packed
from dsrun.releases.lookup import NameRecord, has_own_init, look_up
from dsrun.releases.packed import PackageReleases

CAUGHT = re.compile(r"ImportError|ModuleNotFoundError|AttributeError|TypeError|Exception")
ASKS = re.compile(
    r"version|hasattr|available|TYPE_CHECKING|signature|__dict__|\bdir\(|find_spec", re.IGNORECASE
)
"""What a condition has in it that looks at what is installed."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class NameUse:
    """A name of a package as a script uses it."""

    path: str
    """transformers.TrainingArguments, however the script calls it."""
    line: int
    parameter: str = ""
    """The keyword that it is called with; empty where the name itself is meant."""
    at_start: bool = False
    """Whether the line runs when the file is imported."""


@dataclass(frozen=True)
class MissingName:
    """A name that a release hasn't got."""

    use: NameUse
    record: NameRecord
    version: str
    """The version that it was judged for."""

    @property
    def text(self) -> str:
        """transformers.AdamW is not in transformers 5.23.0: 4.49.0 is the last release that has it."""
        package, record = self.record.package, self.record
        name = f"{self.use.path}({self.use.parameter}=)" if self.use.parameter else self.use.path
        number = package.releases.index(release_of(package, self.version))
        before = record.releases & (1 << number) - 1
        if before:
            last = package.releases[before.bit_length() - 1]
            when = f"{last} is the last release that has it"
        else:
            when = f"{record.first} is the first release that has it"
        return f"{name} is not in {package.name} {self.version}: {when}"

    @property
    def advice(self) -> str:
        """What took its place, or a release to install."""
        record, package = self.record, self.record.package
        number = package.releases.index(release_of(package, self.version))
        if not record.releases & (1 << number) - 1:
            return f"Install {package.name} {record.first} or newer, or leave it out."
        last = package.releases[(record.releases & (1 << number) - 1).bit_length() - 1]
        if record.instead:
            return f"Write {record.instead} ({record.because}), or install {package.name} {last}."
        return f"Install {package.name} {last}, or leave it out."


def missing(text: str, versions: Mapping[str, str]) -> list[MissingName]:
    """What a script's text uses and these versions haven't got, each once, by line. versions: package -> version.

    Raises SyntaxError where the text is no Python.
    """
    found: dict[tuple[str, str], MissingName] = {}
    for use in uses(text):
        package = packed.package_of(use.path)
        version = versions.get(package.name, "") if package else ""
        release = release_of(package, version) if package and version else ""
        if not release or (use.path, use.parameter) in found:
            continue
        record = look_up(use.path, use.parameter)
        if _is_gone(record, release, parameter=bool(use.parameter)) and _has_holder(use, release):
            found[use.path, use.parameter] = MissingName(use, record, version)
    return sorted(found.values(), key=lambda one: one.use.line)


def _is_gone(record: NameRecord, release: str, *, parameter: bool) -> bool:
    """Whether the data are sure that a release hasn't got what others have."""
    if not record.releases or record.is_in(release) is not False or record.dynamic or record.unread:
        return False
    bases = record.inherited_from and not (parameter and has_own_init(record, release))
    return not record.any_keyword and not bases


def _has_holder(use: NameUse, release: str) -> bool:
    """Whether the class or function is there that lacks a member or parameter: else that is reported."""
    holder = use.path if use.parameter else use.path.rpartition(".")[0]
    return "." not in holder or look_up(holder).is_in(release) is not False


def release_of(package: PackageReleases, version: str) -> str:
    """The release that a version is judged as: itself, the one before it of the same minor version, or the newest
    where it is newer; empty where the data have none.
    """
    wanted = _numbers(version)
    if not wanted:
        return ""
    known = [(_numbers(release), release) for release in package.releases]
    if wanted > known[-1][0]:
        return package.releases[-1]
    same = [release for numbers, release in known if numbers[:2] == wanted[:2] and numbers <= wanted]
    # Of some packages the data have the last patch of each minor version only.
    later = [release for numbers, release in known if numbers[:2] == wanted[:2]]
    return (same or later or [""])[-1 if same else 0]


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


# What a script uses


def uses(text: str) -> Iterator[NameUse]:
    """The names of packages that there are data of, with their lines."""
    tree = ast.parse(text)
    known = frozenset(name.replace("-", "_") for name in packed.packages())
    if not any(top in known for top in _tops(tree)):
        return
    yield from _Reader(tree, known).read(tree.body, at_start=True)


def _tops(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


class _Reader:
    """Walks a script with what its imports call the names of packages."""

    def __init__(self, tree: ast.Module, known: frozenset[str]) -> None:
        self.known = known
        self.aliases: dict[str, str] = {}
        """A name in the script -> the path that it stands for."""
        stored = set()
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._take(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored.add(node.id)
            elif isinstance(node, ast.arg):
                stored.add(node.arg)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                stored.add(node.name)
        for name in stored:  # of two things that share a name it isn't known which is meant
            self.aliases.pop(name, None)

    def _take(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                top = alias.name.partition(".")[0]
                self._call(alias.asname or top, alias.name if alias.asname else top)
            elif not node.level and node.module:
                self._call(alias.asname or alias.name, f"{node.module}.{alias.name}")

    def _call(self, name: str, path: str) -> None:
        """Two imports under one name: neither is known to be meant."""
        theirs = path.partition(".")[0] in self.known
        self.aliases[name] = path if theirs and self.aliases.get(name, path) == path else ""

    def read(self, body: Iterable[ast.AST], *, at_start: bool) -> Iterator[NameUse]:
        """The uses in some statements, without those that the script guards."""
        for node in body:
            yield from self._node(node, at_start)

    def _node(self, node: ast.AST, at_start: bool) -> Iterator[NameUse]:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from self._imported(node, at_start)
            return
        if isinstance(node, ast.Try) and any(map(_catches, node.handlers)):
            return
        if isinstance(node, (ast.If, ast.IfExp)) and ASKS.search(ast.unparse(node.test)):
            return
        if isinstance(node, ast.Attribute) and (path := self._path(node)):
            # A member of a class that is gone is told of the class.
            parts = path.split(".")
            for length in range(2, len(parts) + 1):
                yield NameUse(".".join(parts[:length]), node.lineno, at_start=at_start)
            return
        if isinstance(node, ast.Call) and (path := self._path(node.func)):
            for keyword in node.keywords:
                if keyword.arg:
                    yield NameUse(path, keyword.value.lineno, keyword.arg, at_start)
        inner = at_start and not isinstance(node, SCOPES)
        yield from self.read(ast.iter_child_nodes(node), at_start=inner)

    def _imported(self, node: ast.Import | ast.ImportFrom, at_start: bool) -> Iterator[NameUse]:
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif node.level:
            return
        else:  # the module first: with it, its names are gone
            paths = [
                str(node.module),
                *(f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"),
            ]
        for path in paths:
            if path.partition(".")[0] in self.known and "." in path:
                yield NameUse(path, node.lineno, at_start=at_start)

    def _path(self, node: ast.AST) -> str:
        """What an expression stands for, where its first name is a package's; empty otherwise."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        root = self.aliases.get(node.id, "") if isinstance(node, ast.Name) else ""
        return ".".join([root, *reversed(parts)]) if root else ""


def _catches(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or CAUGHT.search(ast.unparse(handler.type)) is not None

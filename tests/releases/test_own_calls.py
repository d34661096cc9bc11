"""dsrun's own calls of other packages: every release that setup.cfg allows has the names and the keywords.

The calls are read from dsrun's code by their syntax; what each release has, from the data that ship (dsrun/releases).
So a name of a newest release only, or a keyword that an allowed one hasn't yet, is found without installing anything.
"""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lowest
import pytest

from dsrun.releases import lookup, packed
from dsrun.releases.packed import PackageReleases
from dsrun.versions import meets

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted((ROOT / "dsrun").rglob("*.py"))
ASKS = re.compile(
    r"\bhasattr\b|\bgetattr\b|version|signature|parameters|is_\w+_available|\b__wrapped__\b|\bvars\("
)
"""A condition that asks whether something is there."""
FORGIVING = {"ImportError", "ModuleNotFoundError", "AttributeError", "TypeError"}
IMPORTS = re.compile(
    rf"^\s*(?:from|import) (?:{'|'.join(map(re.escape, packed.packages()))})\b", re.MULTILINE
)
KNOWN: dict[str, str] = {}
"""NAME or NAME(KEYWORD) that not every allowed release has -> why it is used all the same: what asks first in a way
that syntax alone doesn't show."""


@dataclass(frozen=True)
class Use:
    """A name of another package in dsrun's code, or a keyword that it is called with."""

    where: str
    name: str
    keyword: str = ""
    count: int = 0
    """Positional arguments."""

    def __str__(self) -> str:
        inside = self.keyword or (f"{self.count} positional" if self.count else "")
        return f"{self.name}({inside})" if inside else self.name


class Uses(ast.NodeVisitor):
    """The uses in a module, without those that a condition or an `except` guards."""

    def __init__(self, path: Path) -> None:
        self.where = str(path.relative_to(ROOT))
        self.names: dict[str, str] = {}
        """A name in the module -> the path that it stands for."""
        self.found: list[Use] = []
        self._guarded = 0

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._take(alias.name, node)
            self.names[alias.asname or alias.name.partition(".")[0]] = (
                alias.name if alias.asname else alias.name.partition(".")[0]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module and not node.level:
                self._take(f"{node.module}.{alias.name}", node)
                self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if path := self._path(node):
            self._take(path, node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if path := self._path(node.func):
            for keyword in node.keywords:
                if keyword.arg:
                    self._take(path, node, keyword.arg)
            if node.args and not any(isinstance(one, ast.Starred) for one in node.args):
                self._take(path, node, count=len(node.args))
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._branches(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._branches(node)

    def _branches(self, node: ast.If | ast.IfExp) -> None:
        """What a condition that asks decides about is guarded; both branches are, as one of them is for the others."""
        self.visit(node.test)
        self._guarded += (asks := bool(ASKS.search(ast.unparse(node.test))))
        for part in ast.iter_child_nodes(node):
            if part is not node.test:
                self.visit(part)
        self._guarded -= asks

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        asks = False
        for part in node.values:
            self.visit(part)
            if not asks and ASKS.search(ast.unparse(part)):
                asks = True
                self._guarded += 1
        self._guarded -= asks

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name.id for handler in node.handlers if handler.type for name in ast.walk(handler.type)
                  if isinstance(name, ast.Name)}  # fmt: skip
        forgiving = bool(caught & FORGIVING)
        self._guarded += forgiving
        for part in node.body:
            self.visit(part)
        self._guarded -= forgiving
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def _path(self, node: ast.AST) -> str:
        """The path of an attribute or a name, where it begins with an imported one."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.names:
            return ""
        return ".".join([self.names[node.id], *reversed(parts)])

    def _take(self, path: str, node: ast.AST, keyword: str = "", count: int = 0) -> None:
        if not self._guarded and packed.package_of(path):
            self.found.append(Use(f"{self.where}:{getattr(node, 'lineno', 0)}", path, keyword, count))


def uses(texts: Iterable[tuple[Path, str]]) -> list[Use]:
    found = []
    for path, text in texts:
        if IMPORTS.search(text):
            visitor = Uses(path)
            visitor.visit(ast.parse(text))
            found += visitor.found
    return found


@cache
def lowest_allowed() -> dict[str, str]:
    """Package -> the lowest version that setup.cfg allows, in every extra; transformers decides about tokenizers."""
    config = configparser.ConfigParser()
    config.read(lowest.SETUP, encoding="utf-8")
    texts = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    matches = (lowest.BOUND.match(line.strip()) for text in texts for line in text.splitlines())
    return {match["name"]: match["version"] for match in matches if match} | {"tokenizers": "0.22"}


def defined(path: str) -> tuple[PackageReleases, list[lookup.Definition], list[str]]:
    """The definitions that a path leads to, past modules that a package has under another name, and what is below."""
    package = packed.package_of(path)
    assert package is not None
    module, rest = lookup.longest_module(package, path)
    for _ in range(lookup.DEEPEST):
        if module is None or len(rest) < 2:
            break
        kinds = {entry.kind[1:] for entry in module.of("", rest[0]) if entry.kind.startswith("=")}
        behind = next((there for kind in kinds if (there := package.module(kind))), None)
        if behind is None:
            break
        module, rest = behind, rest[1:]
    return package, lookup.definitions(package, module, rest[0]) if module and rest else [], rest[1:]


@cache
def parameters_of(path: str) -> dict[str, int]:
    """Parameters of a function or class at a path, with the releases of each, over all its definitions."""
    _, definitions, rest = defined(path)
    takes: dict[str, int] = {}
    for one in definitions if not rest else ():
        for name, had in lookup._parameters(packed.package_of(path), one, {}).items():
            takes[name] = takes.get(name, 0) | had
    return takes


@cache
def lacking(name: str, keyword: str, count: int) -> tuple[str, ...]:
    """The allowed releases that lack what is used; empty where all have it, or where the data don't say."""
    package, definitions, rest = defined(name)
    low = lowest_allowed()[package.name.replace("_", "-")]
    # What is compiled, or made as the module is imported, has a name in the data and no more.
    unread = packed.union(
        one.entry for one in definitions if one.entry.kind == "v" or list(one.module.of("%"))
    )
    allowed = [one for one in package.releases if meets(one, f">={low}")]
    if keyword or count:
        record = lookup.look_up(name, keyword or "self")
        takes = parameters_of(name)
        if (
            not definitions
            or rest
            or not takes
            or record.inherited_from
            or any(one[0] == "*" for one in takes)
        ):
            return ()
        if count:
            counts = [
                sum(had >> number & 1 for had in takes.values()) for number in range(len(package.releases))
            ]
            # 0: its __init__ is another package's, or a compiled base's.
            return tuple(
                one for number, one in enumerate(package.releases)
                if one in allowed and not unread >> number & 1 and 0 < counts[number] < count
            )  # fmt: skip
        releases = takes.get(keyword, 0) | record.taken_by_decorator
    else:
        record = lookup.look_up(name)
        releases = record.releases
        if record.dynamic or record.unread or record.inherited_from or not (releases or record.near):
            return ()
    return tuple(
        one for number, one in enumerate(package.releases)
        if one in allowed and not (releases | unread) >> number & 1
    )  # fmt: skip


def wrong_in(texts: Iterable[tuple[Path, str]], known: Mapping[str, str]) -> dict[str, list[str]]:
    """What not every allowed release has -> where it is used."""
    wrong: dict[str, list[str]] = {}
    for use in uses(texts):
        if str(use) not in known and (without := lacking(use.name, use.keyword, use.count)):
            wrong.setdefault(f"{use}: not in {without[0]} to {without[-1]}", []).append(use.where)
    return wrong


@pytest.mark.slow
def test_every_allowed_release_has_what_is_used():
    wrong = wrong_in(((path, path.read_text(encoding="utf-8")) for path in CODE), KNOWN)
    assert not wrong, "\n".join(f"{what} ({', '.join(where)})" for what, where in wrong.items())


def test_no_reason_is_left_over():
    found = {str(use) for use in uses((path, path.read_text(encoding="utf-8")) for path in CODE)}
    assert set(KNOWN) <= found


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("from torch.nn.attention.varlen import varlen_attn", "torch.nn.attention.varlen"),
        (
            "from torch.nn.functional import scaled_dot_product_attention as f\nf(1, 2, 3, enable_gqa=True)",
            "",
        ),
        ("import torch\ntorch.distributed.fsdp.fully_shard(1, mesh=2, dp_mesh_dims=3)", "(dp_mesh_dims)"),
        ("from torch.distributed.fsdp import fully_shard\nfully_shard(1, mash=2)", "(mash)"),
        (
            "from torch.distributed.fsdp import fully_shard\nfully_shard(1, 2, 3, 4, 5, 6, 7, 8, 9)",
            "9 positional",
        ),
        ("try:\n    from torch.nn.attention.varlen import varlen_attn\nexcept ImportError:\n    pass", ""),
        ("import torch\nif hasattr(torch, 'x'):\n    torch.distributed.fsdp.fully_shard(1, mash=3)", ""),
        ("import transformers\ntransformers.AutoModelForVision2Seq", "AutoModelForVision2Seq"),
        ("import deepspeed\ndeepspeed.zero.Init(module=1, modul=2)", "(modul)"),
    ],
)
def test_what_is_found(code, wrong):
    """Names and keywords of some releases only, and made-up ones; not what a condition or an `except` guards."""
    found = "\n".join(wrong_in([(ROOT / "dsrun/made_up.py", code)], {}))
    assert wrong in found
    assert bool(wrong) == bool(found)

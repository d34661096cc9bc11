"""Who may import what, read from the sources."""

from __future__ import annotations

import ast
import fnmatch
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from running import each

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "dsrun"
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "accelerate", "safetensors", "numpy", "peft"}
# Room -> the rooms of dsrun that it may import, besides itself and the modules beside them (errors, files, catalog).
ALLOWED = {
    "options": set(),
    "config": {"options"},
    "data": {"options", "jobs.spec"},
    "models": {"options", "planner", "jobs.spec"},
    "planner": {"config", "options"},
    "host": set(),
    "cluster": {"host"},
    "jobs.spec": {"host", "options", "data", "models"},
    "jobs.diagnosis": {"host", "jobs.spec", "cluster"},
    "jobs.launchers": {"host", "options", "jobs.spec", "cluster", "config", "data", "models"},
    "jobs.allocation": {"host", "options", "jobs.spec", "jobs.launchers", "cluster"},
    "jobs.runs": {"host", "options", "jobs.spec", "jobs.diagnosis", "planner", "config"},
    "jobs.supervision": {
        "host", "options", "jobs.spec", "jobs.diagnosis", "jobs.launchers", "jobs.allocation", "jobs.runs", "cluster",
        "config",
    },
    "reports": {
        "host", "options", "config", "jobs.spec", "jobs.runs", "jobs.diagnosis", "jobs.launchers", "jobs.supervision",
        "cluster",
    },
    "training": {"host", "options", "jobs.spec", "models", "data"},
}  # fmt: skip
ALLOWED["jobs.build"] = {*ALLOWED, "jobs.build"} - {"training", "reports", "jobs.supervision"}
ALLOWED["cli"] = {*ALLOWED, "cli"} - {"training"}
MOST_FLAT = 14
"""Modules that lie flat in a room of jobs or config, at most: more is a street."""
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, outside `if TYPE_CHECKING`."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            if node.module and (PACKAGE.parent / node.module.replace(".", "/")).is_dir():
                found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def room(module: str) -> str | None:
    """The room of a module of dsrun, or None for one that lies beside them, or is not dsrun's."""
    parts = module.split(".")
    if parts[0] != "dsrun" or len(parts) == 1 or not (PACKAGE / parts[1]).is_dir():
        return None
    return ".".join(parts[1:3]) if parts[1] == "jobs" and len(parts) > 2 else parts[1]


def own_room(path: Path) -> str:
    return room(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)) or ""


def test_there_are_sources():
    assert len(SOURCES) > 20


def test_arrows_point_one_way():
    def check(path: Path) -> None:
        own = own_room(path)
        others = {other for module in imports(path) if (other := room(module)) not in (None, "jobs")}
        assert own == "jobs.__init__" or others <= ALLOWED[own] | {own}

    each(SOURCES, check)


def test_no_two_rooms_lean_on_each_other():
    def reached(name: str) -> set[str]:
        new, found = {name}, set()
        while new:
            found |= new
            new = {below for one in new for below in edges[one]} - found
        return found

    edges: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in SOURCES:
        if (own := own_room(path)) in edges:
            edges[own] |= {other for module in imports(path) if (other := room(module)) in edges} - {own}
    assert not [(one, other) for one in edges for other in edges[one] if one in reached(other)]


@pytest.mark.parametrize(
    "folder", sorted({path.parent for room in ("jobs", "config") for path in (PACKAGE / room).rglob("*.py")})
)
def test_a_room_is_no_street(folder):
    flat = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(flat) <= MOST_FLAT


def test_only_training_imports_torch():
    for path in SOURCES:
        if own_room(path) != "training":
            assert not {module.split(".")[0] for module in imports(path)} & HEAVY, path


def test_config_starts_nothing():
    for path in (PACKAGE / "config").rglob("*.py"):
        assert not {module.split(".")[0] for module in imports(path)} & {
            "subprocess", "click", "rich", "socket",
        }, path  # fmt: skip


def test_no_two_public_classes_share_a_name():
    trees = [parsed(path) for path in PACKAGE.rglob("*.py")]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert not [name for name, count in Counter(names).items() if count > 1 and name[0] != "_"]


def test_no_two_test_files_share_a_name():
    """They are modules without a package: pytest collects nothing where two have one name."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_every_test_file_is_collected(pytestconfig):
    """pytest leaves out folders by their names, "build" among them, unless it is told otherwise."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {part for path in TESTS.rglob("test_*.py") for part in path.relative_to(TESTS).parts[:-1]}
    assert not [name for name in sorted(folders) for pattern in left_out if fnmatch.fnmatch(name, pattern)]

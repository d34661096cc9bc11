"""Who may import what, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dsrun"
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "accelerate", "safetensors", "numpy", "peft"}
LEAVES = {"errors", "files", "catalog", "rows", "talks", "__init__"}
# Package -> the packages of dsrun that it may import, besides itself and the leaves.
ALLOWED = {
    "cli": {"jobs", "planner", "cluster", "config"},
    "jobs": {"planner", "cluster", "config"},
    "planner": {"config"},
    "cluster": set(),
    "config": set(),
    "training": {"jobs"},
}
# What training may know of jobs: its value types, the names in the run folder, and what adapters' and ChatGLM's formats
# are.
VALUE_TYPES = {
    f"dsrun.jobs.{name}" for name in ("adapters", "chatglm", "job", "layout", "question", "rank_state")
}
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, outside `if TYPE_CHECKING`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            if node.module and (PACKAGE.parent / node.module.replace(".", "/")).is_dir():
                found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def package(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def test_there_are_sources():
    assert len(SOURCES) > 20


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    own = package(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] != "dsrun" or len(parts) == 1 or not (PACKAGE / parts[1]).is_dir():
            continue
        assert parts[1] == own or parts[1] in ALLOWED[own], f"{own} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_training_imports_torch(path):
    if package(path) != "training" and path.name != "generate.py":
        assert not {module.split(".")[0] for module in imports(path)} & HEAVY


@pytest.mark.parametrize("path", sorted((PACKAGE / "training").rglob("*.py")), ids=lambda path: path.name)
def test_training_knows_only_value_types_of_jobs(path):
    known = {module for module in imports(path) if module.startswith("dsrun.jobs.")}
    assert not {module for module in known if not any(module.startswith(name) for name in VALUE_TYPES)}


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "config").rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_config_starts_nothing(path):
    assert not {module.split(".")[0] for module in imports(path)} & {"subprocess", "click", "rich", "socket"}

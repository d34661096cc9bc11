"""Which room may import which, read from the sources."""

from __future__ import annotations

import ast
import configparser
import fnmatch
import pkgutil
import re
import tokenize
from collections import Counter
from functools import cache
from importlib import metadata
from pathlib import Path
from tokenize import COMMENT

import pytest
from needed import since
from running import each

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "dsrun"
HEAVY = {"torch", "transformers", "deepspeed", "datasets", "accelerate", "safetensors", "numpy", "peft"}
# Room -> the rooms of dsrun that it may import, besides itself and the modules beside them (errors, files, catalog).
ALLOWED = {
    "options": set(),
    "config": {"options", "releases"},
    "data": {"host", "options", "job"},
    "models": {"options", "planner", "job"},
    "planner": {"options"},
    "host": set(),
    "releases": set(),
    "bisect": {"releases"},
    "cluster": {"host"},
    "job": {"host", "options"},
    "jobs.diagnosis": {"host", "job", "releases"},
    "jobs.launchers": {"host", "options", "job", "cluster", "config", "data", "models"},
    "jobs.allocation": {"options", "job", "jobs.launchers", "cluster"},
    "jobs.runs": {"host", "job", "jobs.diagnosis", "planner", "config"},
    "jobs.supervision": {
        "host", "options", "job", "jobs.diagnosis", "jobs.launchers", "jobs.allocation", "jobs.runs", "cluster",
        "config",
    },
    "reports": {
        "host", "config", "job", "jobs.runs", "jobs.diagnosis", "jobs.launchers", "jobs.supervision",
        "cluster"},
    "trainers": {"options", "config"},
    "training": {"host", "options", "job", "models", "data"},
}  # fmt: skip
ALLOWED["jobs.assembly"] = set(ALLOWED) - {
    "bisect",
    "training",
    "reports",
    "jobs.supervision",
    "jobs.diagnosis",
    "trainers",
}
ALLOWED["cli"] = set(ALLOWED) - {"training"}
MOST_FLAT = 14
"""Modules that lie flat in a room of jobs or config, at most: more is a street."""
MOST_FLAT_ELSEWHERE = 20
"""The same for every other room but cli, where a command is a module."""
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


@cache
def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in SOURCES:
        if (own := own_room(path)) in found:
            found[own] |= {other for module in imports(path) if (other := room(module)) in found} - {own}
    return found


def test_every_arrow_is_used():
    """An arrow that nobody uses would let the next import pass unseen."""
    unused = {own: sorted(others - arrows()[own]) for own, others in ALLOWED.items()}
    assert not {own: others for own, others in unused.items() if others}


def test_no_two_rooms_lean_on_each_other():
    def reached(name: str) -> set[str]:
        new, found = {name}, set()
        while new:
            found |= new
            new = {below for one in new for below in arrows()[one]} - found
        return found

    assert not [(one, other) for one in ALLOWED for other in arrows()[one] if one in reached(other)]


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES} - {PACKAGE / "cli"}))
def test_a_room_is_no_street(folder):
    flat = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    strict = folder.relative_to(PACKAGE).parts[0] in ("jobs", "config")
    assert len(flat) <= (MOST_FLAT if strict else MOST_FLAT_ELSEWHERE)


def test_every_room_is_in_the_wheel():
    """setup.cfg lists the packages by name, as templates/ and presets/ lie beside dsrun/ and go into it."""
    config = configparser.ConfigParser()
    config.read(PACKAGE.parent / "setup.cfg", encoding="utf-8")
    listed = {name for name in config["options"]["packages"].split() if not name.startswith("dsrun.shipped")}
    folders = {path.parent.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == listed


def test_only_training_imports_torch():
    for path in SOURCES:
        if own_room(path) != "training":
            assert not {module.split(".")[0] for module in imports(path)} & HEAVY, path


def test_config_starts_nothing():
    for path in (PACKAGE / "config").rglob("*.py"):
        assert not {module.split(".")[0] for module in imports(path)} & {
            "subprocess", "click", "rich", "socket",
        }, path  # fmt: skip


def test_every_launcher_is_tested():
    """Each launcher's name stands in a test: a new module in the folder is offered to users at once."""
    folder = TESTS / "jobs" / "launchers"
    named = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("test_*.py"))
    known = [
        info.name
        for info in pkgutil.iter_modules([str(PACKAGE / "jobs" / "launchers")])
        if info.name != "common"
    ]
    assert len(known) > 8
    assert not [
        name for name in known if not re.search(rf'(?:launchers\.get\(|"--launcher", |\()"{name}"', named)
    ]


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


FILE = re.compile(r"(?<![\w/.-])[\w/.-]*\w\.py\b")
DOTTED = re.compile(r"(?<![\w/.])dsrun(?:\.[A-Za-z_]\w*)+")
QUOTED = (
    "deepspeed",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "huggingface_hub",
    "safetensors",
)
"""Packages whose files are named as sources."""
OTHERS = {
    "train.py", "ptuning/main.py", "tokenization_chatglm.py", "qlinear_cuda_old.py",
    "nn/modules.py", "backends/cuda/ops.py", "autograd/_functions.py",
    "transformers/monkey_patch.py", "ops/fused_linear_cross_entropy.py",
    "pytorch/strategies/deepspeed.py", "strategies/deepspeed.py",
    "runtime/zero/mics.py", "runtime/zero/mics_utils.py",
}  # fmt: skip
"""Files of packages that tests don't install (ChatGLM's, bitsandbytes', liger-kernel's, Lightning's), of DeepSpeed
before 0.19, and users' scripts."""


def prose(path: Path) -> str:
    """The docstrings and comments of a file."""
    strings = [
        node.value.value
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    with path.open("rb") as file:
        return "\n".join(
            [*strings, *(one.string for one in tokenize.tokenize(file.readline) if one.type == COMMENT)]
        )


def ends_of(path: str) -> set[str]:
    """A path by all of its last parts."""
    parts = path.split("/")
    return {"/".join(parts[first:]) for first in range(len(parts))}


def is_in_house(name: str) -> bool:
    """Whether dsrun.a.b is a module, or something that module dsrun.a defines."""
    *folders, last = name.split(".")
    stem = PACKAGE.parent.joinpath(*folders)
    if (stem / last).is_dir() or (stem / f"{last}.py").is_file():
        return True
    module = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    return module.is_file() and bool(
        re.search(rf"^(?:(?:async )?def |class )?{last}\b", module.read_text(), re.M)
    )


@since(deepspeed="0.19.8", torch="2.9")  # their modules are quoted, too
def test_modules_that_are_named_exist():
    """A docstring or comment that names a module of dsrun's follows it when it moves."""
    known = set(OTHERS)
    for package in QUOTED:
        known.update(*(ends_of(str(file)) for file in metadata.files(package) or () if file.suffix == ".py"))
    house = [
        path
        for top in ("dsrun", "tests", "tools", "bench", "docs")
        for path in (TESTS.parent / top).rglob("*.py")
    ]
    known.update(*(ends_of(path.relative_to(TESTS.parent).as_posix()) for path in house))

    def check(path: Path) -> None:
        text = prose(path)
        assert not [name for name in FILE.findall(text) if name.removeprefix("./") not in known]
        assert not [name for name in DOTTED.findall(text) if not is_in_house(name)]

    each(sorted(PACKAGE.rglob("*.py")), check)

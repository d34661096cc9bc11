"""The wheel, made from the source package: it holds every data file of the checkout, and finds them there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import dsrun
from dsrun import catalog

ROOT = catalog.PACKAGE.parent
DATA = ("templates", "presets", "launch")
METADATA = (
    "setup.cfg",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("build") is None, reason="the `build` package is not installed"
    ),
]


def files_of(folder) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the source package, built from a copy of what is checked in, and of the wheel made of that."""
    copy = tmp_path_factory.mktemp("copy") / "dsrun"
    copy.mkdir()
    for name in (*DATA, "dsrun"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in METADATA:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, copy)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(copy / "out"),
        str(copy),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return copy / "out"


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_metadata_is_good(built):
    """Names, versions, and a README that can be shown."""
    files = sorted(map(str, built.iterdir()))
    assert [name.rpartition(".")[2] for name in files] == ["whl", "gz"]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions_agree():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited[1] == dsrun.__version__


def test_the_source_package_has_what_it_is_built_of_and_no_tests(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*METADATA} - {"MANIFEST.in"} <= names
    assert not {name for name in names if name.startswith("tests")}


@pytest.mark.full
def test_in_an_empty_environment(wheel, tmp_path):
    """The wheel is installed with its dependencies from where pip gets packages, and nothing of the checkout."""
    environment = tmp_path / "an empty 环境"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([environment / "bin" / "pip", "install", "-q", wheel], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DSRUN"))}

    def dsrun(*words: str) -> str:
        done = subprocess.run(
            [environment / "bin" / "dsrun", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=clean,
            check=True,
        )
        return done.stdout

    assert json.loads(dsrun("preset", "zero2", "--gpus", "2"))["zero_optimization"]["stage"] == 2
    assert "layers of 4096" in dsrun("plan", "llama-2-7b", "--gpu", "a100-80g", "--gpus", "8")
    assert "chatglm2-6b" in dsrun("models")
    assert "DS101" in dsrun("explain", "DS101")


@pytest.fixture(scope="module")
def unzipped(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "a user's 环境"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("kind", DATA)
def test_every_data_file_is_in_the_wheel(unzipped, kind):
    in_wheel = unzipped / "dsrun" / "shipped" / kind
    assert files_of(in_wheel) == files_of(ROOT / kind)
    for name in files_of(ROOT / kind):
        assert (in_wheel / name).read_bytes() == (ROOT / kind / name).read_bytes()


def test_every_source_file_is_in_the_wheel(unzipped):
    in_wheel = {name for name in files_of(unzipped / "dsrun") if not name.startswith("shipped/")}
    assert in_wheel == files_of(ROOT / "dsrun")
    assert "py.typed" in in_wheel
    assert "config/schemas/deepspeed.json" in in_wheel


def test_nothing_else_is_in_the_wheel(unzipped):
    tops = {path.name.partition("-")[0] for path in unzipped.iterdir()}
    assert tops == {"dsrun"}
    assert not list(unzipped.rglob("tests"))


def in_wheel(unzipped, tmp_path, *args: str) -> str:
    """Output of a Python that has only the wheel."""
    environ = {**os.environ, "PYTHONPATH": str(unzipped)}
    done = subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ,
        check=True,
    )
    return done.stdout


def test_the_catalog_finds_what_the_wheel_holds(unzipped, tmp_path):
    code = (
        "import json; from dsrun import catalog\n"
        "kinds = ('presets', 'presets/models')\n"
        "print(json.dumps([str(catalog.shipped_root()), *(sorted(catalog.files(kind)) for kind in kinds)]))"
    )
    root, *found = json.loads(in_wheel(unzipped, tmp_path, "-c", code))
    assert root == str(unzipped / "dsrun" / "shipped")
    assert found == [sorted(catalog.files(kind)) for kind in ("presets", "presets/models")]


def test_commands_work_from_the_wheel(unzipped, tmp_path):
    config = json.loads(in_wheel(unzipped, tmp_path, "-m", "dsrun", "preset", "zero2-offload", "--gpus", "2"))
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "llama-tiny" in in_wheel(unzipped, tmp_path, "-m", "dsrun", "models")


def test_the_shipped_data_set_is_found_in_the_wheel(unzipped, tmp_path):
    code = "from dsrun.jobs.assembly.finetune.data import dataset_folder; print(dataset_folder('advertise'))"
    folder = unzipped / "dsrun" / "shipped" / "presets" / "datasets" / "advertise"
    assert in_wheel(unzipped, tmp_path, "-c", code) == f"{folder}\n"


def test_the_command_is_named_dsrun(unzipped):
    (entry_points,) = unzipped.glob("*.dist-info/entry_points.txt")
    assert "dsrun = dsrun.cli:main" in entry_points.read_text()


def test_a_runs_folder_changes_nothing_for_lint(tmp_path):
    """README's first command leaves runs/ in the checkout, and its second one lints."""
    shutil.copytree(ROOT / "tests/cluster_lab", tmp_path / "tests/cluster_lab")
    shutil.copy(ROOT / "ruff.toml", tmp_path)
    (tmp_path / "runs").mkdir()
    argv = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "."]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

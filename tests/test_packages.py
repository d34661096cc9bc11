"""Which packages are installed, found without importlib.metadata where pip wrote their names."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from dsrun import packages


@pytest.mark.parametrize("name", ["torch", "deepspeed", "transformers", "nvidia-ml-py", "pytest"])
def test_the_version_is_pips(name):
    try:
        expected = metadata.version(name)
    except metadata.PackageNotFoundError:
        expected = None
    assert packages.installed_version(name) == expected
    assert packages.installed_version(name.replace("-", "_").upper()) == expected


def test_the_first_folder_of_the_path_counts(tmp_path, monkeypatch):
    for number in ("1.0", "2.0+cu128"):
        (tmp_path / number / f"a_b-{number}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(
        sys, "path", [str(tmp_path / "gone"), str(tmp_path / "2.0+cu128"), str(tmp_path / "1.0")]
    )
    assert packages.installed_version("a-b") == "2.0+cu128"


def test_an_egg_counts_and_a_bare_folder_is_no_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("egg_one", "bare_one"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    info = tmp_path / "egg_one-3.1.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: egg-one\nVersion: 3.1\n")
    assert packages.installed_version("egg-one") == "3.1"
    (tmp_path / "egg_two-0.19.8-py3.11.egg-info").mkdir()  # as setup.py names it
    (tmp_path / "its_sources.egg-info").mkdir()
    assert packages.installed([str(tmp_path)]) == {"egg-one": "3.1", "egg-two": "0.19.8"}
    assert packages.installed_version("bare-one") is None
    assert packages.installed_version("not-there-at-all") is None


@pytest.mark.parametrize("gpus", [False, True])
def test_the_command_for_training_is_readmes(monkeypatch, gpus):
    """A hint that on a machine without GPUs would bring CUDA's libraries leads astray."""
    root = Path(packages.__file__).resolve().parents[1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    monkeypatch.chdir(root)
    steps = packages.install_all(gpus=gpus).replace("'", "").split(" && ")
    line = next(line for line in readme.splitlines() if "venv" in line and ("gpu]" in line) is gpus)
    assert all(f".venv/bin/{step}" in line.replace("'", "") for step in steps)
    monkeypatch.chdir("/")
    assert f"-e '{root}[" in packages.install_all(gpus=gpus) or f"-e {root}[" in packages.install_all(
        gpus=gpus
    )


def test_what_lacks_torch_is_told_that_command(monkeypatch, tmp_path):
    from dsrun.jobs.assembly.checks import packages as checks

    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: None)
    for driver, expected in ((tmp_path, "[train,gpu]"), (tmp_path / "none", "whl/cpu && ")):
        monkeypatch.setattr(checks, "DRIVER", driver)
        (problem,) = checks.absent_packages(["torch", "deepspeed"], "training")
        assert "torch, deepspeed" in problem.what
        assert expected in problem.hint
    (problem,) = checks.absent_packages(["peft"], "training")
    assert "peft" in problem.hint
    assert "torch" not in problem.hint

"""Which packages are installed, found without importlib.metadata where pip wrote their names."""

from __future__ import annotations

import sys
from importlib import metadata

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

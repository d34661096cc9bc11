"""What a run was started with, as it is recorded and compared with what is installed now."""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata

import pytest

from dsrun.cluster import devices
from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.jobs.launchers.common import environment

PYTHON = platform.python_version()


@pytest.fixture
def installed(monkeypatch):
    """`installed(name=version, ...)`: what is installed, and nothing else."""

    def only(**versions):
        monkeypatch.setattr(environment.packages, "installed", lambda path=None: versions)

    return only


def record(**versions):
    return {"python": f"{PYTHON} (main) [GCC]", "packages": versions}


def test_every_package_is_recorded():
    described = json.loads(json.dumps(environment.describe(devices.detect({"DS_ACCELERATOR": "cpu"}), {})))
    every = {re.sub("[-_.]+", "-", name): version for name, version in described["packages"].items()}
    for package in metadata.distributions():
        name = re.sub("[-_.]+", "-", package.metadata["Name"]).lower()
        assert every[name], name
    assert every["pytest"] == metadata.version("pytest")
    assert set(environment.COMPUTING) <= set(described["packages"]), "what is missing is recorded, too"
    assert environment.differences(described) == []


def test_what_computes_is_named_and_the_rest_counted(installed):
    installed(
        **{
            "torch": "2.13.0+cpu",
            "peft": "0.21.2",
            "rich": "15",
            "nvidia-nccl-cu13": "2.30.7",
            "numpy": "2.4",
        }
    )
    before = record(**{
        "torch": "2.12.0", "peft": None, "rich": "14", "click": "8.1", "nvidia-nccl-cu13": "2.29.3", "numpy": "2.4",
    })  # fmt: skip
    (line,) = environment.differences({**before, "python": "3.10.1 (main)"})
    assert line == (
        f"other versions than the run was started with: Python 3.10.1 -> {PYTHON}, torch 2.12.0 -> 2.13.0+cpu, "
        "peft none -> 0.21.2, nvidia-nccl-cu13 2.29.3 -> 2.30.7, and of 2 other packages"
    )


def test_what_is_gone(installed):
    installed(torch="2.13.0")
    assert environment.differences(record(torch="2.13.0", transformers="5.23.0")) == [
        "other versions than the run was started with: transformers 5.23.0 -> none"
    ]


def test_packages_that_compute_nothing_are_only_counted(installed):
    installed(torch="2.13.0", rich="15")
    assert environment.differences(record(torch="2.13.0", rich="14")) == [
        "1 package of another version than the run was started with, none that computes"
    ]


def test_an_older_record_is_compared_as_far_as_it_goes(installed):
    """It had seven packages: of the others nobody knows whether they were there."""
    installed(torch="2.13.0", peft="0.21.2", rich="15")
    assert environment.differences(record(torch="2.13.0")) == []


@pytest.mark.parametrize("damaged", [{}, {"packages": 3}, {"packages": ["torch"], "python": None}])
def test_a_run_without_a_record_says_so(damaged):
    (line,) = environment.differences(damaged)
    assert "aren't compared" in line


def test_another_python_is_compared_with_itself(tmp_path):
    for name in ("torch-2.1.0", "rich-14.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    python = PythonEnvironment("/lab/bin/python", "3.8.18", (str(tmp_path),))
    before = {
        **record(torch="9"),
        "ranks": {"python": "3.8.18", "packages": {"torch": "2.0.1", "rich": "14.0"}},
    }
    assert environment.differences(before, python) == [
        "other versions than the run was started with: torch 2.0.1 -> 2.1.0"
    ]
